"""Accuracies of the clients' models against scikit-learn and counting by hand, how they spread, and as data frames."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from helpers import Expert, blobs, mixture, phase, run, runs
from helpers.backends import local_training
from helpers.configurations import REPOSITORY
from helpers.reports import csv_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from scipy.stats import bootstrap
from sklearn.metrics import accuracy_score, confusion_matrix, recall_score
from torchmetrics import Accuracy

from fedmoe_pl import Messages, Select
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import Digits
from fedmoe_pl.evaluation.client_models import evaluate_clients
from fedmoe_pl.evaluation.measure import predict
from fedmoe_pl.evaluation.results import ACCURACIES, ClientEvaluation, Evaluation
from fedmoe_pl.models import ConstantGate, FeatureGate, GlobalOnly, PersonalizedMoE, SmallMLP
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.trees import load_tree

nan = math.nan


def evaluated(model, datamodule, algorithm=None, server=(), kept=(), **changes):
    """The evaluations of all clients after a round."""
    training = replace(local_training(model, algorithm or Local(), datamodule), **changes)
    return evaluate_clients(training, dict(server), dict(kept), 1, "aggregation")


def test_accuracies_are_fractions_in_float64(tmp_path):
    it = phase("FedAvg", FedAvg(), evaluate=True)
    federation = run([it], mixture(), blobs(test_fraction=0.3), tmp_path)
    data = federation.run.datamodule
    for client, found in enumerate(federation.results["FedAvg"].clients):
        for value, samples in ((found.global_test, data.global_test), (found.local_test, data.test_samples[client])):
            assert value == round(value * len(samples)) / len(samples)


def another_model(seed, model) -> dict[str, torch.Tensor]:
    """The tensors of a model of the same architecture."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.5 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def expected_evaluation(model, tensors, datamodule, client) -> dict[str, float]:
    """All accuracies of one client's model, by scikit-learn."""
    load_tree(model, tensors)
    predicted = model(datamodule.x).argmax(1).numpy()
    labels = datamodule.y.numpy()

    def accuracy(samples):
        return accuracy_score(labels[samples], predicted[samples]) if len(samples) else nan

    test = datamodule.global_test.numpy()
    classes = range(datamodule.num_classes)
    by_class = recall_score(labels[test], predicted[test], labels=classes, average=None, zero_division=0)
    own = torch.cat((datamodule.train_samples[client], datamodule.validation_samples[client])).numpy()
    shares = [np.mean(labels[own] == label) for label in classes]
    return {
        "reweighted_test": float(np.average(by_class, weights=shares * np.isin(classes, labels[test]))),
        "local_test": accuracy(datamodule.test_samples[client].numpy()),
        "global_test": accuracy(test),
        "validation": accuracy(datamodule.validation_samples[client].numpy()),
    }


@pytest.mark.parametrize(
    "fractions", [{}, {"test_fraction": 0.3}, {"test_fraction": 0.25, "validation_fraction": 0.25}]
)
def test_accuracies_are_those_of_counting_by_hand_for_every_client(fractions):
    datamodule = blobs((17, 30, 23), **fractions)
    model = mixture(FeatureGate(6))
    kept = {client: another_model(client, model) for client in range(3)}
    evaluations = evaluated(model, datamodule, kept=kept)
    assert [evaluation.client for evaluation in evaluations] == [0, 1, 2]
    for client, evaluation in enumerate(evaluations):
        expected = expected_evaluation(mixture(FeatureGate(6)).eval(), kept[client], datamodule, client)
        actual = {metric: getattr(evaluation, metric) for metric in ACCURACIES}
        assert actual == pytest.approx(expected, abs=1e-6, nan_ok=True)
        assert evaluation.n_train == len(datamodule.train_samples[client])
    assert len({evaluation.reweighted_test for evaluation in evaluations}) == 3
    assert all(evaluation.reweighted_test != pytest.approx(evaluation.global_test) for evaluation in evaluations)


