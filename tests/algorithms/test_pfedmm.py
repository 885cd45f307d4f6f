"""pFedMM against two rounds in bare PyTorch with the learning rate M lr for the backbone, and its limits."""

from functools import partial

import torch
from helpers import blobs, phase, run
from helpers.mixtures_of_learners import RATE, backbone, learners, rounds_by_hand

from fedmoe_pl.algorithms import PFedMM

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
