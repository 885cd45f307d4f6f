"""pFedMM against two rounds in bare PyTorch with the learning rate M lr for the backbone, and its limits."""

from functools import partial

import torch
from helpers import assert_same_bits, blobs, phase, run
from helpers.mixtures_of_learners import RATE, backbone, equal_learners, learners, rounds_by_hand

from fedmoe_pl.algorithms import FedAvg, FedEM, PFedMM
from fedmoe_pl.models import EqualWeights

momentum = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


def test_two_rounds_are_those_of_bare_pytorch_with_m_times_the_rate_for_the_backbone(tmp_path):
    data, model = blobs(), learners(embedding=backbone(), optimizer=momentum)
    state = run([phase("pFedMM", PFedMM(), rounds=2)], model, data, tmp_path).run.states["pFedMM"]

    def optimizers(module):
        return [momentum(module.experts.parameters()), momentum(module.embedding.parameters(), lr=3 * RATE)]

    server, weights = rounds_by_hand(model, data, [range(3)] * 2, 2, optimizers)
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-10)
    for client, expected in weights.items():
        assert state.clients[client].keys() == {"gate.weights"}
        torch.testing.assert_close(state.clients[client]["gate.weights"], expected, rtol=0, atol=1e-10)


def test_without_a_backbone_it_is_fedem(tmp_path):
    servers = [
        run([phase("it", algorithm, rounds=2)], learners(), blobs(), tmp_path / str(index)).run.states["it"].server
        for index, algorithm in enumerate((FedEM(), PFedMM()))
    ]
    assert_same_bits(*servers)


def test_with_equal_heads_the_backbone_takes_a_step_of_fedavg_times_m_and_a_head_an_mth(tmp_path):
    data = blobs(sizes=(4,), batch_size=4)
    model, gate = equal_learners(embedding=backbone()), EqualWeights()
    before = model.state_dict()
    em = run([phase("pFedMM", PFedMM())], model, data, tmp_path / "em", max_epochs=1).run.states["pFedMM"].server
    one = learners(1, backbone())
    average = run([phase("FedAvg", FedAvg(), gate=gate)], one, data, tmp_path / "average", max_epochs=1)
    server = average.run.states["FedAvg"].server
    for name, tensor in em.items():
        same = name if name.startswith("embedding.") else f"experts.0.{name.split('.', 2)[2]}"
        factor = 3 if name.startswith("embedding.") else 1 / 3
        torch.testing.assert_close(tensor - before[name], factor * (server[same] - before[same]), rtol=1e-9, atol=0)
