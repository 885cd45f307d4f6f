"""Files over others, in which a list replaces the whole list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, get_loader  # pyright: ignore[reportPrivateImportUsage]


class ConfigFile(ActionConfigFile):
    """A configuration file.

    Without it, items of a list inherit what they leave out from those of a list before them, if both lists have the
    same length: a phase would have the rounds of another phase in its place.
    """

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        path = Path(str(values)).expanduser()
        content = get_loader("yaml")(path.read_text(encoding="utf-8") if "{" not in str(values) else str(values))
        for key in _lists(content) if isinstance(content, Mapping) else []:
            if isinstance(cfg.get(key), list):
                cfg[key] = []
        super().__call__(parser, cfg, values, option_string)


def _lists(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the keys of the lists in a configuration, but not of those in lists."""
    for name, value in node.items():
        if isinstance(value, list):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{name}.")
