"""FedBN against a bare rewrite, and which tensors it finds."""

import copy

import pytest
import torch
from helpers import Expert, blobs, mixture, phase, run, tensors
from helpers.backends import WithBatchNorm
from helpers.bare import COHORTS, SEED, round_batches, sgd
from helpers.runs import Kill, assert_same, federation
from torch import nn

from fedmoe_pl.algorithms import FedBN
from fedmoe_pl.models import GlobalOnly

EXPERT = "global_expert."
LAYER = "global_expert.extractor.1."
KEPT = {LAYER + name for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def model():
    return mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd)


def simulate(data, expert, cohorts, weights):
    """Algorithm 1: all tensors of the layer stay with their client."""
    own, server = {}, copy.deepcopy(expert.state_dict())
    is_private = {name: EXPERT + name in KEPT for name in server}
    start = copy.deepcopy(server)
    for round, cohort in enumerate(cohorts):
        states = []
        for client in cohort:
            mine = own.get(client, start)
            expert.load_state_dict({name: mine[name] if is_private[name] else server[name] for name in server})
            expert.train()
            for x, y in round_batches(data, client, round, 2):
                if len(y) == 1:
                    continue  # left out of batches with batch normalization
                expert.zero_grad()
                nn.functional.cross_entropy(expert(x), y).backward()
                with torch.no_grad():
                    for parameter in expert.parameters():
                        parameter -= 0.1 * parameter.grad
            own[client] = copy.deepcopy(expert.state_dict())
            states.append(own[client])
        shares = [weights[client] / sum(weights[client] for client in cohort) for client in cohort]
        for name in server:
            if not is_private[name]:
                server[name] = sum(share * state[name] for share, state in zip(shares, states, strict=True))
    private = {client: {name: state[name] for name in state if is_private[name]} for client, state in own.items()}
    return {name: server[name] for name in server if not is_private[name]}, private


@pytest.mark.few("samples")
@pytest.mark.parametrize("weighting", ["samples", None])
def test_statistics_weight_and_bias_stay_with_their_client(weighting, tmp_path):
    """By default, clients weigh the same."""
    data, start = blobs(), model()
    algorithm = FedBN(EXPERT + "*", **({"weighting": weighting} if weighting else {}))
    phases = [phase("FedBN", algorithm, rounds=3, clients_per_round=2)]
    state = run(phases, model(), data, tmp_path, 2, seed=SEED).run.states["FedBN"]
    weights = [13, 8, 11] if weighting else [1, 1, 1]
    server, private = simulate(data, start.global_expert, COHORTS, weights)

    def named(tree):
        return {EXPERT + name: tensor for name, tensor in tree.items()}

    torch.testing.assert_close(state.server, named(server), rtol=0, atol=1e-10)
    for client in range(3):
        torch.testing.assert_close(dict(state.clients[client]), named(private[client]), rtol=0, atol=1e-10)


def test_layers_are_found_by_type_and_those_that_are_not_batch_normalization_are_shared():
    class Odd(Expert):
        """Batch normalization without a telling name, a layer with one, and layer normalization."""

        def __init__(self):
            super().__init__()
            self.downsample = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
            self.bn = nn.Linear(5, 5)
            self.norm = nn.LayerNorm(5)

    module, fedbn = mixture(GlobalOnly(), Odd(), optimizer=sgd), FedBN(EXPERT + "*")
    fedbn.server_init(module)
    private = {name for name in tensors(module, EXPERT) if not fedbn.is_shared(name)}
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert private == {f"{EXPERT}downsample.1.{name}" for name in names}


def test_one_object_serves_phases_with_different_models(tmp_path):
    fedbn = FedBN(EXPERT + "*")
    fedbn.server_init(mixture(GlobalOnly(), WithBatchNorm()))
    other = WithBatchNorm()
    other.extractor = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6))
    module = mixture(GlobalOnly(), other)
    assert fedbn.server_init(module).keys().isdisjoint(name for name in tensors(module) if ".extractor.0." in name)


def test_a_phase_resumed_with_such_an_object_still_finds_its_own_layers(tmp_path):
    other = WithBatchNorm()
    other.extractor = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Tanh())

    def fitted(path, ckpt_path=None, **kwargs):
        fedbn, of_other = FedBN(EXPERT + "*"), mixture(GlobalOnly(), copy.deepcopy(other), optimizer=sgd)
        phases = [phase("one", fedbn, rounds=2), phase("two", fedbn, model=of_other, start="initial")]
        run = federation(path, phases, **kwargs)
        run.fit(model(), blobs(), ckpt_path=ckpt_path)
        return run.run.states["one"]

    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, callbacks=[Kill("on_round_end", 1)])
    assert_same(fitted(tmp_path, "last").server, fitted(tmp_path / "whole").server)
