"""A grid file is read, overlays and arguments change single keys, and what is wrong is refused in one line."""

import re
import shlex
import sys
from argparse import ArgumentError
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, REPOSITORY
from helpers.grids import write_grid

from fedmoe_pl.catalogue import folder
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli import main
from fedmoe_pl.cli.grid_files import read_grid

ALPHA = "data.init_args.partitioner.init_args.alpha"


def test_files_are_relative_to_the_grid(tmp_path, monkeypatch):
    arguments = write_grid(tmp_path, variants={"A": {"configs": ["tiny.yaml"]}, "B": {}})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    grid = read_grid(arguments)
    (path,) = grid.configs
    assert Path(path.absolute).samefile(tmp_path / "tiny.yaml")
    assert Path(grid.variants["A"].configs[0].absolute).samefile(tmp_path / "tiny.yaml")
    assert grid.keys == ["variant", "seed_everything"]


def test_configurations_of_the_package_are_named_as_for_fit(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text("{configs: [quickstart], values: {seed_everything: [0]}, folder: runs}")
    (config,) = read_grid(["--config", str(grid), "--variants.a.configs", "[papers/pfl_moe]"]).configs
    assert Path(config.absolute) == folder() / "quickstart.yaml"
    (tmp_path / "quickstart").touch()  # the user's own file goes first
    (config,) = read_grid(["--config", str(grid)]).configs
    assert config.absolute == str(tmp_path / "quickstart")


def test_config_in_place_of_configs_is_refused(tmp_path, capsys):
    for value in ("[quickstart]", "quickstart"):
        (tmp_path / "grid.yaml").write_text(f"{{config: {value}, values: {{seed_everything: [0]}}, folder: runs}}")
        with pytest.raises(SystemExit):
            main(["benchmark", "--config", str(tmp_path / "grid.yaml"), "--configs", "[quickstart]"])
        assert capsys.readouterr().err == "fedmoe: config is not an argument; did you mean configs?\n"


def test_overlays_and_arguments_change_single_keys(tmp_path):
    arguments = write_grid(tmp_path, values={"seed_everything": [0, 1], ALPHA: [0.5, 5]}, overrides={"trainer.a": 1})
    overlay = tmp_path / "quick.yaml"
    overlay.write_text(yaml.safe_dump({"values": {"seed_everything": [7]}, "overrides": {"trainer": {"b": 2}}}))
    for trainer in ({"trainer": {"a": 1, "b": 1}}, {"trainer.a": 1}):
        write_grid(tmp_path, values={"seed_everything": [0, 1], ALPHA: [0.5, 5]}, overrides=trainer)
        grid = read_grid([*arguments, "--config", str(overlay)])
        assert grid.values == {"seed_everything": [7], ALPHA: [0.5, 5]}
        assert grid.overrides == {"trainer.a": 1, "trainer.b": 2}
    grid = read_grid([*arguments, "--values.seed_everything", "[8]", f"--values.{ALPHA}", "[9]", "--methods", "[a]"])
    assert grid.values == {"seed_everything": [8], ALPHA: [9]}
    assert grid.methods == ["a"]
    words = ["--overrides.trainer.a", "3", "--overrides.data.class_path", "NpzFile", "--overrides.data.path", "x.npz"]
    grid = read_grid([*arguments, *words])
    assert grid.overrides == {"trainer.a": 3, "data.class_path": "NpzFile", "data.path": "x.npz"}


def test_the_grid_of_the_documentation_is_one(tmp_path):
    page = (REPOSITORY / "docs/guide/benchmark.md").read_text()
    text, of_papers = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "values:" in block)
    (tmp_path / "grid.yaml").write_text(text)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    first, *_, other_partition = re.findall(r"^fedmoe benchmark --config grid.yaml (--.*)$", page, re.MULTILINE)
    grid = read_grid(["--config", str(tmp_path / "grid.yaml"), *shlex.split(first)])
    assert grid.values["seed_everything"] == [0, 1] and grid.overrides["trainer.max_epochs"] == 1
    pair = read_grid(["--config", str(tmp_path / "grid.yaml"), *shlex.split(other_partition)])
    assert pair.folder == "runs/pairs" and pair.values["seed_everything"] == [1]
    assert pair.overrides["data.init_args.partition_seed"] == 1
    assert Path(grid.configs[0].absolute).samefile(QUICKSTART)
    (tmp_path / "papers.yaml").write_text(of_papers)
    grid = read_grid(["--config", str(tmp_path / "papers.yaml")])
    phases = yaml.safe_load(Path(grid.configs[0].absolute).read_text())["federation"]["phases"]
    assert {*grid.methods, grid.baseline} <= {phase["name"] for phase in phases}


