"""Sample-level privacy of whole runs: targets, refusals, kills, the log, and epsilon after every history of a phase.

Epsilon is compared with that of Opacus over a list of all steps; `aggregation/test_accountant.py` is about its value.
"""

import hmac
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from helpers import TensorData, blobs, mixture
from helpers.backends import WithBatchNorm, local_training
from helpers.reports import csv_rows
from helpers.runs import Kill, assert_same, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import DPSGD, Federation, Phase, Select, Train
from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.aggregation.accountant import _ORDERS, epsilon, noise_for
from fedmoe_pl.algorithms import Ditto, FedAvg, FedPAC, FedProx, FineTuning, LabelPrior, Local, PFLMoE
from fedmoe_pl.algorithms.consent import OptOut
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.local_client import _private_generator, client_of
from fedmoe_pl.checkpoints.phase_state import EVERYONE, NOT_PRIVATE, PhaseState
from fedmoe_pl.models import EqualWeights, GlobalOnly, LinearGate, LocalOnly
from fedmoe_pl.phases.participation import phase_cohort
from fedmoe_pl.rounds import privacy

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
SIZES, BATCH, EPOCHS, DELTA = (13, 8, 11), 4, 2, 1e-3
ONE = {"accelerator": "cpu", "devices": 1}


def private(noise_multiplier: float | None = 2.0, delta=DELTA, **arguments):
    return DPSGD(0.5, delta, noise_multiplier, **arguments)


def phase(name="it", privacy=None, rounds=2, **arguments):
    return Phase(name, FedAvg("global_expert.*"), rounds, gate=GlobalOnly(), sample_privacy=privacy, **arguments)


def tuned(privacy=None, **arguments):
    train = Train(max_epochs=3, batch_size=2)
    return Phase("PFL-FT", FineTuning(), gate=LocalOnly(), sample_privacy=privacy, train=train, **arguments)


def run_of(path, phases, trainer=(), **kwargs) -> Federation:
    return federation(path, phases, trainer={**ONE, "max_epochs": EPOCHS, **dict(trainer)}, **kwargs)


def fit(path, phases, ckpt_path=None, rounds=None, model=None, **kwargs) -> Federation:
    """Runs phases, or goes on with them, whatever has changed; if ``rounds`` is given, only so many rounds."""
    run = run_of(path, phases, callbacks=[Kill("on_round_end", rounds or -1)], **kwargs)
    resuming = {"ckpt_path": ckpt_path, "allow_changes": ["phases"]} if ckpt_path else {}
    with pytest.raises(KeyboardInterrupt) if rounds else nullcontext():
        run.fit(model or mixture(), blobs(SIZES), **resuming)
    return run


