"""Commands and options that the parser does not know, and what is missing: one sentence with the cause."""

import pytest

from fedmoe_pl.cli import main
from fedmoe_pl.cli.errors import one_sentence
from fedmoe_pl.cli.faults import unknown_argument
from fedmoe_pl.cli.listing import list_parser

CHOICES = "argument subcommand: invalid choice: {!r} (choose from 'fit', 'list', 'test')"


@pytest.mark.parametrize(
    ("message", "arguments", "sentence"),
    [
        (CHOICES.format("fi"), ["fi"], "fi is not a command; did you mean fit?"),
        (CHOICES.format("version"), ["version"], "version is not a command; it has fit, list, test."),
        (
            CHOICES.format("3"),
            ["--trainer.max_epochs", "3", "fit"],
            "--trainer.max_epochs must come after the command, as in fedmoe fit --trainer.max_epochs ...",
        ),
        (
            "Option 'model.init_args.optimizer' is not accepted before subcommand 'fit'",
            ["--config=quickstart", "fit"],
            "--config must come after the command, as in fedmoe fit --config ...",
        ),
        (
            'expected "subcommand" to be one of {fit, ...}, but it was not provided.',
            [],
            "the command is missing, as in fedmoe fit --config quickstart; fedmoe --help lists all commands.",
        ),
        (
            "the following arguments are required: list.model",
            ["list"],
            "list needs a configuration, as in fedmoe list --config quickstart.",
        ),
        ("the following arguments are required: list.model", ["list", "--config=a.yaml"], ""),
        ("unrecognized arguments: --kind", ["list"], "kind is not an argument; it has none."),
        ("unrecognized arguments: x y", ["list", "x"], "x is not an argument of list; arguments are written as --name"),
        ("argument --model: expected one argument", ["fit", "--model"], ""),
    ],
)
def test_what_the_parser_does_not_know_is_named(message, arguments, sentence):
    found = unknown_argument(message, arguments, {"list": list_parser()})
    assert found.startswith(sentence)
    assert bool(sentence) == bool(found)


@pytest.mark.parametrize("command", ["fit", "audit"])
def test_what_no_file_has_is_named_without_the_command(command):
    required = f"the following arguments are required: {command}.federation.phases, {command}.data, {command}.model"
    assert one_sentence(required).startswith("no --config has federation.phases and data and model; ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "quickstart", "fit"], "--config must come after the command, as in fedmoe fit --config ..."),
        (["completion"], "completion: the shell is missing; it must be bash or zsh."),
    ],
)
def test_a_command_line_is_refused_in_one_line(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line != "Seed set to 0"]
    assert line.startswith(f"fedmoe: {sentence}")
