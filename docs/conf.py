"""Builds the documentation; `CONTRIBUTING.md` has the command."""

import os
from importlib.metadata import version as version_of
from pathlib import Path

from jupyter_cache import get_cache

os.environ["OMP_NUM_THREADS"] = "1"  # of each tutorial, because several are executed at the same time

project = "fedmoe_pl"
author = "The fedmoe_pl developers"
copyright = f"2026, {author}"
release = version = version_of("fedmoe-pl")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton", "myst_nb"]
exclude_patterns = ["build"]

# the anchors of headings, which links between Markdown pages name
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_block"]

# Tutorials are executed in a folder that is removed afterwards. `cache` executes only those whose code has changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "build" / "notebooks")
get_cache(nb_execution_cache_path).list_cache_records()  # makes its database, before parallel processes all make it
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds for a cell, on a busy machine
nb_merge_streams = True

# `collate_fn` is a field whose default is PyTorch's function, with PyTorch's docstring
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "collate_fn"}
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "fedmoe_pl"
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["custom.css"]
