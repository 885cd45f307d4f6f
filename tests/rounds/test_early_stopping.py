"""Phases that end when their validation stops getting better, against bare loops."""

import math
from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, mixture, phase, run
from helpers.early_stopping import stopped_by_hand
from helpers.runs import Kill

from fedmoe_pl import Evaluate, Select
from fedmoe_pl.algorithms import FedAvg, FineTuning, OptInFedAvg, SpecialistMixture
from fedmoe_pl.callbacks import BestEpoch, FederationCallback
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ConstantGate, LinearGate
from fedmoe_pl.phases.phase import Phase, Train

SIZES = (9, 4, 12, 7, 5, 8, 6, 10, 11, 4)


def losses_by_hand(datamodule, expert, clients):
    """Mean over clients of the mean negative log-likelihood of their validation samples."""
    means = []
    for client in clients:
        samples = datamodule.validation_samples[client]
        terms = [-torch.log(expert(datamodule.x[i][None]).softmax(1)[0, datamodule.y[i]]) for i in samples.tolist()]
        means.append(sum(terms) / len(terms))
    return (sum(means) / len(means)).item()


def stopping_phase(**kwargs) -> Phase:
    """Big steps, with which the validation loss goes up and down."""
    defaults = {"rounds": 20, "select": Select("validation_loss", patience=2), "evaluate": Evaluate(every_n_rounds=2)}
    defaults |= {"gate": ConstantGate(1), "clients_per_round": 3, "train": Train(optimizer=BIG_STEPS)}
    return Phase("FedAvg", OptInFedAvg("global_expert.*", 0.4), **{**defaults, **kwargs})


BIG_STEPS = partial(torch.optim.SGD, lr=0.6, momentum=0.9)


class Servers(FederationCallback):
    """Copies the server's state behind every round."""

    def __init__(self):
        self.after = {}

    def on_round_end(self, run, phase, round):
        server = run.states[phase.name].server
        self.after[round + 1] = {name: tensor.clone() for name, tensor in server.items()}


def test_patience_ends_a_phase_whose_result_is_the_best_validated_round_of_the_participants(tmp_path):
    datamodule, min_delta = blobs(SIZES, validation_fraction=0.4), 0.02
    federation = run(
        [stopping_phase(select=Select("validation_loss", patience=2, min_delta=min_delta))],
        mixture(),
        datamodule,
        tmp_path,
        seed=5,
    )
    clients = OptInFedAvg(opt_out_clients=0.4).opt_out.participants(range(10), 5)
    unstopped = stopping_phase(select=None, evaluate=False)
    servers = Servers()
    run([unstopped], mixture(), datamodule, tmp_path / "unstopped", seed=5, callbacks=[servers])
    losses, everybody = [], []
    for round in range(2, 21, 2):
        module = mixture()
        module.load_state_dict(servers.after[round], strict=False)
        losses.append(losses_by_hand(datamodule, module.global_expert, clients))
        everybody.append(losses_by_hand(datamodule, module.global_expert, range(10)))
    _, number = stopped_by_hand([(loss, None) for loss in losses], patience=2, min_delta=min_delta)
    assert 2 < number < len(losses), "the test would show nothing if the phase ran to its end"
    assert [row["round"] for row in federation.run.rows] == list(range(2, 2 * number + 1, 2))
    best = losses.index(min(losses[:number]))
    assert 0 < best < number - 1
    assert losses != pytest.approx(everybody, abs=1e-3), "those who opt out must not count"
    assert federation.results["FedAvg"].round == 2 * (best + 1)
    assert federation.results["FedAvg"].selection == "best round by validation_loss"
    assert_same_bits(federation.run.states["FedAvg"].server, servers.after[2 * (best + 1)])
    measured = federation.results["FedAvg"].spread("validation_loss", set(clients)).mean
    assert measured == pytest.approx(losses[best], rel=1e-12)


