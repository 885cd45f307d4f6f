"""FedAvg, FedProx, Local, SCAFFOLD and server optimizers against closed forms and simulations in plain numbers."""

import math
from functools import partial

import pytest
import torch
from helpers import OneWeight, PureOneWeight, assert_same_bits, blobs, mixture, phase, quadratic, run, two_quadratics
from helpers.quadratics import LOSSES, MINIMA, RATE, REMAINS, STEPS, fixed_point, weight_of
from torch import nn

from fedmoe_pl import Train
from fedmoe_pl.algorithms import FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Local, Scaffold
from fedmoe_pl.phases.participation import sample_cohort


@pytest.mark.few("samples-sizes1-PureOneWeight")
@pytest.mark.parametrize("module", [PureOneWeight, OneWeight])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1)])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_on_two_quadratics_is_at_the_closed_form_after_any_number_of_rounds(module, sizes, weighting, tmp_path):
    samples = torch.tensor(sizes).double()
    shares = samples / samples.sum() if weighting == "samples" else torch.tensor([0.5, 0.5]).double()
    limit, remains = fixed_point(shares)
    for rounds in (1, 5):
        algorithm = FedAvg(weighting=weighting)
        federation = run([phase("FedAvg", algorithm, rounds=rounds)], module(), two_quadratics(sizes), tmp_path, STEPS)
        weight = federation.client_module("FedAvg", 0).weight.detach()
        torch.testing.assert_close(weight, limit + remains**rounds * (0 - limit), rtol=1e-13, atol=0)
        assert torch.equal(weight, federation.client_module("FedAvg", 1).weight)


@pytest.mark.parametrize("mu", [0.0, 0.5, 20.0])
def test_fedprox_on_two_quadratics_is_at_the_closed_form_after_a_round(mu, tmp_path):
    start = 2.0
    federation = run([phase("FedProx", FedProx(mu))], PureOneWeight(start=start), two_quadratics(), tmp_path, STEPS)
    ends = []
    for a, b in LOSSES:  # gradient a (w - b) + mu (w - start): a quadratic of curvature a + mu around its own minimum
        minimum = (a * b + mu * start) / (a + mu)
        ends.append(minimum + (1 - RATE * (a + mu)) ** STEPS * (start - minimum))
    assert weight_of(federation, "FedProx") == pytest.approx(sum(ends) / 2, rel=1e-13)


def test_local_clients_each_reach_their_own_closed_form_from_the_same_start(tmp_path):
    federation = run([phase("Local", Local(), rounds=3)], PureOneWeight(start=2.0), two_quadratics(), tmp_path, STEPS)
    for client in (0, 1):
        expected = MINIMA[client] + REMAINS[client] ** 3 * (2.0 - MINIMA[client])
        weight = federation.client_module("Local", client).weight.detach()
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)


def test_a_client_that_trains_back_to_the_initial_model_keeps_no_older_one(tmp_path):
    # With rate 2 a step from w mirrors it at b: 2 -> 4 -> 2 where b = 3 and a = 1.
    datamodule = two_quadratics()
    datamodule.setup()
    datamodule.x = torch.tensor([[1.0, 3.0]] * 4).double()
    for rounds, expected in ((1, 4.0), (2, 2.0), (3, 4.0)):
        model = PureOneWeight(lr=2.0, start=2.0)
        federation = run([phase("Local", Local(), rounds=rounds)], model, datamodule, tmp_path, 1)
        assert federation.client_module("Local", 0).weight.item() == expected


def test_a_method_that_a_users_module_holds_as_an_attribute_is_that_of_the_clients_own_copy(tmp_path):
    class WithMethod(OneWeight):
        def __init__(self):
            super().__init__()
            self.criterion = self.own_loss

        def own_loss(self, x):
            return quadratic(self.weight, x)

        def training_step(self, batch, batch_idx):
            return self.criterion(batch[0])

    federation = run([phase("Local", Local())], WithMethod(), two_quadratics(), tmp_path, STEPS)
    weight = federation.client_module("Local", 1).weight.detach()
    torch.testing.assert_close(weight, MINIMA[1] - REMAINS[1] * MINIMA[1], rtol=1e-13, atol=0)


# SCAFFOLD


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


@pytest.mark.few("None-1.0-1.0", "1-0.5-1.0", "None-1.0-0.6")
@pytest.mark.parametrize("decay", [1.0, 0.6])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("clients_per_round", [None, 1])
def test_scaffold_takes_the_steps_of_its_algorithm_also_with_a_rate_that_falls(
    clients_per_round, server_lr, decay, tmp_path
):
    arguments = {"rounds": 6, "clients_per_round": clients_per_round}
    falling = Train(round_lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=decay))
    scaffold = phase("it", Scaffold(server_lr=server_lr), train=falling if decay < 1 else Train(), **arguments)
    federation = run([scaffold], PureOneWeight(), two_quadratics(), tmp_path, STEPS, seed=3)
    cohorts = [sample_cohort(range(2), clients_per_round or 2, 3, round) for round in range(6)]
    assert clients_per_round is None or {client for cohort in cohorts for client in cohort} == {0, 1}
    x, c, own = simulate_scaffold(6, cohorts, server_lr, decay)
    state = federation.run.states["it"]
    assert weight_of(federation, "it") == pytest.approx(x, rel=1e-12)
    assert state.server["control/weight"].item() == pytest.approx(c, rel=1e-10)
    assert [state.clients[i]["control/weight"].item() for i in (0, 1)] == pytest.approx(own, rel=1e-10)


