"""Clients that fail are left out, the others go on, and nothing is silent; with states of each client, too."""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, sparse_mixture
from helpers.architectures import pair
from helpers.backends import exchanged
from helpers.reports import csv_rows
from helpers.runs import Kill, assert_same, data, federation, model
from helpers.workers import SIZES, TwoInThisProcess

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.aggregation import MultiKrum
from fedmoe_pl.algorithms import FedAvg, FedKD, FedMoEDA, Scaffold
from fedmoe_pl.backends import NotFiniteError, StackedBackend, TrainerBackend, check_finite
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, LocalOnly, SmallMLP
from fedmoe_pl.phases.client_failures import ClientError, ClientFailures
from fedmoe_pl.phases.participation import sample_cohort
from fedmoe_pl.trees import subtree

BACKENDS = {"trainer": TrainerBackend, "stacked": StackedBackend, "workers": TwoInThisProcess}
REASONS = {"raise": "ZeroDivisionError: in a client", "nan": "its global_expert.extractor.0.weight is not finite"}
WEIGHT = "global_expert.extractor.0.weight"


class Unlucky(FedAvg):
    """Averages the global experts; a client keeps its local one. Some clients fail, in some rounds."""

    def __init__(self, how, failing):
        super().__init__("global_expert.*")
        self.how = how
        self.failing = failing

    def client_init(self, client, sent):
        constants = super().client_init(client, sent)
        if client.id in self.failing.get(client.round, ()):
            if self.how == "raise":
                raise ZeroDivisionError("in a client")
            if self.how == "hang":
                time.sleep(100)
            with torch.no_grad():
                client.module.get_parameter(WEIGHT).fill_(torch.nan)
        return constants


def without_dropout() -> PersonalizedMoE:
    module = model()
    for expert in (module.global_expert, module.local_expert):
        expert.classifier[0].p = 0.0
    return module


def unlucky(path, how, failing, rounds=3, clients_per_round=None, **kwargs) -> Federation:
    phase = Phase("FedAvg", Unlucky(how, failing), rounds, clients_per_round, gate=ConstantGate(0.5))
    return federation(path, [phase], **{"backend": TrainerBackend(), **kwargs})


def fit(run: Federation, warned: list[str], **kwargs) -> Federation:
    """The run after its rounds, in which it warns of these clients and of nothing else."""
    with pytest.warns(UserWarning) as found:
        run.fit(without_dropout(), data(sizes=SIZES), **kwargs)
    assert [str(warning.message) for warning in found] == warned
    return run