def test_a_round_is_selected_by_the_mean_of_the_participants(tmp_path):
    algorithm = OptInFedAvg("global_expert.*", 0.4)
    it = Phase("it", algorithm, gate=ConstantGate(1), select=Select("reweighted_test"))
    federation = run([it], mixture(), blobs(SIZES), tmp_path, 1, seed=5)
    everybody = [client.reweighted_test for client in federation.results["it"].clients]
    means = [sum(everybody) / 10, sum(everybody[client] for client in algorithm.opt_out.participants(range(10), 5)) / 6]
    assert federation.run.states["it"].best_metric == pytest.approx(means[1], rel=1e-12) != pytest.approx(means[0])


def test_a_round_before_the_first_that_may_be_selected_is_not(tmp_path):
    it = Phase("it", FedAvg("global_expert.*"), 3, gate=ConstantGate(1), train=Train(optimizer=BIG_STEPS))
    it.select = Select("validation_loss", from_round=3)
    result = run([it], mixture(), blobs((9, 4), validation_fraction=0.4), tmp_path, seed=5)
    losses = [row["validation_loss_mean"] for row in result.run.rows]
    assert len(losses) == 3 and min(losses) < losses[2], "another round would be selected"
    assert result.results["it"].round == result.run.states["it"].best_round == 3
    assert result.results["it"].selection == "best round by validation_loss"


def test_the_best_round_is_a_copy_and_personalization_starts_from_it(tmp_path):
    datamodule = blobs(SIZES, validation_fraction=0.4)
    phases = [stopping_phase(), phase("Fine-tuned", FineTuning(), train=Train(max_epochs=0))]
    federation = run(phases, mixture(), datamodule, tmp_path, seed=2)
    assert federation.results["FedAvg"].round < federation.run.rows[-1]["round"]
    server = federation.run.states["FedAvg"].server
    for client in range(10):
        module = federation.client_module("Fine-tuned", client)
        for name, tensor in server.items():
            for expert in ("global_expert.", "local_expert."):
                assert torch.equal(module.state_dict()[name.replace("global_expert.", expert)], tensor)


def early_phases() -> list[Phase]:
    train = Train(max_epochs=4, callbacks=[BestEpoch(patience=1)], trainer={"limit_val_batches": 1.0})
    return [
        stopping_phase(),
        phase("Fine-tuned", FineTuning(), train=Train(max_epochs=1)),
        Phase("Mixture", SpecialistMixture(), train=train),
    ]


def run_early_phases(path, **kwargs) -> Federation:
    datamodule = blobs(SIZES, validation_fraction=0.4)
    return run(early_phases(), mixture(LinearGate(5)), datamodule, path, enable_checkpointing=True, seed=2, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that never stopped."""
    torch.manual_seed(0)
    return run_early_phases(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_stopped_within_a_phase_that_ends_early_and_resumed_gives_the_same_bits(whole, tmp_path):
    assert 5 < whole.run.rows[-2]["round"] < 20, "the federated phase ends early, after the stops of this test"
    with pytest.raises(KeyboardInterrupt):
        run_early_phases(tmp_path, callbacks=[Kill("on_round_end", 5)])
    settings = {"default_root_dir": str(tmp_path), "enable_progress_bar": False, "logger": False}
    resumed = Federation(early_phases(), {"max_epochs": 2}, seed=2, **settings)
    datamodule = blobs(SIZES, validation_fraction=0.4)
    resumed.fit(mixture(LinearGate(5)), datamodule, ckpt_path="last", allow_changes="trainer.callbacks")
    for name, state in whole.run.states.items():
        again = resumed.run.states[name]
        assert_same_bits(again.server, state.server)
        assert (again.round, again.best_round, again.stopped) == (state.round, state.best_round, state.stopped)
        assert again.clients.keys() == state.clients.keys()
        for client in state.clients:
            assert_same_bits(again.clients[client], state.clients[client])
    assert (resumed.run_dir / "rounds.csv").read_bytes() == (whole.run_dir / "rounds.csv").read_bytes()


def test_a_round_without_a_number_is_never_the_best():
    state = PhaseState({}, {})
    for state.round, metric in enumerate((math.nan, 0.5, math.nan, 0.7, 0.6), start=1):
        state.remember_best(metric)
    assert (state.best_round, state.best_metric, state.improved_round) == (4, 0.7, 4)
