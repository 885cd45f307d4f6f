"""What mixtures compute: of two experts, clusters, pools of classifiers, representations; what a phase replaces."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, blobs, mixture, run
from helpers.architectures import SIZES, pair
from helpers.clusters import GateNet, clustered
from helpers.data import refused_argument
from helpers.models import count, plain_trainer, samples, trainer
from helpers.pfedmoe import model, narrow, network
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import EqualWeights, FeatureGate, LinearGate, LocalOnly, PersonalizedMoE, SmallMLP
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.rounds.begin import phase_module

# Clusters


def test_the_mixture_is_the_weighted_sum_of_probabilities_with_the_local_expert_last():
    module = clustered(2, gate=models.NetworkGate(GateNet(3)))
    x = torch.randn(7, 5, dtype=torch.float64)
    scores, weights = module.mix(x)
    expected_weights = F.softmax(module.gate.network(x), dim=1)
    experts = [*module.global_experts, module.local_expert]
    expected = sum(expected_weights[:, [i]] * F.softmax(expert(x), dim=1) for i, expert in enumerate(experts))
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(scores.exp(), expected)


def test_all_experts_are_drawn_independently():
    given = Expert().double()
    module = clustered(3, expert=given)
    experts = [given, *module.global_experts, module.local_expert]
    for name in ("extractor.1.weight", "extractor.1.bias", "classifier.1.weight", "classifier.1.bias"):
        values = torch.cat([expert.get_parameter(name).flatten() for expert in experts])
        assert len(values.unique()) == len(values), name


def test_clusters_that_share_fc_are_equal_except_for_the_weights_of_convolutions():
    torch.manual_seed(0)
    module = models.ClusteredMoE(models.LEAFCNN(), 3, clusters_share_fc=True)
    for name, first in module.global_experts[0].named_parameters():
        others = [expert.get_parameter(name) for expert in module.global_experts[1:]]
        drawn = name in ("extractor.0.weight", "extractor.3.weight")
        assert [torch.equal(first, other) for other in others] == [not drawn] * 2, name
        assert not drawn or not torch.equal(*others)
    first, local = module.global_experts[0].classifier, module.local_expert.classifier
    assert not torch.equal(first[3].weight, local[3].weight), "the local expert is drawn by itself"
    shared = [tensor.data_ptr() for expert in module.global_experts for tensor in expert.parameters()]
    assert len(set(shared)) == len(shared), "they are copies, which training may tell apart"


def test_the_logged_weight_of_the_global_experts_is_that_of_all_of_them(tmp_path):
    gate = models.ConstantGate([0.2, 0.3, 0.5])
    module = models.ClusteredMoE(models.SmallMLP(5, 4, 3), 2, gate=gate)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)))
    (found,) = trainer.test(module, data, verbose=False)
    assert found["test_gate/global_expert"] == pytest.approx(0.5)


# Pools of classifiers, and the gate of PM-MoE


def pooled(num_experts=3, gate=None, **kwargs) -> models.PooledMoE:
    torch.manual_seed(0)
    module = models.PooledMoE(Expert(), num_experts, gate, **kwargs).double().eval()
    for classifier in module.pool:
        classifier[1].reset_parameters()
    return module


class Given(models.EqualWeights):
    """A gate that gives every sample the same weights, whatever they add up to."""

    def fit_to(self, num_experts):
        self.weights = [0.2, 0.5, 0.3]


def test_the_largest_weights_are_used_as_they_are_and_the_others_are_0():
    x = samples()[0].double()
    module = pooled(gate=Given(), top_k=2)
    logits, weights = module.mix(x)
    features = module.local_expert.extractor(x)
    torch.testing.assert_close(logits, 0.5 * module.pool[1](features) + 0.3 * module.pool[2](features))
    torch.testing.assert_close(weights[0], torch.tensor([0.0, 0.5, 0.3]).double(), check_dtype=False)
    module.top_k = None
    everything = logits + 0.2 * module.pool[0](features)
    torch.testing.assert_close(module(x), everything)


@pytest.mark.parametrize("top_k", [None, 3])
def test_equal_classifiers_or_a_pool_of_one_are_the_expert_itself(top_k):
    x = samples()[0]
    for number, k in ((3, top_k), (1, None)):
        module = models.PooledMoE(Expert(), number, models.MLPGate(number, 6, dropout=0.0), k)
        torch.testing.assert_close(module(x), module.local_expert(x))


def test_a_gate_of_one_classifier_is_that_classifier_on_the_own_features():
    x = samples()[0].double()
    for gate, index in ((models.GlobalOnly(), 0), (models.LocalOnly(), 2)):
        module = pooled(gate=gate)
        torch.testing.assert_close(module(x), module.pool[index](module.local_expert.extractor(x)))


def assert_orthogonal(layer):
    rows = layer.weight if len(layer.weight) <= layer.weight.shape[1] else layer.weight.T
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).to(rows), rtol=0, atol=1e-5)


def test_the_gate_is_a_perceptron_of_orthogonal_layers_which_it_draws_anew():
    gate = models.MLPGate(4, 6, dropout=0.0).double()
    assert count(gate) == 7 * 128 + 129 * 256 + 257 * 128 + 129 * 4
    layers = [layer for layer in gate.layers if isinstance(layer, nn.Linear)]
    first, z = [layer.weight.clone() for layer in layers], torch.randn(5, 6, dtype=torch.float64)
    h = layers[0](z).relu()
    for layer in layers[1:3]:
        h = F.leaky_relu(layer(h))
    torch.testing.assert_close(gate(z), layers[3](h).softmax(1))
    gate.reset_parameters()
    for layer, before in zip(layers, first, strict=True):
        assert not torch.equal(layer.weight, before)
        assert_orthogonal(layer)


def test_a_gate_that_is_sized_by_its_input_reads_the_features_or_the_input():
    for reads_features, width in ((True, 64), (False, 256)):
        module = models.PooledMoE(models.SmallMLP(256), 3, models.MLPGate(3, reads_features=reads_features))
        assert module.gate.in_features == width
        module.gate.reset_parameters()
        assert_orthogonal(module.gate.layers[0])


# Representations


def by_hand(module: models.RepresentationMoE, x, weights, architecture=0):
    """The mixture written down layer by layer."""
    parameters = module.state_dict()

    def extractor(prefix):
        hidden = F.relu(x @ parameters[f"{prefix}.extractor.1.weight"].T + parameters[f"{prefix}.extractor.1.bias"])
        return F.relu(hidden @ parameters[f"{prefix}.extractor.3.weight"].T + parameters[f"{prefix}.extractor.3.bias"])

    shared, local = extractor("shared_extractor"), extractor(f"local_experts.{architecture}")
    mixed = weights[:, :1] * shared + weights[:, 1:] * local
    return mixed @ parameters["header.weight"].T + parameters["header.bias"]


@pytest.mark.parametrize("architecture", [0, 1, 2])
def test_the_header_reads_the_weighted_sum_of_both_representations(architecture):
    module = narrow(architecture)
    x = torch.randn(7, 5, dtype=torch.float64)
    logits, weights = module.mix(x)
    g = torch.sigmoid(x @ module.gate.linear.weight[0] + module.gate.linear.bias)
    torch.testing.assert_close(weights, torch.stack((g, 1 - g), dim=1))
    torch.testing.assert_close(logits, by_hand(module, x, weights, architecture))
    mixed, shared, local = module.representations(x)
    torch.testing.assert_close(mixed, g[:, None] * shared + (1 - g[:, None]) * local)
    torch.testing.assert_close(module.header(mixed), logits)


def test_a_gate_that_reads_features_reads_the_shared_representation():
    module = model(models.FeatureGate(2))
    x = torch.randn(4, 5, dtype=torch.float64)
    shared = module.shared_extractor(x)
    assert torch.equal(module.mix(x)[1], module.gate(shared))


def test_clients_have_architectures_in_turn_or_as_given_and_nothing_of_the_others():
    module = model()
    assert [module.client_architecture(client) for client in range(5)] == [0, 1, 2, 0, 1]
    given = model(architectures=[2, 2, 0])
    assert [given.client_architecture(client) for client in range(3)] == [2, 2, 0]
    own = narrow(1)
    assert {name.split(".")[1] for name in own.state_dict() if name.startswith("local")} == {"1"}
    sizes = sum(p.numel() for p in own.parameters())
    assert sizes == (5 * 2 + 2 + 2 * 2 + 2) + (5 * 4 + 4 + 4 * 2 + 2) + (2 * 3 + 3) + (5 + 1)  # G, F, header, gate


def test_experts_given_are_not_changed_and_not_shared():
    expert = network(4)
    module = models.RepresentationMoE(expert, [expert, expert])
    assert isinstance(expert.classifier, nn.Linear)
    parts = (module.shared_extractor, *module.local_experts, module.header)
    assert len({id(p) for part in parts for p in part.parameters()}) == 4 * 3 + 2


# A global and a local expert of one architecture


def test_mixture_weighs_the_global_experts_logits_by_the_first_weight():
    x, _ = samples()
    module = mixture(LinearGate(5), dtype=torch.float64)
    g = torch.sigmoid(x.double() @ module.gate.linear.weight[0] + module.gate.linear.bias)[:, None]
    expected = g * module.global_expert(x.double()) + (1 - g) * module.local_expert(x.double())
    logits, weights = module.mix(x.double())
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(weights, torch.cat((g, 1 - g), dim=1))
    assert torch.equal(module(x.double()), logits)


def test_feature_gate_reads_the_global_experts_features():
    x, _ = samples()
    module = mixture(FeatureGate(6), dtype=torch.float32)
    logits, weights = module.mix(x)
    features = module.global_expert.extractor(x)
    g = torch.sigmoid(F.linear(features, module.gate.linear.weight, module.gate.linear.bias))
    torch.testing.assert_close(weights[:, :1], g)
    expected = g * module.global_expert(x) + (1 - g) * module.local_expert(x)
    torch.testing.assert_close(logits, expected)
    gradients = (torch.autograd.grad(each.square().sum(), [*module.parameters()]) for each in (logits, expected))
    torch.testing.assert_close(*gradients, msg="the extractor learns from both experts and the gate")
    nn.init.zeros_(module.local_expert.extractor[1].weight)
    assert torch.equal(module.mix(x)[1], weights)


@pytest.mark.parametrize(
    "given", [lambda expert: None, lambda expert: expert, lambda expert: [expert, nn.Linear(5, 3)]]
)
def test_without_a_local_expert_of_its_own_it_is_a_copy_of_the_global_one(given):
    expert = Expert()
    expert.extractor[1].weight._no_weight_decay = True
    module = PersonalizedMoE(expert, given(expert))
    local = getattr(module.local_expert, "expert", module.local_expert)  # of a list, the first one
    assert_same_bits(local.state_dict(), module.global_expert.state_dict())
    assert local.extractor[1].weight._no_weight_decay
    nn.init.zeros_(local.extractor[1].weight)
    assert module.global_expert.extractor[1].weight.any()


def test_a_phase_replaces_gate_and_optimizer_in_a_copy_of_the_model_and_keeps_its_class():
    class Mine(PersonalizedMoE):
        pass

    module = Mine(Expert(), gate=FeatureGate(6))
    adam = partial(torch.optim.Adam, lr=0.5)
    other = phase_module(module, Phase("phase", FedAvg(), gate=LinearGate(5), train=Train(optimizer=adam)))
    assert type(other) is Mine
    assert isinstance(other.gate, LinearGate) and isinstance(module.gate, FeatureGate)
    assert isinstance(other.configure_optimizers(), torch.optim.Adam)
    assert isinstance(module.configure_optimizers(), torch.optim.SGD)
    for part in ("global_expert", "local_expert"):
        assert_same_bits(getattr(other, part).state_dict(), getattr(module, part).state_dict())
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert not own & {parameter.data_ptr() for parameter in other.parameters()}


def test_a_gate_s_own_learning_rate_goes_with_any_optimizer():
    module = PersonalizedMoE(Expert(), gate=FeatureGate(6), optimizer=partial(torch.optim.Adam, lr=0.5), gate_lr=0.01)
    groups = module.configure_optimizers().param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    expected = {id(p): 0.01 if name.startswith("gate.") else 0.5 for name, p in module.named_parameters()}
    assert rates == expected


def test_experts_of_several_architectures_are_checked_without_a_copy_of_the_command_lines_optimizer():
    class Parser:
        """What LightningCLI's optimizers hold; it has the data."""

        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    def optimizer(parser, parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    optimizer.__module__ = "jsonargparse._typehints"
    PersonalizedMoE(SmallMLP(), [SmallMLP(), SmallMLP()], optimizer=partial(optimizer, Parser()))


@pytest.mark.parametrize("argument", ["optimizer", "loss"])
def test_what_must_be_a_function_is_refused_if_it_is_a_name(argument):
    with pytest.raises(MisconfigurationException, match=f"^PersonalizedMoE: {argument} is 'SGD', but must be a fun"):
        PersonalizedMoE(SmallMLP(8, 4, 3), task="multiclass", **{argument: "SGD"})


# Several architectures


@pytest.mark.parametrize(("gate", "share"), [(EqualWeights(), 0.5), (LocalOnly(), 0.0)])
def test_clients_are_evaluated_with_their_own_architecture(gate, share, tmp_path):
    fed = run([Phase("it", FedAvg("global_expert.*"), gate=gate)], pair(), blobs(SIZES), tmp_path)
    data = fed.run.datamodule
    x, y = data.x[data.global_test], data.y[data.global_test]
    for client in range(3):
        module = fed.client_module("it", client)
        logits = share * module.global_expert(x) + (1 - share) * module.local_expert[client % 2](x)
        right = (logits.argmax(1) == y).double().mean().item()
        assert fed.results["it"].clients[client].global_test == pytest.approx(right, abs=1e-6)
    assert fed.results["it"].model == ("mixture" if share else "local expert")


def test_sharing_a_local_expert_that_some_clients_lack_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="which clients of architecture 0 do not have"):
        run([Phase("it", FedAvg("local_expert.1.*"))], pair(), blobs(SIZES), tmp_path)