def failed(run: Federation) -> list[str]:
    return [row["failed"] for row in csv_rows(run.run_dir / "rounds.csv")]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The state after one round without failures."""
    run = unlucky(tmp_path_factory.mktemp("healthy"), "raise", {}, 1)
    run.fit(without_dropout(), data(sizes=SIZES))
    return run.run.states["FedAvg"]


@pytest.mark.few(2)
@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_that_fails_is_left_out_and_keeps_what_it_kept(how, backend, healthy, tmp_path, capsys):
    run = unlucky(tmp_path, how, {1: [2], 2: [2, 3]}, backend=BACKENDS[backend]())
    one, two = "Phase 'FedAvg', round 2: client 2 is", "Phase 'FedAvg', round 3: clients 2, 3 are"
    state = fit(run, [f"{who} left out: {REASONS[how]}" for who in (one, two)]).run.states["FedAvg"]
    assert failed(run) == ["0", "1", "3"]
    assert "failed or dropped out, counted over all rounds: FedAvg 3." in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in state.server.values())
    torch.testing.assert_close(state.clients[2], healthy.clients[2], msg="as after the first round")
    assert all(not torch.equal(state.clients[1][name], healthy.clients[1][name]) for name in healthy.clients[1])


def test_a_run_that_goes_on_after_failures_has_the_same_bits(tmp_path):
    failing, settings = {0: [1], 1: [2], 3: [0, 3]}, {"failures": ClientFailures(dropout=0.2)}
    whole = unlucky(tmp_path / "whole", "raise", failing, 4, **settings)
    stopped = unlucky(tmp_path / "both", "raise", failing, 4, callbacks=[Kill("on_round_start", 4)], **settings)
    resumed = unlucky(tmp_path / "both", "raise", failing, 4, **settings)
    with pytest.warns(UserWarning, match="left out"):
        whole.fit(model(), data(sizes=SIZES))
        with pytest.raises(KeyboardInterrupt):
            stopped.fit(model(), data(sizes=SIZES))
        resumed.fit(model(), data(sizes=SIZES), ckpt_path="last")
    for name in ("rounds.csv", "clients.csv"):
        assert (resumed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()
    assert_same(resumed.run.states["FedAvg"].server, whole.run.states["FedAvg"].server)
    assert int(failed(whole)[-1]) >= 4


def test_a_round_with_too_few_answers_is_tried_again_with_other_clients(tmp_path):
    seed = next(
        seed
        for seed in range(100)
        if 2 in sample_cohort(range(4), 2, seed, 0) and 2 not in sample_cohort(range(4), 2, seed, 0, attempt=1)
    )
    run = unlucky(tmp_path, "raise", {0: [2]}, 1, 2, failures=ClientFailures(min_clients=2), seed=seed)
    fit(
        run,
        [
            f"Phase 'FedAvg', round 1: client 2 is left out: {REASONS['raise']}",
            "Phase 'FedAvg', round 1: 1 of 2 clients answered, but min_clients is 2; the round is tried again.",
        ],
    )
    assert failed(run) == ["1"]
    assert sorted(run.run.states["FedAvg"].clients) == sample_cohort(range(4), 2, seed, 0, attempt=1)


def krum(path, **kwargs) -> Federation:
    """Seven rounds with as many clients as Krum needs."""
    phase = Phase("FedAvg", FedAvg("global_expert.*"), 7, gate=ConstantGate(0.5), aggregation=MultiKrum(1))
    return federation(path, [phase], backend=TrainerBackend(), evaluate_every_n_rounds=0, **kwargs)


def test_a_round_with_too_few_answers_for_its_aggregation_is_tried_again(tmp_path):
    five, settings = data(sizes=(6,) * 5), {"failures": ClientFailures(dropout=0.1), "seed": 3}
    whole, resumed = krum(tmp_path / "whole", **settings), krum(tmp_path / "both", **settings)
    with pytest.warns(UserWarning) as found:
        whole.fit(model(), five)
    assert [str(warning.message) for warning in found] == [
        "Phase 'FedAvg', round 6: 4 of 5 clients answered, but MultiKrum needs 5; the round is tried again.",
        "Phase 'FedAvg', round 7: 3 of 5 clients answered, but MultiKrum needs 5; the round is tried again.",
    ]
    with pytest.warns(UserWarning):
        with pytest.raises(KeyboardInterrupt):
            krum(tmp_path / "both", callbacks=[Kill("on_round_end", 6)], **settings).fit(model(), five)
        resumed.fit(model(), five, ckpt_path="last")
    assert_same(resumed.run.states["FedAvg"].server, whole.run.states["FedAvg"].server)
    assert failed(whole) == failed(resumed) == ["3"]


@pytest.mark.parametrize("how", REASONS)
def test_a_round_that_never_has_enough_answers_ends_the_run(how, tmp_path):
    run = unlucky(tmp_path, how, {0: range(4)}, backend=TrainerBackend() if how == "raise" else StackedBackend())
    tries = " and all failed alike" if how == "raise" else ", also after 3 more tries"  # an error of the code
    message = f"Phase 'FedAvg', round 1: 0 of 4 clients answered, but min_clients is 1{tries}; client 0: {REASONS[how]}"
    with warnings.catch_warnings(record=True) as warned, pytest.raises(ClientError) as error:
        warnings.simplefilter("always")
        run.fit(without_dropout(), data(sizes=SIZES))
    assert f"round 1: clients 0, 1, 2, 3 are left out: {REASONS[how]}" in str(warned[0].message)
    assert str(error.value) == message
    assert sum("tried again" in str(each.message) for each in warned) == (0 if how == "raise" else 3)
    assert isinstance(error.value.__cause__, ZeroDivisionError if how == "raise" else type(None))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.few(1)
def test_with_raise_the_run_stops_and_names_phase_round_and_client(backend, tmp_path):
    run = unlucky(tmp_path, "raise", {1: [2]}, backend=BACKENDS[backend](), failures=ClientFailures("raise"))
    message = r"^Phase 'FedAvg', round 2, client 2: ZeroDivisionError: in a client$"
    with pytest.raises(ClientError, match=message) as error:
        run.fit(without_dropout(), data(sizes=SIZES))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.few("trainer")
@pytest.mark.parametrize("backend", ["trainer", "stacked"])
def test_a_client_that_takes_too_long_is_left_out(backend, tmp_path):
    run = unlucky(tmp_path, "hang", {0: [2]}, 1, backend=BACKENDS[backend](), failures=ClientFailures(timeout=2))
    fit(run, ["Phase 'FedAvg', round 1: client 2 is left out: it took longer than failures.timeout, 2 s"])
    assert sorted(run.run.states["FedAvg"].clients) == [0, 1, 3]


def test_values_of_all_types_must_be_finite():
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        tensor = torch.ones(3, dtype=dtype)
        check_finite([{"w": tensor}], 1, {})
        tensor[1] = torch.nan
        with pytest.raises(NotFiniteError, match="its w is not finite"):
            check_finite([{"w": tensor}], 1, {})


def test_a_server_that_is_not_finite_ends_the_run(tmp_path):
    class Overflows(FedAvg):
        def server_update(self, server, combined):
            return {name: tensor * torch.inf for name, tensor in super().server_update(server, combined).items()}

    run = federation(tmp_path, [Phase("FedAvg", Overflows())], backend=TrainerBackend())
    message = (
        r"^Phase 'FedAvg', round 1: the server cannot go on: its .* is not finite, although all that clients sent is\.$"
    )
    with pytest.raises(ClientError, match=message):
        run.fit(model(), data(sizes=SIZES))


def test_clients_drop_out_with_the_given_probability_and_one_stays():
    failures = ClientFailures(dropout=0.2)
    dropped = [failures.dropped(range(100), 3, round, 0) for round in range(100)]
    assert 1900 < sum(map(len, dropped)) < 2100
    assert dropped == [failures.dropped(range(100), 3, round, 0) for round in range(100)]
    assert failures.dropped(range(100), 3, 0, attempt=1) != dropped[0] != failures.dropped(range(100), 4, 0, 0)
    assert all(len(ClientFailures(dropout=0.99).dropped([5, 6], 0, round, 0)) <= 1 for round in range(50))
    assert ClientFailures().dropped(range(100), 3, 0, 0) == []


def test_where_nobody_must_stay_a_client_drops_out_whoever_else_is_drawn():
    failures = ClientFailures(dropout=0.5)
    of_all, of_two, of_none = (
        [failures.dropped(cohort, 3, round, 0, one_stays=False) for round in range(50)]
        for cohort in (range(10), [3, 7], [])
    )
    assert of_two == [[client for client in dropped if client in (3, 7)] for dropped in of_all]
    assert [3, 7] in of_two and not any(of_none)


@pytest.mark.parametrize("command", ["fit", "personalize"])
def test_a_time_limit_that_nobody_could_keep_is_refused(command, tmp_path):
    """Only the main thread can be interrupted."""
    timed = federation(tmp_path, [Phase("p", FedAvg())], failures=ClientFailures(timeout=1.0))
    with ThreadPoolExecutor(1) as executor, pytest.raises(InvalidArgumentError, match="outside of the main thread"):
        executor.submit(getattr(timed, command), model(), data()).result()


def failing(algorithm, rounds):
    """The algorithm, whose clients fail at the end of their training in some rounds."""

    class Failing(type(algorithm)):
        def client_final(self, client, constants):
            if client.id in rounds.get(client.round, ()):
                raise ValueError("no answer")
            return super().client_final(client, constants)

    algorithm.__class__ = Failing
    return algorithm


def fitted(path, algorithm, rounds, module, number=4, **kwargs):
    fed = federation(path, [Phase("it", failing(algorithm, rounds), number, **kwargs)], backend=TrainerBackend())
    with pytest.warns(UserWarning, match="left out: ValueError: no answer"):
        fed.fit(module, blobs(dtype=torch.float32))
    return fed.run.states["it"]


def test_fedkd_sends_the_student_to_a_client_that_has_missed_an_update(tmp_path):
    module = pair(torch.float32, (6,))
    state = fitted(tmp_path, FedKD(1, 1), {0: [2], 1: [1], 2: [1]}, module, gate=LocalOnly())
    assert state.failed == 3
    for client in (1, 2):  # the student before the last round's training
        assert_same_bits(subtree(state.clients[client], "student/"), subtree(state.clients[0], "student/"))
    assert not any(name == "senders/1" for name in state.server)


def test_fedmoe_da_averages_the_experts_of_the_clients_that_are_left(tmp_path):
    algorithm = FedMoEDA("all", interval=1)
    rows = torch.arange(3)
    matrix = {
        "neighbours": torch.stack([rows.roll(-shift) for shift in range(3)]),
        "weights": torch.tensor([[0.5, 0.25, 0.25]] * 3),
        "owners": torch.stack([rows, torch.zeros_like(rows)], dim=1),
    }
    server = {f"aggregation/{name}": tensor for name, tensor in matrix.items()}
    kept = {client: {"experts.0.w": torch.tensor([float(client)])} for client in (0, 2)}
    after = exchanged(algorithm, server, kept, 1)
    means = {client: own["experts.0.w"].item() for client, (own, _) in after.items()}
    assert means == {0: pytest.approx(2 / 3), 2: pytest.approx(4 / 3)} and len(after[0][1]) == 1
    state = fitted(
        tmp_path, FedMoEDA(2, interval=2), {0: [0], 1: [1], 2: [1]}, sparse_mixture([3, 2], dtype=torch.float32)
    )
    assert state.failed == 3 and state.clients.keys() == {0, 1, 2}
    assert all(tensor.isfinite().all() for tree in (state.server, *state.clients.values()) for tensor in tree.values())


def test_scaffold_keeps_the_mean_of_the_control_variates(tmp_path):
    expert = SmallMLP(in_features=5, num_classes=3)
    module = PersonalizedMoE(expert, optimizer=partial(torch.optim.SGD, lr=0.1))
    state = fitted(tmp_path, Scaffold("global_expert.*"), {0: [2], 1: [1], 2: [0, 1]}, module)
    for name, control in subtree(state.server, "control/").items():
        own = [state.clients[client].get(f"control/{name}", torch.zeros_like(control)) for client in range(3)]
        torch.testing.assert_close(control, sum(own) / 3)