def test_scaffold_of_the_only_client_that_takes_part_is_fedavg(tmp_path):
    """The mean of the participants' control variates is the client's own, so that the corrections cancel."""
    for rounds in (1, 3):
        alone = phase("it", Scaffold(), rounds=rounds, clients=[1])
        federation = run([alone], PureOneWeight(), two_quadratics(), tmp_path, STEPS)
        expected = (1 - REMAINS[1] ** rounds) * MINIMA[1]
        assert weight_of(federation, "it") == pytest.approx(expected.item(), rel=1e-13)


def test_scaffold_goes_on_after_a_round_with_a_learning_rate_of_0(tmp_path):
    """Such a round tells nothing of the gradients, so that all control variates stay as they are."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: float(round != 1))
    states = []
    for rounds, factory in ((3, schedule), (2, None)):
        it = phase("it", Scaffold(), rounds=rounds, train=Train(round_lr_scheduler=factory))
        fed = run([it], PureOneWeight(), two_quadratics(), tmp_path / str(rounds), STEPS)
        states.append(fed.run.states["it"])
    assert_same_bits(*(dict(state.server) for state in states))
    for client in (0, 1):
        assert torch.equal(*(state.clients[client]["control/weight"] for state in states))


def test_scaffold_with_two_epochs_of_several_batches_counts_every_step(tmp_path):
    """All clients alike: the corrections cancel, and the server's c is the mean gradient along the way."""
    data = blobs(sizes=(8, 8), batch_size=4)
    model = mixture(optimizer=partial(torch.optim.SGD, lr=RATE))
    federation = run([phase("Scaffold", Scaffold())], model, data, tmp_path, 2)
    state = federation.run.states["Scaffold"]
    name = "global_expert.classifier.1.weight"
    moved = state.server[name] - model.state_dict()[name]
    torch.testing.assert_close(state.server["control/" + name], -moved / (4 * RATE), rtol=1e-10, atol=1e-14)


def test_scaffold_takes_its_parameters_from_a_checkpoint_of_lightning_and_controls_of_zero(tmp_path):
    state = mixture().state_dict()
    torch.save({"state_dict": {name: tensor + 1 for name, tensor in state.items()}}, tmp_path / "given.ckpt")
    given = phase("Scaffold", Scaffold(), ckpt_path=str(tmp_path / "given.ckpt"))
    module = mixture(optimizer=partial(torch.optim.SGD, lr=0.1))
    server = run([given], module, blobs(), tmp_path).run.states["Scaffold"].server
    for name, tensor in state.items():
        assert torch.equal(server[name], tensor + 1) and not server[f"control/{name}"].any()


# Server optimizers


TAU = 0.3
BETA1, BETA2 = 0.6, 0.7


def second_moment(name, v, squared):
    """Algorithm 2: how each optimizer changes v, in plain numbers."""
    if name == "FedAdagrad":
        return v + squared
    if name == "FedAdam":
        return BETA2 * v + (1 - BETA2) * squared
    return v - (1 - BETA2) * squared * math.copysign(1.0, v - squared)


def simulate(name, rounds, lr, start, v):
    """Rounds of both clients in plain numbers; clients weigh the same."""
    x, m = start, 0.0
    for _ in range(rounds):
        delta = (MINIMA + REMAINS * (x - MINIMA)).mean().item() - x
        if name == "FedAvgM":
            m = BETA1 * m + delta
            x += lr * m
            continue
        m = BETA1 * m + (1 - BETA1) * delta
        v = second_moment(name, v, delta**2)
        x += lr * m / (math.sqrt(v) + TAU)
    return x


OPTIMIZERS = {
    "FedAvgM": partial(torch.optim.SGD, lr=0.7, momentum=BETA1),
    "FedAdagrad": partial(FedAdagrad, lr=0.7, beta1=BETA1, tau=TAU),
    "FedAdam": partial(FedAdam, lr=0.7, beta1=BETA1, beta2=BETA2, tau=TAU),
    "FedYogi": partial(FedYogi, lr=0.7, beta1=BETA1, beta2=BETA2, tau=TAU),
    "FedYogi from 0": partial(FedYogi, lr=0.7, beta1=BETA1, beta2=BETA2, tau=TAU, v0=0.0),
}


@pytest.mark.few("FedAdam-4-0.0", "FedYogi from 0-4-0.0")
@pytest.mark.parametrize("start", [0.0, 6.0])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_server_takes_the_steps_of_the_paper(name, rounds, start, tmp_path):
    """Yogi's sign is negative in the first round and positive later, when the changes are small."""
    it = phase("it", FedAvg(), rounds=rounds, server_optimizer=OPTIMIZERS[name])
    federation = run([it], PureOneWeight(RATE, start), two_quadratics(), tmp_path, STEPS)
    v0 = OPTIMIZERS[name].keywords.get("v0", TAU**2)
    assert weight_of(federation, "it") == pytest.approx(simulate(name, rounds, 0.7, start, v0), rel=1e-12)


def test_a_parameter_without_a_gradient_is_left_out():
    x = nn.Parameter(torch.ones(1))
    optimizer = FedAdam([x], lr=0.1)
    optimizer.step()
    assert x.item() == 1 and not optimizer.state
