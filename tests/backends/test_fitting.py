"""What finished Trainers have trained does not fill the memory."""

import gc

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import FEW, begin, local_training, train_clients
from lightning.pytorch import Callback

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend, fitting

KINDS = {
    "clients that share a Trainer": (TrainerBackend(), {}),
    "clients with a Trainer": (TrainerBackend(), {"callbacks": [Callback()]}),
    "a stack": (StackedBackend(), {}),
}


def live_parameters(training) -> int:
    """How many live tensors have the shape of one of the module's weights."""
    shape = training.initial["global_expert.classifier.1.weight"].shape
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return sum(tensor.shape == shape for tensor in tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cycles", [False, True])
def test_models_are_freed_at_once_or_if_they_form_cycles_when_they_are_too_large(kind, cycles, monkeypatch):
    """Without the collector's own runs, which do not know how large tensors are."""
    backend, arguments = KINDS[kind]
    model = mixture()
    if cycles:
        model.itself = [model]
    training = local_training(model, FedAvg(), blobs(FEW), rounds=6, **arguments)
    plan, live = begin(backend, training), []
    gc.collect()
    gc.disable()
    try:
        for round in range(6):
            monkeypatch.setattr(fitting, "_MOST_GARBAGE", 0 if round < 3 else 2**40)
            train_clients(plan, round)
            live.append(live_parameters(training))
    finally:
        gc.enable()
    assert live[1] == live[2] and (live[2] < live[3] < live[4] < live[5] if cycles else len({*live[1:]}) == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_client_s_model_counts(kind, monkeypatch):
    backend, arguments = KINDS[kind]
    counted = []
    monkeypatch.setattr(fitting._garbage, "add", counted.append)
    training = local_training(mixture(), FedAvg(), blobs(FEW), **arguments)
    train_clients(begin(backend, training))
    assert sum(counted) == len(FEW) * sum(tensor.nbytes for tensor in training.initial.values())
