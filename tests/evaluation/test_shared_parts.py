"""Parts that the models of clients have in common are computed once for the global test set, with the same bits."""

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import local_training
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torchmetrics.classification import MulticlassHingeLoss

from fedmoe_pl.algorithms import Local
from fedmoe_pl.backends import untrained
from fedmoe_pl.backends.untrained import SharedParts
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation import stacked_models
from fedmoe_pl.evaluation.client_models import evaluate_clients
from fedmoe_pl.models import LocalOnly

SIZES = (7, 9, 4, 8, 6)
BATCH_SIZE = 8


def expert(*body) -> nn.Sequential:
    """A body, and a head that is each client's own."""
    return nn.Sequential(OrderedDict(body=nn.Sequential(nn.Linear(5, 6), *body), head=nn.Linear(6, 3)))


class Expert(nn.Module):
    """The same as a class of the user's, whose forward may do anything."""

    def __init__(self, body=None):
        super().__init__()
        self.body, self.head = body or nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Noisy(nn.Linear):
    """Draws random numbers, also in eval mode, which seldom change its output."""

    def forward(self, x):
        return super().forward(x) + (torch.rand(()) > 0.7)


class Counting(nn.Linear):
    """Counts its calls, and scales its output from the second model on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class PeekingBody(nn.Linear):
    """Uses a tensor that is not its own, from the second batch on."""

    def forward(self, x):
        return super().forward(x) + (self.others[0].weight.sum() if len(x) < BATCH_SIZE else 0)


class Peeking(Expert):
    """Its body uses a weight of the head."""

    def __init__(self):
        super().__init__(PeekingBody(5, 6))
        self.body.others = [self.head]  # in a list, so that they are not registered


class Setting(Expert):
    """Writes what its body, a layer of PyTorch's, computes with, as a hypernetwork does."""

    def forward(self, x):
        if len(x) < BATCH_SIZE:
            self.body.weight.data = self.body.weight.data + self.head.weight.data.sum()
        return super().forward(x)


class HeadFirst(Expert):
    """Scales the last, shorter batch by a number of the client's own."""

    def forward(self, x):
        return super().forward(x * self.head.bias.sum() if len(x) < BATCH_SIZE else x)


def with_own_forward():
    """Its body has a function of its own in place of the class's ``forward``, as libraries that wrap modules set it."""
    made = expert()
    made.body.forward = partial(twice, made.body, made.head)
    return made


def twice(body, head, x):
    return nn.Sequential.forward(body, x) + (head.weight.sum() if len(x) < BATCH_SIZE else 0)


def with_hook():
    made = expert()
    made.body[0].register_forward_hook(partial(add, made.head))
    return made


def add(head, part, inputs, output):
    return output + (head.weight.sum() if len(output) < BATCH_SIZE else 0)


def evaluations(monkeypatch, expert, looked_up, rounds=1):
    """The evaluations after some rounds of clients with heads of their own, and how often the body was called."""
    torch.manual_seed(0)
    data = blobs(SIZES)
    training = local_training(mixture(LocalOnly(), expert), Local(), data)
    training = replace(training, metrics={"hinge": MulticlassHingeLoss(3)})
    heads = [name for name in training.initial if "local_expert.head" in name]
    own = {client: {name: torch.randn_like(training.initial[name]) for name in heads} for client in range(len(SIZES))}
    body = {name: tensor for name, tensor in training.initial.items() if "local_expert.body" in name}
    found, calls = [], []
    with monkeypatch.context() as patch, register_module_forward_hook(lambda part, *_: calls.append(type(part))):
        patch.setattr(stacked_models, "_MOST", 1)
        patch.setattr(FederatedDataModule, "evaluated_at_once", BATCH_SIZE)
        if not looked_up:
            patch.setattr(SharedParts, "looked_up", lambda *arguments: nullcontext())
        for round in range(1, rounds + 1):
            for tensor in body.values():
                tensor.mul_(round)  # in place, as a method might
            kept = {client: body | head for client, head in own.items()}
            found += evaluate_clients(training, {}, kept, round, "aggregation")
    return [asdict(evaluation) for evaluation in found], calls.count(nn.Tanh)


EXPERTS = {
    "a body and a head": expert,
    "an output changed in place": lambda: expert(nn.Tanh(), nn.ReLU(inplace=True)),
    "random numbers": lambda: Expert(Noisy(5, 6)),
    "random numbers of PyTorch's": lambda: expert(
        nn.Unflatten(1, (1, 2, 3)), nn.FractionalMaxPool2d(1, output_size=(2, 3)), nn.Flatten()
    ),
    "a counter": lambda: Expert(Counting(5, 6)),
    "another part's tensor": Peeking,
    "a part that is written to": Setting,
    "a forward of its own": with_own_forward,
    "a hook": with_hook,
    "an input of the client's own": HeadFirst,
}


@pytest.mark.parametrize("expert", EXPERTS)
def test_looking_up_what_models_have_in_common_changes_no_bit(monkeypatch, expert):
    looked_up, computed = (evaluations(monkeypatch, EXPERTS[expert](), each, rounds=2)[0] for each in (True, False))
    assert str(looked_up) == str(computed)  # nan is not equal to itself
    hinges = {evaluation["metrics"]["global_test_hinge"] for evaluation in computed}
    assert len(hinges) == 2 * len(SIZES), "the models differ"


def test_a_body_that_all_share_is_computed_for_the_first_two_clients(monkeypatch):
    (_, looked_up), (_, computed) = (evaluations(monkeypatch, expert(nn.Tanh()), each) for each in (True, False))
    batches = -(-len(blobs(SIZES).load().y_test) // BATCH_SIZE)
    assert batches > 1
    assert computed - looked_up == (len(SIZES) - 2) * batches


def test_no_more_is_remembered_than_a_bound(monkeypatch):
    monkeypatch.setattr(untrained, "_MOST_BYTES", 100)
    assert str(evaluations(monkeypatch, expert(), True)) == str(evaluations(monkeypatch, expert(), False))
