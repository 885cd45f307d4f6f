"""The command lines and files of ``fedmoe benchmark`` and ``fedmoe tune``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jsonargparse import ArgumentParser

from fedmoe_pl.catalogue import parser_of
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.parsing import CheckingParser, ConfigFile, check_values, read_config
from fedmoe_pl.grids.grid import SEED, Grid, Published, Variant, dotted
from fedmoe_pl.grids.tuning import Tuning

_OF_RUN = {SEED, "model", "data", "trainer", "federation"}


class GridFile(ConfigFile):
    """A file over others: it changes single keys of ``values`` and ``overrides``, where the parser replaces all."""

    of_keys: tuple[str, ...] = ("values", "overrides")

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        before = {name: self.single_keys(cfg.get(name) or {}) for name in self.of_keys}
        super().__call__(parser, cfg, values, option_string)
        for name, old in before.items():
            cfg[name] = old | self.single_keys(cfg.get(name) or {})

    def single_keys(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of nested mappings as dotted words, with their values."""
        return dict(dotted(node))


def grid_parser() -> ArgumentParser:
    """The parser of ``fedmoe benchmark``."""
    parser = parser_of("benchmark", CheckingParser)
    parser.add_argument("--config", action=GridFile, help="A grid file; may be given more than once, as overlays.")
    parser.add_class_arguments(Grid, as_group=False)
    return parser


def read_grid(arguments: Sequence[str]) -> Grid:
    """The grid that a command line gives."""
    given = grid_parser().parse_args([*arguments]).as_dict()
    del given["config"]
    check_values(Grid, given, "benchmark")
    given["variants"] = {name: _made(Variant, variant) for name, variant in given["variants"].items()}
    given["paper"] = [_made(Published, published) for published in given["paper"]]
    return Grid(**given)


def _made(kind: type, arguments: dict[str, Any]) -> Any:
    """A part of a grid, from its arguments."""
    check_values(kind, arguments, "benchmark")
    return kind(**arguments)


class _SpaceFile(GridFile):
    """A file over others: it changes single keys of ``space``."""

    of_keys = ("space",)

    def single_keys(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """The keys as they are: a mapping below one is a range or a list of choices."""
        return dict(node)


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
    for name, example in {"sampler": "TPESampler", "pruner": "NopPruner"}.items():
        if given.get(name, example) is None:
            raise InvalidArgumentError("tune", name, None, f"a class, such as {example}")
    check_values(Tuning, given, "tune")
    return Tuning(**given), of_run


def _divided(file: str, own: list[str], of_run: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yields a file, or its two parts if it has keys of both commands, and which arguments each belongs to."""
    file, content = read_config(file)
    if content.keys() <= _OF_RUN or content.keys().isdisjoint(Tuning.__dataclass_fields__):
        yield of_run, file
        return
    parts = {name: content[name] for name in content if name in _OF_RUN}
    yield own, json.dumps({name: value for name, value in content.items() if name not in _OF_RUN})
    if parts:
        yield of_run, json.dumps(parts)
