"""The base: patterns, frozen parts, tensors of its own, and results that follow from seed, client and round alone."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import Expert, assert_same_bits, blobs, mixture, phase, run, tensors
from helpers.backends import local_training
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.algorithms.algorithm import Patterns
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import ConstantGate, FeatureGate, LinearGate

SIZES = (13, 8, 11)


class Bookkeeping(FedAvg):
    """FedAvg that also sends, averages and keeps tensors of its own, one of them under a parameter's name."""

    def server_init(self, module):
        return {
            **super().server_init(module),
            "book/samples": torch.zeros(2),
            "book/local_expert.classifier.1.bias": ONES,
        }

    def client_final(self, client, constants):
        update = super().client_final(client, constants)
        rounds = client.state.get("book/rounds", torch.zeros((), dtype=torch.int64))
        if client.round % 2 == 0:  # else what it kept is carried over
            update.state["book/rounds"] = rounds + 1
        update.sent["book/samples"] = torch.full((2,), float(len(client.samples)))
        return update


ONES = torch.ones(3, dtype=torch.float64)
EXPECTED_SAMPLES = sum(size**2 for size in SIZES) / sum(SIZES)  # the mean of n, weighted by n


@pytest.mark.few(1)
@pytest.mark.parametrize("every_batch", [False, True])
def test_an_algorithm_s_own_tensors_are_sent_averaged_kept_and_stored_but_never_loaded(every_batch, tmp_path):
    """A later phase does not see them."""
    plain, counted = (
        run(
            [Phase("it", kind("global_expert.*"), rounds=3), phase("after", kind("global_expert.*"), start="it")],
            mixture(FeatureGate(6)),
            blobs(),
            tmp_path / kind.__name__,
            every_batch=every_batch,
            enable_checkpointing=every_batch,
            backend=TrainerBackend(),
        )
        for kind in (FedAvg, Bookkeeping)
    )
    state, expected = counted.run.states["it"], plain.run.states["it"]
    assert state.server["book/samples"].tolist() == pytest.approx([EXPECTED_SAMPLES] * 2)
    assert torch.equal(state.server["book/local_expert.classifier.1.bias"], ONES)
    for client in range(3):
        kept = dict(state.clients[client])
        assert kept.pop("book/rounds").item() == 2, "rounds 0 and 2"
        assert counted.run.states["after"].clients[client]["book/rounds"].item() == 1
        assert_same_bits(kept, dict(expected.clients[client]))
        assert_same_bits(tensors(counted.client_module("it", client)), tensors(plain.client_module("it", client)))
    assert counted.results["it"].spread("global_test") == plain.results["it"].spread("global_test")
    added = {name: number - expected.traffic[name] for name, number in state.traffic.items()}
    up, down = 2 * 4, 2 * 4 + 3 * 8  # two float32; three float64 that the server alone sends
    # 3 clients in 3 rounds
    assert (added["bytes_up"], added["bytes_down"]) == (3 * 3 * up, 3 * 3 * down), "they count as traffic"
    assert added["parameters_up"] == added["parameters_down"] == 0, "they are no parameters"


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.* have each trained for themselves")  # FedAvg shares them
@pytest.mark.parametrize(
    ("stage", "trained"),
    [
        (FineTuning("local_expert.classifier.*", 0.25), "local_expert.classifier."),
        (FineTuning(), "local_expert."),
        (PFLMoE(), "gate."),
        (FedAvg(trainable="global_expert.*"), "global_expert."),
        (Local(trainable=["local_expert.extractor.*", "gate.*"]), ("local_expert.extractor.", "gate.")),
    ],
)
def test_only_what_is_trainable_changes_and_the_rest_is_the_same_to_the_bit(tmp_path, stage, trained):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    phases = [phase("FedAvg", FedAvg()), phase("Before", FineTuning(gate_fraction=0.25), train=Train(max_epochs=0))]
    decaying = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)  # would change frozen parameters, too
    federation = run(
        [*phases, phase("After", stage, start="Before", train=Train(optimizer=decaying))], model, datamodule, tmp_path
    )
    for client in range(3):
        before = federation.client_module("Before", client).state_dict()
        after = federation.client_module("After", client).state_dict()
        assert {name for name in after if not torch.equal(after[name], before[name])} == {
            name for name in after if name.startswith(trained)
        }


