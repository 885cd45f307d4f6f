"""The settings of ``fedmoe tune``, which may be in the files of the run's configuration; see docs/guide/tune.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, get_loader  # pyright: ignore[reportPrivateImportUsage]
from jsonargparse.typing import PositiveFloat, PositiveInt

from fedmoe_pl.catalogue import parser_of
from fedmoe_pl.cli.parsing import CheckingParser
from fedmoe_pl.grids.grid import SEED, GridFile

_OF_RUN = {SEED, "model", "data", "trainer", "federation"}


@dataclass
class Tuning:
    """What is searched, and how.

    Args:
        space: the values of each key: ``{low: 0.01, high: 1.0}``, with ``log: true`` or a ``step``, or
            ``{choices: [...]}``. Numbers are integers if both ends are. A phase is named by its name.
        metric: what is best: ``validation`` (accuracy), ``validation_loss``, or a metric of the federation on
            validation samples, such as ``validation_f1``.
        method: the phase whose metric it is; by default, the last one that is evaluated. Only it and those that it
            starts from are run.
        trials: number of trials, with those of earlier calls.
        timeout: seconds after which no trial begins.
        seed: seed of the sampler.
        parallel: trials at a time; on GPUs, each has one of its own, in turn.
        folder: where trials and results are written; by default, that of the run's name with ``_tune``.
        sampler: class and arguments of the sampler.
        pruner: class and arguments of the pruner.
    """

    space: dict
    metric: str = "validation"
    method: str | None = None
    trials: PositiveInt = 20  # pyright: ignore[reportInvalidTypeForm]
    timeout: PositiveFloat | None = None  # pyright: ignore[reportInvalidTypeForm]
    seed: int = 0
    parallel: PositiveInt = 1  # pyright: ignore[reportInvalidTypeForm]
    folder: str | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    pruner: dict[str, Any] = field(default_factory=dict)


class _SpaceFile(GridFile):
    """A file over others: it changes single keys of ``space``."""

    of_keys = ("space",)


def tune_parser() -> ArgumentParser:
    """The parser of ``fedmoe tune``."""
    usage = "fedmoe tune --config RUN.yaml --config SPACE.yaml [--KEY VALUE ...]"
    parser = parser_of("tune", CheckingParser, usage=usage)
    parser.add_argument(
        "--config",
        action=_SpaceFile,
        help="A file with keys below, with keys of fedmoe fit, or with both; may be given more than once.",
    )
    parser.add_class_arguments(Tuning, as_group=False, skip={"sampler", "pruner"})
    with suppress(ImportError):  # fedmoe tune is refused without Optuna, but other commands list its arguments
        from optuna.pruners import BasePruner
        from optuna.samplers import BaseSampler

        text = "how values are drawn"
        parser.add_argument("--sampler", type=BaseSampler, default={"class_path": "TPESampler"}, help=text)
        # from the fifth round on, because good learning rates may begin slowly
        pruner = {"class_path": "MedianPruner", "init_args": {"n_warmup_steps": 5}}
        text = "what ends bad trials early, by the metric after each evaluated round; NopPruner ends none"
        parser.add_argument("--pruner", type=BasePruner, default=pruner, help=text)
    return parser


def read_tuning(arguments: Sequence[str]) -> tuple[Tuning, list[str]]:
    """The settings of a command line, and its arguments of ``fedmoe fit``."""
    own, of_run = list[str](), list[str]()
    words, last = iter(arguments), own
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--config", "-c"):
            for last, part in _divided(value if equals else next(words, ""), own, of_run):
                last += ["--config", part]
            continue
        if option.startswith("--"):
            last = of_run if option[2:].partition(".")[0] in _OF_RUN else own
        last.append(word)
    given = tune_parser().parse_args(own).as_dict()
    del given["config"]
    return Tuning(**given), of_run


def _divided(file: str, own: list[str], of_run: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yields a file, or its two parts if it has keys of both commands, and which arguments each belongs to."""
    try:
        content: Any = get_loader("yaml")(file if "{" in file else Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):  # which the parser of the run's configuration reports
        content = None
    keys = {*content} if isinstance(content, dict) else _OF_RUN
    if keys <= _OF_RUN or keys.isdisjoint(Tuning.__dataclass_fields__):
        yield of_run, file
        return
    parts = {name: content[name] for name in content if name in _OF_RUN}
    yield own, json.dumps({name: value for name, value in content.items() if name not in _OF_RUN})
    if parts:
        yield of_run, json.dumps(parts)