def test_reweighted_test_weighs_each_classs_accuracy_by_the_clients_share_of_the_class():
    # A model that always says 1: right on class 1 alone, of which the clients have a quarter and all of it.
    datamodule = blobs((4, 3))
    datamodule.y[:7] = torch.tensor([0, 0, 1, 2, 1, 1, 1])
    counts = datamodule.class_counts()
    datamodule.class_shares = counts / counts.sum(1, keepdim=True)
    model = mixture(ConstantGate(1))
    torch.nn.init.zeros_(model.global_expert.classifier[1].weight)
    model.global_expert.classifier[1].bias.data = torch.tensor([0.0, 1.0, 0.0]).double()
    first, second = evaluated(model, datamodule)
    assert (first.reweighted_test, second.reweighted_test) == (0.25, 1.0)
    share = (datamodule.y[datamodule.global_test] == 1).double().mean().item()
    assert first.global_test == second.global_test == pytest.approx(share, abs=1e-6)


def test_a_class_that_the_test_set_lacks_has_no_weight_and_an_output_without_a_class_counts_as_nothing():
    datamodule = blobs((17, 30))
    datamodule.global_test = datamodule.global_test[datamodule.y[datamodule.global_test] != 2][3:]
    assert datamodule.y[datamodule.global_test].bincount().tolist() == [8, 9], "not the same number of each class"
    model = mixture(ConstantGate(1), Expert(classes=5))
    evaluations = evaluated(model, datamodule)
    for client, evaluation in enumerate(evaluations):
        expected = expected_evaluation(model.eval(), {}, datamodule, client)
        assert evaluation.reweighted_test == pytest.approx(expected["reweighted_test"], abs=1e-6)
        assert evaluation.global_test == pytest.approx(expected["global_test"], abs=1e-6)


@pytest.mark.parametrize("test_fraction", [0.0, 0.3])
def test_gate_weights_are_of_the_held_out_samples_or_else_of_the_training_samples(test_fraction):
    datamodule = blobs((17, 30), test_fraction=test_fraction, validation_fraction=0.2)
    model = mixture(FeatureGate(6))
    kept = {1: another_model(1, model)}
    metrics = {"accuracy": Accuracy("multiclass", num_classes=3)}
    for client, evaluation in enumerate(evaluated(model, datamodule, kept=kept, metrics=metrics)):
        assert evaluation.metrics["local_test_accuracy"] == pytest.approx(evaluation.local_test, nan_ok=True)
        own = (datamodule.test_samples if test_fraction else datamodule.train_samples)[client]
        module = mixture(FeatureGate(6)).eval()
        load_tree(module, kept.get(client, {}))
        expected = module.mix(datamodule.x[own])[1].detach()
        torch.testing.assert_close(evaluation.gate_weights, expected)
        assert torch.equal(evaluation.gate_labels, datamodule.y[own])
        assert evaluation.mean_gate_weight == pytest.approx(expected[:, 0].mean().item())
        assert 0 < evaluation.mean_gate_weight < 1 and evaluation.mean_gate_weight != 0.5


class Unshortened(FedAvg):
    """Sends every client a new copy, so that no two are known to have the same model."""

    def server_send(self, server, client_id, request):
        return dict(server)


@pytest.mark.parametrize("with_own", [set(), {1, 2, 4}])
def test_clients_are_evaluated_the_same_with_and_without_the_shortcut_for_equal_models(with_own):
    datamodule = blobs((17, 30, 9, 12, 21), test_fraction=0.25, validation_fraction=0.25)
    model = mixture(FeatureGate(6))
    server = {name: t for name, t in another_model(9, model).items() if name.startswith("global_expert.")}
    kept = {
        client: {name: t for name, t in another_model(client, model).items() if name.startswith("local_expert.")}
        for client in with_own
    }
    pattern = "global_expert.*"
    short = evaluated(model, datamodule, FedAvg(pattern), server, kept)
    long = evaluated(model, datamodule, Unshortened(pattern), server, kept)
    for client, (a, b) in enumerate(zip(short, long, strict=True)):
        for metric in ACCURACIES:
            assert getattr(a, metric) == getattr(b, metric)
        torch.testing.assert_close(a.gate_weights, b.gate_weights)  # other batches: the last bit may differ
        initial = mixture(FeatureGate(6)).eval()
        expected = expected_evaluation(initial, {**server, **kept.get(client, {})}, datamodule, client)
        assert {metric: getattr(a, metric) for metric in ACCURACIES} == pytest.approx(expected, abs=1e-6)


