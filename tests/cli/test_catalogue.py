"""Classes and configurations of the package: listed with one line each, found by name from any folder, and copied."""

import gc
import inspect
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from helpers.configurations import CONFIGURATIONS, REPOSITORY
from jsonargparse import ArgumentError

import fedmoe_pl.algorithms
from fedmoe_pl.catalogue import COMMANDS, configs, did_you_mean, folder, names, with_files
from fedmoe_pl.cli import entry, main
from fedmoe_pl.cli.command_line import OTHER_PARSERS, FederationCLI
from fedmoe_pl.cli.grid_files import read_grid
from fedmoe_pl.cli.kinds import KINDS, listing


def test_every_class_has_a_line(capsys):
    main(["list"])
    shown = capsys.readouterr().out
    remedy = "python -m fedmoe_pl.cli.kinds > classes.txt && mv classes.txt fedmoe_pl/cli"
    assert shown.strip() == listing().strip(), f"run `{remedy}`"
    lines = shown.splitlines()
    assert [line[:-1] for line in lines if line.endswith(":") and line[0] != " "] == [*KINDS]
    shown = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert {each.__name__ for classes in KINDS.values() for each in classes} == {*shown}
    assert all("`" not in text for text in shown.values())
    public = [getattr(fedmoe_pl.algorithms, name) for name in fedmoe_pl.algorithms.__all__]
    concrete = {each.__name__ for each in public if inspect.isclass(each) and not inspect.isabstract(each)}
    assert concrete - {*shown} <= {"Algorithm"}
    assert "BestEpoch" in shown and "SwitchNorm1d" not in shown
    assert all(text[0].isupper() for text in shown.values()), "sentences, and no formulas"