@plain_trainer
def test_a_plain_trainer_trains_the_first_architecture(tmp_path):
    x, y = samples()
    module, start = pair(torch.float32), pair(torch.float32).state_dict()
    trainer(tmp_path, max_epochs=1).fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name in start if not name.startswith("local_expert.1.")}
    logits = (module.global_expert(x) + module.local_expert[0](x)) / 2
    torch.testing.assert_close(module(x), logits, rtol=0, atol=1e-6)


def test_a_client_s_module_computes_its_own_architecture_also_its_parts():
    module, x = pair(torch.float32), samples()[0]
    second = module.local_expert[1]
    module.keep_architecture(1)
    assert torch.equal(module.local_expert(x), second(x))
    assert module.local_expert.extractor is second.extractor and module.local_expert.classifier is second.classifier
    assert [module.client_architecture(client) for client in range(4)] == [0, 1, 0, 1]
    assert not any(name.startswith("local_expert.0.") for name in module.state_dict())
    assert PersonalizedMoE(Expert()).client_architecture(3) == 0


@pytest.mark.parametrize("classes", [(10, 7), (7, 10)])
def test_an_expert_of_another_number_of_outputs_is_refused_wherever_it_is_in_the_list(classes):
    experts = [SmallMLP(num_classes=number) for number in classes]
    assert refused_argument(lambda: PersonalizedMoE(SmallMLP(), experts)) == "local_expert"
