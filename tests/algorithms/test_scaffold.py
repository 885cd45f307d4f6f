"""SCAFFOLD against a simulation in plain numbers."""

from functools import partial

import pytest
import torch
from helpers import PureOneWeight, blobs, mixture, phase, run, two_quadratics
from helpers.quadratics import LOSSES, RATE, STEPS, weight_of
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Train
from fedmoe_pl.algorithms import Scaffold
from fedmoe_pl.phases.participation import sample_cohort


def simulate_scaffold(rounds, cohorts, server_lr, decay=1.0):
    """Algorithm 1 in plain numbers: x, c and the c_i."""
    x, c, own = 0.0, 0.0, [0.0, 0.0]
    for round in range(rounds):
        rate, moves, changes = RATE * decay**round, [], []
        for client in cohorts[round]:
            a, b = LOSSES[client]
            y = x
            for _ in range(STEPS):
                y -= rate * (a * (y - b) - own[client] + c)
            new = own[client] - c + (x - y) / (STEPS * rate)
            moves.append(y - x)
            changes.append(new - own[client])
            own[client] = new
        x += server_lr * sum(moves) / len(moves)
        c += sum(changes) / len(LOSSES)
    return x, c, own


@pytest.mark.few("None-1.0", "1-0.5")
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("clients_per_round", [None, 1])
def test_scaffold_takes_the_steps_of_its_algorithm(clients_per_round, server_lr, tmp_path):
    scaffold = phase("Scaffold", Scaffold(server_lr=server_lr), rounds=6, clients_per_round=clients_per_round)
    federation = run([scaffold], PureOneWeight(), two_quadratics(), tmp_path, STEPS, seed=3)
    cohorts = [sample_cohort(range(2), clients_per_round or 2, 3, round) for round in range(6)]
    assert clients_per_round is None or {client for cohort in cohorts for client in cohort} == {0, 1}
    x, c, own = simulate_scaffold(6, cohorts, server_lr)
    state = federation.run.states["Scaffold"]
    assert weight_of(federation, "Scaffold") == pytest.approx(x, rel=1e-12)
    assert state.server["control/weight"].item() == pytest.approx(c, rel=1e-11)
    assert [state.clients[i]["control/weight"].item() for i in (0, 1)] == pytest.approx(own, rel=1e-11)


def test_scaffold_follows_a_learning_rate_that_falls_from_round_to_round(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.6)
    scaffold = phase("Scaffold", Scaffold(), rounds=4, train=Train(round_lr_scheduler=schedule))
    federation = run([scaffold], PureOneWeight(), two_quadratics(), tmp_path, STEPS)
    x, c, own = simulate_scaffold(4, [[0, 1]] * 4, 1.0, decay=0.6)
    state = federation.run.states["Scaffold"]
    assert weight_of(federation, "Scaffold") == pytest.approx(x, rel=1e-12)
    assert state.server["control/weight"].item() == pytest.approx(c, rel=1e-10)
    assert [state.clients[i]["control/weight"].item() for i in (0, 1)] == pytest.approx(own, rel=1e-10)


def test_scaffold_goes_on_after_a_round_with_a_learning_rate_of_0(tmp_path):
    """Such a round tells nothing of the gradients, so that all control variates stay as they are."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: float(round != 1))
    states = [
        run(
            [phase("it", Scaffold(), rounds=rounds, train=Train(round_lr_scheduler=factory))],
            PureOneWeight(),
            two_quadratics(),
            tmp_path / str(rounds),
            STEPS,
        ).run.states["it"]
        for rounds, factory in ((3, schedule), (2, None))
    ]
    for name, tensor in states[1].server.items():
        assert torch.equal(states[0].server[name], tensor)
    for client in (0, 1):
        assert torch.equal(states[0].clients[client]["control/weight"], states[1].clients[client]["control/weight"])


def test_scaffold_with_two_epochs_of_several_batches_counts_every_step(tmp_path):
    """All clients alike: the corrections cancel, and the server's c is the mean gradient along the way."""
    data = blobs(sizes=(8, 8), batch_size=4)
    model = mixture(optimizer=partial(torch.optim.SGD, lr=RATE))
    federation = run([phase("Scaffold", Scaffold())], model, data, tmp_path, 2)
    state = federation.run.states["Scaffold"]
    name = "global_expert.classifier.1.weight"
    moved = state.server[name] - model.state_dict()[name]
    torch.testing.assert_close(state.server["control/" + name], -moved / (4 * RATE), rtol=1e-10, atol=1e-14)


def test_accumulated_gradients_are_refused(tmp_path):
    """A last step of fewer batches is smaller, and counts as one all the same."""
    scaffold = phase("Scaffold", Scaffold(), train=Train(trainer={"accumulate_grad_batches": 2}))
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches is 2"):
        run([scaffold], PureOneWeight(), two_quadratics(), tmp_path)


def test_scaffold_takes_its_parameters_from_a_checkpoint_of_lightning_and_controls_of_zero(tmp_path):
    state = mixture().state_dict()
    torch.save({"state_dict": {name: tensor + 1 for name, tensor in state.items()}}, tmp_path / "given.ckpt")
    given = phase("Scaffold", Scaffold(), ckpt_path=str(tmp_path / "given.ckpt"))
    module = mixture(optimizer=partial(torch.optim.SGD, lr=0.1))
    server = run([given], module, blobs(), tmp_path).run.states["Scaffold"].server
    for name, tensor in state.items():
        assert torch.equal(server[name], tensor + 1) and not server[f"control/{name}"].any()
