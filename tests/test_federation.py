"""Phases, rounds, selection, checkpoint and resume."""

import csv
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.runs import Kill, WithDropout, assert_same, data, federation, model, phases
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, Local, PersonalizedExpert, PFLMoE
from fedmoe_pl.callbacks import ClientCheckpoint
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.rounds.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("hook", "n"),
    [
        *(("on_client_end", 2), ("on_client_end", 6), ("on_evaluation_end", 3), ("on_round_end", 3)),
        *(("on_round_end", 5), ("on_client_end", 15), ("on_phase_end", 3), ("on_fit_end", 1)),
    ],
)
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path, hook, n):
    federation(tmp_path / "whole").fit(model(), data())
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "stopped", callbacks=[Kill(hook, n)]).fit(model(), data())
    resumed = federation(tmp_path / "stopped")
    resumed.fit(model(seed=9), data(), ckpt_path="last")

    whole = tmp_path / "whole/federation/version_0"
    content, expected = (
        load_checkpoint(resumed.run_dir / "checkpoints/last.ckpt"),
        load_checkpoint(whole / "checkpoints/last.ckpt"),
    )
    assert_same(content, expected)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (resumed.run_dir / name).read_bytes() == (whole / name).read_bytes()


def test_a_process_killed_by_the_system_is_continued_from_the_command_line(tmp_path):
    command = [sys.executable, "cli.py", "fit", "--config", "configs/quickstart.yaml", "--federation.phases", PHASES]
    command += ["--data.init_args.num_clients", "4", "--data.init_args.partitioner", "IID", "--federation.name", "run"]

    def arguments(folder):
        return [*command, "--federation.default_root_dir", str(tmp_path / folder)]

    rounds = tmp_path / "killed/run/version_0/rounds.csv"
    with subprocess.Popen(arguments("killed"), cwd=REPOSITORY, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while (not rounds.is_file() or len(rounds.read_text().splitlines()) < 4) and time.monotonic() < deadline:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    assert len(rounds.read_text().splitlines()) < 26
    subprocess.run([*arguments("killed"), "--ckpt_path", "last"], cwd=REPOSITORY, check=True, capture_output=True)
    subprocess.run(arguments("whole"), cwd=REPOSITORY, check=True, capture_output=True)
    content, expected = (
        load_checkpoint(tmp_path / folder / "run/version_0/checkpoints/last.ckpt") for folder in ("killed", "whole")
    )
    assert_same(content, expected)
    assert rounds.read_bytes() == (tmp_path / "whole/run/version_0/rounds.csv").read_bytes()


PHASES = """[
  {name: FedAvg, algorithm: {class_path: FedAvg, init_args: {shared: global_expert.*}}, rounds: 25, gate: {class_path:
   ConstantGate, init_args: {weight: 1.0}}},
  {name: PFL-FT, algorithm: {class_path: PersonalizedExpert}}]"""


def test_one_federated_phase_serves_all_personalized_ones_and_local_ignores_it(tmp_path):
    run = federation(tmp_path, phases()[1:] + phases()[:1])
    assert run.starts == {"FedAvg": "initial", "PFL-FB": "FedAvg", "PFL-MF": "PFL-FB", "Local": "initial"}
    run.fit(model(), data())
    fedavg = run.client_module("FedAvg", 0).state_dict()
    for method in ("PFL-FB", "PFL-MF"):
        for client in range(3):
            state = run.client_module(method, client).state_dict()
            for name, tensor in state.items():
                if name.startswith("global_expert."):
                    assert torch.equal(tensor, fedavg[name])
                if name.startswith("local_expert.extractor."):
                    assert torch.equal(tensor, fedavg[name.replace("local_expert", "global_expert")])
    experts = [run.client_module(method, 1).local_expert.state_dict() for method in ("PFL-FB", "PFL-MF")]
    assert_same(dict(experts[0]), dict(experts[1]))


def test_the_monitored_round_is_the_result_and_the_next_phase_starts_from_it(tmp_path):
    federated = Phase("FedAvg", FedAvg("global_expert.*"), rounds=6, gate=ConstantGate(1.0), monitor="global_test")
    run = federation(tmp_path, [federated, Phase("PFL-FT", PersonalizedExpert(), max_epochs=0)])
    results = run.fit(model(), data())
    accuracies = [row["global_test_mean"] for row in run.run.rows[:6]]
    best = accuracies.index(max(accuracies)) + 1
    assert best < 6, "the test shows nothing if the last round is the best"
    assert (results["FedAvg"].round, results["FedAvg"].selection) == (best, "best round by global_test")
    assert results["FedAvg"].spread("global_test").mean == max(accuracies)

    short = Phase("FedAvg", FedAvg("global_expert.*"), rounds=best, gate=ConstantGate(1.0))
    expected = federation(tmp_path / "short", [short])
    expected.fit(model(), data())
    state = run.client_module("PFL-FT", 0).global_expert.state_dict()
    assert_same(dict(state), dict(expected.client_module("FedAvg", 0).global_expert.state_dict()))


def test_rounds_before_monitor_from_round_are_not_selected(tmp_path):
    phase = Phase("FedAvg", FedAvg("global_expert.*"), rounds=6, gate=ConstantGate(1.0), monitor="global_test")
    phase.monitor_from_round = 6
    assert federation(tmp_path, [phase]).fit(model(), data())["FedAvg"].round == 6


@pytest.mark.parametrize("kind", ["federation", "lightning"])
def test_a_checkpoint_given_in_place_of_fedavg_gives_the_same_personalized_models(tmp_path, kind):
    whole = federation(tmp_path / "whole")
    whole.fit(model(), data())
    if kind == "federation":
        path = whole.run_dir / "checkpoints/last.ckpt"
    else:
        path = whole.run_dir / "clients/FedAvg/all_clients.ckpt"
    given = phases()
    given[1].ckpt_path = str(path)
    run = federation(tmp_path / "given", given)
    run.fit(model(), data())
    assert_same(run.run.states["PFL-MF"].kept, whole.run.states["PFL-MF"].kept)


def test_every_client_s_checkpoint_loads_as_a_lightning_module(tmp_path):
    run = federation(tmp_path)
    run.fit(model(), data())
    x = data().x[:7]
    for method, file in (("PFL-MF", "client_002.ckpt"), ("FedAvg", "all_clients.ckpt")):
        path = run.run_dir / "clients" / method / file
        module = PersonalizedMoE.load_from_checkpoint(
            path, global_expert=WithDropout(), local_expert=WithDropout()
        ).eval()
        assert torch.equal(module(x), run.client_module(method, 2)(x))


def test_files_name_every_number(tmp_path):
    run = federation(tmp_path, logger=CSVLogger(tmp_path / "log"))
    run.fit(model(), data(test_fraction=0.2, validation_fraction=0.2))
    with (run.run_dir / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [phase.name for phase in run.phases for _ in range(3)]
    assert {(row["method"], row["model"], row["moment"]) for row in rows} == {
        ("Local", "local expert", "after local training"),
        ("FedAvg", "global expert", "after aggregation"),
        ("PFL-FB", "local expert", "after local training"),
        ("PFL-MF", "mixture", "after local training"),
    }
    assert all(row["local_test_held_out"] and row["validation"] for row in rows)
    assert [bool(row["mean_gate_weight"]) for row in rows] == [False] * 9 + [True] * 3
    with (run.run_dir / "rounds.csv").open() as file:
        assert [(row["method"], row["round"]) for row in csv.DictReader(file)] == [
            ("Local", "1"),
            *(("FedAvg", str(i)) for i in (1, 2, 3, 4)),
            ("PFL-FB", "1"),
            ("PFL-MF", "1"),
        ]
    assert next((tmp_path / "log").rglob("metrics.csv")).is_file()


def test_test_and_predict_repeat_the_run_s_numbers_from_its_checkpoint(tmp_path, capsys):
    run = federation(tmp_path)
    run.fit(model(), data(test_fraction=0.3))
    table = capsys.readouterr().out.strip("\n").splitlines()[:7]
    again = federation(tmp_path)
    again.test(model(seed=3), data(test_fraction=0.3))
    assert capsys.readouterr().out.splitlines()[:7] == table
    again.predict(model(seed=3), data(test_fraction=0.3))
    with (run.run_dir / "predictions.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "PFL-MF" and row["client"] == "1"]
    right = [row["label"] == row["prediction"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(run.results["PFL-MF"].clients[1].local_test_held_out)
    assert all(0 <= float(row["gate_weight"]) <= 1 for row in rows)


def test_validate_needs_and_uses_validation_samples(tmp_path, capsys):
    run = federation(tmp_path)
    run.fit(model(), data(validation_fraction=0.3))
    capsys.readouterr()
    federation(tmp_path).validate(model(), data(validation_fraction=0.3))
    mean = 100 * run.results["PFL-MF"].spread("validation").mean
    assert f"{mean:.2f}" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("PFL-MF"))
    with pytest.raises(MisconfigurationException, match="validation_fraction is 0"):
        federation(tmp_path).validate(model(), data())


def test_early_stopping_of_a_client_sees_its_validation_loss(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    seen = []

    class Seen(EarlyStopping):
        def on_train_end(self, trainer, pl_module):
            seen.append((trainer.current_epoch, float(trainer.callback_metrics["validation_loss"])))

    trainer = {"accelerator": "cpu", "limit_val_batches": 1.0, "max_epochs": 50}
    trainer["callbacks"] = [Seen("validation_loss", min_delta=10.0, patience=2)]
    federation(tmp_path, [Phase("Local", Local())], trainer=trainer).fit(model(), data(validation_fraction=0.3))
    assert [epochs for epochs, _ in seen] == [3, 3, 3], "every client has callbacks of its own"


REFUSED = {
    "clients_per_round is 4, but must be at most the number of clients, 3": {"clients_per_round": 4},
    "clients_per_round is 1.5": {"clients_per_round": 1.5},
    "rounds is 0, but must be at least 1": {"rounds": 0},
    "monitor is 'accuracy', but must be one of local_test": {"monitor": "accuracy"},
    "monitor is 'validation', but validation_fraction is 0": {"monitor": "validation"},
    "monitor_from_round is 3, but must be at most rounds, 1": {"monitor_from_round": 3},
    "start is 'Fed', but must be 'initial' or an earlier phase": {"start": "Fed"},
    "PFLMoE starts from an earlier phase, but none": {"algorithm": PFLMoE()},
    "shared is 'global_exprt.*', which matches no parameter": {"algorithm": FedAvg("global_exprt.*")},
    "Invalid learning rate: -1": {"optimizer": partial(torch.optim.SGD, lr=-1)},
    "ckpt_path is 'none.ckpt', but there is no such file": {"ckpt_path": "none.ckpt"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_phase_that_cannot_run_is_refused_before_any_training(tmp_path, sentence):
    with pytest.raises(MisconfigurationException, match=sentence.replace("*", r"\*")):
        phase = Phase(**{"name": "FedAvg", "algorithm": FedAvg(), **REFUSED[sentence]})
        federation(tmp_path, [Phase("Local", Local(), evaluate=False), phase]).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_refused_and_the_run_is_kept(tmp_path, damage):
    run = federation(tmp_path)
    run.fit(model(), data())
    path = run.run_dir / "checkpoints/last.ckpt"
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(path.read_bytes()[:-2000] if damage is None else damage)
    files = {file: file.read_bytes() for file in run.run_dir.rglob("*") if file.is_file()}
    with pytest.raises(MisconfigurationException, match="damaged or no checkpoint"):
        federation(tmp_path).fit(model(), data(), ckpt_path=str(damaged))
    assert {file: file.read_bytes() for file in run.run_dir.rglob("*") if file.is_file()} == files


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    federation(tmp_path).fit(model(), data())
    with pytest.raises(MisconfigurationException, match="seed_everything 0, but now it is 1"):
        federation(tmp_path, seed=1).fit(model(), data(), ckpt_path="last")
    with pytest.raises(MisconfigurationException, match="holds the phases"):
        federation(tmp_path, phases()[:1]).fit(model(), data(), ckpt_path="last")
    with pytest.raises(MisconfigurationException, match=r"no run in .* has a checkpoint"):
        federation(tmp_path / "empty").fit(model(), data(), ckpt_path="last")


def test_a_model_that_does_not_fit_the_data_is_refused(tmp_path):
    class TooFew(WithDropout):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(4, 2)

    class Wide(WithDropout):
        def __init__(self):
            super().__init__()
            self.extractor = nn.Linear(50, 4)

    for expert, sentence in ((TooFew(), "have 3 classes"), (Wide(), r"samples of shape \(5,\)")):
        with pytest.raises(MisconfigurationException, match=sentence):
            federation(tmp_path).fit(PersonalizedMoE(expert), data())
    with pytest.raises(MisconfigurationException, match="at least one phase and every name once"):
        federation(tmp_path, [phases()[0], phases()[0]])


def test_a_callback_of_the_user_takes_the_default_s_place(tmp_path):
    from fedmoe_pl.callbacks import GateMonitor

    mine = GateMonitor(max_clients=2)
    monitors = [
        callback for callback in federation(tmp_path, callbacks=[mine]).callbacks if type(callback) is GateMonitor
    ]
    assert monitors == [mine]


def test_a_checkpoint_goes_on_only_with_its_own_data_and_rounds(tmp_path):
    federation(tmp_path).fit(model(), data())
    for other in (data(sizes=(13, 8, 11, 9)), data(validation_fraction=0.3), data(sizes=(11, 8, 13))):
        with pytest.raises(MisconfigurationException, match="a run on other data or clients"):
            federation(tmp_path).test(model(), other)
    changed = phases()
    changed[1].rounds = 7
    with pytest.raises(MisconfigurationException, match="'FedAvg' has had 4 rounds, but rounds is 7"):
        federation(tmp_path, changed).fit(model(), data(), ckpt_path="last")
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((tmp_path / "federation/version_0/checkpoints/last.ckpt").read_bytes())
    with pytest.raises(MisconfigurationException, match=r"it must be checkpoints/last\.ckpt in the folder of its run"):
        federation(tmp_path).fit(model(), data(), ckpt_path=str(moved))


def test_a_result_given_by_a_checkpoint_says_so_and_must_fit_before_any_training(tmp_path):
    whole = federation(tmp_path / "whole")
    whole.fit(model(), data())
    given = phases()
    given[1].ckpt_path, given[1].rounds = str(whole.run_dir / "checkpoints/last.ckpt"), 1000
    results = federation(tmp_path / "given", given).fit(model(), data())
    assert results["FedAvg"].selection == "given checkpoint"
    assert results["FedAvg"].round == whole.results["FedAvg"].round
    assert results["FedAvg"].clients == whole.results["FedAvg"].clients or results["FedAvg"].spread("global_test") == (
        whole.results["FedAvg"].spread("global_test")
    )

    class Wide(WithDropout):
        def __init__(self):
            super().__init__()
            self.extractor = nn.Sequential(nn.Linear(5, 9), nn.ReLU())
            self.classifier = nn.Linear(9, 3)

    with pytest.raises(MisconfigurationException, match="cannot be loaded"):
        federation(tmp_path / "wide", given).fit(PersonalizedMoE(Wide()), data())
    assert not (tmp_path / "wide").exists()


def test_a_phase_s_scheduler_steps_once_per_local_epoch(tmp_path):
    def stop(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)

    kept = []
    for epochs, scheduler in ((1, None), (4, stop), (4, None)):
        phase = Phase("Local", Local(), max_epochs=epochs, lr_scheduler=scheduler, gate=ConstantGate(0.0))
        run = federation(tmp_path / str(len(kept)), [phase])
        torch.manual_seed(0)
        run.fit(PersonalizedMoE(NoDropout(), optimizer=partial(torch.optim.SGD, lr=0.1)), data())
        kept.append(run.run.states["Local"].kept)
    assert_same(kept[0], kept[1])  # with a rate of 0 from the second epoch on, one epoch is all
    assert not torch.equal(*(one[0]["local_expert.0.weight"] for one in kept[1:]))


class NoDropout(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def test_batch_normalization_trains_with_a_last_batch_of_one_sample(tmp_path):
    class Normalized(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    sizes = (13, 9, 1)  # batches of 4: a last one of one sample, which is left out, or only one of one sample
    phase = Phase("FedAvg", FedAvg(), rounds=2, gate=ConstantGate(1.0))
    run = federation(tmp_path, [phase])
    with pytest.raises(MisconfigurationException, match="client 2 has one training sample"):
        run.fit(PersonalizedMoE(Normalized()), data(sizes=sizes))
    run = federation(tmp_path, [phase])
    run.fit(PersonalizedMoE(Normalized()), data(sizes=sizes[:2]))
    server = run.run.states["FedAvg"].server
    assert server["global_expert.1.num_batches_tracked"] == 2 * 3, "three whole batches a round, counted by client 0"


def test_gradient_clipping_of_the_trainer_reaches_every_step(tmp_path):
    trainer = {"accelerator": "cpu", "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "norm"}
    run = federation(tmp_path, [Phase("Local", Local(), gate=ConstantGate(0.0))], trainer=trainer)
    torch.manual_seed(0)
    module = PersonalizedMoE(NoDropout(), optimizer=partial(torch.optim.SGD, lr=1.0))
    run.fit(module, data())
    steps = len(data().batches(data().train_samples[0]))
    before = module.local_expert.state_dict()
    moved = [run.run.states["Local"].kept[0][f"local_expert.{name}"] - before[name] for name in before]
    assert 0 < torch.cat([part.flatten() for part in moved]).norm() <= steps * 1e-3 * 1.001


def test_only_the_named_methods_clients_are_written(tmp_path):
    run = federation(tmp_path, callbacks=[ClientCheckpoint(["PFL-FB"])])
    run.fit(model(), data())
    assert [path.name for path in (run.run_dir / "clients").iterdir()] == ["PFL-FB"]
    wrong = federation(tmp_path / "wrong", callbacks=[ClientCheckpoint(["PFL-FT"])])
    with pytest.raises(MisconfigurationException, match=r"methods has 'PFL-FT', but federation\.phases are"):
        wrong.fit(model(), data())
