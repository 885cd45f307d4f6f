"""Completion: the script that ``fedmoe completion`` prints, asked by bash."""

import contextlib
import io
import shutil
import subprocess

import pytest

from fedmoe_pl.cli import main


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The file with the script."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmoe"])
        main(["completion", "bash"])
    path = tmp_path_factory.mktemp("completion") / "fedmoe.bash"
    path.write_text(out.getvalue())
    return path


COMPLETED = {
    ("",): ["fit", "report", "configs", "--help", "--version"],
    ("p",): ["personalize", "predict", "partition", "provision"],
    ("fit", "--trainer.max_e"): ["--trainer.max_epochs"],
    ("fit", "--config", "quickst"): ["quickstart"],
    ("benchmark", "--config", "papers/pfl_moe_q"): ["papers/pfl_moe_quick"],
    ("fit", "--federation.store", ""): ["memory", "disk"],
    ("fit", "--data", "=", "Fash"): ["FashionMNIST"],
    ("test", "--data.init_args.partitioner.init_args.majority_s"): [
        "--data.init_args.partitioner.init_args.majority_share"
    ],
    ("fit", "--model.init_args.gate", "Feat"): ["FeatureGate"],
    ("fit", "--config", "quickstart", "--federation.phases.F"): ["--federation.phases.FedAvg."],
    ("fit", "--config", "quickstart", "--federation.phases.label"): [r"--federation.phases.label\ prior."],
    ("fit", "--config", "quickstart", "--federation.phases.FedAvg.clients_p"): (
        ["--federation.phases.FedAvg.clients_per_round"]
    ),
    ("fit", "--config", "=", "quickstart", "--federation.phases.FedAvg.clients_p"): (
        ["--federation.phases.FedAvg.clients_per_round"]
    ),
    ("fit", "--config", "own.yaml", "--federation.phases.quoted"): ["--federation.phases.quoted.name."],
    ("fit", "--config", "quickstart", r"--federation.phases.label\ prior.gate", "Fea"): ["FeatureGate"],
    ("fit", "--config", "quickstart", "--federation.phases.FedAvg.evaluate", "=", "f"): ["false"],
    ("fit", "--config", "fol"): ["folder/"],
    ("fit", "--model", ""): ["PersonalizedMoE", "SparseMoE"],
    ("test", "--ckpt_path", "fol"): ["folder/"],
    ("fit", "--trainer.accelerator", "C"): [],
    ("export", ""): ["--format", "--method"],
    ("export", "--config", "quickstart", "--method", "PFL-M"): ["PFL-MF", "PFL-MFE"],
    ("export", "--config=quickstart", "--method", "la"): [r"label\ prior"],
    ("fit", "--data=Fash"): ["--data=FashionMNIST"],
    ("fit", "--config=quickst"): ["--config=quickstart"],
    ("fit", "--config=quickstart", "--federation.phases.FedAvg.gate=Fea"): (
        ["--federation.phases.FedAvg.gate=FeatureGate"]
    ),
    ("list", "server"): ["server_optimizers"],
    ("list", "part"): ["partitioners"],
    ("fit", "--trainer.callbacks+", "BestE"): ["BestEpoch"],
    ("fit", "--trainer.callbacks+", "EarlyS"): ["EarlyStopping"],
    ("report", "--base"): ["--baseline"],
}


def test_bash_completes_commands_options_and_values(script):
    """One bash for all, in which Python is not found."""
    commands = [f"PATH={script.parent}", f"source {script}"]
    for words in COMPLETED:
        quoted = " ".join(f"'{word}'" for word in ("fedmoe", *words))
        commands += [f"COMP_WORDS=({quoted}) COMP_CWORD={len(words)}", "_fedmoe"]
        commands += ['IFS="|"; echo "${COMPREPLY[*]}"', "unset IFS"]
    (script.parent / "sed").symlink_to(shutil.which("sed"))
    (script.parent / "folder").mkdir()
    (script.parent / "own.yaml").write_text("federation:\n  phases:\n    - {name: 'quoted.name', algorithm: FedAvg}\n")
    bash = ["bash", "-c", "\n".join(commands)]
    run = subprocess.run(bash, capture_output=True, text=True, cwd=script.parent, timeout=30)
    assert not run.stderr
    for (words, expected), line in zip(COMPLETED.items(), run.stdout.splitlines(), strict=True):
        completed = [word.removesuffix(" ") for word in line.split("|") if word]
        assert {*expected} <= {*completed}, words
        assert len(completed) == len(expected) or not words[-1]
        assert "null" not in completed or len(completed) > 1
        assert not words[-1].startswith("--federation.phases.F") or line.endswith(".") or line.endswith(" ")


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["completion", "fish"])
    assert exit.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