def test_a_kind_alone(capsys):
    main(["list", "gates", "partitioners"])
    out = capsys.readouterr().out
    assert "FeatureGate" in out and "Dirichlet" in out and "FedAvg " not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gate"], "list: kind is 'gate', but must be one of algorithms, "),
        (["--gates"], "unrecognized arguments: --gates"),
    ],
)
def test_what_is_unknown_is_named(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["list", *arguments])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--version", "--help", "list", "configs"])
@pytest.mark.few(1)
def test_what_needs_no_torch_imports_none(command):
    """In a Python of its own, which takes a seventh of a second."""
    code = f"""
import sys
from fedmoe_pl.cli import main
try:
    main(["{command}"])
finally:
    assert not {{"torch", "lightning", "numpy"}} & {{*sys.modules}}, "seconds"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(("fedmoe 0.", "usage: fedmoe", "algorithms:", "adapters_digits"))


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, f"{entry._IMPORTING}\r{33 * ' '}\r"), (False, "")])
def test_a_terminal_shows_that_imports_take_time_until_they_are_done(is_terminal, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    entry._imported("json")
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("last", ["", "\nraise RuntimeError"])
def test_nothing_is_searched_for_cycles_while_a_command_s_module_is_imported(tmp_path, monkeypatch, last):
    name = f"imported_{len(last)}"
    (tmp_path / f"{name}.py").write_text(f"import gc\nassert not gc.isenabled()\nkept = [[]]{last}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) if last else nullcontext():
        kept = entry._imported(name).kept
        assert not any(each is kept for each in gc.get_objects()), "nor afterwards"
        assert entry._imported(name).kept is kept
    assert gc.isenabled()


def test_what_a_script_or_notebook_has_in_memory_is_not_kept_from_the_garbage_collector(monkeypatch, capsys):
    monkeypatch.delattr(entry, "_imported")  # which freezes all that is there
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "usage: fedmoe" in capsys.readouterr().out


def test_the_help_has_every_command():
    assert {*COMMANDS} == {*FederationCLI.subcommands(), *OTHER_PARSERS}


def test_an_unknown_command_has_a_suggestion(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["tset", "--config", "quickstart"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == "fedmoe: tset is not a command; did you mean test?\n"


def test_ctrl_c_while_torch_is_imported_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as exit:
        entry._imported("torch")
    assert (exit.value.code, capsys.readouterr().err.count("\n")) == (130, 1)


@pytest.mark.slow  # a Python of its own
def test_a_pipe_that_nobody_reads_is_no_traceback():
    command = f"{sys.executable} -m fedmoe_pl list | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (141, "")


def test_they_are_those_of_the_repository_which_the_build_puts_into_the_package():
    parts = Path(fedmoe_pl.__file__).parent, REPOSITORY  # of a wheel, and of the repository
    assert folder() == next(part / "configs" for part in parts if (part / "configs").is_dir())
    assert {"quickstart", "papers/pfl_moe"} <= {*names()}
    build = (REPOSITORY / "pyproject.toml").read_text()
    assert re.search(r'force-include\]\n"configs" = "fedmoe_pl/configs"', build)


@pytest.mark.slow
def test_one_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", "quickstart", "--data.init_args.num_clients=3", "--print_config"])
    out, err = capsys.readouterr()
    assert not exit.value.code, err
    assert yaml.safe_load(out)["federation"]["name"] == "quickstart"


def test_a_file_of_the_user_s_goes_first(tmp_path, monkeypatch):
    assert with_files(["fit", "--config=quickstart", "-c", "quickstart"]) == [
        *("fit", f"--config={folder() / 'quickstart.yaml'}", "-c", str(folder() / "quickstart.yaml"))
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # as `fedmoe configs quickstart --to quickstart` makes it
    assert with_files(["fit", "--config", "quickstart"])[-1] == str(folder() / "quickstart.yaml")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("")
    assert with_files(["fit", "--config", "quickstart", "--federation.name", "zoo_digits"])[2:] == [
        *("quickstart", "--federation.name", "zoo_digits")
    ]


def test_a_file_that_is_not_here_is_told_from_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"'configs/quickstart\.yaml', but there is no such file; "):
        with_files(["fit", "--config", "configs/quickstart.yaml"])
    with pytest.raises(ArgumentError, match=r"did you mean quickstart, which the package has\?"):
        with_files(["fit", "--config", "quickstat"])
    for name in ("other.yaml", 300 * "a"):
        assert with_files(["fit", "--config", name])[-1] == name


def test_every_one_is_listed_with_what_it_is(capsys):
    assert configs([]) == []
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert [*lines] == names()
    assert {path.stem for path in CONFIGURATIONS} <= {*lines}
    assert not [line for line in lines.values() if line.endswith(("Fig", "al"))], "abbreviations end no sentence"
    assert lines["quickstart"] == "PFL-MoE (Guo et al. 2021) and its baselines on digits: 20 clients, Dirichlet 0.5"


def test_copies_have_what_their_commands_need(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written = configs(["fedmoe_da_svhn", "papers/pfl_moe_quick"])
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert {path.relative_to("configs").with_suffix("").as_posix() for path in written} == {
        *("fedmoe_da_svhn", "fedmoe_da_cifar10", "papers/pfl_moe", "papers/pfl_moe_quick", "pfl_moe_cifar10_lenet5"),
        *("pfl_moe_fmnist_lenet5", "pfl_moe_cifar10_vgg16"),
    }
    grid = read_grid(["--config", "configs/papers/pfl_moe.yaml", "--config", "configs/papers/pfl_moe_quick.yaml"])
    assert all(Path(path.absolute).is_file() for path in grid.configs)
    with pytest.raises(ArgumentError, match=r"fedmoe_da_cifar10\.yaml exists; --to names"):
        configs(["fedmoe_da_svhn"])
    with pytest.raises(ArgumentError, match=r"--to is 'configs/fedmoe_da_svhn\.yaml', but cannot be written: "):
        configs(["configs/quickstart.yaml", "--to", "configs/fedmoe_da_svhn.yaml"])
    assert len(configs(["papers/*", "--to", "mine"])) > 14


def test_an_unknown_name_has_a_suggestion():
    with pytest.raises(ArgumentError, match=r"configs has no quickstrat; did you mean quickstart\?"):
        configs(["quickstrat"])


def test_a_key_is_like_another_only_by_what_comes_after_their_group():
    keys = ["federation.name", "federation.rounds_of_all", "trainer.max_epochs"]
    assert did_you_mean("federation.roundz", ["federation.name"]) == "."
    assert did_you_mean("federation.nam", keys) == "; did you mean federation.name?"
    assert did_you_mean("trainr.max_epochs", keys) == "; did you mean trainer.max_epochs?"
