"""FedJETs against two rounds in bare PyTorch, its common expert and its anchor clients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, run
from helpers.shared_experts import FOUR, choosy, loss_of_likelihood, rounds_by_hand

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, FedJETs
from fedmoe_pl.algorithms.fedjets import most_distant
from fedmoe_pl.models import GlobalOnly

COMMON = FedAvg(["embedding.*", "experts.0.*"], ["embedding.*", "experts.0.*"])


def phases(rounds=2, anchors=True, **kwargs) -> list[Phase]:
    return [
        Phase("common", COMMON, rounds=2, gate=GlobalOnly()),
        Phase("FedJETs", FedJETs(anchors=anchors), rounds=rounds, **kwargs),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("anchors", [False, True])
def test_two_rounds_are_those_of_bare_pytorch(tmp_path, anchors):
    data, model = blobs(FOUR), choosy()
    states = run(phases(anchors=anchors), model, data, tmp_path).run.states
    common = copy.deepcopy(model)
    common.load_state_dict({**common.state_dict(), **states["common"].server})
    for expert in common.experts:
        expert.load_state_dict(common.experts[0].state_dict())
    expert_of = {}
    if anchors:
        expert_of = {client: expert for expert, client in enumerate(most_distant(data.class_shares, 4).tolist())}
        assert expert_of.keys() == {0, 1, 2, 3}

    def by_samples(module, pair, x, y):
        return [len(x)] * 2

    server, trained, asked = rounds_by_hand(
        common, data, [range(4)] * 2, 2, by_samples, anchors=expert_of, frozen=("embedding.",), rounds_before=2
    )
    state = states["FedJETs"]
    own = {name: tensor for name, tensor in state.server.items() if "/" not in name}
    assert own.keys() == {name for name in server if not name.startswith("embedding.")}
    torch.testing.assert_close(own, {name: server[name] for name in own}, rtol=0, atol=1e-10)
    assert {client: tree["experts/asked"].tolist() for client, tree in state.clients.items()} == asked
    for client, expert in expert_of.items():
        assert all(expert in pairs[client] for pairs in trained)
    if not anchors:
        assert len({tuple(pair) for pair in trained[0].values()}) > 1


def test_the_validation_loss_is_that_of_the_likelihood_without_the_anchors_term(tmp_path):
    data = blobs((20, 13, 16, 15), validation_fraction=0.3)
    federation = run(phases(1), choosy(), data, tmp_path)
    for client in range(4):
        samples = data.validation_samples[client]
        module = federation.client_module("FedJETs", client).eval()
        loss = loss_of_likelihood(module, data.x[samples], data.y[samples])
        assert federation.results["FedJETs"].clients[client].validation_loss == pytest.approx(loss, abs=1e-10)


def test_anchors_are_the_clients_with_the_most_distant_labels():
    shares = torch.tensor([[0.3, 0.3, 0.4], [1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert sorted(most_distant(shares, 3).tolist()) == [1, 3, 4]
    assert sorted(most_distant(shares, 9).tolist()) == [0, 1, 2, 3, 4], "there are no more clients"
    assert len({*most_distant(torch.ones(4, 3) / 3, 3).tolist()}) == 3, "no client is anchor of two experts"


def test_an_anchor_s_loss_makes_the_gate_choose_its_expert_and_pads_do_not_count():
    module, x, y = choosy(), torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    constants = {"experts": [0, 2], "anchor": -1}
    plain = FedJETs().client_loss(module, (x, y), constants)
    anchored = FedJETs().client_loss(module, (x, y), {**constants, "anchor": 2})
    chosen = F.cross_entropy(module.gate(module.embedding(x)).log(), torch.full((6,), 2))
    torch.testing.assert_close(anchored, plain + chosen)
    expected = FedJETs().client_loss(module, (x[:4], y[:4]), {**constants, "anchor": 2})
    y[4:] = -100
    torch.testing.assert_close(FedJETs().client_loss(module, (x, y), {**constants, "anchor": 2}), expected)
