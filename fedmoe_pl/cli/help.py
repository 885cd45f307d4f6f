"""The help of a command: its own arguments first, and those of Lightning's Trainer where they are asked for."""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse._typehints import ActionTypeHint, get_all_subclass_paths

_TITLES = {
    "data": "the data set and its partition among clients",
    "model": "the model of every client, a LightningModule",
    "federation": "phases and rounds",
    "federation.failures": "what happens when clients fail, or drop out",
    "federation.reports": "what a client of a deployed federation reports of evaluations",
}


_LONGEST = 20  # classes


def _known_subclasses(action: ActionTypeHint) -> str:
    """The classes that an argument can have; of very many, such as all modules of torch, only the package's."""
    hint: Any = action._typehint
    paths = [path for path in get_all_subclass_paths(hint, closed_types=False) if _is_public(path)]
    if len(paths) > _LONGEST:
        paths = [path for path in paths if path.startswith("fedmoe_pl.")]
    return f", known subclasses: {', '.join(paths)}" if paths else ""


def _is_public(path: str) -> bool:
    """Whether users may name a class: of the package's, those that a module exports."""
    module, _, name = path.rpartition(".")
    return not path.startswith("fedmoe_pl.") or name in getattr(sys.modules[module], "__all__", ())


ActionTypeHint.extra_help = _known_subclasses  # pyright: ignore[reportAttributeAccessIssue]  the signature is its


def with_class_to_help(arguments: Sequence[str]) -> list[str]:
    """The arguments, in which a help without a class is that of the class that was chosen before it.

    Example:
        >>> with_class_to_help(["fit", "--model=PersonalizedMoE", "--model.help"])
        ['fit', '--model=PersonalizedMoE', '--model.help=PersonalizedMoE']
    """
    chosen = [*arguments]
    if chosen and chosen[-1].endswith(".help"):
        key, before = chosen[-1].removesuffix(".help"), " ".join(chosen)
        chosen[-1] += "".join(f"={name}" for name in re.findall(rf"{re.escape(key)}[= ]([\w.]+)", before)[-1:])
    return chosen


def arrange(parser: ArgumentParser, command: str) -> None:
    """Arranges the sections of a command's help."""
    parser.usage = f"fedmoe {command} [--config FILE] [--KEY VALUE ...]"
    groups: Any = parser.groups
    parser.add_argument("--trainer.help", action=_TrainerHelp, help="Show the Trainer's arguments, and exit.")
    own = [groups[name] for name in (command, *_TITLES)]
    for group, title in zip(own, [f"arguments of {command}", *_TITLES.values()], strict=True):
        group.title = title
    others = [group for group in parser._action_groups if group not in (*own, groups["trainer"])]
    parser._action_groups = [*others, *own]


class _TrainerHelp(Action):
    """Prints the arguments of the Trainer, which are left out of the help of the command."""

    def __init__(self, option_strings: list[str], help: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Any, *arguments: Any) -> None:
        """Prints them and exits; argparse's signature."""
        formatter = parser._get_formatter()
        formatter.start_section("the Trainer of every client")
        formatter.add_arguments(parser.groups["trainer"]._group_actions)
        formatter.end_section()
        print(formatter.format_help(), end="")
        parser.exit()
