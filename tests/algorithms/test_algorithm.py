"""The base: patterns, frozen parts, tensors of its own, and results that follow from seed, client and round alone."""

import copy
import inspect
from functools import partial

import pytest
import torch
from helpers import Expert, assert_same_bits, blobs, mixture, phase, run, tensors
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Algorithm, Phase, Train, algorithms
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, FedKD, FineTuning, Local, PFLMoE
from fedmoe_pl.algorithms.algorithm import Patterns
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining, TrainerBackend
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
    plain, counted = (
        run(
            [Phase("it", algorithm, rounds=3)],
            mixture(FeatureGate(6)),
            blobs(SIZES),
            tmp_path / type(algorithm).__name__,
            every_batch=every_batch,
            enable_checkpointing=every_batch,
            backend=TrainerBackend(),
        )
        for algorithm in (FedAvg("global_expert.*"), Bookkeeping("global_expert.*"))
    )
    state, expected = counted.run.states["it"], plain.run.states["it"]
    assert state.server["book/samples"].tolist() == pytest.approx([EXPECTED_SAMPLES] * 2)
    assert torch.equal(state.server["book/local_expert.classifier.1.bias"], ONES)
    for client in range(3):
        kept = dict(state.clients[client])
        assert kept.pop("book/rounds").item() == 2, "rounds 0 and 2"
        assert_same_bits(kept, dict(expected.clients[client]))
        assert_same_bits(tensors(counted.client_module("it", client)), tensors(plain.client_module("it", client)))
    assert counted.results["it"].spread("global_test") == plain.results["it"].spread("global_test")
    counts, none = (federation.run.states["it"].traffic for federation in (counted, plain))
    added = {name: counts[name] - none[name] for name in counts}
    up, down = 2 * 4, 2 * 4 + 3 * 8  # two float32; three float64 that the server alone sends
    # 3 clients in 3 rounds
    assert (added["bytes_up"], added["bytes_down"]) == (3 * 3 * up, 3 * 3 * down), "they count as traffic"
    assert added["parameters_up"] == added["parameters_down"] == 0, "they are no parameters"


def test_a_run_with_own_tensors_goes_on_from_its_checkpoint_and_a_later_phase_does_not_see_them(tmp_path):
    def phases(rounds):
        first = Phase("it", Bookkeeping("global_expert.*"), rounds=rounds, ckpt_path=None)
        return [first, Phase("after", Bookkeeping("global_expert.*"), start="it")]

    whole = run(phases(3), mixture(FeatureGate(6)), blobs(SIZES), tmp_path / "whole", enable_checkpointing=True)
    given = phases(3)
    given[0].ckpt_path = str(whole.run_dir / "checkpoints/last.ckpt")
    again = run(given, mixture(FeatureGate(6)), blobs(SIZES), tmp_path / "again")
    for name, rounds in (("it", 2), ("after", 1)):
        assert_same_bits(again.run.states[name].server, whole.run.states[name].server)
        for client in range(3):
            assert_same_bits(dict(again.run.states[name].clients[client]), dict(whole.run.states[name].clients[client]))
            assert whole.run.states[name].clients[client]["book/rounds"].item() == rounds


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
            self.seen.setdefault(self.name, set()).add(self.training)
        return x


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
    seen: dict[str, set[bool]] = {}
    datamodule, model = blobs(), mixture(LinearGate(5))
    for expert in ("global_expert", "local_expert"):
        for part in ("extractor", "classifier"):
            getattr(getattr(model, expert), part).append(Recorder(f"{expert}.{part}", seen))
    algorithm = stage(frozen_train_mode=frozen_train_mode)
    run([phase("After", algorithm, start="initial")], model, datamodule, tmp_path, every_batch=True)
    parts = [f"{expert}.{part}" for expert in ("global_expert", "local_expert") for part in ("extractor", "classifier")]
    expected = {part: {frozen_train_mode or part in trained} for part in parts}
    if isinstance(algorithm, FineTuning) or algorithm.interleaved:  # the local expert is trained alone
        expected = {part: modes for part, modes in expected.items() if part.startswith("local_expert.")}
    assert seen == expected


def test_a_part_that_was_frozen_in_one_epoch_is_back_in_train_mode_when_it_is_trained(tmp_path):
    class ByTurns(Local):
        def is_trainable(self, name, round, epoch):
            return name.startswith("local_expert.extractor." if epoch % 2 == 0 else "local_expert.classifier.")

    modes = []

    class Watched(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            if torch.is_grad_enabled():
                modes.append((self.name, self.training))
            return x

    model, datamodule = mixture(ConstantGate(0)), blobs((4, 4))
    model.local_expert.extractor.append(Watched("extractor"))
    model.local_expert.classifier.append(Watched("classifier"))
    run([phase("A", ByTurns(), clients_per_round=1)], model, datamodule, tmp_path, 3, every_batch=True)
    assert modes[-6:] == [  # before them, a batch of each kind had its operations counted
        *(("extractor", True), ("classifier", False)),
        *(("extractor", False), ("classifier", True)),
        *(("extractor", True), ("classifier", False)),
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


def client_results(cohort, seed=0, round=0, max_epochs=2):
    """What each client of the cohort sends and keeps, by client; with dropout, so that all randomness is at work."""
    model = mixture(FeatureGate(6), Expert(dropout=0.5))
    training = LocalTraining(
        module=model,
        initial=copy.deepcopy(model.state_dict()),
        algorithm=FedAvg(shared="global_expert.*"),
        datamodule=blobs((9, 9, 9)),
        trainer={**LEAN_TRAINER, "max_epochs": max_epochs},
        batch_size=None,
        seed=seed,
    )
    before = copy.deepcopy(model.state_dict())
    server = training.algorithm.server_init(model)
    groups = list(TrainerBackend().plan(training).train(server, cohort, {}, round))
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
    weights = [
        client_results([1], seed=seed, round=round)[1]["local_expert.classifier.1.weight"]
        for seed, round in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len({weight[0, 0].item() for weight in weights}) == 4
    model, datamodule = mixture(FeatureGate(6), Expert(dropout=0.5)), blobs((9, 9))
    datamodule.train_samples = datamodule.train_samples.select(torch.tensor([0, 0]))  # the same for both clients
    federation = run([phase("Local", Local())], model, datamodule, tmp_path)
    first, second = (federation.client_module("Local", client).state_dict() for client in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_algorithms_that_read_the_number_of_rounds_say_so():
    classes = [each for each in vars(algorithms).values() if isinstance(each, type) and issubclass(each, Algorithm)]
    readers = {each for each in classes if "client.rounds" in inspect.getsource(each)} - {Algorithm}
    assert readers == {FedKD, EpsilonGreedyIFCA}
