"""The help of a command: its own arguments first, and those of Lightning's Trainer where they are asked for."""

from __future__ import annotations

from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import ArgumentParser

_TITLES = {
    "data": "the data set and its partition among clients",
    "model": "the model of every client, a LightningModule",
    "federation": "phases and rounds",
    "federation.failures": "what happens when clients fail, or drop out",
    "federation.reports": "what a client of a deployed federation reports of evaluations",
}


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
