"""Mixtures in a plain Trainer, in Lightning's tuner, under vmap, and from checkpoints that describe all their parts."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import Expert, assert_same_bits, blobs, mixture, run
from helpers.models import checkpoint, plain_trainer, samples, trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import (
    CNN,
    IFCACNN,
    LEAFCNN,
    ClusteredMoE,
    ConstantGate,
    ConvBlock,
    ConvExpert,
    EqualWeights,
    FeatureGate,
    FedAvgCNN,
    GateCNN,
    GlobalOnly,
    LinearGate,
    LocalOnly,
    MixtureWeights,
    MLPGate,
    NetworkGate,
    PersonalizedMoE,
    PooledMoE,
    RepresentationMLP,
    RepresentationMoE,
    SmallMLP,
    SparseMoE,
    SwitchNormGate,
    TwoConvCNN,
)

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
@pytest.mark.parametrize("is_of_class", [False, True])
def test_loggers_show_no_optimizer_that_the_constructor_s_function_may_not_make(is_of_class):
    class Own(PersonalizedMoE):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = (Own if is_of_class else PersonalizedMoE)(SmallMLP(), optimizer=sgd)
    if not is_of_class:
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters())
    assert module.hparams_initial["mixing"] == "logits"
    assert not {"optimizer", "lr", "momentum"} & module.hparams_initial.keys()


class WithTask(LightningDataModule):
    def __init__(self, task="digits", lr=3):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4, 64), torch.arange(4)), 4)


@of_lightning
def test_a_data_module_may_have_hyperparameters_of_the_names_of_a_mixture_s(tmp_path):
    plain = trainer(tmp_path, max_epochs=1)
    plain.loggers = [TensorBoardLogger(tmp_path)]
    plain.fit(PersonalizedMoE(SmallMLP(), optimizer=sgd), WithTask())
    logged = yaml.safe_load((tmp_path / "lightning_logs/version_0/hparams.yaml").read_text())
    assert (logged["task"], logged["lr"], logged["mixing"]) == ("digits", 3, "logits")


@of_lightning
@pytest.mark.slow
@pytest.mark.parametrize("call", ["validate", "test"])
def test_several_processes_log_the_means_over_the_samples_of_all(call, tmp_path):
    module = mixture(LinearGate(5), dtype=torch.float32)
    x, y = samples(8)
    y[0::2] = -100  # those of the first process
    y[5] = -100
    loader, logged = DataLoader(TensorDataset(x, y), batch_size=3), []
    for several in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        logged += getattr(trainer(tmp_path, **several), call)(module, loader, verbose=False)
    assert len(logged[0]) == 3 and logged[1] == pytest.approx(logged[0])


@of_lightning
def test_torch_scripts_an_expert():
    expert, x = SmallMLP(), torch.randn(2, 64)
    assert torch.equal(torch.jit.script(expert)(x), expert(x))


# Checkpoints


def half_squared_error(outputs, targets):
    return (outputs - targets).square().mean() / 2


def with_one_activation() -> PersonalizedMoE:
    activation = nn.ReLU()
    return PersonalizedMoE(nn.Sequential(nn.Linear(8, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 3)))


def with_parts_of_odd_arguments() -> PersonalizedMoE:
    """Arguments that torch has renamed, or takes and does not use."""
    return PersonalizedMoE(
        nn.Sequential(nn.Linear(8, 4), nn.Hardtanh(-2.0, 2.0), nn.Identity(5, unused=0.1), nn.Linear(4, 3))
    )


def frozen() -> PersonalizedMoE:
    return PersonalizedMoE(SmallMLP(8, 4, 3).requires_grad_(False), SmallMLP(8, 5, 3), LinearGate())


def sparse(*arguments, **kwargs) -> SparseMoE:
    return SparseMoE(ConvBlock(1, 2, 16), ConvExpert(2, 3, 6, 3, 4), *arguments, **kwargs)


def of_architectures(own: int | None) -> PersonalizedMoE:
    module = PersonalizedMoE(SmallMLP(8), [SmallMLP(8, width) for width in (4, 7)])
    if own is not None:
        module.keep_architecture(own)
    return module


def estimated() -> SparseMoE:
    module = sparse(3, gate=MixtureWeights(), mixing="probabilities")
    module.gate.weights.copy_(torch.tensor([0.5, 0.2, 0.3]))
    return module


IMAGE = (1, 16, 16)
MIXTURES = [
    (partial(PersonalizedMoE, LEAFCNN(1, 3, 2, 2, 4, 0.1, True, 16), gate=SwitchNormGate(256, 4, 0.5)), IMAGE),
    (partial(PersonalizedMoE, TwoConvCNN(1, 3, 16, 0.1, 2, 2, 4, 4), gate=ConstantGate(0.3), gate_lr=0.5), IMAGE),
    (partial(PersonalizedMoE, FedAvgCNN(1, 3, 16), gate=NetworkGate(GateCNN(1, 2, 2, None, 4, 0.1, True, 16))), IMAGE),
    (partial(PersonalizedMoE, CNN(5, 1, 3), channels_last=True), (1, 32, 32)),
    (partial(PersonalizedMoE, IFCACNN(1, 3, 0.1, True)), (1, 32, 32)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 3), SmallMLP(8, 9, 3), FeatureGate()), (8,)),
    (with_one_activation, (8,)),
    (with_parts_of_odd_arguments, (8,)),
    (frozen, (8,)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 1), gate=LinearGate(), loss=nn.HuberLoss(delta=0.5)), (8,)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 1), gate=GlobalOnly(), task="regression", loss=half_squared_error), (8,)),
    *((partial(of_architectures, own), (8,)) for own in (None, 0, 1)),
    (partial(ClusteredMoE, SmallMLP(8, 4, 3), 3, SmallMLP(8, 6, 3), LocalOnly()), (8,)),
    (
        partial(
            RepresentationMoE,
            RepresentationMLP(8, 4, 2, 3, True),
            [RepresentationMLP(8, 6, 2)],
            nn.Linear(2, 3, bias=False),
            EqualWeights(),
            architectures=[0, 0],
        ),
        (8,),
    ),
    (partial(PooledMoE, SmallMLP(8, 4, 3), 3, MLPGate(3, dropout=0.2), 2), (8,)),
    (partial(sparse, [2, 1], load_balancing=0.5), IMAGE),
    (estimated, IMAGE),
]


@pytest.mark.few("frozen-shape8")
@plain_trainer
@pytest.mark.parametrize(("make", "shape"), MIXTURES)
def test_a_checkpoint_of_a_plain_trainer_builds_the_mixture_again(make, shape, tmp_path):
    module = make().eval()
    loaded = type(module).load_from_checkpoint(checkpoint(tmp_path, module), weights_only=True).eval()
    assert_same_parameters(loaded, module)
    assert str(loaded) == str(module), "with the same dropout"
    arguments = [{}, {}]
    for each, of_checkpoint in zip((module, loaded), arguments, strict=True):
        each.on_save_checkpoint(of_checkpoint)
    assert arguments[0] == arguments[1]
    x, y = torch.randn(4, *shape), torch.arange(4) % 3
    (scores, weights), expected = loaded.mix(x), module.mix(x)
    assert torch.equal(scores, expected[0]) and torch.equal(weights, expected[1])
    y = y if module.task == "multiclass" else torch.rand(4)
    assert torch.equal(loaded.loss_of(scores, y), module.loss_of(scores, y))


def assert_same_parameters(loaded, module):
    assert_same_bits(loaded.state_dict(), module.state_dict())
    assert [each.requires_grad for each in loaded.parameters()] == [each.requires_grad for each in module.parameters()]


def mine(width=6, **kwargs):
    class Mine(PersonalizedMoE):
        """As a class of ``__main__`` or of a renamed module, it cannot be imported by its saved path."""

        def __init__(self, width=width, **kwargs):
            self.save_hyperparameters("width")
            super().__init__(SmallMLP(8, width, 3), **kwargs)

    return Mine(**kwargs), Mine


class Child(PersonalizedMoE):
    """A subclass that takes what its parent takes."""


@pytest.mark.slow
@plain_trainer
@pytest.mark.parametrize("is_parent", [False, True])
def test_a_class_without_a_path_is_the_one_that_loads(is_parent, tmp_path):
    module, kind = mine(7, mixing="probabilities", gate=EqualWeights())
    if is_parent:
        module, kind = PersonalizedMoE(SmallMLP(8, 7, 3), mixing="probabilities", gate=EqualWeights()), Child
    path = checkpoint(tmp_path, module)
    loaded = kind.load_from_checkpoint(path, weights_only=True)
    assert type(loaded) is kind and loaded.mixing == "probabilities"
    assert_same_bits(loaded.state_dict(), module.state_dict())
    with pytest.raises(MisconfigurationException, match="gate_lr is -1"):
        kind.load_from_checkpoint(path, gate_lr=-1.0)


@plain_trainer
def test_a_gate_of_unknown_width_is_loaded_with_what_was_frozen(tmp_path):
    torch.manual_seed(0)
    module = mixture(FeatureGate(), dtype=torch.float32)
    module.mix(torch.zeros(2, 5))
    module.gate.requires_grad_(False)
    expert, gate = mixture(dtype=torch.float32).global_expert, FeatureGate()  # a gate that has no parameters yet
    path = checkpoint(tmp_path, module)
    loaded = PersonalizedMoE.load_from_checkpoint(path, global_expert=expert, gate=gate, weights_only=True)
    assert_same_parameters(loaded, module)
