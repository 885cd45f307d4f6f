"""A break of what is public is named in the changelog: today's names and arguments beside those of the last release."""

import re
from pathlib import Path

import griffe
import pytest
from helpers.public_api import stub

from fedmoe_pl.version import __version__

SNAPSHOT = Path(__file__).with_name("public_api.pyi")
CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
REMEDY = "PYTHONPATH=tests python -m helpers.public_api >public_api.pyi && mv public_api.pyi tests"


def breaks(old: str, new: str) -> list[str]:
    """What a user of the old names and arguments would notice, with the path of each."""
    modules = [griffe.visit("api", Path("api.pyi"), text) for text in (old, new)]
    return [
        f"{found.obj.path.removeprefix('api.')}: {found.kind.value}" for found in griffe.find_breaking_changes(*modules)
    ]


def unnamed(found: list[str], changelog: str) -> list[str]:
    """The breaks whose class or function the changelog does not name."""
    return [each for each in found if not re.search(rf"`{re.split('[.:(]', each)[1]}\b", changelog)]


def test_every_break_since_the_last_release_is_in_the_changelog():
    of_release = re.search(r"# fedmoe_pl (\S+)", SNAPSHOT.read_text())
    assert of_release and of_release[1] == __version__, f"a release needs the new snapshot: {REMEDY}"
    newer = CHANGELOG.partition(f"## [{__version__}]")[0]
    assert not unnamed(breaks(SNAPSHOT.read_text(), stub()), newer), f"name it, or before the first release: {REMEDY}"


OLD = """
class algorithms:
    class FedAvg:
        def __init__(self, shared, weighting='samples', *, cohort=None): ...
        def aggregate(self, updates): ...
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shared, weighting", "weighting"),
        ("weighting='samples'", "weighting='uniform'"),
        ("self, shared, weighting='samples'", "self, weighting='samples', shared=None"),
        ("(self, updates)", "(self, updates, server)"),
        ("aggregate", "combine"),
        ("FedAvg", "FederatedAveraging"),
    ],
)
def test_a_break_is_noticed_and_must_be_named(old, new):
    found = breaks(OLD, OLD.replace(old, new))
    assert found
    assert unnamed(found, "The argument `weighting` of FedAvg") == found
    assert not unnamed(found, "`FedAvg(shared=...)` has")


def test_what_is_added_is_no_break():
    assert not breaks(OLD, OLD.replace("cohort=None", "cohort=None, seed=0") + "        def new(self): ...\n")
