"""Training samples without a label: what counts them, and what is refused; see also ``few labels`` of the oracle."""

import csv
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, mixture, run
from helpers.data import Own, numbered, refused_argument, set_up, without_labels
from helpers.deployed import federation as deployed
from helpers.methods import METHODS, data
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import TensorDataset

from fedmoe_pl import DPSGD, Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.algorithms.consent import OptOut
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import CsvFile, Dirichlet, FromDatasets, NpzFile
from fedmoe_pl.data.partition_report import log_partition, partition_rows
from fedmoe_pl.deployment.descriptions import own_data
from fedmoe_pl.evaluation.outputs import own_batch
from fedmoe_pl.models import GlobalOnly, LinearGate, PersonalizedMoE

NONE = -100
Y = [0, NONE, 1, 2, NONE, 0, 1, NONE, 2, 0, NONE, 1]
LEAN = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def of_arrays(folder, **kwargs):
    return Own(numbered(Y, client_train=np.repeat([*"ab"], 6)), **kwargs)


def of_tensors(folder, **kwargs):
    x, y, groups = torch.randn(12, 3), torch.tensor(Y), np.repeat([*"ab"], 6)
    test = TensorDataset(x[:2], torch.tensor([0, 1]))
    return FromDatasets(TensorDataset(x, y), test, groups=lambda dataset: groups[: len(dataset)], **kwargs)


def of_npz(folder, **kwargs):
    x = np.ones((12, 3), np.float32)
    arrays = {"x_train": x, "y_train": Y, "x_test": x[:2], "y_test": [0, 1], "client_train": np.repeat([*"ab"], 6)}
    np.savez(folder / "own.npz", **arrays)
    return NpzFile(str(folder / "own.npz"), **kwargs)


def of_csv(folder, **kwargs):
    for name, labels in (("own", Y), ("test", [0, 1])):
        rows = [f"{place},{label},{'ab'[place // 6]}" for place, label in enumerate(labels)]
        (folder / f"{name}.csv").write_text("\n".join(["x,y,site", *rows]) + "\n")
    return CsvFile(str(folder / "own.csv"), "y", "site", test_path=str(folder / "test.csv"), **kwargs)


@pytest.mark.parametrize("make", [of_arrays, of_tensors, of_npz, of_csv])
@pytest.mark.parametrize("stratify", [False, True])
def test_all_that_clients_hold_out_has_labels_and_only_those_are_counted(make, stratify, tmp_path):
    samples = set_up(make(tmp_path, stratify=stratify, validation_fraction=0.5))
    assert samples.num_classes == 3 and samples.y[:12].tolist() == Y
    for client, held in enumerate((range(6), range(6, 12))):
        train, validation = (part[client].tolist() for part in (samples.train_samples, samples.validation_samples))
        assert {*train, *validation} == {*held} and {i for i in held if Y[i] == NONE} <= {*train}
        expected = [sum(Y[i] == label for i in held) for label in range(3)]
        assert samples.class_counts()[client].tolist() == expected
        assert samples.class_shares[client].tolist() == pytest.approx([each / sum(expected) for each in expected])
        row = [*partition_rows(samples)][client]
        assert [row[f"class_{label}"] for label in range(3)] == expected
        assert row["train"] + row["validation"] == 6
    assert (samples.y[samples.validation_samples.indices] >= 0).all()


def test_a_share_of_the_samples_with_labels_is_held_out(caplog):
    samples = without_labels(blobs((40, 20)), 0.5, test_fraction=0.3, validation_fraction=0.2)
    log_partition(samples)
    of_each = []
    splits = samples.partitioner.parts, samples.test_samples, samples.validation_samples
    for part, *held_out in zip(*splits, strict=True):
        labelled = int((samples.y[part] >= 0).sum())
        of_each.append(len(part) - labelled)
        assert [*map(len, held_out)] == [round(0.3 * labelled), round(0.2 * labelled)]
        assert all((samples.y[some] >= 0).all() for some in held_out)
    assert f"{min(of_each)} to {max(of_each)} training samples without a label" in caplog.text


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Own(numbered([0, 1, 2], [0, NONE]), num_clients=1), "y_test"),
        (lambda: Own(numbered([NONE] * 3), num_clients=1), "y_train"),
        (lambda: Own(numbered([0, -1, NONE]), num_clients=1), "y_train"),
        (lambda: Own(numbered([0, 1, NONE] * 9), num_clients=2, partitioner=Dirichlet(1.0)), "partitioner"),
        (lambda: Own(numbered([0, 1, NONE], client_train=np.array([*"aab"]))), "partitioner"),
        (
            lambda: FromDatasets(TensorDataset(torch.ones(3, 2).double(), torch.tensor([0, 1, NONE])), pool=True),
            "targets",
        ),
    ],
)
def test_data_that_lack_too_much_are_refused(make, argument):
    assert refused_argument(make) == argument


