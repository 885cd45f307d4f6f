"""The personalized mixture: what it computes, what a phase replaces, and local experts of several architectures."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, blobs, mixture, run
from helpers.architectures import SIZES, pair
from helpers.data import refused_argument
from helpers.ingredients import InputShape, over_features
from helpers.models import plain_trainer, samples, trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import EqualWeights, FeatureGate, LinearGate, LocalOnly, PersonalizedMoE, SmallMLP
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.rounds.begin import phase_module

# One architecture


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


def test_without_a_local_expert_it_is_a_copy_of_the_global_one():
    expert = Expert()
    expert.extractor[1].weight._no_weight_decay = True
    module = PersonalizedMoE(expert)
    assert_same_bits(module.local_expert.state_dict(), module.global_expert.state_dict())
    assert module.local_expert.extractor[1].weight._no_weight_decay
    nn.init.zeros_(module.local_expert.extractor[1].weight)
    assert module.global_expert.extractor[1].weight.any()


def test_construction_leaves_batch_norm_statistics_and_train_mode_as_they_are():
    """Of an expert that tells its input and cannot be run on a batch of one in train mode."""
    module = PersonalizedMoE(InputShape(over_features(nn.BatchNorm1d(6))), gate=LinearGate())
    assert module.global_expert.extractor[1].num_batches_tracked == 0
    assert all(submodule.training for submodule in module.modules())


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