def by_opacus(*steps):
    """Epsilon of kinds of steps, (noise multiplier, sampling rate, number); infinite without noise."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [each for each in steps if each[2]]
    has_noise = all(noise for noise, _, _ in accountant.history)
    return accountant.get_epsilon(DELTA, alphas=[*_ORDERS]) if has_noise else math.inf


@pytest.mark.slow
def test_epsilon_is_that_of_opacus_over_rounds_and_phases(tmp_path, caplog):
    """Batches of 4 in two epochs of two rounds, then of 2 in three epochs of one, for 13, 8 and 11 samples."""
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [phase(privacy=private()), tuned(private(3.0))])
    after, later = run.run.states["it"], run.run.states["PFL-FT"]
    of_clients = [by_opacus((2.0, 4 / n, 4 * max(round(n / 4), 1))) for n in SIZES]
    with_later = [
        by_opacus((2.0, 4 / n, 4 * max(round(n / 4), 1)), (3.0, 2 / n, 3 * max(round(n / 2), 1))) for n in SIZES
    ]
    assert after.sample_epsilon == pytest.approx(max(of_clients), rel=1e-9)
    assert later.sample_epsilon == pytest.approx(max(with_later), rel=1e-9)
    assert (after.sample_delta, math.isnan(after.epsilon)) == (1e-3, True)
    rows = [(row["method"], row["sample_epsilon"], row["sample_delta"]) for row in csv_rows(run.run_dir / "rounds.csv")]
    assert rows[-2:] == [("it", repr(after.sample_epsilon), "0.001"), ("PFL-FT", repr(later.sample_epsilon), "0.001")]
    worst = of_clients.index(max(of_clients))
    assert "Phase 'it': all that it trains (global_expert: shared) has (epsilon, delta)-differential" in caplog.text
    assert (
        f"epsilon {after.sample_epsilon:.3g} (client {worst}; mean over clients {sum(of_clients) / 3:.3g})"
        in caplog.text
    )
    assert "Phase 'PFL-FT': all that it trains (local_expert: private) has" in caplog.text


@pytest.mark.slow
def test_a_target_gives_each_client_the_noise_that_reaches_it_with_the_phases_before(tmp_path):
    run = fit(tmp_path, [phase(privacy=private(None, target_epsilon=2.0)), tuned(private(None, target_epsilon=5.0))])
    it, later = (run.run.states[name] for name in ("it", "PFL-FT"))
    for client, n in enumerate(SIZES):
        ((rate, noise, number),) = it.counted_steps["it"][str(client)]
        assert (rate, number) == (4 / n, 4 * max(round(n / 4), 1))
        first = (noise, rate, number)
        assert 1.8 < by_opacus(first) <= 2.0
        ((rate, noise, number),) = later.counted_steps["PFL-FT"][str(client)]
        assert 4.7 < by_opacus(first, (noise, rate, number)) <= 5.0
    assert len({kinds[0][1] for kinds in it.counted_steps["it"].values()}) == 3
    assert it.sample_epsilon <= 2 and later.sample_epsilon <= 5
    with pytest.raises(
        MisconfigurationException, match=r"target_epsilon is 2\.0, but must be higher, because client 0"
    ):
        fit(tmp_path, [phase(privacy=private()), tuned(private(None, target_epsilon=2.0))])


def test_clients_pay_for_the_rounds_that_they_are_asked_to_train_in(tmp_path):
    run = fit(tmp_path, [phase(privacy=private(), rounds=4, clients_per_round=1)])
    counted = run.run.states["it"].counted_steps["it"]
    per_round = {str(client): 2 * max(round(n / 4), 1) for client, n in enumerate(SIZES)}
    assert sum(steps // per_round[client] for client, ((_, _, steps),) in counted.items()) == 4


@pytest.mark.slow
def test_a_run_that_was_killed_has_the_same_bits_and_the_same_epsilon(tmp_path):
    def phases():
        return [phase(privacy=private(), rounds=3), tuned(private(None, target_epsilon=9.0))]

    alone = fit(tmp_path / "alone", phases())
    fit(tmp_path, phases(), rounds=2)
    resumed = fit(tmp_path, phases(), "last")
    assert_same(resumed.run.states, alone.run.states)
    assert (resumed.run_dir / "rounds.csv").read_bytes() == (alone.run_dir / "rounds.csv").read_bytes()


@pytest.mark.slow
def test_noise_1000_destroys_what_training_learns(tmp_path):
    accuracy = {}
    for noise in (None, 0.0, 1000.0):
        privacy = None if noise is None else private(noise)
        phases = [phase(privacy=privacy, rounds=20)]
        run = fit(tmp_path, phases, enable_checkpointing=False, evaluate_every_n_rounds=0)
        accuracy[noise] = run.run.results["it"].spread("global_test").mean
    assert accuracy[None] > 0.8 and accuracy[0.0] > 0.8, accuracy
    assert accuracy[1000.0] < 0.6, accuracy


@pytest.mark.parametrize("clients", [["0", "2"], []])
def test_after_steps_without_noise_nobody_has_a_finite_epsilon_also_if_no_client_has_trained_since(clients):
    state = PhaseState({}, {}, counted_steps={"before": {EVERYONE: [[*NOT_PRIVATE, 1]]}})
    state.counted_steps["it"] = {client: [[0.5, 2.0, 3]] for client in clients}
    privacy.update_epsilons(phase(privacy=private()), state)
    assert state.sample_epsilon == math.inf
    assert privacy.epsilon_of_clients(phase(privacy=private()), state) == dict.fromkeys(clients, math.inf)


@pytest.mark.slow
def test_a_result_from_a_checkpoint_costs_what_its_run_cost(tmp_path):
    first = fit(tmp_path / "first", [phase(privacy=private())])
    path = str(first.run_dir / "checkpoints/last.ckpt")
    run = fit(tmp_path, [phase(privacy=private(), ckpt_path=path), phase("next", private(), start="it")])
    assert run.run.states["it"].sample_epsilon == first.run.states["it"].sample_epsilon
    more = by_opacus((2.0, 4 / 11, 4 * 3 * 2))
    assert run.run.states["next"].sample_epsilon >= more * (1 - 1e-9)
    fit(tmp_path / "open", [phase()])
    path = str(tmp_path / "open/federation/version_0/checkpoints/last.ckpt")
    run = fit(tmp_path, [phase(privacy=private(), ckpt_path=path)])
    assert run.run.states["it"].sample_epsilon == math.inf


def named(**parts) -> TensorData:
    """The clouds of points, of clients with names."""
    of = blobs(SIZES).arrays
    return TensorData(of.x_train, of.y_train, parts, (of.x_test, of.y_test), torch.float64, batch_size=BATCH)


@pytest.mark.slow
def test_the_steps_of_a_given_result_follow_the_names_of_clients_that_keep_nothing(tmp_path):
    a, b, c = torch.arange(sum(SIZES)).split(SIZES)
    first = run_of(tmp_path / "first", [phase(privacy=private())])
    first.fit(mixture(), named(a=a, b=b, c=c))
    given = phase(privacy=private(), ckpt_path=str(first.run_dir / "checkpoints/last.ckpt"))
    later = run_of(tmp_path / "later", [given, phase("next", private(), start="it")])
    with pytest.warns(UserWarning, match="clients c, a may hold out other samples"):
        later.fit(mixture(), named(c=c, a=a))
    found = privacy.epsilon_of_clients(later.phases[1], later.run.states["next"])
    steps = [(2.0, 4 / n, 4 * max(round(n / 4), 1)) for n in SIZES]
    expected = {"0": 2 * [steps[2]], "1": 2 * [steps[0]], f"{given.ckpt_path}/b": [steps[1]]}
    assert found == pytest.approx({client: by_opacus(*kinds) for client, kinds in expected.items()}, rel=1e-9)


def test_the_steps_of_a_given_result_are_refused_where_only_a_number_says_whose_they_are(tmp_path):
    first = fit(tmp_path / "first", [phase(privacy=private())])
    path = str(first.run_dir / "checkpoints/last.ckpt")
    others = blobs((11, 8, 13))
    with pytest.warns(UserWarning, match="other clients or samples"):
        run_of(tmp_path, [phase(ckpt_path=path)]).check(mixture(), others)  # it says nothing of epsilon
    with pytest.raises(MisconfigurationException, match="epsilon counts the steps of each of its clients, which have"):
        run_of(tmp_path, [phase(privacy=private(), ckpt_path=path)]).check(mixture(), others)


@pytest.mark.slow
def test_a_newcomer_does_not_pay_for_the_steps_of_a_client_with_its_number(tmp_path, caplog):
    first = fit(tmp_path / "first", [phase(privacy=private(2.0), rounds=1)])
    path = str(first.run_dir / "checkpoints/last.ckpt")
    for noise in (3.0, 1.0):
        later = run_of(tmp_path, [phase(privacy=private(noise))], {"max_epochs": 1})
        with caplog.at_level("INFO"):
            later.personalize(mixture(), blobs((9, 6)), path)
        of_newcomers = max(by_opacus((noise, 4 / n, 2)) for n in (9, 6))
        expected = max(first.run.states["it"].sample_epsilon, of_newcomers)
        assert later.run.states["it"].sample_epsilon == pytest.approx(expected, rel=1e-9)
        assert (f"client {path}/1; mean" if noise == 3 else "(client 1; mean") in caplog.text
        caplog.clear()


@pytest.mark.slow
def test_private_parts_may_be_trained_without_protection_after_what_is_shared(tmp_path, caplog):
    """The server has seen nothing else: what the first phase sent has the bits of a run without the second one."""
    alone = fit(tmp_path / "alone", [phase(privacy=private())])
    mixed = Phase("PFL-MF", PFLMoE(0), gate=LinearGate(5), start={"global_expert": "it", "local_expert": "PFL-FT"})
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [phase(privacy=private()), tuned(), mixed, Phase("equal", PFLMoE(0), gate=EqualWeights())])
    assert_same(run.run.states["it"].server, alone.run.states["it"].server)
    assert run.run.states["it"].sample_epsilon == alone.run.states["it"].sample_epsilon
    assert math.isnan(run.run.states["PFL-FT"].sample_epsilon)
    for name, parts in {"PFL-FT": "local_expert: private", "PFL-MF": "gate: private"}.items():
        assert f"Phase '{name}': what it trains ({parts}) is not protected by differential privacy" in caplog.text
    assert "Phase 'equal': what it computes for each client is not protected by differential privacy" in caplog.text


def test_both_kinds_of_privacy_can_be_had_together(tmp_path):
    run = fit(tmp_path, [phase(privacy=private(), aggregation=DifferentialPrivacy(2.0, 0.5, 1e-3))])
    state = run.run.states["it"]
    assert 0 < state.epsilon < math.inf and 0 < state.sample_epsilon < math.inf


def test_rounds_in_which_nobody_was_drawn_have_an_epsilon_of_zero(tmp_path, caplog):
    aggregation = DifferentialPrivacy(2.0, 0.5, 1e-3)
    empty = phase(privacy=private(), aggregation=aggregation, rounds=1, clients_per_round=1)
    seed = next(seed for seed in range(99) if not phase_cohort(empty, len(SIZES), seed, 0))
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [empty], seed=seed)
    assert run.run.states["it"].sample_epsilon == 0
    assert "for each sample with epsilon 0 (no client was asked to train) and delta " in caplog.text


def drawn(training, client, purpose=13):
    of_client = client_of(training, training.module, client, {}, round=0)
    return torch.rand(9, generator=_private_generator(training, of_client, purpose))


@pytest.mark.parametrize("purpose", [12, 13])
def test_noise_and_batches_follow_from_every_sample_of_the_client_and_of_no_other(purpose):
    def of(change=None, sizes=(21_000, 8), client=0, **kwargs):
        datamodule = blobs(sizes, dtype=torch.float32)
        if change is not None:
            change(datamodule)
        training = local_training(mixture(GlobalOnly()), FedAvg("global_expert.*"), datamodule)
        return drawn(replace(training, **{"phase_name": "it", **kwargs}), client, purpose)

    before = of()
    assert torch.equal(of(), before) and not torch.equal(of(seed=1), before) and not torch.equal(of(client=1), before)
    for sample in (0, 1, 7, 20_999):
        for change in (lambda data: data.x[sample, 4:].mul_(1 + 2**-20), lambda data: data.y[sample].add_(1)):  # noqa: B023
            assert not torch.equal(of(change), before)
    assert torch.equal(of(lambda data: data.x[21_000:].add_(1)), before)
    assert not torch.equal(of(client=1), of(lambda data: data.x[21_007].add_(1), client=1))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "tried"), [(TrainerBackend(), 0), (StackedBackend(), 2)])
def test_the_samples_of_a_client_are_hashed_once_in_a_phase(backend, tried, tmp_path, monkeypatch):
    """And those of two once more, before a stack is known to train them as they are trained alone."""
    hashed = []
    own = SimpleNamespace(new=lambda key, digestmod: hashed.append(key) or hmac.new(key, digestmod=digestmod))
    monkeypatch.setattr("fedmoe_pl.backends.training.hmac", own)
    fit(tmp_path, [phase(privacy=private()), phase("open", start="initial")], backend=backend)
    assert len(hashed) == len(SIZES) + tried


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", "clients"])
def test_phases_whose_names_have_one_checksum_draw_other_noise(kind, tmp_path):
    names = ("plumless", "buckeroo")
    assert len({crc32(name.encode()) for name in names}) == 1
    given = {"privacy": private()} if kind == "samples" else {"aggregation": DifferentialPrivacy(2.0, 0.5, 1e-3)}
    run = fit(tmp_path, [phase(name, start="initial", **given) for name in names], evaluate_every_n_rounds=0)
    one, other = (run.run.states[name].server for name in names)
    assert all((one[name] - other[name]).abs().mean() > 1e-3 for name in one)
    cohorts = [[phase_cohort(phase(name, clients_per_round=2, **given), 9, 0, n) for n in range(9)] for name in names]
    assert (cohorts[0] == cohorts[1]) == (kind == "samples")  # which are the same in all phases


REFUSED = {
    "batch normalization": ({}, {"model": mixture(expert=WithBatchNorm())}, "batch normalization in PersonalizedMoE"),
    "FedProx": ({"algorithm": FedProx(shared="global_expert.*")}, {}, "FedProx is not known to use samples in the"),
    "Ditto": ({"algorithm": Ditto(), "gate": LocalOnly()}, {}, "Ditto is not known"),
    "FedPAC": ({"algorithm": FedPAC()}, {}, "FedPAC is not known"),
    "a subclass": ({"algorithm": type("Own", (FedAvg,), {})("global_expert.*")}, {}, "Own is not known"),
    "other batches": (
        {
            "algorithm": type("Own", (FedAvg,), {"samples_in_loss_only": True, "client_batches": lambda *_: []})(
                "global_expert.*"
            )
        },
        {},
        "client_batches of Own would be ignored",
    ),
    "select": ({"select": Select("global_test")}, {}, "a select by clients' data is not in epsilon"),
    "accumulation": ({}, {"trainer": {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches is set"),
    "delta": ({"sample_privacy": private(delta=0.1)}, {}, "sample_privacy.delta is 0.1, but must be below 0.0769"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_epsilon_would_not_hold_for_is_refused(what, tmp_path):
    arguments, others, because = REFUSED[what]
    defaults = {"algorithm": FedAvg("global_expert.*"), "gate": GlobalOnly(), "sample_privacy": private()}
    refused = Phase("it", **{**defaults, **arguments})
    with pytest.raises(MisconfigurationException, match=f"^Phase 'it': (?!Phase).*{because}"):
        fit(tmp_path, [refused], **others)


@pytest.mark.parametrize(("seed", "is_refused"), [(2, False), (3, True)])
def test_delta_is_compared_with_the_samples_of_those_that_take_part_with_the_run_s_seed(seed, is_refused, tmp_path):
    algorithm = FedAvg("global_expert.*")
    algorithm.opt_out = OptOut(clients=0.4)
    assert (0 in algorithm.opt_out.participants(range(3), seed)) == is_refused, "whose 13 samples are the most"
    run = run_of(tmp_path, [Phase("it", algorithm, gate=GlobalOnly(), sample_privacy=private(delta=1 / 12))], seed=seed)
    with pytest.raises(MisconfigurationException, match="a client has 13 samples") if is_refused else nullcontext():
        run.check(mixture(), blobs(SIZES))


def test_delta_is_compared_with_the_samples_of_newcomers_that_train(tmp_path):
    keeping = Phase("it", FedAvg("global_expert.extractor.*"), gate=GlobalOnly(), sample_privacy=private(delta=1 / 14))
    run = fit(tmp_path, [keeping])
    with pytest.raises(MisconfigurationException, match="a client has 15 samples"):
        run.personalize(mixture(), blobs((9, 15)))


def test_a_phase_that_starts_from_one_without_protection_is_refused(tmp_path):
    """Also where only clients kept what that one trained: it changes the gradients of all samples."""
    because = "must be given in '{}', from which the phase starts, too, because what it trained tells"
    with pytest.raises(MisconfigurationException, match=because.format("it")):
        fit(tmp_path, [phase(), tuned(private())])
    own = Phase("own", Local("local_expert.*"), gate=LocalOnly())
    both = Phase("both", FedAvg("global_expert.*"), gate=EqualWeights(), start="own", sample_privacy=private())
    with pytest.raises(MisconfigurationException, match=because.format("own")):
        fit(tmp_path, [own, both])
    prior = Phase("prior", LabelPrior(), gate=GlobalOnly())
    over_prior = Phase("again", Local("global_expert.*"), gate=GlobalOnly(), start="prior", sample_privacy=private())
    with pytest.raises(MisconfigurationException, match=because.format("prior")):
        fit(tmp_path, [phase(privacy=private()), prior, over_prior])


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({}, "noise_multiplier is None, but must be given, or target_epsilon in its place"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "noise_multiplier is 1.0, but must be given, or"),
        ({"target_epsilon": 0.0}, "target_epsilon is 0.0"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta is 1.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, because):
    with pytest.raises(MisconfigurationException, match=because):
        DPSGD(**{"max_grad_norm": 1.0, "delta": 1e-3, **arguments})


NOISE = {"P": 2.0, "Q": 3.0}  # N is a round without


def first(name="first", algorithm=None, gate=GlobalOnly):
    """A phase of one round with little cost."""
    algorithm = algorithm or FedAvg("global_expert.*")
    return Phase(name, algorithm, gate=gate(), evaluate=False, sample_privacy=private(5.0))


KINDS = {
    "FedAvg": lambda **kw: [Phase("it", FedAvg("global_expert.*"), gate=GlobalOnly(), **kw)],
    "Local": lambda **kw: [Phase("it", Local("local_expert.*"), gate=LocalOnly(), **kw)],
    "FineTuning": lambda **kw: [first(), Phase("it", FineTuning(), gate=LocalOnly(), **kw)],
    "PFLMoE": lambda **kw: [
        first(),
        first("tuned", FineTuning(), LocalOnly),
        Phase("it", PFLMoE(0), gate=LinearGate(5), **kw),
    ],
}


def by_hand(*letters, before=0):
    """Epsilon of the client that pays most for rounds with the noise of some letters, after some of ``first``."""
    steps = [(5.0, before)] + [(NOISE.get(letter, 0.0), 1) for letter in letters]
    kinds = [(n, max(round(n / BATCH), 1) * EPOCHS) for n in SIZES]
    return max(by_opacus(*((z, BATCH / n, rounds * number) for z, rounds in steps)) for n, number in kinds)


@pytest.mark.few("PNP-Local")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", ["PNP", "PQ", "NP", "NQPN"])
def test_epsilon_covers_every_step_of_a_history_and_of_the_phase_that_starts_from_it(history, kind, tmp_path):
    rounds, before = len(history), len(KINDS[kind]()) - 1
    for i, letter in enumerate(history):
        so_far, is_last = history[: i + 1], i == rounds - 1
        privacy = private(NOISE[letter]) if letter in NOISE else None
        phases = KINDS[kind](rounds=rounds, evaluate=False, sample_privacy=privacy)
        state = fit(tmp_path, phases, "last" if i else None, None if is_last else 1 + before * (not i)).run.states["it"]
        expected = math.nan if {*so_far} == {"N"} else by_hand(*so_far, before=before)
        assert state.round == i + 1 and state.sample_epsilon == pytest.approx(expected, rel=1e-9, nan_ok=True)
    after = Phase("after", Local("local_expert.*"), gate=LocalOnly(), evaluate=False, start="it")
    after.sample_privacy = private(3.0)
    run = fit(tmp_path, [*KINDS[kind](rounds=rounds, evaluate=False, sample_privacy=private()), after], "last")
    expected = by_hand(*history, "Q", before=before)
    assert run.run.states["after"].sample_epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FedAvg", "Local"])
def test_more_rounds_cost_more(kind, tmp_path):
    fit(tmp_path, KINDS[kind](rounds=3, sample_privacy=private()), rounds=2)
    run = fit(tmp_path, KINDS[kind](rounds=5, sample_privacy=private()), "last")
    epsilons = [float(row["sample_epsilon"]) for row in csv_rows(run.run_dir / "rounds.csv")]
    assert sorted(epsilons) == epsilons and epsilons[-1] == pytest.approx(by_hand(*"PPPPP"), rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_result_that_clients_trained_alone_without_noise_has_none(is_known, tmp_path, monkeypatch):
    """Also if the checkpoint is of a version that did not count such rounds."""
    if not is_known:
        monkeypatch.setattr("fedmoe_pl.rounds.fit.count_steps", lambda *_: None)
    run = fit(tmp_path / "before", KINDS["Local"]())
    path = str(run.run_dir / "checkpoints/last.ckpt")
    later = fit(tmp_path, KINDS["Local"](sample_privacy=private(), ckpt_path=path))
    assert later.run.states["it"].sample_epsilon == math.inf


@pytest.mark.few("PN")
@pytest.mark.parametrize("history", ["PP", "PN", "NP"])
def test_newcomers_pay_for_their_own_steps_and_are_covered_no_better_than_others(history, tmp_path):
    """One letter says how the federation was trained, the next how newcomers train what they keep."""
    in_federation, of_newcomers = (private() if letter == "P" else None for letter in history)

    def phases(privacy):
        return [Phase("it", FedAvg("global_expert.*"), sample_privacy=privacy)]

    run = run_of(tmp_path, phases(in_federation))
    run.fit(mixture(), blobs(SIZES))
    later = run_of(tmp_path, phases(of_newcomers))
    later.personalize(mixture(), blobs((40, 6)), str(run.run_dir / "checkpoints/last.ckpt"), rounds=3)
    own = max(by_opacus((2.0, BATCH / n, 3 * EPOCHS * max(round(n / BATCH), 1))) for n in (40, 6))
    expected = max(by_hand("P"), own) if history == "PP" else math.inf
    assert later.run.states["it"].sample_epsilon == pytest.approx(expected, rel=1e-9)


def target(epsilon, rounds, before=0, **arguments):
    """A phase with a target, perhaps after one with some noise."""
    given = {"sample_privacy": private(None, target_epsilon=epsilon), "gate": LocalOnly(), **arguments}
    phases = [Phase("it", FineTuning() if before else Local("local_expert.*"), rounds, **given)]
    return [Phase("first", FedAvg("global_expert.*"), sample_privacy=private(before)), *phases] if before else phases


CHANGES = {
    "more rounds": (target(3.0, 9), r"is 3\.0, but must be higher, or .*client 0 has spent 2\.\d+ .* after round 9"),
    "more epochs": (target(3.0, 3, train=Train(max_epochs=7)), None),
    "other batches": (target(3.0, 3, train=Train(batch_size=2)), None),
    "a lower target": (target(2.0, 3), "is 2.0, but must be higher"),
    "fewer rounds": (target(3.0, 2), None),
    "a higher target": (target(6.0, 3), None),
    "none": (target(3.0, 3), None),
}


@pytest.fixture(scope="module")
def two_of_three_rounds(tmp_path_factory):
    path = tmp_path_factory.mktemp("targets")
    fit(path, target(3.0, 3), rounds=2)
    return path / "federation"


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_a_resumed_run_exceeds_a_target(change, two_of_three_rounds, tmp_path):
    phases, refusal = CHANGES[change]
    shutil.copytree(two_of_three_rounds, tmp_path / "federation")
    if refusal is not None:
        with pytest.raises(MisconfigurationException, match=f"^Phase 'it': sample_privacy.target_epsilon.*{refusal}"):
            fit(tmp_path, phases, "last")
        return
    state = fit(tmp_path, phases, "last").run.states["it"]
    steps = [[(noise, rate, number) for rate, noise, number in kinds] for kinds in state.counted_steps["it"].values()]
    assert len(steps) == len(SIZES) and state.round == phases[0].rounds
    assert max(by_opacus(*kinds) for kinds in steps) <= phases[0].sample_privacy.target_epsilon


@pytest.mark.slow
def test_a_target_counts_what_was_spent_and_not_what_the_configuration_says_of_it(tmp_path):
    fit(tmp_path, target(9.0, 1, before=1.0), rounds=1)
    with pytest.raises(
        MisconfigurationException, match=r"target_epsilon is 9\.0, but must be higher.*client \d has spent"
    ):
        fit(tmp_path, target(9.0, 1, before=3.0), "last")


def test_after_rounds_without_noise_no_target_can_be_kept(tmp_path):
    phases = target(3.0, 3)
    phases[0].sample_privacy = None
    fit(tmp_path, phases, rounds=2)
    with pytest.raises(MisconfigurationException, match=r"left out, with a noise_multiplier .* steps without noise"):
        fit(tmp_path, target(3.0, 3), "last")


@pytest.mark.parametrize("setting", [(0.2, 1e-7, 0.01, 100), (0.2, 1e-5, 0.1, 100), (2.0, 1e-5, 0.1, 100)])
def test_the_noise_for_a_target_keeps_it_by_the_accountant_that_is_reported(setting):
    """The search looks at fewer orders, of which the accountant lacked one."""
    target, delta, probability, number = setting
    noise = noise_for(target, delta, probability, number, [])
    assert 0.99 * target < epsilon([(probability, noise, number)], delta) <= target