class Individual(FedAvg):
    """Sends every client a model of its own."""

    def server_send(self, server, client_id, request):
        return {name: tensor * (client_id - 1) for name, tensor in server.items()}


class Asking(FedAvg):
    """Sends every client the model times what it asks for."""

    messages = Messages(request=("factor/",))

    def server_send(self, server, client_id, request):
        return {name: tensor * request["factor/x"] for name, tensor in server.items()}


FACTORS = {client: {"factor/x": torch.tensor(client - 1.0)} for client in range(3)}


@pytest.mark.parametrize(("algorithm", "kept"), [(Individual(), {}), (Asking(), FACTORS)])
def test_clients_that_kept_no_model_are_evaluated_with_what_each_is_sent(algorithm, kept):
    datamodule, model = blobs((17, 30, 9)), mixture(GlobalOnly())
    server = another_model(9, model)
    found = evaluated(model, datamodule, algorithm, server, kept)
    for client, evaluation in enumerate(found):
        tensors = {name: tensor * (client - 1) for name, tensor in server.items()}
        expected = expected_evaluation(mixture(GlobalOnly()).eval(), tensors, datamodule, client)
        assert evaluation.global_test == pytest.approx(expected["global_test"], abs=1e-6)
    assert len({evaluation.global_test for evaluation in found}) > 1


class Own(Expert, LightningModule):
    """A user's own module."""


def test_the_validation_loss_of_a_user_s_own_module_is_the_mean_cross_entropy():
    datamodule, module = blobs((17, 30), validation_fraction=0.2), Own().double()
    found = evaluated(module, datamodule, FedAvg())
    for client, evaluation in enumerate(found):
        samples = datamodule.validation_samples[client]
        expected = torch.nn.functional.cross_entropy(module(datamodule.x[samples]), datamodule.y[samples])
        assert evaluation.validation_loss == pytest.approx(expected.item(), rel=1e-12)


def test_the_validation_loss_is_the_algorithm_s_own_also_for_clients_that_share_a_model():
    class Brier(FedAvg):
        def validation_loss(self, module, batch, constants):
            x, y = batch
            return (module(x).softmax(1) - torch.nn.functional.one_hot(y, 3)).square().sum(1).mean()

    datamodule, module = blobs((17, 30, 1), validation_fraction=0.2), mixture(GlobalOnly()).eval()
    server = another_model(9, module)
    found, plain = (evaluated(mixture(GlobalOnly()), datamodule, each, server) for each in (Brier(), FedAvg()))
    load_tree(module, server)
    for client, evaluation in enumerate(found):
        samples, loss = datamodule.validation_samples[client], math.nan
        if len(samples):
            p, classes = module(datamodule.x[samples]).softmax(1), datamodule.y[samples][:, None]
            loss = (p.square().sum(1) - 2 * p.gather(1, classes)[:, 0] + 1).mean().item()
        assert evaluation.validation_loss == pytest.approx(loss, rel=1e-12, nan_ok=True)
        assert repr(replace(evaluation, validation_loss=0.0)) == repr(replace(plain[client], validation_loss=0.0))


def test_the_validation_loss_of_a_mixture_with_a_loss_of_its_own_is_that_of_its_samples_together():
    own = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), label_smoothing=0.1)
    datamodule = blobs((17, 30), validation_fraction=0.2)
    module = PersonalizedMoE(Expert(), gate=GlobalOnly(), loss=own).double()
    for client, evaluation in enumerate(evaluated(module, datamodule, FedAvg())):
        samples = datamodule.validation_samples[client]
        expected = own(module(datamodule.x[samples]), datamodule.y[samples])
        assert evaluation.validation_loss == pytest.approx(expected.item(), rel=1e-12)


def test_clients_with_the_same_model_are_evaluated_in_one_pass(monkeypatch):
    datamodule = blobs((5, 7, 9, 1), test_fraction=0.2, validation_fraction=0.2)
    model = mixture(FeatureGate(6))
    sizes = []
    batches = datamodule.batches

    def recorded(samples, **kwargs):
        sizes.append(len(samples))
        return batches(samples, **kwargs)

    monkeypatch.setattr(datamodule, "batches", recorded)
    kept = {1: another_model(1, model)}
    evaluations = evaluated(model, datamodule, FedAvg(), dict(model.state_dict()), kept)
    one = [30, 1, 1]  # client 1: global test, held out, validation
    others = [30, 1 + 2 + 1, 1 + 2]  # client 3 holds nothing out, and shows its gate on its training sample
    assert sizes == [*one, *others]
    # a piece of the pass carries no more than itself into a checkpoint
    assert all(len(e.gate_weights.untyped_storage()) == 8 * e.gate_weights.numel() for e in evaluations)


