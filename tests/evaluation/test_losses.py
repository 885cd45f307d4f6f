"""A loss that is no number, as of a batch without labels, leaves a client in as long as its tensors are finite."""

import copy
from functools import partial

import pytest
import torch
from helpers import Expert, blobs, client_generator, phase, run, train_by_hand
from helpers.workers import TwoInThisProcess
from torch import nn

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.models import GlobalOnly

SIZES, SEED, IGNORED = (12, 8, 4), 3, 2
ignoring = nn.CrossEntropyLoss(ignore_index=IGNORED)


class OwnStep(PersonalizedMoE):
    """A user's module with a training step of its own."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0]


def data():
    """Samples whose labels are ignored: some of client 0, half of client 1, all of client 2."""
    datamodule = blobs(SIZES)
    datamodule.y[12:24] = torch.tensor([IGNORED, 0, IGNORED, IGNORED, 1, IGNORED, IGNORED, 1] + [IGNORED] * 4)
    return datamodule


PATHS = {
    "one Trainer for small clients": {"backend": TrainerBackend()},
    "a Trainer per client": {"backend": TrainerBackend(), "every_batch": True},
    "a training step of the user": {"backend": TrainerBackend(), "kind": OwnStep},
    "stacked": {"backend": StackedBackend()},
    "auto": {"backend": AutoBackend()},
    "workers": {"backend": TwoInThisProcess()},
}


@pytest.mark.few("auto-0.0", "stacked-0.1", "workers-0.1")
@pytest.mark.parametrize("pull", [0.0, 0.1])  # with it, the gradients of a batch without labels are not 0
@pytest.mark.parametrize("path", PATHS)
def test_a_client_with_batches_without_labels_is_trained_as_by_hand(path, pull, tmp_path):
    class Pulled(PATHS[path].get("kind", PersonalizedMoE)):
        def loss(self, batch):
            loss, metrics = super().loss(batch)
            return loss + pull * sum((tensor**2).sum() for tensor in self.global_expert.parameters()), metrics

    sgd, datamodule = partial(torch.optim.SGD, lr=0.1, momentum=0.9), data()
    torch.manual_seed(1)
    module = Pulled(Expert(), gate=GlobalOnly(), loss=ignoring, optimizer=sgd).double()
    states, were_nan = [], []
    for client, samples in enumerate(datamodule.train_samples):
        own = copy.deepcopy(module)

        def loss(x, y, own=own):
            found = ignoring(own.global_expert(x), y)
            were_nan.append(bool(found.isnan()))
            return found + pull * sum((tensor**2).sum() for tensor in own.global_expert.parameters())

        batches = datamodule.batches(samples, generator=client_generator(SEED, client, 0))
        train_by_hand(own, "global_expert.", batches, sgd, 2, loss)
        states.append(own.state_dict())
    assert 0 < sum(were_nan) < len(were_nan)
    arguments = {name: value for name, value in PATHS[path].items() if name != "kind"}
    federation = run([phase("FedAvg", FedAvg("global_expert.*"))], module, datamodule, tmp_path, seed=SEED, **arguments)
    server = federation.run.states["FedAvg"].server
    mean = {n: sum(size * s[n] for size, s in zip(SIZES, states, strict=True)) / sum(SIZES) for n in server}
    torch.testing.assert_close(dict(server), mean, rtol=1e-10, atol=1e-12)
