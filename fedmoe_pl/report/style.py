"""How all pictures look: a column's width, colours that colour-blind readers can tell apart, one for each method."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from fedmoe_pl.callbacks.figures import COLORS, LINE_STYLES, MARKERS

WIDTH = 3.4
"""Inches: a column of a two-column paper."""

INK = "#000001"
"""The colour of text and lines: black in print. On the page it becomes that of the page's text."""

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "grid.linewidth": 0.4,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "pdf.fonttype": 42,  # journals refuse matplotlib's default, type 3
    "svg.fonttype": "path",
    "svg.hashsalt": "fedmoe",  # the same picture has the same bytes
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


class Style(NamedTuple):
    """How a method is drawn, as arguments of matplotlib's ``plot``."""

    color: str
    linestyle: str
    marker: str


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, in the order in which they first appear: first colours, then lines and markers change."""
    colors = [INK if color == "#000000" else color for color in COLORS]
    found = {}
    for i, label in enumerate(dict.fromkeys(labels)):
        again = i // len(colors)
        found[label] = Style(
            colors[i % len(colors)],
            LINE_STYLES[again % len(LINE_STYLES)],
            MARKERS[(i + again) % len(MARKERS)],
        )
    return found


def wrapped(label: str, width: int) -> str:
    r"""A label in lines of at most so many characters, as far as its words allow.

    Example:
        >>> wrapped("FedMoE-DA (top_p 5, mixing logits)", 20)
        'FedMoE-DA (top_p 5,\nmixing logits)'
    """
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


class Picture(NamedTuple):
    """A drawn picture.

    Attributes:
        name: the name of its file, without suffix.
        caption: what it shows.
        svg: for the page; the ink is ``currentColor``.
        pdf: for a paper.
    """

    name: str
    caption: str
    svg: str
    pdf: bytes


def new_figure(height: float) -> Figure:
    """An empty figure of a column's width.

    Args:
        height: in inches.
    """
    return Figure(figsize=(WIDTH, height), layout="constrained")


def picture(name: str, caption: str, figure: Figure) -> Picture:
    """Renders a figure as SVG for the page, and as PDF.

    Args:
        name: what the picture shows, such as ``curves alpha 0.5``; other characters than letters, digits, dots and
            hyphens are replaced for the file's name.
        caption: what it shows, in a sentence.
        figure: the figure.
    """
    name = re.sub(r"[^\w.-]+", "_", name).strip("_")
    with matplotlib.rc_context(RC):
        figure.draw_without_rendering()  # the layout, once for both files
    figure.set_layout_engine("none")
    return Picture(name, caption, _svg(name, caption, figure), _saved(figure, "pdf", {"CreationDate": None}))


def _svg(name: str, caption: str, figure: Figure) -> str:
    """The ``svg`` element, whose ids are no other picture's, as all of them are in the same page."""
    text = _saved(figure, "svg", {"Date": None, "Creator": None, "Type": None, "Format": None}).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{_plain(caption)}">', text
    )
    return text.replace(INK, "currentColor").replace("xlink:href", "href")


def _plain(text: str) -> str:
    return text.replace("&", "and").replace('"', "'").replace("<", "(").replace(">", ")")


def _saved(figure: Figure, format: str, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(file, format=format, metadata=metadata, dpi=300)  # of large maps, which are images
    return file.getvalue()


def write_pdfs(folder: Path, pictures: Iterable[Picture]) -> None:
    """Writes the pictures as PDF files into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for drawn in pictures:
        (folder / f"{drawn.name}.pdf").write_bytes(drawn.pdf)
