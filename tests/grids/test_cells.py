"""The cells of a grid: their names and configurations, and what is refused before any of them is run."""

import functools

import pytest
from helpers.configurations import REPOSITORY
from helpers.grids import pretended_configured, write_grid
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.command_line import configured
from fedmoe_pl.cli.grid_files import read_grid
from fedmoe_pl.grids.cells import configuration_of, make_cells
from fedmoe_pl.grids.grid import published_for

ALPHA = "data.init_args.partitioner.init_args.alpha"
GRIDS = sorted((REPOSITORY / "configs/papers").glob("*.yaml"))
STUDIES = sorted((REPOSITORY / "configs/studies").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])


def cells_of(folder, make=configured, **changes):
    return make_cells(read_grid(write_grid(folder, **changes)), make)


def names_of(configuration):
    return [phase["name"] for phase in configuration["federation"]["phases"]]


def test_there_is_a_cell_for_every_combination(tmp_path):
    iid = {"overrides": {"data.init_args.partitioner": {"class_path": "IID"}, "trainer.max_epochs": 9}}
    values = {"seed_everything": [0, 7], "trainer.max_epochs": [1, 2]}
    cells = cells_of(tmp_path, pretended_configured, variants={"Dirichlet": {}, "equal": iid}, values=values)
    assert [cell.name for cell in cells] == [
        f"{variant},seed_everything={seed},max_epochs={epochs}"
        for variant in ("Dirichlet", "equal")
        for epochs in (1, 2)
        for seed in (0, 7)
    ]
    last = cells[-1]
    assert last.folder == tmp_path / "runs" / last.name
    assert last.where == {"variant": "equal", "seed_everything": 7, "trainer.max_epochs": 2}
    assert last.condition == {"variant": "equal", "trainer.max_epochs": 2}
    assert last.configuration["seed_everything"] == last.seed == 7
    assert last.configuration["trainer"]["max_epochs"] == 2
    assert last.configuration["data"]["init_args"]["partitioner"]["class_path"] == "IID"
    assert last.configuration["federation"]["default_root_dir"] == str(tmp_path / "runs")
    assert last.configuration["federation"]["name"] == last.name


@pytest.mark.parametrize("order", [1, -1])
def test_a_value_of_the_grid_has_the_last_word_and_an_argument_comes_after_its_class(tmp_path, order):
    """Wherever else the key is given before, and whichever of the two is written first."""
    whole = {"class_path": "Dirichlet", "init_args": {"alpha": 0.3}}
    of_variant = {ALPHA.partition(".init_args.alpha")[0]: whole}
    changes = {"overrides": {ALPHA: 0.1}, "variants": {"A": {"overrides": of_variant}}, "values": {ALPHA: [0.7]}}
    (cell,) = cells_of(tmp_path, pretended_configured, **changes)
    assert cell.configuration["data"]["init_args"]["partitioner"]["init_args"]["alpha"] == cell.where[ALPHA] == 0.7
    both = dict([*of_variant.items(), (ALPHA, 0.2)][::order])
    (cell,) = cells_of(tmp_path, pretended_configured, overrides=both, values={})
    assert cell.configuration["data"]["init_args"]["partitioner"]["init_args"]["alpha"] == 0.2


@pytest.mark.slow
def test_a_class_keeps_the_arguments_that_are_given_for_it_one_by_one(tmp_path):
    arguments = {"data.init_args.num_clients": 3, "data.init_args.validation_fraction": 0.25}
    whole = {"data": {"class_path": "Digits", "init_args": {"num_clients": 4}}}
    (cell,) = cells_of(tmp_path, overrides=arguments, variants={"other data": {"overrides": whole}}, values={})
    kept = cell.configuration["data"]["init_args"]
    assert (kept["num_clients"], kept["validation_fraction"]) == (4, 0.25)


@pytest.mark.slow
def test_a_phase_is_changed_by_its_name(tmp_path):
    (cell,) = cells_of(
        tmp_path,
        values={"federation.phases.PFL-FT.train.max_epochs": [3]},
        overrides={"federation.phases.FedAvg.algorithm.init_args.weighting": "uniform"},
    )
    assert cell.name == "max_epochs=3,seed_everything=0"
    local, fedavg, fine_tuned = cell.configuration["federation"]["phases"]
    assert local["train"]["max_epochs"] is None and fine_tuned["train"]["max_epochs"] == 3
    assert fedavg["algorithm"]["init_args"] == {"shared": "global_expert.*", "trainable": "*", "weighting": "uniform"}