def test_evaluation_is_in_eval_mode_in_whole_batches_and_changes_neither_model_nor_random_numbers():
    datamodule, model = blobs((17, 30)), mixture(FeatureGate(6), Expert(dropout=0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    kept = {0: another_model(0, model)}
    first, again = (evaluated(model, datamodule, kept=kept) for _ in range(2))
    assert [e.reweighted_test for e in first] == [e.reweighted_test for e in again]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_predict_joins_batches_in_the_order_of_the_samples():
    datamodule = blobs((1500, 700))
    model = mixture(FeatureGate(6)).eval()
    samples = torch.randperm(2200)[:2100]
    logits, weights, targets = predict(model, datamodule, samples)
    expected_logits, expected_weights = model.mix(datamodule.x[samples])
    torch.testing.assert_close(logits, expected_logits.detach())
    torch.testing.assert_close(weights, expected_weights.detach())
    assert torch.equal(targets, datamodule.y[samples])


def test_the_federation_evaluates_each_clients_own_model_and_says_what_it_is(tmp_path):
    datamodule, model = blobs((20, 27, 31), test_fraction=0.25, validation_fraction=0.25), mixture(FeatureGate(6))
    phases = [
        Phase("FedAvg", FedAvg(), rounds=2, gate=ConstantGate(1)),
        phase("Expert", FineTuning(gate_fraction=0.25)),
        Phase("Gate", PFLMoE()),
        Phase("Local", Local(), gate=ConstantGate(0), clients_per_round=2),
    ]
    federation = run(phases, model, datamodule, tmp_path)
    assert list(federation.results) == ["FedAvg", "Gate", "Local"]
    facts = {
        name: (e.method, e.round, e.model, e.evaluation_point, e.selection) for name, e in federation.results.items()
    }
    assert facts == {
        "FedAvg": ("FedAvg", 2, "global expert", "after aggregation", "last round"),
        "Gate": ("Gate", 1, "mixture", "after local training", "last round"),
        "Local": ("Local", 1, "local expert", "after local training", "last round"),
    }
    for name, evaluation in federation.results.items():
        for client, result in enumerate(evaluation.clients):
            module = federation.client_module(name, client)
            expected = expected_evaluation(module, {}, datamodule, client)
            assert {metric: getattr(result, metric) for metric in ACCURACIES} == pytest.approx(expected, abs=1e-6)
    gates = [result.mean_gate_weight for result in federation.results["Gate"].clients]
    assert len(set(gates)) == 3


def evaluation(values, metric="reweighted_test"):
    clients = [
        ClientEvaluation(client, 10, **{**dict.fromkeys(ACCURACIES, 0.5), metric: value})
        for client, value in enumerate(values)
    ]
    return Evaluation("FedAvg", 1, "mixture", "after aggregation", "last round", clients)


@given(st.lists(st.floats(0, 1) | st.just(nan), min_size=1, max_size=40), st.sampled_from(ACCURACIES))
@settings(max_examples=100, deadline=None)
def test_the_spread_is_that_of_numpy_over_the_clients_that_have_the_metric(values, metric):
    spread = evaluation(values, metric).spread_or_nan(metric)
    have = np.array([value for value in values if not math.isnan(value)])
    if not len(have):
        assert all(math.isnan(value) for value in spread)
        return
    lowest = np.sort(have)[: math.ceil(len(have) / 10)]
    assert spread == pytest.approx((have.mean(), have.std(), lowest.mean()), abs=1e-12)


def test_the_spread_over_some_clients_is_theirs():
    found = evaluation([0.25, 0.5, 1.0, nan])
    assert found.values("reweighted_test", {0, 2, 3}) == [0.25, 1.0]
    assert found.spread("reweighted_test", {0, 2, 3}) == (0.625, 0.375, 0.25)


def test_the_step_is_the_round_or_else_the_epoch():
    assert [replace(evaluation([0.5]), round=2, epochs=epochs).step for epochs in (None, 0, 3)] == [2, 0, 3]


def test_the_weight_of_the_global_experts_is_that_of_all_but_the_last():
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])
    client = replace(evaluation([0.5]).clients[0], gate_weights=weights)
    assert client.global_weights.tolist() == [0.75, 0.25] and client.mean_gate_weight == 0.5
    assert replace(client, has_global_expert=False).global_weights is None


