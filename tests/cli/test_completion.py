"""Completion: the script that ``fedmoe completion`` prints, asked by bash."""

import contextlib
import io
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
    ("",): ["fit", "report", "configs", "benchmark"],
    ("p",): ["personalize", "predict", "partition", "provision"],
    ("fit", "--trainer.max_e"): ["--trainer.max_epochs"],
    ("fit", "--config", "quickst"): ["quickstart"],
    ("fit", "--data", "Fash"): ["FashionMNIST"],
    ("test", "--data.init_args.partitioner.init_args.majority_s"): [
        "--data.init_args.partitioner.init_args.majority_share"
    ],
    ("fit", "--model.init_args.gate", "Feat"): ["FeatureGate"],
    ("fit", "--config", "fol"): ["folder"],
    ("fit", "--model", ""): ["PersonalizedMoE", "SparseMoE"],
    ("test", "--ckpt_path", "fol"): ["folder"],
    ("export", "--for"): ["--format"],
    ("export", "--format", ""): ["onnx", "torch_export", "lightning", "peft", "merged"],
    ("list", "server"): ["server_optimizers"],
    ("completion", "z"): ["zsh"],
    ("fit", "--trainer.callbacks", "BestE"): ["BestEpoch"],
    ("report", "--base"): ["--baseline"],
    ("tune", "--tri"): ["--trials"],
    ("tune", "--config", "tune/q"): ["tune/quickstart"],
}


@pytest.mark.slow
def test_bash_completes_commands_options_and_values(script):
    """One bash for all, in which Python is not found."""
    commands = [f"PATH={script.parent}", f"source {script}"]
    for words in COMPLETED:
        quoted = " ".join(f"'{word}'" for word in ("fedmoe", *words))
        commands += [f"COMP_WORDS=({quoted}) COMP_CWORD={len(words)}", "_shtab_fedmoe"]
        commands += ['IFS="|"; echo "${COMPREPLY[*]}"', "unset IFS"]
    (script.parent / "folder").mkdir()
    bash = ["bash", "-c", "\n".join(commands)]
    run = subprocess.run(bash, capture_output=True, text=True, cwd=script.parent, timeout=30)
    assert not run.stderr
    for (words, expected), line in zip(COMPLETED.items(), run.stdout.splitlines(), strict=True):
        completed = line.split("|")
        assert {*expected} <= {*completed}, (words, completed)


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["completion", "fish"])
    assert exit.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