def test_a_class_is_a_value_and_has_only_the_arguments_that_are_written(tmp_path):
    adamw = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}
    phases = [{"name": "Local", "algorithm": "Local", "train": {"optimizer": adamw}}]
    overrides = {"federation.phases": phases, "data.partitioner": {"class_path": "IID"}}
    assert read_grid(write_grid(tmp_path, overrides=overrides)).overrides == overrides


def published(where):
    return {"paper": [{"table": "T", "where": where, "metric": "reweighted_test", "cells": {"A": 1}}]}


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("values.seed_everything", {"values": {"seed_everything": []}}),
        ("values.seed_everything", {"values": {"seed_everything": [0, -1]}}),
        ("values.seed_everything", {"values": {"seed_everything": [None]}}),
        ("variants", {"variants": None}),
        ("parallel", {"parallel": None}),
        ("values", {"values": {"variant": ["A", "B"]}}),
        ("values.trainer.max_epochs", {"values": {"trainer.max_epochs": 3}}),
        ("values.trainer.max_epochs", {"values": {"trainer.max_epochs": [3, 3]}}),
        ("where", published({"alpha": 0.5})),
    ],
)
def test_a_wrong_value_is_refused(argument, changes, tmp_path):
    with pytest.raises(InvalidArgumentError) as error:
        read_grid(write_grid(tmp_path, **changes))
    assert error.value.argument == argument


def test_published_numbers_are_a_number_or_two(tmp_path):
    entry = {"table": "T", "metric": "reweighted_test", "cells": {"A": [90, 1], "B": 80}}
    assert read_grid(write_grid(tmp_path, paper=[entry])).paper[0].numbers == {"A": (90, 1), "B": (80, None)}
    with pytest.raises(ArgumentError):
        read_grid(write_grid(tmp_path, paper=[{**entry, "cells": {"A": [90, 1, 2]}}]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", '{"valuess": {"a": 1}}'], "fedmoe: valuess is not an argument; did you mean values?"),
        (["--configs+", "none.yaml"], "none.yaml"),
        (
            ["--variants.A.overides", "{a: 1}"],
            "variants.A.overides is not an argument of Variant; did you mean overrides?",
        ),
        (["--values.seed_everything", "[]"], "fedmoe: benchmark: values.seed_everything is [], but must be a list"),
    ],
)
def test_the_command_line_refuses_in_one_line(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    grid = write_grid(tmp_path) if arguments and arguments[0] != "--config" else []
    with pytest.raises(SystemExit) as end:
        main(["benchmark", *grid, *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and sentence in error


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"variants": {"few": {}, "many": {"overides": {"a": 1}}}},
            "variants.many.overides is not an argument of Var",
        ),
        (
            {"variants": {"few": {}, "many": {"configs": ["none.yaml"]}}},
            "variants.many.configs[0] is 'none.yaml', but must be a file",
        ),
        ({"paper": [*published({})["paper"], {"table": "T", "metric": "f1", "cells": {}}]}, "paper[1].metric is 'f1'"),
    ],
)
def test_the_wrong_item_of_a_list_or_a_dict_is_named(changes, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["benchmark", *write_grid(tmp_path, **changes)])
    assert capsys.readouterr().err.startswith(f"fedmoe: {sentence}")
