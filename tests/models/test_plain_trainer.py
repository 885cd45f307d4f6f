"""Mixtures in a plain Trainer, in Lightning's tuner, and under vmap."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import Expert, blobs, mixture, run
from helpers.models import plain_trainer, samples, trainer
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, FeatureGate, LinearGate, PersonalizedMoE, SmallMLP

of_lightning = pytest.mark.filterwarnings("ignore")
sgd = partial(torch.optim.SGD, lr=0.1)


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


@of_lightning
def test_the_tuner_finds_and_sets_the_rate_of_all_but_a_gate_with_its_own(tmp_path):
    module = mixture(LinearGate(5), optimizer=sgd)
    module.gate_lr = 0.7
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(0)
    suggested = (
        Tuner(trainer(tmp_path, max_epochs=9))
        .lr_find(module, blobs(), num_training=30, early_stop_threshold=None)
        .suggestion()
    )
    assert [group["lr"] for group in module.configure_optimizers().param_groups] == [suggested, 0.7]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_clients_train_with_the_rate_that_is_set_unless_their_phase_has_an_optimizer(tmp_path):
    trained = []
    for lr, optimizer, own in ((None, partial(torch.optim.SGD, lr=0.4), None), (0.4, sgd, None), (9.0, sgd, 0.4)):
        module = mixture(optimizer=optimizer)
        module.lr = lr
        train = Train(optimizer=own and partial(torch.optim.SGD, lr=own))
        federation = run([Phase("Local", Local(), train=train)], module, blobs(), tmp_path)
        trained.append(federation.run.states["Local"].clients[0])
    for other in trained[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in trained[0].items())


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_a_finder_among_the_callbacks_of_clients_is_refused_before_training(finder, tmp_path):
    phase = Phase("Local", Local(), train=Train(callbacks=[finder()]))
    with pytest.raises(InvalidArgumentError, match=f"callbacks is '{finder.__name__}', but must be left out"):
        run([phase], mixture(), blobs(), tmp_path)


@of_lightning
def test_a_mixture_is_tested_on_several_loaders(tmp_path):
    data, plain = blobs(), trainer(tmp_path, max_epochs=9)
    loaders = [data.train_dataloader(), data.test_dataloader()]
    for call in (plain.validate, plain.test):
        both = call(mixture(), loaders, verbose=False)
        alone = call(mixture(), loaders[1], verbose=False)[0]
        assert {name.partition("/dataloader_idx")[0]: value for name, value in both[1].items()} == alone
    assert [len(batches) for batches in plain.predict(mixture(), loaders)] == [8, 8]


@of_lightning
def test_a_plain_trainer_logs_what_a_mixture_was_made_with(tmp_path):
    """So that TensorBoard compares runs; what the constructor got is known, and the rate is the one that is used."""
    module = PersonalizedMoE(SmallMLP(num_classes=7), gate=ConstantGate(0.25), mixing="probabilities", optimizer=sgd)
    module.lr = 0.3
    plain = trainer(tmp_path, max_epochs=9)
    plain.loggers = [TensorBoardLogger(tmp_path)]
    x, y = torch.randn(4, 64), torch.tensor([0, 1, 2, 3])
    plain.fit(module, DataLoader(TensorDataset(x, y), 4))
    logged = yaml.safe_load((tmp_path / "lightning_logs/version_0/hparams.yaml").read_text())
    assert logged["global_expert"]["init_args"]["num_classes"] == 7 and logged["mixing"] == "probabilities"
    assert logged["gate"]["init_args"] == {"weight": 0.25}
    assert (logged["optimizer"], logged["lr"], logged["momentum"]) == ("SGD", 0.3, 0)
    assert not module.hparams, "checkpoints describe the arguments by themselves"


@of_lightning
def test_torch_scripts_an_expert():
    expert, x = SmallMLP(), torch.randn(2, 64)
    assert torch.equal(torch.jit.script(expert)(x), expert(x))
