"""Local experts of several architectures: which one a client has, trains and keeps."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, blobs, phase, run, tensors
from helpers.architectures import SIZES, pair, train_bare
from helpers.data import refused_argument
from helpers.models import plain_trainer, samples, trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import EqualWeights, PersonalizedMoE, SmallMLP


def equal_weights(global_expert, local_expert, x, y):
    return F.cross_entropy((global_expert(x) + local_expert(x)) / 2, y)


def test_two_rounds_over_two_architectures_are_those_of_bare_pytorch(tmp_path):
    """The global expert is averaged; a client trains and keeps its own local expert and has no other."""
    data = blobs(SIZES)
    fedavg = phase("it", FedAvg("global_expert.*"), rounds=2, train=Train(max_epochs=1), gate=EqualWeights())
    fed = run([fedavg], pair(), data, tmp_path, backend=TrainerBackend())
    start = pair().state_dict()
    server, kept = tensors(pair(), "global_expert."), [start] * 3
    for round in range(2):
        kept = [train_bare(client, round, {**kept[client], **server}, data, equal_weights) for client in range(3)]
        server = {name: sum(n * one[name] for n, one in zip(SIZES, kept, strict=True)) / sum(SIZES) for name in server}
    state = fed.run.states["it"]
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-12)
    for client in range(3):
        own = {name: tensor for name, tensor in kept[client].items() if name not in server}
        torch.testing.assert_close(dict(state.clients[client]), own, rtol=0, atol=1e-12)
        assert {name.split(".")[1] for name in state.clients[client]} == {str(client % 2)}
        assert not any(torch.equal(own[name], start[name]) for name in own)
        names = fed.client_module("it", client).state_dict()
        assert {name for name in names if name.startswith("local_expert.")} == own.keys()


def test_clients_are_evaluated_with_their_own_architecture(tmp_path):
    fed = run([Phase("it", FedAvg("global_expert.*"), gate=EqualWeights())], pair(), blobs(SIZES), tmp_path)
    data = fed.run.datamodule
    for client in range(3):
        module = fed.client_module("it", client)
        x, y = data.x[data.global_test], data.y[data.global_test]
        logits = (module.global_expert(x) + module.local_expert[client % 2](x)) / 2
        right = (logits.argmax(1) == y).double().mean().item()
        assert fed.results["it"].clients[client].global_test == pytest.approx(right, abs=1e-6)


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