class Recorder(nn.Module):
    """Remembers in which mode it was called; without parameters, as dropout."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __deepcopy__(self, memo):
        return Recorder(self.name, self.seen)  # of what copies see, too

    def forward(self, x):
        if torch.is_grad_enabled():  # not with the samples that check the model's outputs and gate
            self.seen.append((self.name, self.training))
        return x


def recorded(gate, seen):
    model = mixture(gate)
    for name in ("global_expert", "local_expert"):
        for part in ("extractor", "classifier"):
            getattr(getattr(model, name), part).append(Recorder(f"{name}.{part}", seen))
    return model


@pytest.mark.few(3)
@pytest.mark.parametrize("frozen_train_mode", [False, True])
@pytest.mark.parametrize(
    ("stage", "trained"),
    [
        (partial(FineTuning, "local_expert.classifier.*", 0.25), {"local_expert.classifier"}),
        (partial(FineTuning, gate_fraction=0.25), {"local_expert.extractor", "local_expert.classifier"}),
        (PFLMoE, set()),
        (partial(PFLMoE, interleaved=True), {"local_expert.classifier"}),
    ],
)
def test_frozen_modules_are_in_eval_mode_unless_the_official_codes_way_is_asked_for(
    tmp_path, stage, trained, frozen_train_mode
):
    seen = []
    algorithm = stage(frozen_train_mode=frozen_train_mode)
    it = phase("After", algorithm, start="initial")
    run([it], recorded(LinearGate(5), seen), blobs(), tmp_path, every_batch=True)
    parts = {name for name, _ in seen}
    assert {*seen} == {(part, frozen_train_mode or part in trained) for part in parts}
    trains_alone = isinstance(algorithm, FineTuning) or algorithm.interleaved
    assert len(parts) == (2 if trains_alone else 4) and "local_expert.extractor" in parts


def test_a_part_that_was_frozen_in_one_epoch_is_back_in_train_mode_when_it_is_trained(tmp_path):
    class ByTurns(Local):
        def is_trainable(self, name, round, epoch):
            return name.startswith("local_expert.extractor." if epoch % 2 == 0 else "local_expert.classifier.")

    seen = []
    it = phase("A", ByTurns(), clients_per_round=1)
    run([it], recorded(ConstantGate(0), seen), blobs((4, 4)), tmp_path, 3, every_batch=True)
    extractor, classifier = "local_expert.extractor", "local_expert.classifier"
    assert seen[-6:] == [  # before them, a batch of each kind had its operations counted
        *((extractor, True), (classifier, False)),
        *((extractor, False), (classifier, True)),
        *((extractor, True), (classifier, False)),
    ]


PARTS = "gate.*, global_expert.*, local_expert.*"
LOCAL_PARTS = "local_expert.classifier.*, local_expert.extractor.*"


@pytest.mark.parametrize(
    ("algorithm", "key", "pattern", "beside"),
    [
        (FedAvg(shared="global_exprt.*"), "shared", "global_exprt.*", PARTS),
        (FedAvg(trainable=["global_expert.*", "heads.*"]), "trainable", "heads.*", PARTS),
        (Local(trainable="classifier.*"), "trainable", "classifier.*", PARTS),
        (FineTuning("local_expert.clasifier.*"), "trainable", "local_expert.clasifier.*", LOCAL_PARTS),
        (PFLMoE(interleaved=True, trainable="local.*"), "trainable", "local.*", PARTS),
    ],
)
def test_a_misspelt_pattern_is_refused_before_training_with_what_the_model_has(
    algorithm, key, pattern, beside, tmp_path
):
    with pytest.raises(MisconfigurationException) as error:
        run([phase("A", algorithm, start="initial")], mixture(LinearGate(5)), blobs(), tmp_path)
    assert str(error.value) == (
        f"Phase 'A': {type(algorithm).__name__}: {key} is '{pattern}', which matches no parameter of the model; it has "
        f"{beside}."
    )


def test_a_pattern_for_a_model_without_parameters_is_refused():
    with pytest.raises(MisconfigurationException, match=r"no parameter of the model; it has none\.$"):
        Patterns("*").check([], "shared")


# A client's result depends on the seed, the client and the round alone


def client_results(cohort, seed=0, round=0):
    """What each client of the cohort sends and keeps, by client; with dropout, so that all randomness is at work."""
    model = mixture(FeatureGate(6), Expert(dropout=0.5))
    training = replace(local_training(model, FedAvg("global_expert.*"), blobs((9, 9, 9))), seed=seed)
    server, before = training.algorithm.server_init(model), copy.deepcopy(model.state_dict())
    plan = TrainerBackend().plan(training)
    groups = list(plan.train(server, plan.groups(cohort), {}, round))
    assert_same_bits(model.state_dict(), before)  # the template is never trained
    assert [list(group.clients) for group in groups] == [[client] for client in cohort]
    return {client: {**group.update.sent, **group.update.state} for group in groups for client in group.clients}


def test_training_clients_in_another_order_or_subset_gives_the_same_bits():
    everybody = client_results([0, 1, 2])
    for cohort in ([2, 0, 1], [1], [2, 1]):
        torch.manual_seed(123)  # what ran before is of no consequence
        torch.rand(7)
        for client, result in client_results(cohort).items():
            assert_same_bits(result, everybody[client])


def test_another_seed_round_or_client_shuffles_and_drops_differently(tmp_path):
    results = [client_results([1], seed, round)[1] for seed, round in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({result["local_expert.classifier.1.weight"][0, 0].item() for result in results}) == 4
    model, datamodule = mixture(FeatureGate(6), Expert(dropout=0.5)), blobs((9, 9))
    datamodule.train_samples = datamodule.train_samples.select(torch.tensor([0, 0]))  # the same for both clients
    federation = run([phase("Local", Local())], model, datamodule, tmp_path)
    first, second = (federation.client_module("Local", client).state_dict() for client in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)
