"""A learning rate by the round, and an optimizer whose state a client keeps, against plain numbers."""

import copy
import types
from functools import partial

import pytest
import torch
from helpers import OneWeight, PureOneWeight, blobs, mixture, momentum_sgd, phase, run, two_quadratics
from helpers.quadratics import LOSSES, RATE, weight_of
from helpers.runs import Kill, assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import lr_scheduler

from fedmoe_pl import Federation, Train
from fedmoe_pl.algorithms import FedAvg, FedProx, PFLMoE
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.optimizers import learning_rates, set_optimizer
from fedmoe_pl.models import LinearGate

EPOCHS = 10
SCHEDULES = {
    "falls": (partial(lr_scheduler.ExponentialLR, gamma=0.5), [1, 0.5, 0.25, 0.125]),
    "steps": (partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.1), [1, 0.1, 0.1, 0.01]),
    "warms up": (partial(lr_scheduler.LinearLR, start_factor=0.25, total_iters=3), [0.25, 0.5, 0.75, 1]),
    "is given": (partial(lr_scheduler.LambdaLR, lr_lambda=lambda round: 1 / (round + 1)), [1, 1 / 2, 1 / 3, 1 / 4]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_round_has_its_learning_rate(name):
    """And clients are trained with it: "rates over rounds" in test_oracle.py."""
    schedule, factors = SCHEDULES[name]
    rates = [learning_rates(PureOneWeight(lr=RATE), schedule, round)[0] for round in range(4)]
    assert rates == pytest.approx([RATE * factor for factor in factors], rel=1e-12)


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_user_s_optimizer_that_a_single_module_has_is_used(tmp_path, own_loss):
    model, x = PureOneWeight(lr=99.0), 0.0
    model.configure_optimizers = types.MethodType(lambda self: torch.optim.SGD(self.parameters(), lr=RATE), model)
    halved = Train(round_lr_scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.5))
    it = phase("it", FedProx(mu=0.0) if own_loss else FedAvg(), rounds=2, train=halved)
    federation = run([it], model, two_quadratics(), tmp_path, EPOCHS)
    for rate in (RATE, RATE / 2):  # a step goes from y to y - rate * a * (y - b)
        x = sum(b + (x - b) * (1 - rate * a) ** EPOCHS for a, b in LOSSES) / 2
    assert weight_of(federation, "it") == pytest.approx(x, rel=1e-12)


