"""pFedMoE: what is shared, trained, kept and evaluated, over several architectures."""

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, client_generator, run, tensors
from helpers.pfedmoe import model, narrow

from fedmoe_pl import Evaluate, Phase, Train
from fedmoe_pl.algorithms import FedAvg, Local, PFedMoE
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.trees import subtree

SIZES = (13, 8, 11, 9)


def trained_by_hand(client: int, round: int, start: dict, data, gate_lr: float | None = None) -> dict:
    """A client's tensors after an epoch of plain PyTorch, everything stepped at once; not with Lightning."""
    generator = client_generator(0, client, round)
    module = narrow(client % 3)
    module.load_state_dict({name: start[name] for name in module.state_dict()})
    groups = [
        {"params": [p for name, p in module.named_parameters() if not name.startswith("gate.")], "lr": 0.1},
        {"params": [*module.gate.parameters()], "lr": 0.1 if gate_lr is None else gate_lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    samples = data.train_samples[client]
    for own in samples[torch.randperm(len(samples), generator=generator)].split(4):
        optimizer.zero_grad()
        x, y = data.x[own], data.y[own]
        g = torch.sigmoid(x @ module.gate.linear.weight.T + module.gate.linear.bias)
        mixed = g * module.shared_extractor(x) + (1 - g) * module.local_experts[client % 3](x)
        logits = mixed @ module.header.weight.T + module.header.bias
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.few("0.7")
@pytest.mark.parametrize("gate_lr", [None, 0.7])
def test_two_rounds_over_three_architectures_are_those_of_bare_pytorch(tmp_path, gate_lr):
    """Everything is trained at the same time; the extractor alone is averaged, by numbers of samples.

    The extractor that a client has trained, and keeps for its evaluation, is not what it goes on with.
    """
    data = blobs(SIZES)
    phase = Phase("pFedMoE", PFedMoE(), rounds=2, train=Train(max_epochs=1))
    fed = run([phase], model(gate_lr=gate_lr), data, tmp_path, backend=TrainerBackend())
    start = model().state_dict()
    server = {name: tensor for name, tensor in start.items() if name.startswith("shared_extractor.")}
    own = [start] * 4
    for round in range(2):
        own = [trained_by_hand(client, round, {**own[client], **server}, data, gate_lr) for client in range(4)]
        server = {name: sum(n * one[name] for n, one in zip(SIZES, own, strict=True)) / sum(SIZES) for name in server}
    state = fed.run.states["pFedMoE"]
    torch.testing.assert_close(state.server, server, rtol=1e-12, atol=1e-12)
    for client in range(4):
        kept = {name: tensor for name, tensor in own[client].items() if name not in server}
        kept |= {f"trained/{name}": own[client][name] for name in server}
        torch.testing.assert_close(dict(state.clients[client]), kept, rtol=1e-12, atol=1e-12)
        moved = {name.split(".")[0] for name in own[client] if not torch.equal(own[client][name], start[name])}
        assert moved == {"shared_extractor", "local_experts", "header", "gate"}
        assert not any(f"local_experts.{other}" in name for name in own[client] for other in {0, 1, 2} - {client % 3})


@pytest.mark.few(2)
@pytest.mark.parametrize("evaluate_after", [None, "local_training", "aggregation"])
def test_a_client_is_evaluated_with_the_extractor_that_it_trained_or_the_servers(tmp_path, evaluate_after):
    own_copy = evaluate_after != "aggregation"
    phase = Phase(
        "p", PFedMoE(), train=Train(max_epochs=2), clients_per_round=2, evaluate=Evaluate(after=evaluate_after)
    )
    fed = run([phase], model(), blobs(SIZES), tmp_path, backend=TrainerBackend())
    state, data = fed.run.states["p"], fed.run.datamodule
    trained = sorted(state.clients)
    assert len(trained) == 2
    seen = []
    for client in range(4):
        module, kept = fed.client_module("p", client), state.clients.get(client, {})
        extractor = subtree(kept, "trained/")
        assert {name.split(".")[0] for name in extractor} == (
            {"shared_extractor"} if client in trained and own_copy else set()
        )
        expected = {**state.initial, **state.server, **kept, **extractor}
        own = tensors(module)
        torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=0, atol=0)
        is_servers = all(torch.equal(own[name], state.server[name]) for name in state.server)
        assert is_servers == (not own_copy or client not in trained)
        right = (module(data.x[data.global_test]).argmax(1) == data.y[data.global_test]).double().mean().item()
        assert fed.results["p"].clients[client].global_test == pytest.approx(right, abs=1e-6)
        seen.append(right)
    assert len(set(seen)) > 1
    assert fed.results["p"].evaluation_point == ("after local training" if own_copy else "after aggregation")


def test_standalone_and_lg_fedavg_are_configurations(tmp_path):
    """Standalone trains local expert and header alone; LG-FedAvg averages the one header of all architectures."""
    phases = [
        Phase("Standalone", Local(), gate=ConstantGate(0), train=Train(max_epochs=1)),
        Phase("LG-FedAvg", FedAvg("header.*"), gate=ConstantGate(0), train=Train(max_epochs=1)),
    ]
    fed = run(phases, model(), blobs(SIZES), tmp_path, backend=TrainerBackend())
    alone, lg = fed.run.states["Standalone"], fed.run.states["LG-FedAvg"]
    for client in range(4):
        assert {name.split(".")[0] for name in alone.clients[client]} == {"local_experts", "header"}
        assert {".".join(name.split(".")[:2]) for name in lg.clients[client]} == {f"local_experts.{client % 3}"}
    for name in ("header.weight", "header.bias"):
        mean = sum(n * alone.clients[client][name] for client, n in enumerate(SIZES)) / sum(SIZES)
        torch.testing.assert_close(lg.server[name], mean, rtol=1e-12, atol=1e-12)
    assert fed.results["Standalone"].model == "local expert"
