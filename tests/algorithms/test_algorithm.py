"""The base: tensors that belong to the algorithm alone."""

import copy

import pytest
import torch
from helpers import assert_same_bits, blobs, mixture, run, tensors
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import ClusterMixture, FedAvg, FedProx, Local, PersonalizedExpert, PFLMoE, Scaffold
from fedmoe_pl.models import ClusteredMoE, ConstantGate, FeatureGate, LinearGate

SIZES = (13, 8, 11)


class Bookkeeping(FedAvg):
    """FedAvg that also sends, averages and keeps tensors of its own, one of them under a parameter's name."""

    def server_init(self, module):
        return {
            **super().server_init(module),
            "book/samples": torch.zeros(2),
            "book/local_expert.classifier.1.bias": ONES,
        }

    def client_final(self, client, const):
        update = super().client_final(client, const)
        rounds = client.kept.get("book/rounds", torch.zeros((), dtype=torch.int64))
        if client.round % 2 == 0:  # else what it kept is carried over
            update.kept["book/rounds"] = rounds + 1
        update.sent["book/samples"] = torch.full((2,), float(len(client.samples)))
        return update


ONES = torch.ones(3, dtype=torch.float64)
EXPECTED_SAMPLES = sum(size**2 for size in SIZES) / sum(SIZES)  # the mean of n, weighted by n


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("every_batch", [False, True])
def test_an_algorithm_s_own_tensors_are_sent_averaged_kept_and_stored_but_never_loaded(store, every_batch, tmp_path):
    plain, counted = (
        run(
            [Phase("it", algorithm, rounds=3)],
            mixture(FeatureGate(6)),
            blobs(SIZES),
            tmp_path / type(algorithm).__name__,
            every_batch=every_batch,
            store=store,
            enable_checkpointing=True,
        )
        for algorithm in (FedAvg("global_expert.*"), Bookkeeping("global_expert.*"))
    )
    state, expected = counted.states["it"], plain.states["it"]
    assert state.server["book/samples"].tolist() == pytest.approx([EXPECTED_SAMPLES] * 2)
    assert torch.equal(state.server["book/local_expert.classifier.1.bias"], ONES)
    for client in range(3):
        kept = dict(state.kept[client])
        assert kept.pop("book/rounds").item() == 2, "rounds 0 and 2"
        assert_same_bits(kept, dict(expected.kept[client]))
        assert_same_bits(tensors(counted.client_module("it", client)), tensors(plain.client_module("it", client)))
    assert counted.results["it"].spread("global_test") == plain.results["it"].spread("global_test")
    up = [federation.states["it"].traffic["parameters_up"] for federation in (counted, plain)]
    down = [federation.states["it"].traffic["parameters_down"] for federation in (counted, plain)]
    assert (up[0] - up[1], down[0] - down[1]) == (3 * 3 * 2, 3 * 3 * (2 + 3)), "they count as traffic"


def test_a_run_with_own_tensors_goes_on_from_its_checkpoint_and_a_later_phase_does_not_see_them(tmp_path):
    def phases(rounds):
        first = Phase("it", Bookkeeping("global_expert.*"), rounds=rounds, ckpt_path=None)
        return [first, Phase("after", Bookkeeping("global_expert.*"), start="it")]

    whole = run(phases(3), mixture(FeatureGate(6)), blobs(SIZES), tmp_path / "whole", enable_checkpointing=True)
    given = phases(3)
    given[0].ckpt_path = str(whole.run_dir / "checkpoints/last.ckpt")
    again = run(given, mixture(FeatureGate(6)), blobs(SIZES), tmp_path / "again")
    for name, rounds in (("it", 2), ("after", 1)):
        assert_same_bits(again.states[name].server, whole.states[name].server)
        for client in range(3):
            assert_same_bits(dict(again.states[name].kept[client]), dict(whole.states[name].kept[client]))
            assert whole.states[name].kept[client]["book/rounds"].item() == rounds


class WithControl(LightningModule):
    """A user's module with a part named as SCAFFOLD's control variates begin."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.part = part
        setattr(self, part, nn.Linear(5, 3).double())

    def forward(self, x):
        return getattr(self, self.part)(x)

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1]), {}

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_part_of_the_model_may_be_named_control_under_scaffold(tmp_path):
    found = []
    for part in ("control", "layer"):
        federation = run([Phase("it", Scaffold(), rounds=3)], WithControl(part), blobs(SIZES), tmp_path / part)
        assert set(federation.states["it"].server) == {
            *(f"{part}.weight", f"{part}.bias", f"control/{part}.weight", f"control/{part}.bias")
        }
        found.append({name.replace(f"{part}.", ""): tensor for name, tensor in federation.states["it"].server.items()})
    assert_same_bits(*found)
    assert found[0]["control/weight"].any()


def test_a_module_with_a_slash_in_the_name_of_a_tensor_is_refused():
    module = mixture(LinearGate(5))
    module.global_expert.classifier.add_module("a/b", nn.Linear(3, 3))
    module.local_expert = copy.deepcopy(module.global_expert)
    sentence = (
        "PersonalizedMoE: a tensor's name is 'global_expert.classifier.a/b.weight', but must not contain '/', which "
        "marks the tensors of algorithms."
    )
    for algorithm in (FedAvg(), Local(), FedProx(), PersonalizedExpert(), PFLMoE(), PFLMoE(interleaved=True)):
        with pytest.raises(MisconfigurationException) as error:
            algorithm.check(module)
        assert str(error.value) == sentence
    clustered = ClusteredMoE(nn.Sequential(), 2, gate=ConstantGate([1.0, 0.0, 0.0]))
    clustered.local_expert.add_module("a/b", nn.Linear(3, 3))
    with pytest.raises(MisconfigurationException, match=r"'local_expert\.a/b\.weight', but must not contain '/'"):
        ClusterMixture().check(clustered)
