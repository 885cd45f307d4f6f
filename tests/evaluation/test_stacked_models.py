"""Small clients' models, evaluated all together, against each of them alone."""

import math
import random
from collections import OrderedDict

import pytest
import torch
from helpers import Expert, blobs, mixture, small_expert
from helpers.backends import local_training
from helpers.clusters import clustered
from torch import nn

from fedmoe_pl.algorithms import Local
from fedmoe_pl.evaluation import client_models as evaluating
from fedmoe_pl.evaluation import stacked_models
from fedmoe_pl.evaluation.client_models import evaluate_clients
from fedmoe_pl.evaluation.results import MONITORS
from fedmoe_pl.evaluation.stacked_models import evaluation_groups
from fedmoe_pl.models import (
    ConstantGate,
    FeatureGate,
    LeNet5,
    LinearGate,
    NetworkGate,
    PersonalizedMoE,
    ProxyGate,
    SparseMoE,
)
from fedmoe_pl.rounds.begin import sized
from fedmoe_pl.trees import load_tree

SIZES = (17, 30, 1, 23, 44)


def expert(*others) -> nn.Sequential:
    """Layers of PyTorch's, which are known to treat samples apart."""
    extractor = nn.Sequential(nn.Linear(5, 6), *others, nn.Tanh())
    return nn.Sequential(OrderedDict(extractor=extractor, classifier=nn.Linear(6, 3)))


class Counting(Expert):
    """Its output depends on how often experts were called."""

    def forward(self, x):
        torch.manual_seed(torch.initial_seed() + 1)  # a counter that no attribute shows
        return super().forward(x) * (-1) ** (torch.initial_seed() // 5)


class Drawing(Expert):
    """Draws numbers of Python."""

    def forward(self, x):
        return super().forward(x) * (1 if random.random() > 0.2 else -1)


class Comparing(Expert):
    """Compares the samples of a batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class DataDependent(Expert):
    """Computes other layers for some samples, which ``vmap`` cannot map over."""

    def forward(self, x):
        logits = super().forward(x)
        return -logits if x.sum().item() > 0 else logits


class Caching(Expert):
    """Keeps what it computes of its weights in eval mode until it is trained again."""

    scale = None

    def forward(self, x):
        if self.scale is None or self.training:
            self.scale = next(self.classifier.parameters()).abs().mean()
        return super().forward(x) / self.scale


MODELS = {
    "trained gate": lambda: mixture(FeatureGate(6), expert()),
    "gate that reads the input": lambda: mixture(LinearGate(5), expert()),
    "constant gate": lambda: mixture(ConstantGate(0.3), expert()),
    "batch norm": lambda: mixture(LinearGate(5), expert(nn.BatchNorm1d(6))),
    "sparse experts": lambda: SparseMoE(nn.Linear(5, 6), small_expert(), 2, gate=ProxyGate(2, 6)).double(),
    "clusters": lambda: clustered(gate=NetworkGate(nn.Linear(5, 4)).double(), expert=expert()),
}


def states(module, clients):
    """The tensors of every client's model; the first expert's first tensor is the same for all of them."""
    kept = {}
    for client in clients:
        generator = torch.Generator().manual_seed(client)
        kept[client] = {
            name: tensor + 0.5 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in [*module.state_dict().items()][1:]
            if tensor.is_floating_point()
        }
    return kept


def evaluations(monkeypatch, module, datamodule, stacked, algorithm=None):
    """The evaluation of all clients' own models, either all stacked or each alone."""
    training = local_training(module, algorithm or Local(), datamodule)
    kept = states(module, range(datamodule.num_clients))
    with monkeypatch.context() as patch:
        if stacked:
            patch.setattr(evaluating, "client_predictor", None)  # nothing is evaluated alone
        else:
            patch.setattr(stacked_models, "_MOST", 1)
        return evaluate_clients(training, {}, kept, 1, "aggregation")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fractions", [{}, {"test_fraction": 0.25, "validation_fraction": 0.25}])
def test_models_evaluated_together_have_the_accuracies_of_each_alone(monkeypatch, model, fractions):
    module = MODELS[model]()
    together, alone = (
        evaluations(monkeypatch, module, blobs(SIZES, **fractions), stacked) for stacked in (True, False)
    )
    assert [evaluation.client for evaluation in together] == list(range(len(SIZES)))
    for stacked, expected in zip(together, alone, strict=True):
        for metric in (*MONITORS, "n_train", "has_global_expert"):
            assert getattr(stacked, metric) == pytest.approx(getattr(expected, metric), abs=1e-12, nan_ok=True), metric
        assert (stacked.gate_weights is None) == (expected.gate_weights is None) == (model == "constant gate")
        if expected.gate_weights is not None:
            torch.testing.assert_close(stacked.gate_weights, expected.gate_weights, rtol=1e-12, atol=1e-12)
            assert torch.equal(stacked.gate_labels, expected.gate_labels)
    assert len({evaluation.global_test for evaluation in alone}) > 1, "the models differ"


class TakeFirst(nn.Module):
    """The output at a sequence's only place."""

    def forward(self, x):
        return x[0][:, 0]


def lstm():
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.LSTM(5, 3, batch_first=True), TakeFirst())


