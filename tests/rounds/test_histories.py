"""Epsilon after every history of a phase, against an accountant on the list of all steps, written by hand."""

import math
import shutil
from importlib.util import find_spec

import pytest
from helpers import blobs, mixture
from helpers.accountant import epsilon_of
from helpers.reports import csv_rows
from helpers.runs import Kill, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import DPSGD, Phase, Train
from fedmoe_pl.aggregation.accountant import epsilon, noise_for
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
SIZES, BATCH, EPOCHS, DELTA = (13, 8, 11), 4, 2, 1e-3
NOISE = {"P": 2.0, "Q": 3.0}  # N is a round without


def private(noise_multiplier: float | None = 2.0, **arguments):
    return DPSGD(0.5, DELTA, noise_multiplier, **arguments)


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


def run_of(path, phases, **kwargs):
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS}
    return federation(path, phases, trainer=trainer, **kwargs)


def fit(path, phases, is_resumed, rounds=None, sizes=SIZES):
    """Runs some phases, or goes on with them, with whatever changes; if ``rounds`` is given, only so many rounds."""
    run = run_of(path, phases, callbacks=[] if rounds is None else [Kill("on_round_end", rounds)])
    resuming = {"ckpt_path": "last", "allow_changes": ["phases"]} if is_resumed else {}
    try:
        run.fit(mixture(), blobs(sizes), **resuming)
    except KeyboardInterrupt:
        assert rounds is not None
    return run


def by_hand(*letters, before=0):
    """Epsilon of the client that pays most for rounds with the noise of some letters, after some of ``first``."""
    steps = [(5.0, before)] + [(NOISE.get(letter, 0.0), 1) for letter in letters]
    kinds = [(n, max(round(n / BATCH), 1) * EPOCHS) for n in SIZES]
    return max(epsilon_of([(z, BATCH / n, rounds * number) for z, rounds in steps], DELTA) for n, number in kinds)


def epsilons(run, name):
    rows = [row for row in csv_rows(run.run_dir / "rounds.csv") if row["method"] == name]
    return [float(row["sample_epsilon"] or "nan") for row in rows]


@pytest.mark.few("PNP-Local")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", ["PNP", "PQ", "NP", "NQPN"])
def test_epsilon_covers_every_step_of_a_history_and_of_the_phase_that_starts_from_it(history, kind, tmp_path):
    rounds, before = len(history), len(KINDS[kind]()) - 1
    for i, letter in enumerate(history):
        so_far, is_last = history[: i + 1], i == rounds - 1
        privacy = private(NOISE[letter]) if letter in NOISE else None
        phases = KINDS[kind](rounds=rounds, evaluate=False, sample_privacy=privacy)
        state = fit(tmp_path, phases, i > 0, None if is_last else 1 + before * (not i)).run.states["it"]
        expected = math.nan if {*so_far} == {"N"} else by_hand(*so_far, before=before)
        assert state.round == i + 1 and state.sample_epsilon == pytest.approx(expected, rel=1e-3, nan_ok=True)
    after = Phase("after", Local("local_expert.*"), gate=LocalOnly(), evaluate=False, start="it")
    after.sample_privacy = private(3.0)
    run = fit(tmp_path, [*KINDS[kind](rounds=rounds, evaluate=False, sample_privacy=private()), after], True)
    expected = by_hand(*history, "Q", before=before)
    assert run.run.states["after"].sample_epsilon == pytest.approx(expected, rel=1e-3)


@pytest.mark.few("Local")
@pytest.mark.parametrize("kind", ["FedAvg", "Local"])
def test_more_rounds_cost_more(kind, tmp_path):
    fit(tmp_path, KINDS[kind](rounds=3, sample_privacy=private()), False, 2)
    run = fit(tmp_path, KINDS[kind](rounds=5, sample_privacy=private()), True)
    assert epsilons(run, "it") == pytest.approx([by_hand(*"P" * n) for n in range(1, 6)], rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_result_that_clients_trained_alone_without_noise_has_none(is_known, tmp_path, monkeypatch):
    """Also if the checkpoint is of a version that did not count such rounds."""
    if not is_known:
        monkeypatch.setattr("fedmoe_pl.rounds.fit.count_steps", lambda *_: None)
    run = fit(tmp_path / "before", KINDS["Local"](), False)
    path = str(run.run_dir / "checkpoints/last.ckpt")
    later = fit(tmp_path, KINDS["Local"](sample_privacy=private(), ckpt_path=path), False)
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
    own = max(epsilon_of([(2.0, BATCH / n, 3 * EPOCHS * max(round(n / BATCH), 1))], DELTA) for n in (40, 6))
    expected = max(by_hand("P"), own) if history == "PP" else math.inf
    assert later.run.states["it"].sample_epsilon == pytest.approx(expected, rel=1e-3)


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
    fit(path, target(3.0, 3), False, 2)
    return path / "federation"


@pytest.mark.few("a higher target")
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_a_resumed_run_exceeds_a_target(change, two_of_three_rounds, tmp_path):
    phases, refusal = CHANGES[change]
    shutil.copytree(two_of_three_rounds, tmp_path / "federation")
    if refusal is not None:
        with pytest.raises(MisconfigurationException, match=f"^Phase 'it': sample_privacy.target_epsilon.*{refusal}"):
            fit(tmp_path, phases, True)
        return
    state = fit(tmp_path, phases, True).run.states["it"]
    steps = [[(noise, rate, number) for rate, noise, number in kinds] for kinds in state.counted_steps["it"].values()]
    assert len(steps) == len(SIZES) and state.round == phases[0].rounds
    assert max(epsilon_of(kinds, DELTA) for kinds in steps) <= phases[0].sample_privacy.target_epsilon


def test_a_target_counts_what_was_spent_and_not_what_the_configuration_says_of_it(tmp_path):
    fit(tmp_path, target(9.0, 1, before=1.0), False, 1)
    with pytest.raises(
        MisconfigurationException, match=r"target_epsilon is 9\.0, but must be higher.*client \d has spent"
    ):
        fit(tmp_path, target(9.0, 1, before=3.0), True)


def test_after_rounds_without_noise_no_target_can_be_kept(tmp_path):
    phases = target(3.0, 3)
    phases[0].sample_privacy = None
    fit(tmp_path, phases, False, 2)
    with pytest.raises(MisconfigurationException, match=r"left out, with a noise_multiplier .* steps without noise"):
        fit(tmp_path, target(3.0, 3), True)


@pytest.mark.parametrize("setting", [(0.2, 1e-7, 0.01, 100), (0.2, 1e-5, 0.1, 100), (2.0, 1e-5, 0.1, 100)])
def test_the_noise_for_a_target_keeps_it_by_the_accountant_that_is_reported(setting):
    """The search looks at fewer orders, of which the accountant lacked one."""
    target, delta, probability, number = setting
    noise = noise_for(target, delta, probability, number, [])
    assert 0.99 * target < epsilon([(probability, noise, number)], delta) <= target
