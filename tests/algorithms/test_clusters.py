"""The initial models of clusters, drawn until enough clients choose each."""

import pytest
import torch
from helpers import Expert, TensorData, assert_same_bits, phase, run
from helpers.clusters import FIRST, Watch, clustered, conflicting, losses_by_hand, tensors_of
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Train
from fedmoe_pl.algorithms import EpsilonGreedyIFCA
from fedmoe_pl.algorithms.fedlease import clusters_of
from fedmoe_pl.models import ClusteredMoE, ConstantGate, GlobalOnly
from fedmoe_pl.trees import copy_module


def test_initial_models_are_drawn_until_enough_clients_choose_each(tmp_path):
    """The choices are counted by hand; the first draw leaves a cluster without clients."""
    data, watch = conflicting(), Watch()
    module = next(
        module
        for seed in range(100)
        if losses_of_first_cluster(module := two_clusters(seed), data) in ({True}, {False})
    )
    algorithm = EpsilonGreedyIFCA(epsilon=1.0, good_init=0.5)
    good = phase("IFCA", algorithm, gate=ConstantGate(FIRST[2]), train=Train(max_epochs=0))
    federation = run([good], module, data, tmp_path, callbacks=[watch])
    drawn = copy_module(module)
    drawn.load_state_dict({**module.state_dict(), **tensors_of(watch.servers[0])})
    losses = [losses_by_hand(drawn, data, client) for client in range(6)]
    assert [first < second for first, second in losses].count(True) == 3
    weights = [expert.classifier[1].weight for m in (module, drawn) for expert in m.global_experts]
    assert len({weight.sum().item() for weight in weights}) == 4, "both models are new, and not equal"

    again = run([good], module, data, tmp_path / "again")
    assert_same_bits(*(tensors_of(f.run.states["IFCA"].server) for f in (federation, again)))
    other = run([good], module, data, tmp_path / "other", seed=1).run.states["IFCA"].server
    assert not torch.equal(other["global_experts.0.classifier.1.weight"], weights[2]), "draws depend on the seed"
    without = run(
        [phase("IFCA", EpsilonGreedyIFCA(0.0), gate=good.gate, train=Train(max_epochs=0))],
        drawn,
        data,
        tmp_path / "one",
    )
    kept = run([good], drawn, data, tmp_path / "kept")  # models that are good already are not drawn anew
    assert_same_bits(*(tensors_of(f.run.states["IFCA"].server) for f in (without, kept)))


def test_of_numbers_of_clusters_that_are_as_good_the_lowest_is_taken():
    """Where all clients are as far from each other, each silhouette is 0."""
    assert clusters_of(1 - torch.eye(4, dtype=torch.float64), most=3).max() == 1


def two_clusters(seed):
    return clustered(2, expert=Expert(classes=2), seed=seed)


def losses_of_first_cluster(module, data) -> set[bool]:
    """Whether clients choose the first cluster."""
    return {first < second for first, second in (losses_by_hand(module, data, client) for client in range(6))}


def test_new_draws_keep_what_clusters_share_and_end_if_no_draw_can_be_good(tmp_path, monkeypatch):
    module = ClusteredMoE(Convolutional(), 2, gate=GlobalOnly(), clusters_share_fc=True)
    images = torch.rand(12, 1, 3, 3)
    data = TensorData(images, torch.arange(12) % 2, torch.arange(12).split(3), batch_size=3)
    good = phase("IFCA", EpsilonGreedyIFCA(good_init=0.5), train=Train(max_epochs=0))
    server = run([good], module, data, tmp_path).run.states["IFCA"].server
    assert torch.equal(server["global_experts.0.fc.weight"], server["global_experts.1.fc.weight"])
    assert not torch.equal(server["global_experts.0.conv.weight"], server["global_experts.1.conv.weight"])

    monkeypatch.setattr("fedmoe_pl.algorithms.ifca._DRAWS", 3)
    one_client = phase("IFCA", EpsilonGreedyIFCA(good_init=0.5), train=Train(max_epochs=0), clients_per_round=1)
    with pytest.raises(MisconfigurationException, match=r"good_init is 0\.5, but must be lower for these data"):
        run([one_client], module, data, tmp_path)


class Convolutional(nn.Module):
    """Images of 3x3 pixels to two classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1).tanh())
