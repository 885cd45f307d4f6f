"""Mixtures in a plain Trainer, from checkpoints and under vmap."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, mixture
from helpers.models import plain_trainer, samples, trainer
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl.models import ConstantGate, FeatureGate, LinearGate, PersonalizedMoE


@plain_trainer
def test_a_plain_trainer_fits_validates_tests_and_predicts_with_an_ordinary_dataloader(tmp_path):
    x, y = samples()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    module = mixture(FeatureGate(6), dtype=torch.float32)
    by_hand = copy.deepcopy(module)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            F.cross_entropy(by_hand(batch_x), batch_y).backward()
            optimizer.step()

    plain = trainer(tmp_path, max_epochs=3)
    plain.fit(module, loader, loader)
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict())

    logits, weights = by_hand.eval().mix(x)
    expected = {
        "loss": F.cross_entropy(logits, y).item(),
        "accuracy": (logits.argmax(1) == y).double().mean().item(),
        "gate/global_expert": weights[:, 0].mean().item(),
    }
    assert 0 < expected["accuracy"] < 1
    whole = DataLoader(TensorDataset(x, y), batch_size=5)  # the last batch is shorter
    assert plain.validate(module, whole, verbose=False)[0] == pytest.approx(
        {f"validation_{name}": value for name, value in expected.items()}, rel=1e-5
    )
    assert plain.test(module, whole, verbose=False)[0] == pytest.approx(
        {f"test_{name}": value for name, value in expected.items()}, rel=1e-5
    )
    for predicted in (plain.predict(module, whole), plain.predict(module, DataLoader(x, batch_size=5))):
        torch.testing.assert_close(torch.cat([batch["logits"] for batch in predicted]), logits)
        torch.testing.assert_close(torch.cat([batch["gate_weights"] for batch in predicted]), weights)


@plain_trainer
def test_a_learning_rate_schedule_steps_once_an_epoch(tmp_path):
    x, y = samples()
    rates = []

    class Recorded(PersonalizedMoE):
        def on_train_batch_start(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    module = Recorded(
        Expert(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    trainer(tmp_path, max_epochs=2).fit(module, DataLoader(TensorDataset(x, y), batch_size=6))
    assert rates == [0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize(
    "gate", [partial(LinearGate, 5), partial(FeatureGate, 6), partial(ConstantGate, 0.5), partial(ConstantGate, 1)]
)
def test_the_loss_and_its_gradients_under_vmap_are_those_of_one_client_at_a_time(gate):
    torch.manual_seed(2)
    clients = [PersonalizedMoE(Expert(), Expert(), gate()).double() for _ in range(4)]
    batches = [samples(seed=seed) for seed in range(4)]
    x, y = torch.stack([x.double() for x, _ in batches]), torch.stack([y for _, y in batches])
    template = clients[0]
    stacked, _ = torch.func.stack_module_state(clients)

    def loss(parameters, x, y):
        call = {f"module.{name}": parameter for name, parameter in parameters.items()}
        return torch.func.functional_call(_Loss(template), call, ((x, y),))

    gradients, (losses, metrics) = torch.vmap(torch.func.grad_and_value(loss, has_aux=True))(stacked, x, y)
    for i, client in enumerate(clients):
        expected, expected_metrics = client.loss((x[i], y[i]))
        expected.backward()
        assert expected.item() == pytest.approx(F.cross_entropy(client(x[i]), y[i]).item(), rel=1e-12)
        torch.testing.assert_close(losses[i], expected)
        torch.testing.assert_close({name: value[i] for name, value in metrics.items()}, expected_metrics)
        for name, parameter in client.named_parameters():
            expected_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradients[name][i], expected_gradient)


class _Loss(LightningModule):
    """Calls the loss as a module's forward, because ``functional_call`` calls a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.loss(batch)