@pytest.mark.slow
def test_a_class_of_a_phase_is_as_a_run_writes_it_so_that_the_run_is_found(tmp_path):
    grid = read_grid(write_grid(tmp_path, overrides={"federation.phases.Local.gate": "GlobalOnly"}))
    local, *_ = configuration_of(grid, {}, configured)["federation"]["phases"]
    assert local["gate"] == {"class_path": "fedmoe_pl.models.GlobalOnly"}


@pytest.mark.slow
def test_methods_keep_the_phases_that_they_start_from(tmp_path):
    cell, _ = cells_of(tmp_path, methods=["PFL-FT"])
    assert names_of(cell.configuration) == ["FedAvg", "PFL-FT"]
    assert cell.phases == ["PFL-FT"]
    cell, _ = cells_of(tmp_path, pretended_configured, methods=["PFL-FT"], baseline="Local")
    assert names_of(cell.configuration) == ["Local", "FedAvg", "PFL-FT"]
    assert cell.phases == ["Local", "PFL-FT"]


def test_a_condition_that_has_begun_is_not_checked_again(tmp_path, monkeypatch):
    checks = []

    def recording(arguments, check):
        checks.append(check)
        return pretended_configured(arguments, check)

    grid = read_grid(write_grid(tmp_path))
    first = make_cells(grid, recording)
    assert checks == [False, True]
    monkeypatch.setattr("fedmoe_pl.grids.cells.finished_run", lambda cell: cell.folder)
    assert make_cells(grid, recording) == first
    assert checks == [False, True, False]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        ("alpha=-1: ", {"values": {ALPHA: [0.5, -1]}}),  # the class refuses it
        ("every cell: ", {"overrides": {"federation.phases.FedAvgg.rounds": 3}}),
        ("every cell: ", {"baseline": "FedProx"}),
        ("every cell: ", {"methods": ["FedProx"]}),
        ("A: ", {"variants": {"A": {"overrides": {"trainer.max_epoch": 1}}}}),
        (
            "rounds=1: benchmark: values is 'federation.phases.Local.rounds', but must be a key of a phase that is run",
            {"methods": ["FedAvg"], "values": {"federation.phases.Local.rounds": [1, 2]}},
        ),
        ("root=a/b: ", {"values": {"data.init_args.root": ["a/b"]}}),  # no folder can have this name
    ],
)
def test_a_wrong_configuration_is_refused_with_its_cell(cell, changes, tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        cells_of(tmp_path, **changes)
    assert str(error.value).startswith(cell)


@functools.cache
def grid_of(path):
    base = str(path).replace("_quick", "")
    return read_grid([word for file in dict.fromkeys((base, str(path))) for word in ("--config", file)])


def cells_of_file(path):
    return make_cells(grid_of(path), lambda arguments, check: configured(arguments, False))


@pytest.mark.few(8)
@pytest.mark.parametrize("path", [*GRIDS, *STUDIES], ids=lambda path: path.stem)
def test_the_grids_of_papers_and_studies_name_their_command(path):
    grid, text = grid_of(path), path.read_text()
    kind, stem = path.parent.name, path.stem
    assert f"# fedmoe benchmark --config configs/{kind}/{stem.replace('_quick', '')}.yaml" in text
    assert grid.folder == f"runs/{kind}/{stem}"
    assert len(grid.values["seed_everything"]) >= 3
    if path in GRIDS:
        assert f"configs/papers/{stem.removesuffix('_quick')}_quick.yaml" in text
        assert grid.paper and grid.baseline


@pytest.mark.slow
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_the_grids_of_the_papers_have_cells_with_published_numbers(path):
    grid, cells = grid_of(path), cells_of_file(path)
    for cell in cells:
        published = published_for(grid.paper, cell.condition)
        assert published, cell.name
        if not path.stem.endswith("_quick"):
            assert {method for each in published for method in each.cells} <= {*names_of(cell.configuration)}
    conditions = [cell.condition for cell in cells]
    if not path.stem.endswith("_quick"):
        assert all(any(each in published_for(grid.paper, where) for where in conditions) for each in grid.paper)


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_a_study_can_be_configured(path):
    assert cells_of_file(path)
