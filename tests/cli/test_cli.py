"""The command line: YAML in, a table out, and one line for what the user can fix."""

import copy
import errno
import signal
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, shortened

from fedmoe_pl.cli import FederationCLI, main
from fedmoe_pl.trees import copy_module


@pytest.fixture
def quickstart(tmp_path):
    """The shortened quickstart, whose runs are in a folder of the test's own."""
    return shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)


@pytest.mark.parametrize(("command", "text"), [("join", "Takes part in a federation"), ("test", "Prints the table")])
def test_the_help_of_a_command_begins_with_what_it_does(command, text, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    described = capsys.readouterr().out.partition("options:")[0]
    assert text in described and "Runs all phases" not in described


@pytest.mark.parametrize("words", [["--model.help", "PersonalizedMoE"], ["--model=PersonalizedMoE", "--model.help"]])
def test_the_help_of_a_class_is_short_also_where_the_class_was_chosen_before(words, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *words])
    shown = capsys.readouterr().out
    assert "--model.gate_lr" in shown and "LeNet5" in shown and shown.count("\n") < 300


def test_the_help_of_a_command_has_the_arguments_of_the_trainer_on_request(capsys):
    shown = dict.fromkeys(["--help", "--trainer.help"], "")
    for option in shown:
        with pytest.raises(SystemExit) as exit:
            main(["fit", option])
        assert not exit.value.code
        shown[option] = capsys.readouterr().out
    sections = [line for line in shown["--help"].splitlines() if line.endswith(":") and line[0] != " "]
    assert sections[:2] == ["options:", "arguments of fit:"] and len(sections) == 7
    assert "--ckpt_path" in shown["--help"] and "--federation.failures.dropout" in shown["--help"]
    assert "StandIn" not in shown["--help"], "no data of a user's"
    for argument in ("accelerator", "limit_train_batches"):
        assert f"--trainer.{argument}" not in shown["--help"]
        assert f"--trainer.{argument}" in shown["--trainer.help"]


def test_partition_prints_and_draws_who_holds_what(tmp_path, capsys):
    main(["partition", "--config", QUICKSTART, "--federation.default_root_dir", str(tmp_path)])
    assert (tmp_path / "quickstart/partition.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) > 20


def test_copies_of_a_module_share_the_command_line_s_optimizer_factory(quickstart, tmp_path):
    """The factory holds the parser and with it the data; a deep copy of it would copy the data for every client."""
    phases = quickstart["federation"]["phases"][:1]
    quickstart["federation"] |= {"phases": phases, "enable_progress_bar": False, "logger": False}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(quickstart))
    module = FederationCLI(["fit", "--config", str(tmp_path / "one.yaml")]).model
    copied = copy_module(module)
    assert copied.optimizer is module.optimizer
    assert copied.global_expert is not module.global_expert
    assert copy.deepcopy(module).optimizer is not module.optimizer, "nothing to guard against any more"


def test_every_command_takes_the_configuration_in_a_run_s_folder_also_of_new_clients(quickstart, tmp_path, capsys):
    quickstart["federation"] |= {"phases": quickstart["federation"]["phases"][1:2], "logger": False}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(quickstart))
    for command in (["fit"], ["personalize", "--rounds", "1"]):
        main([*command, "--config", str(tmp_path / "one.yaml")])
    (path,) = tmp_path.glob("**/new_clients/version_0/config.yaml")
    main(["partition", "--config", str(path)])
    assert "Picture: " in capsys.readouterr().out


REFUSED = {  # at every moment of a command: while it is parsed, made, set up and started
    "data.init_args.partitioner.init_args.alpha is -1.0, but must be a finite number above 0.": (
        ["--data.init_args.partitioner.init_args.alpha", "-1"]
    ),
    "num_clients is 5000, but": ["--data.init_args.num_clients", "5000"],
    "trainer.devices is '0', but must be what a Trainer accepts, because `devices` s": ["--trainer.devices", "0"],
    "trainer.accelerator is 'hpu', but must be what a Trainer accepts, such as auto or cpu, because": [
        "--trainer.accelerator",
        "hpu",
    ],
    "root": ["--data", "FashionMNIST", "--data.init_args.root", "nowhere"],
    "ckpt_path is 'none.ckpt', but there is no such file": ["--ckpt_path", "none.ckpt"],
    "trainer.accelerator is 'gpu', but must be what a Trainer accepts, such as auto or cpu, because": [
        *("--trainer.accelerator", "gpu")
    ],
    "model.init_args.global_expert.init_args.in_features is 784, but must be 64, because the samples of Digits have": [
        *("--model.global_expert.in_features", "784")
    ],
    "model.init_args.global_expert.init_args.num_classes is 7, but must be at least 10, as the data have": [
        *("--model.global_expert.num_classes", "7")
    ],
    "default_root_dir": ["--federation.default_root_dir", __file__],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("sentence", REFUSED)
def test_what_the_user_can_fix_is_one_line_that_names_the_key(sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", QUICKSTART, *REFUSED[sentence]])
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("fedmoe: ")
    assert sentence in line
    assert not list(tmp_path.rglob("version_*")), "nothing was started"


@pytest.mark.slow
def test_a_full_disk_is_one_line_also_where_a_logger_notices(tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_text", full)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", QUICKSTART, f"--federation.default_root_dir={tmp_path}"])
    assert exit.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "fedmoe: No space left on device; make room, and continue the run with --ckpt_path last."


@pytest.mark.few(1)
@pytest.mark.parametrize("evaluation_point", ["in a client's training", "between rounds"])
def test_ctrl_c_says_how_to_go_on(evaluation_point, quickstart, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **kwargs):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    if evaluation_point == "between rounds":
        monkeypatch.setattr("fedmoe_pl.callbacks.ResultFiles.on_evaluation_end", interrupt)
    else:
        monkeypatch.setattr("fedmoe_pl.models.PersonalizedMoE.loss_of", interrupt)
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(quickstart))
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(tmp_path / "short.yaml")])
    assert exit.value.code == 130
    last = capsys.readouterr().err.strip().splitlines()[-1]
    if evaluation_point == "between rounds":
        assert last.startswith(f"fedmoe fit --config {tmp_path}/short.yaml --ckpt_path ")
        assert last.endswith("version_0/checkpoints/last.ckpt")
    else:  # a step of two clients is tried before the run has a folder
        assert last == "fedmoe: SIGINT has ended the run, which has no checkpoint to continue from."
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "a second Ctrl-C is heard"