def test_updates_weigh_as_many_samples_as_have_a_label(tmp_path):
    """A step of all clients on all that they have is then a step on all samples with a label together."""
    samples = without_labels(blobs((30, 7, 12), batch_size=99), 0.6)
    module, phase = mixture(GlobalOnly(), optimizer=lambda p: torch.optim.SGD(p, lr=0.5)), Phase("it", FedAvg())
    state = run([phase], module, samples, tmp_path, max_epochs=1).run.states["it"]
    chosen = (samples.y[:49] >= 0).nonzero().flatten()
    expert = mixture(GlobalOnly()).global_expert
    F.cross_entropy(expert(samples.x[chosen]), samples.y[chosen]).backward()
    for name, parameter in expert.named_parameters():
        expected = parameter.detach() - 0.5 * parameter.grad
        torch.testing.assert_close(state.server[f"global_expert.{name}"], expected, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore")  # of Lightning, of few batches and workers
def test_means_of_batches_are_means_over_samples_with_a_label():
    samples = without_labels(blobs((30,), batch_size=3), 0.7)
    chosen = samples.train_samples[0][torch.randperm(30, generator=torch.Generator().manual_seed(0))]
    batches = samples.batches(chosen)
    assert any((y < 0).all() for _, y in batches) and any((y < 0).any() and not (y < 0).all() for _, y in batches)
    module, labelled = mixture(LinearGate(5)), chosen[samples.y[chosen] >= 0]
    (found,) = Trainer(accelerator="cpu", **LEAN).validate(module, batches, verbose=False)
    with torch.no_grad():
        scores, y = module(samples.x[labelled]), samples.y[labelled]
    assert found["validation_loss"] == pytest.approx(F.cross_entropy(scores, y).item())
    assert found["validation_accuracy"] == pytest.approx((scores.argmax(1) == y).double().mean().item())


@pytest.mark.filterwarnings("ignore")
def test_curves_of_clients_are_means_over_samples_with_a_label(tmp_path):
    samples = without_labels(blobs((30,), batch_size=3), 0.7)
    still = mixture(LinearGate(5), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    phase = Phase("it", FedAvg(), train=Train(max_epochs=1, trainer={"logger": True}))
    run([phase], still, samples, tmp_path, logger=CSVLogger(tmp_path / "logs"))
    labelled = samples.train_samples[0][samples.y[samples.train_samples[0]] >= 0]
    with torch.no_grad():
        scores, y = still(samples.x[labelled]), samples.y[labelled]
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    (row,) = [row for row in csv.DictReader(file.read_text().splitlines()) if row["it/train_loss"]]
    assert float(row["it/train_loss"]) == pytest.approx(F.cross_entropy(scores, y).item())
    assert float(row["it/train_accuracy"]) == pytest.approx((scores.argmax(1) == y).double().mean().item())


def test_gate_weights_by_class_leave_out_samples_without_a_label(tmp_path):
    samples = without_labels(blobs((12, 9)), 0.6)
    phases = [Phase("FedAvg", FedAvg(), gate=LinearGate(5).double())]
    finished = federation(tmp_path, phases)
    finished.fit(mixture(), samples)
    (file,) = tmp_path.rglob("gate_weights.csv")
    for client, row in enumerate(csv.DictReader(file.read_text().splitlines())):
        (module,) = finished.run.client_modules("FedAvg", [client])
        own = samples.train_samples[client]
        assert (samples.y[own_batch(samples, client)[0]] >= 0).all(), "of which callbacks show the class"
        with torch.no_grad():
            weights = module.mix(samples.x[own])[1][:, 0]
        for label in range(3):
            expected = weights[samples.y[own] == label].mean().item()
            assert float(row[f"class_{label}"] or "nan") == pytest.approx(expected, nan_ok=True)


TRAINED = {"Local", "FedAvg", "FedAvg of everything", "TrimmedMean", "DifferentialPrivacy", "SecureAggregation"}
TRAINED |= {"FedPer", "FedRep", "FineTunedFedPer"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_with_such_samples_or_refuses_them_before_training(name, tmp_path):
    samples = without_labels(data(), 0.5, **METHODS[name].split)
    its = federation(tmp_path, METHODS[name].phases(), trainer={"accelerator": "cpu", "max_epochs": 2})
    if name in TRAINED:
        its.fit(METHODS[name].model(), samples)
        return
    with pytest.raises(InvalidArgumentError, match="some training samples have no label") as refusal:
        its.fit(METHODS[name].model(), samples)
    assert refusal.value.argument == "algorithm" and not [*tmp_path.rglob("*.ckpt")]


def with_settings(model=mixture, trainer=None, **kwargs):
    return lambda path: federation(
        path, [Phase("it", FedAvg(), **kwargs)], trainer={"accelerator": "cpu", **(trainer or {})}
    ).fit(model(), without_labels(blobs(), 0.5))


class Declared(FedAvg):
    pass


@pytest.mark.parametrize(
    ("argument", "fit"),
    [
        ("sample_privacy", with_settings(sample_privacy=DPSGD(0.5, 1e-3, 2.0))),
        ("trainer.strategy", with_settings(trainer={"strategy": "ddp", "devices": 2})),
        ("loss", with_settings(lambda: PersonalizedMoE(nn.Linear(5, 3), loss=nn.CrossEntropyLoss(ignore_index=2)))),
        (
            "loss",
            with_settings(
                lambda: PersonalizedMoE(nn.Linear(5, 3), task="multiclass", loss=lambda scores, y: scores.sum())
            ),
        ),
        ("task", with_settings(lambda: PersonalizedMoE(nn.Linear(5, 1), task="regression"))),
    ],
)
def test_what_would_count_them_is_refused(argument, fit, tmp_path):
    with pytest.raises(InvalidArgumentError, match="some training samples have no label") as refusal:
        fit(tmp_path)
    assert refusal.value.argument.endswith(argument)


def test_a_client_that_opts_in_no_sample_with_a_label_is_refused(tmp_path):
    algorithm = FedAvg()
    algorithm.opt_out = OptOut(data=0.9)
    with pytest.raises(InvalidArgumentError, match=r"one that trains each client on a sample with a label, because"):
        federation(tmp_path, [Phase("it", algorithm)]).fit(mixture(), without_labels(blobs(), 0.9))


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_samples_set_aside_may_not_leave_expert_or_gate_without_a_label(fraction, tmp_path):
    """Each client has one label, which only one of them could learn from."""
    moe = [Phase("expert", FineTuning(gate_fraction=fraction)), Phase("gate", PFLMoE(fraction), gate=LinearGate(5))]
    its = federation(tmp_path, [Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()), *moe])
    with pytest.raises(InvalidArgumentError, match="would have none") if fraction else nullcontext():
        its.check(mixture(), without_labels(blobs((8, 9)), 1.0))


@pytest.mark.parametrize("shared", ["*", "global_expert.extractor.*"])
def test_where_training_could_count_them_a_given_result_is_refused_for_new_clients_that_train(shared, tmp_path):
    algorithm = FedAvg(shared)
    algorithm.opt_out = OptOut(data=0.9)
    before = federation(tmp_path, [Phase("it", algorithm, gate=GlobalOnly())])
    before.fit(mixture(), blobs())
    path, samples = str(before.run_dir / "checkpoints/last.ckpt"), without_labels(blobs((12, 9)), 0.9)
    if shared == "*":
        given = federation(tmp_path, [Phase("it", algorithm, gate=GlobalOnly(), ckpt_path=path)])
        with pytest.warns(UserWarning, match="a run with other clients or samples"):
            given.check(mixture(), samples)
        return
    with pytest.raises(InvalidArgumentError, match="one that trains each client on a sample with a label"):
        before.personalize(mixture(), samples)


@pytest.mark.parametrize("algorithm", [Declared(), FineTuning(keep_better=True), PFLMoE(interleaved=True)])
def test_an_algorithm_must_declare_that_it_uses_samples_in_its_losses_only(algorithm, tmp_path):
    phases = [Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()), Phase("it", algorithm)]
    with pytest.raises(InvalidArgumentError, match=r"Phase 'it': algorithm is .*samples_in_loss_only"):
        federation(tmp_path, phases).fit(mixture(LinearGate(5)), without_labels(blobs(), 0.5, validation_fraction=0.2))


def test_a_deployed_client_is_refused_such_data(tmp_path):
    samples = of_arrays(tmp_path)
    with pytest.raises(MisconfigurationException, match="some training samples have no label"):
        own_data(samples, 0, deployed([Phase("it", FedAvg())], tmp_path))
