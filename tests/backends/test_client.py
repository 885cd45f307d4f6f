"""What happens before a client's local training."""

from dataclasses import replace

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import FEW, UNEQUAL, begin, local_training, train, train_clients

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend, data_on, on_device
from fedmoe_pl.models import LinearGate


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_a_gpu_gives_what_a_cpu_gives(backend):
    data = blobs(UNEQUAL, batch_size=10)
    expected, _ = train(TrainerBackend(), local_training(mixture(LinearGate(5)), FedAvg(), data))
    training = local_training(mixture(LinearGate(5)), FedAvg(), data, accelerator="gpu")
    device = torch.device("cuda", 0)
    update, _ = train(backend, replace(training, device=device, datamodule=data_on(data, device)))
    torch.testing.assert_close(update.sent, expected.sent, rtol=1e-10, atol=1e-10)


def test_constants_are_moved_whatever_holds_them():
    bias = torch.zeros(2)
    constants = {"strength": 0.5, "received": {"gate.bias": bias}, "prototypes": [torch.ones(3), None], "cluster": 1}
    moved = on_device(constants, torch.device("meta"))
    assert moved["received"]["gate.bias"].device.type == "meta"
    assert moved["prototypes"][0].device.type == "meta"
    assert (moved["strength"], moved["prototypes"][1], moved["cluster"]) == (0.5, None, 1)
    assert constants["received"]["gate.bias"] is bias
    assert on_device(constants, torch.device("cpu"))["received"]["gate.bias"] is bias


class RemembersConstants(FedAvg):
    """Notes which constants each client made, and which it gets back."""

    def __init__(self):
        super().__init__()
        self.made, self.returned = {}, {}

    def client_init(self, client, sent):
        self.made[client.id] = super().client_init(client, sent) | {"number": torch.tensor(client.id + 1.0)}
        return self.made[client.id]

    def client_loss(self, module, batch, constants):
        loss, metrics = module.loss(batch)
        return loss * constants["number"], metrics

    def client_final(self, client, constants):
        self.returned[client.id] = constants
        return super().client_final(client, constants)


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(4)])
def test_the_last_hook_gets_the_constants_as_the_first_returned_them(backend):
    plan = begin(backend, local_training(mixture(), RemembersConstants(), blobs(FEW)))
    train_clients(plan)
    algorithm = plan.training.algorithm
    assert algorithm.returned.keys() == {0, 1, 2, 3}
    for client, constants in algorithm.returned.items():
        assert constants is algorithm.made[client]