@pytest.mark.parametrize("kind", [Counting, Drawing, Comparing, DataDependent, lstm])
def test_models_with_code_of_the_user_s_or_layers_that_vmap_lacks_are_evaluated_alone(monkeypatch, kind):
    monkeypatch.setattr(TakeFirst, "__module__", "fedmoe_pl.models")  # the package's own code is known
    training = local_training(mixture(LinearGate(5), kind()), Local(), blobs(SIZES, validation_fraction=0.25))
    kept, found = states(training.module, range(len(SIZES))), []
    for most in (8, 1):
        monkeypatch.setattr(stacked_models, "_MOST", most)
        assert len(evaluation_groups(training, range(5))) == (1 if kind is lstm and most == 8 else 5)
        random.seed(0)
        torch.manual_seed(0)
        found.append(evaluate_clients(training, {}, kept, 1, "aggregation"))
    together, alone = ([(e.global_test, e.validation, e.local_test) for e in each] for each in found)
    assert str(together) == str(alone)
    assert len({accuracy for accuracy, *_ in alone}) > 1


class OfTheServer(Local):
    """All clients have the model that the server holds, as in IFCA with one cluster."""

    def personal_tensors(self, client, server):
        return server


class ReturnsViews(Local):
    """Loads a client's model into the module and returns the module's own tensors."""

    def personal_tensors(self, client, server):
        load_tree(client.module, client.state)
        return client.module.state_dict()


def test_clients_that_have_the_same_tensors_are_evaluated_together_too(monkeypatch):
    module, data = mixture(LinearGate(5), expert()), blobs(SIZES)
    server = states(module, [7])[7]
    monkeypatch.setattr(evaluating, "client_predictor", None)
    found = evaluate_clients(local_training(module, OfTheServer(), data), server, {}, 1, "aggregation")
    load_tree(module, server)
    with torch.no_grad():
        right = module.eval()(data.x[data.global_test]).argmax(1) == data.y[data.global_test]
    assert [e.global_test for e in found] == pytest.approx(5 * [right.double().mean().item()], abs=1e-6)


def test_an_algorithm_may_return_the_module_s_own_tensors_as_a_client_s_model(monkeypatch):
    module, data = mixture(LinearGate(5), expert()), blobs(SIZES)
    expected = evaluations(monkeypatch, module, data, stacked=False)
    found = evaluations(monkeypatch, module, data, stacked=True, algorithm=ReturnsViews())
    assert [e.global_test for e in found] == [e.global_test for e in expected]
    assert len({e.global_test for e in expected}) > 1


def test_models_with_a_part_of_two_names_are_evaluated_alone():
    layer = nn.Linear(5, 5)
    training = local_training(mixture(LinearGate(5), nn.Sequential(layer, layer)), Local(), blobs(SIZES, classes=5))
    assert evaluation_groups(training, [0, 1]) == [[1], [0]]


def test_groups_have_similar_sizes_and_models_with_convolutions_or_of_many_parameters_are_alone(monkeypatch):
    training = local_training(mixture(LinearGate(5), expert()), Local(), blobs(SIZES))
    assert evaluation_groups(training, [0, 1, 3]) == [[1, 3, 0]]
    monkeypatch.setattr(stacked_models, "_MOST", 2)
    assert evaluation_groups(training, range(5)) == [[4, 1], [3, 0], [2]]
    monkeypatch.setattr(stacked_models, "_MOST", 3)
    assert evaluation_groups(training, range(4)) == [[1, 3], [0, 2]], "pieces of equal size"
    large = sum(tensor.nbytes for tensor in training.module.state_dict().values())
    monkeypatch.setattr(stacked_models, "CPU_CACHE", 2 * large - 1)
    assert evaluation_groups(training, [0, 1]) == [[1], [0]]
    images = PersonalizedMoE(LeNet5())
    assert evaluation_groups(local_training(images, Local(), blobs(SIZES)), [0, 1]) == [[1], [0]]


@pytest.mark.parametrize("most", [1, 8])
def test_what_a_model_keeps_from_predicting_is_of_its_client_alone(monkeypatch, most):
    monkeypatch.setattr(stacked_models, "_MOST", most)
    training = local_training(mixture(LinearGate(5), Caching()), Local(), blobs(SIZES, validation_fraction=0.25))
    kept = states(training.module, range(len(SIZES)))
    together = evaluate_clients(training, {}, kept, 1, "aggregation")
    for client, evaluation in enumerate(together):
        (alone,) = evaluate_clients(training, {}, kept, 1, "aggregation", clients=[client])
        assert evaluation.validation_loss == pytest.approx(alone.validation_loss, rel=1e-12, nan_ok=True)


def test_finding_the_size_of_a_gate_leaves_nothing_else_in_the_module():
    datamodule = blobs(SIZES)
    datamodule.setup()
    module = sized(mixture(FeatureGate(), Caching()), datamodule, seed=0)
    assert module.gate.linear.in_features == 6 and module.local_expert.scale is module.global_expert.scale is None


def test_a_model_that_has_diverged_leaves_the_losses_of_other_clients_as_they_are():
    training = local_training(mixture(LinearGate(5), expert()), Local(), blobs(SIZES, validation_fraction=0.25))
    kept = states(training.module, range(len(SIZES)))
    expected = evaluate_clients(training, {}, kept, 1, "aggregation")
    ((first, *others),) = evaluation_groups(training, range(len(SIZES)))
    kept[first] = {name: tensor * torch.inf for name, tensor in kept[first].items()}
    found = evaluate_clients(training, {}, kept, 1, "aggregation")
    assert math.isnan(found[first].validation_loss) and not math.isnan(expected[first].validation_loss)
    for client in others:
        assert found[client].validation_loss == pytest.approx(expected[client].validation_loss, rel=1e-12, nan_ok=True)
