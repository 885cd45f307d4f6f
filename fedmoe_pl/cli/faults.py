"""Arguments of a command line that the parser would not take, or not name: one sentence each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jsonargparse import ArgumentParser

from fedmoe_pl.cli.reading import put, read_arguments, read_files
from fedmoe_pl.cli.schema import arguments_of, faults
from fedmoe_pl.cli.words import did_you_mean


def fault_of(arguments: Sequence[str], parsers: Mapping[str, ArgumentParser]) -> tuple[str, bool]:
    """The first argument of a command line that seems to have another name or type than it must.

    Args:
        arguments: the arguments of the command line; those before the subcommand are not looked at.
        parsers: the parser of each subcommand.

    Returns:
        A sentence that names it, empty if there is none; and whether that is certain: it is a section that no command
        has, an argument that no section has, or one of the files has this fault without the others, too.

    Raises:
        MisconfigurationException: if a file cannot be read; the message names it.
    """
    subcommand = next((argument for argument in arguments if argument in parsers), None)
    if subcommand is None:
        return "", False
    following = arguments[arguments.index(subcommand) + 1 :]
    known = arguments_of(parsers[subcommand])
    found = list(faults(read_arguments(following), known))
    of_files = {fault for content in read_files(following) for fault in faults(content, known)} if found else set()
    # no other file or argument can make a section of this name, or an argument of a section
    ends = ("is not an argument", *{f"is not an argument of {key.partition('.')[0]}" for key in known if "." in key})
    certain = [fault for fault in found if fault in of_files or fault.partition(";")[0].endswith(ends)]
    return [*certain, *found, ""][0], bool(certain)


def unknown_argument(message: str, arguments: Sequence[str], parsers: Mapping[str, ArgumentParser]) -> str:
    """A sentence for what the parser does not know: a command, or an argument that it does not name or explain.

    Args:
        message: the parser's message.
        arguments: the arguments of the command line.
        parsers: the parser of each subcommand.

    Returns:
        The sentence; empty if the message is about something else.
    """
    subcommand = next((argument for argument in arguments if argument in parsers), None)
    if "subcommand" in message:
        return _fault_of_command(message, arguments)
    if subcommand and "arguments are required" in message and not any(map(_is_config, arguments)):
        return f"{subcommand} needs a configuration, as in fedmoe {subcommand} --config quickstart."
    match = re.match(r"[Uu]nrecognized arguments: (\S+)", message)
    if match is None or subcommand is None:
        return ""
    option = match[1].partition("=")[0]
    if not option.startswith("--"):
        return f"{option} is not an argument of {subcommand}; arguments are written as --name value."
    known, configuration = arguments_of(parsers[subcommand]), {}
    put(configuration, option[2:].split("."), None)
    return next(faults(configuration, known), f"{option} is not an argument of {subcommand}.")


def _fault_of_command(message: str, arguments: Sequence[str]) -> str:
    """A sentence for a command that is unknown, missing, or not the first argument."""
    if arguments and arguments[0].startswith("-"):
        option = arguments[0].partition("=")[0]
        return f"{option} must come after the command, as in fedmoe fit {option} ..."
    if choices := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return f"{choices[1]} is not a command; {did_you_mean(choices[1], re.findall('[a-z]+', choices[2]))}"
    if not arguments:
        return "the command is missing, as in fedmoe fit --config quickstart; fedmoe --help lists all commands."
    return ""


def _is_config(argument: str) -> bool:
    return argument.partition("=")[0] in ("--config", "-c")