def test_equal_accuracies_have_no_deviation_at_all():
    assert evaluation([0.1] * 7).spread("reweighted_test") == (0.1, 0.0, 0.1)


def test_rotated_images_have_no_accuracy_by_class_shares(tmp_path):
    """A client that knows only upright images would get half of it, another the same, whatever their own images are."""
    data = Digits(num_clients=2, rotations=[0, 180], batch_size=100)
    module = PersonalizedMoE(SmallMLP(), gate=GlobalOnly())
    federation = run([Phase("FedAvg", FedAvg("global_expert.*"))], module, data, tmp_path, max_epochs=1)
    clients = federation.results["FedAvg"].clients
    assert all(math.isnan(client.reweighted_test) and client.local_test > 0 for client in clients)
    with pytest.raises(InvalidArgumentError) as refused:
        run([Phase("FedAvg", FedAvg("global_expert.*"), select=Select("reweighted_test"))], module, data, tmp_path)
    assert refused.value.argument == "select.monitor" and "reweighted_test" not in refused.value.allowed


@pytest.mark.parametrize("metric", ["local_tst", "mean_gate_weight"])
def test_the_spread_of_what_was_not_measured_is_refused(metric):
    with pytest.raises(InvalidArgumentError) as refused:
        evaluation([0.5, 0.7]).spread(metric)
    assert refused.value.allowed == "one of local_test, reweighted_test, global_test, validation"


PAGE = REPOSITORY / "docs/guide/results.md"


def test_the_frames_are_clients_csv(tmp_path):
    fed = runs.federation(tmp_path)
    frame = pandas.concat(each.to_pandas() for each in fed.fit(runs.model(), runs.data()).values())
    rows = csv_rows(fed.run_dir / "clients.csv")
    assert list(frame.columns) == [*rows[0]]
    for (_, ours), row in zip(frame.iterrows(), rows, strict=True):
        assert (ours["method"], str(ours["client"])) == (row["method"], row["client"])
        assert ours["global_test"] == float(row["global_test"])
        assert math.isnan(ours["local_test"]) and row["local_test"] == ""


def test_the_statistics_of_the_page_are_those_of_other_programs(tmp_path):
    fed = runs.federation(tmp_path)
    samples = runs.data(sizes=(20, 31, 12), test_fraction=0.4)
    results = fed.fit(runs.model(), samples)
    fed.predict(runs.model(), samples)
    section = PAGE.read_text().split("## Other statistics")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    found: dict[str, Any] = {}
    exec(code.replace("runs/quickstart/version_0", str(fed.run_dir)), found)
    for name, evaluation in results.items():
        own = np.sort(evaluation.values("local_test"))
        n, order = len(own), np.arange(1, len(own) + 1)
        assert found["lowest"][name] == own[0] and found["best_tenth"][name] == own[-1]
        assert found["gini"][name] == pytest.approx(((2 * order - n - 1) * own).sum() / (n * own.sum()))
        assert found["jain"][name] == pytest.approx(own.sum() ** 2 / (n * (own**2).sum()))
        assert found["weighted"][name] == pytest.approx(evaluation.local_test_pooled)
        rows = found["predictions"].query("method == @name")
        assert (found["confusion"].loc[name].values == confusion_matrix(rows.label, rows.prediction)).all()
        for client, of_client in rows.groupby("client"):
            labels = sorted({*of_client.label})
            expected = recall_score(of_client.label, of_client.prediction, labels=labels, average=None)
            assert found["recall"][name, client].values == pytest.approx(expected)
    resampled = bootstrap([found["difference"]], np.mean, method="percentile", rng=0)
    assert found["interval"] == pytest.approx([*resampled.confidence_interval], abs=0.02)