class WithMomentum(PureOneWeight):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Averaging(torch.optim.Optimizer):
    """Divides its rate by the number of its steps, which it counts in the parameter group."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0, "share": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["k"] += 1
            group["share"], group["best"] = 1 / group["k"], float("inf")
            for parameter in group["params"]:
                parameter -= group["lr"] * group["share"] * parameter.grad
        return loss


class WithAveraging(PureOneWeight):
    def configure_optimizers(self):
        return Averaging(self.parameters(), self.lr)


@pytest.mark.parametrize("every_batch", [True, False])
def test_a_client_keeps_the_numbers_of_parameter_groups_that_are_not_a_schedule_s(tmp_path, every_batch):
    train = Train(keep_optimizer=True, round_lr_scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.5))
    it = phase("it", FedAvg(), rounds=3, train=train)
    federation = run([it], WithAveraging(lr=RATE), two_quadratics(), tmp_path, EPOCHS, every_batch=every_batch)
    x, steps = 0.0, 0
    for round in range(3):
        ends = []
        for a, b in LOSSES:
            y = x
            for k in range(steps, steps + EPOCHS):
                y -= RATE * 0.5**round / (k + 1) * a * (y - b)
            ends.append(y)
        x, steps = sum(ends) / 2, steps + EPOCHS
    assert weight_of(federation, "it") == pytest.approx(x, rel=1e-12)
    kept = {
        "optimizer/param_groups.0/k": torch.tensor(30),
        "optimizer/param_groups.0/share": torch.tensor(1 / 30).double(),
    }
    torch.testing.assert_close(dict(federation.run.states["it"].clients[0]), kept, check_dtype=False)


@pytest.mark.slow
def test_adam_s_moments_of_expert_and_gate_are_kept_through_rounds_that_train_the_other(tmp_path):
    """Interleaved PFL-MoE in rounds of one epoch is then plain Adam over the epochs of each part, also after a kill."""
    adam = partial(torch.optim.Adam, lr=0.01)
    arguments = {"enable_checkpointing": True, "backend": AutoBackend()}

    def phases(rounds):
        interleaved = PFLMoE(interleaved=True, trainable="local_expert.*")
        train = Train(max_epochs=1, optimizer=adam, keep_optimizer=True)
        first = phase("FedAvg", FedAvg(), train=Train(max_epochs=0))
        return [first, phase("it", interleaved, rounds=rounds, train=train)]

    whole = run(phases(4), mixture(LinearGate(5)), blobs(), tmp_path / "whole", **arguments)
    kept = whole.run.states["it"].clients[0]
    steps = {name.split("/")[1].split(".")[0]: kept[name].item() for name in kept if name.endswith("/step")}
    size = len(whole.run.datamodule.train_samples[0])
    batches = {"gate": -(-(size // 4) // 4), "local_expert": -(-(size - size // 4) // 4)}
    assert steps == {part: 2 * number for part, number in batches.items()}, "two rounds of each part"
    arguments["callbacks"] = [Kill("on_round_start", 4)]
    with pytest.raises(KeyboardInterrupt):
        run(phases(4), mixture(LinearGate(5)), blobs(), tmp_path / "killed", **arguments)
    again = Federation(phases(4), {"max_epochs": 2}, default_root_dir=str(tmp_path / "killed"), logger=False)
    again.fit(mixture(LinearGate(5)), blobs(), ckpt_path="last")
    for client in range(3):
        assert_same(dict(again.run.states["it"].clients[client]), dict(whole.run.states["it"].clients[client]))


class TwoRates(LightningModule):
    """Two parameter groups, and a schedule over epochs that begins with a half of their rates."""

    RATES, FACTORS = (0.1, 0.4), (1 / 2, 1 / 4, 3, 5)

    def __init__(self, in_parts):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(())) for _ in range(2))
        self.in_parts = in_parts

    def configure_optimizers(self):
        groups = [{"params": [self.first], "lr": self.RATES[0]}, {"params": [self.second], "lr": self.RATES[1]}]
        optimizer = torch.optim.SGD(groups)
        if self.in_parts:
            parts = [
                lr_scheduler.LambdaLR(optimizer, lambda epoch: self.FACTORS[epoch]),
                lr_scheduler.LambdaLR(optimizer, lambda epoch: self.FACTORS[epoch + 2]),
            ]
            return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.SequentialLR(optimizer, parts, [2])}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.LambdaLR(optimizer, self.FACTORS.__getitem__)}


@pytest.mark.parametrize("in_parts", [False, True])
def test_each_group_s_rate_is_its_own_by_the_round_times_the_factor_of_the_epoch(in_parts):
    module = TwoRates(in_parts)
    rates = learning_rates(module, partial(lr_scheduler.ExponentialLR, gamma=0.1), round=2)
    assert rates == pytest.approx([0.1 / 100, 0.4 / 100], rel=1e-12)
    set_optimizer(module, rates, {})
    optimizer, scheduler = module.configure_optimizers().values()
    for factor in TwoRates.FACTORS:
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [factor * 0.1 / 100, factor * 0.4 / 100], rel=1e-12
        )
        if factor != TwoRates.FACTORS[-1]:
            optimizer.step()
            scheduler.step()
    later = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # as a callback may make it
    assert later.get_last_lr() == rates


class TwoOptimizers(OneWeight):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([self.weight], lr=0.1), torch.optim.Adam([self.weight], lr=0.1)]


class WithCycle(PureOneWeight):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)}


KEEP = {"train": Train(keep_optimizer=True), "rounds": 2}
HALVE = {"train": Train(round_lr_scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.5)), "rounds": 2}
REFUSED = {
    "cycle": (
        HALVE,
        WithCycle(),
        "must be left out, because OneCycleLR, a scheduler over epochs, has learning rates of its own",
    ),
    "two": (KEEP, TwoOptimizers(), "returns more than an optimizer"),
    "stack": (KEEP, WithMomentum(), "each client keeps the state of its optimizer"),
    "number": (
        KEEP,
        mixture(optimizer=torch.optim.LBFGS),
        "^Phase 'it': LBFGS: func_evals of its state is 1, but must be a tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scheduled_or_kept_is_refused_before_any_training(tmp_path, name):
    options, model, sentence = REFUSED[name]
    backend = StackedBackend() if name == "stack" else TrainerBackend()
    it = phase("it", FedProx(0.0) if name == "stack" else FedAvg(), **options)
    with pytest.raises(MisconfigurationException, match=sentence):
        run([it], model, two_quadratics(), tmp_path, backend=backend)


@pytest.mark.parametrize("key", ["server_optimizer", "train.optimizer"])
def test_a_resumed_run_refuses_an_optimizer_that_cannot_go_on_from_the_state_of_another_before_any_training(
    tmp_path, key
):
    def federation(optimizer, **kwargs):
        of_clients = {"train": Train(optimizer=optimizer, keep_optimizer=True)}
        it = phase("it", FedAvg(), rounds=3, **of_clients if key[0] == "t" else {key: optimizer})
        return Federation([it], {"max_epochs": 1}, default_root_dir=str(tmp_path), logger=False, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        federation(momentum_sgd, callbacks=[Kill("on_round_end", 2)]).fit(mixture(), blobs())
    allowed = {"ckpt_path": "last", "allow_changes": [f"phases.it.{key}"]}
    adam, start = partial(torch.optim.Adam, lr=0.1), Kill("on_fit_start", 1)
    with pytest.raises(MisconfigurationException, match=r"^Phase 'it': .*optimizer must have the class and options"):
        federation(adam, callbacks=[start]).fit(mixture(), blobs(), **allowed)
    faster = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
    with pytest.raises(KeyboardInterrupt):
        federation(faster, callbacks=[start]).fit(mixture(), blobs(), **{**allowed, "allow_changes": ["phases"]})


def test_a_copy_of_a_client_s_module_configures_an_optimizer_of_its_own(tmp_path):
    copies = []

    class Copies(FedAvg):
        def client_final(self, client, constants):
            copies.append((client.module, copy.deepcopy(client.module)))
            return super().client_final(client, constants)

    schedule = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    it = phase("it", Copies(), rounds=2, train=Train(round_lr_scheduler=schedule))
    run([it], mixture(optimizer=momentum_sgd), blobs(), tmp_path, backend=TrainerBackend())
    module, other = copies[-1]
    parameters = [*other.configure_optimizers().param_groups[0]["params"]]
    assert [id(p) for p in parameters] == [id(p) for p in other.parameters()]
    assert other.configure_optimizers().param_groups[0]["lr"] == module.configure_optimizers().param_groups[0]["lr"]
