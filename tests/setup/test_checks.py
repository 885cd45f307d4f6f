"""What is refused before any training, by the argument that is wrong; what Lightning and torch say is passed on."""

import threading
from contextlib import nullcontext
from functools import partial
from typing import get_args

import pytest
import torch
from helpers import OneWeight, TensorData, blobs, mixture, run
from helpers.backends import WithBatchNorm
from helpers.data import refused_argument
from helpers.ingredients import Own
from helpers.runs import WithDropout, data, federation, model, phases
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import ReduceLROnPlateau as MonitoredPlateau
from lightning.pytorch.demos.boring_classes import BoringDataModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fedmoe_pl import ClientFailures, Evaluate, Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy
from fedmoe_pl.algorithms import Ditto, FedAvg, FedProx, FineTuning, Local, PerFedAvg, PFLMoE
from fedmoe_pl.algorithms.algorithm import Need
from fedmoe_pl.backends import LEAN_TRAINER, StackedBackend
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, NetworkGate
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.setup.check_module import check_kept_optimizers
from fedmoe_pl.setup.check_run import check_phase
from fedmoe_pl.setup.check_trainer import check_trainer

sgd = partial(SGD, lr=0.1)
STEP = partial(StepLR, step_size=1)
BY_VALIDATION = partial(MonitoredPlateau, monitor="validation_loss", patience=0)
BOTH = Evaluate(after="both")
UNMADE = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
NO_FILES = ("..", "a\0b", "ä" * 150)
REFUSED = [
    ("clients_per_round", {"clients_per_round": 4}),
    ("clients_per_round", {"clients_per_round": 1.5}),
    ("rounds", {"rounds": 2**63}),
    ("select.monitor", {"select": Select("accuracy")}),
    ("select.monitor", {"select": Select("validation")}),  # without validation samples
    ("select.from_round", {"select": Select("global_test", from_round=3)}),
    ("select", {"select": Select("global_test"), "evaluate": False}),
    ("select", {"select": Select("global_test"), "evaluate": Evaluate(every_n_rounds=0)}),
    ("evaluate.after", {"algorithm": Local(), "evaluate": Evaluate(after="both")}),
    ("evaluate.every_n_epochs", {"evaluate": Evaluate(every_n_epochs=1)}),  # not alone
    ("start", {"start": "Fed"}),
    ("start", {"start": {"gate": "Local"}, "gate": LinearGate(5)}),
    ("start", {"algorithm": PFLMoE()}),
    ("gate", {"algorithm": Ditto(), "gate": LinearGate(5)}),
    ("train.trainer", {"train": Train(trainer={"devices": 2})}),
    ("train.trainer", {"train": Train(trainer={"strategy": "ddp"})}),
    ("train.trainer.limit_val_batchs", {"train": Train(trainer={"limit_val_batchs": 1.0})}),
    ("train.trainer.precision", {"train": Train(trainer={"precision": "64-true"})}),
    ("train.trainer.accumulate_grad_batches", {"train": Train(trainer={"accumulate_grad_batches": 2.5})}),
    ("train.trainer.callbacks", {"train": Train(trainer={"callbacks": [UNMADE]})}),
    ("train.trainer.callbacks", {"train": Train(trainer={"callbacks": "Timer"})}),
    ("train.trainer.logger", {"train": Train(trainer={"logger": UNMADE})}),
    ("train.trainer.profiler", {"train": Train(trainer={"profiler": UNMADE})}),
    ("train.trainer.plugins", {"train": Train(trainer={"plugins": [UNMADE]})}),
    ("train.trainer.gradient_clip_val", {"train": Train(trainer={"gradient_clip_val": float("nan")})}),
    ("train", {"train": {"max_epochs": 3}}),
    ("select", {"select": "global_test"}),
    ("evaluate", {"evaluate": None}),
    ("trainer.limit_val_batches", {"train": Train(callbacks=[BestEpoch()])}),
    ("validation_fraction", {"train": Train(callbacks=[BestEpoch()], trainer={"limit_val_batches": 1.0})}),
    ("lr of train.optimizer", {"train": Train(optimizer=partial(SGD, lr=float("inf")))}),
    ("lr of server_optimizer", {"server_optimizer": partial(SGD, lr=float("inf"))}),
    ("EarlyStopping.monitor", {"train": Train(callbacks=[EarlyStopping("val_loss")])}),
    ("EarlyStopping.monitor", {"train": Train(callbacks=[EarlyStopping("train_loss")])}),
    ("BestEpoch.monitor", {"train": Train(callbacks=[BestEpoch("validation_accuracy")])}),
    ("train.callbacks", {"train": Train(callbacks=[EarlyStopping("train_loss"), EarlyStopping("train_loss")])}),
    ("callbacks", {"train": Train(callbacks=[LearningRateMonitor()])}),  # without a logger
    ("callbacks", {"train": Train(callbacks=[DeviceStatsMonitor()])}),
    ("callbacks", {"train": Train(callbacks=[BestEpoch(), EMAWeightAveraging()])}),
    ("callbacks", {"train": Train(callbacks=[StochasticWeightAveraging(0.1), BestEpoch()])}),
    ("train.lr_scheduler", {"train": Train(lr_scheduler=ReduceLROnPlateau)}),
    ("train.lr_scheduler", {"train": Train(lr_scheduler=partial(MonitoredPlateau, monitor="train_loss"))}),
    ("trainer.limit_val_batches", {"train": Train(lr_scheduler=BY_VALIDATION)}),
    (
        "train.round_lr_scheduler",
        {"train": Train(round_lr_scheduler=STEP, lr_scheduler=partial(OneCycleLR, max_lr=1, total_steps=2))},
    ),
]


@pytest.mark.parametrize(("argument", "arguments"), REFUSED)
def test_a_phase_that_cannot_run_is_refused_before_any_training(tmp_path, argument, arguments):
    with pytest.raises(InvalidArgumentError) as error:
        phase = Phase(**{"name": "FedAvg", "algorithm": FedAvg(), **arguments})
        federation(tmp_path, [Phase("Local", Local(), evaluate=False), phase]).fit(model(), data())
    assert error.value.argument == argument
    assert error.value.owner.startswith(("Phase 'FedAvg'", "Phase", "TensorData"))
    assert not list(tmp_path.rglob("version_*"))


TWO_STEPS = partial(OneCycleLR, max_lr=1, total_steps=2)
ONE_RATE = partial(LambdaLR, lr_lambda=lambda round: [1.0][round])
BY_ROUND, BY_EPOCH = (
    "round_lr_scheduler cannot be stepped once per round",
    "lr_scheduler cannot be stepped once per epoch",
)
TRIED = [
    ("train.optimizer .* cannot be made: Invalid learning rate: -1", {"train": Train(optimizer=partial(SGD, lr=-1))}),
    ("server_optimizer cannot be stepped: LBFGS", {"server_optimizer": torch.optim.LBFGS}),
    ("server_optimizer cannot be made: Invalid momentum", {"server_optimizer": partial(SGD, lr=1, momentum=-1)}),
    ("server_optimizer cannot be made: optimizer got an empty", {"algorithm": Local(), "server_optimizer": sgd}),
    (f"{BY_ROUND}: ReduceLROnPlateau needs a metric", {"train": Train(round_lr_scheduler=ReduceLROnPlateau)}),
    (f"{BY_ROUND}: list index", {"train": Train(round_lr_scheduler=ONE_RATE), "rounds": 2}),
    (f"{BY_ROUND}: Tried to step 3 times", {"train": Train(round_lr_scheduler=TWO_STEPS), "rounds": 4}),
    (
        f"{BY_ROUND}: Tried to step 3 times",
        {"train": Train(round_lr_scheduler=TWO_STEPS), "rounds": 4, "select": Select("global_test")},
    ),
    (f"{BY_EPOCH}: integer ", {"train": Train(lr_scheduler=partial(StepLR, step_size=0), max_epochs=1)}),
    (f"{BY_EPOCH}: Tried to step 3 times", {"train": Train(lr_scheduler=TWO_STEPS, max_epochs=3)}),
    (r"train.trainer.limit_val_batches is 1.5, ", {"train": Train(trainer={"limit_val_batches": 1.5})}),
    ("train.callbacks: .*`enable_checkpointing=False`", {"train": Train(callbacks=[ModelCheckpoint()])}),
    (r"reads inputs of shape \(3, 5\), because it fails with: .*3x5 and 4x1", {"gate": NetworkGate(nn.Linear(4, 1))}),
]


@pytest.mark.parametrize(("sentence", "arguments"), TRIED)
def test_what_torch_and_lightning_refuse_is_said_with_the_phase_s_name(tmp_path, sentence, arguments):
    phase = Phase(**{"name": "p", "algorithm": FedAvg(), **arguments})
    with pytest.raises(MisconfigurationException, match=f"^Phase 'p': .*{sentence}"):
        federation(tmp_path, [phase]).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


@pytest.mark.parametrize(
    ("argument", "made"),
    [
        ("phases", lambda: Federation([phases()[0], phases()[0]])),
        ("phases", lambda: Federation([Phase("p", FedAvg(), evaluate=BOTH), Phase("p after local training", Local())])),
        ("phases", lambda: Federation([Phase("alpha < 1", FedAvg()), Phase("alpha > 1", FedAvg())])),  # one tag
        ("phases", lambda: Federation([Phase("FedAvg", FedAvg()), Phase("fedavg", FedAvg())])),  # one file on macOS
        ("datamodule", lambda: Federation(phases()).fit(model(), BoringDataModule())),
        ("min_clients", lambda: ClientFailures(min_clients=0)),
        ("dropout", lambda: ClientFailures(dropout=float("nan"))),
        ("max_change", lambda: ClientFailures(max_change=0.5)),
        *(("name", lambda name=name: Phase(name, FedAvg())) for name in (*NO_FILES, "a/b", "\ud800", "initial")),
        *(("name", lambda name=name: Federation(phases(), name=name)) for name in (*NO_FILES, "../x", "/tmp/x")),
    ],
)
def test_arguments_are_refused_when_they_are_given(argument, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused_argument(made) == argument


class Several(WithDropout, LightningModule):
    def forward(self, x):
        return super().forward(x), x


class OwnNetwork(nn.Linear):
    """Has arguments of the names of the package's networks, but notes no sizes."""

    def __init__(self, in_features, num_classes):
        super().__init__(in_features, num_classes)


class MadeLater(WithDropout, LightningModule):
    def configure_model(self):
        self.last = getattr(self, "last", nn.Linear(3, 3))


class Pretrained(OneWeight):
    def setup(self, stage):
        self.weight.data.fill_(2)


class PretrainedWithTrainer(Pretrained):
    def setup(self, stage):
        super().setup(stage)
        self.epochs = self.trainer.max_epochs


class ShiftedLater(OneWeight):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(2), persistent=False)

    def setup(self, stage):
        self.shift += 1


class ScaledLater(OneWeight):
    scale = 1.0

    def configure_model(self):
        self.scale = 3.0

    def forward(self, x):
        return self.scale * super().forward(x)


class Unconfigurable(OneWeight):
    def configure_model(self):
        self.scale = self.trainer.max_epochs


class WithState(WithDropout):
    def get_extra_state(self):
        return {"seen": torch.zeros(2, 2)}

    def set_extra_state(self, state): ...


class WithoutOptimizer(Own):
    def configure_optimizers(self):
        return None


class MixtureWithoutOptimizer(PersonalizedMoE):
    configure_optimizers = WithoutOptimizer.configure_optimizers


def having(**parts):
    """A mixture whose local expert has something more."""
    module = model()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not part.requires_grad:
            module.local_expert.register_buffer(name, part)
        else:
            setattr(module.local_expert, name, part)
    return module


def of_one_expert():
    mixture = PersonalizedMoE(WithDropout())
    mixture.local_expert = mixture.global_expert
    return mixture


class TooFew(WithDropout):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (Several, r": its forward must return the scores as one tensor, and not a tuple\.$"),
        (WithDropout, "Federation: model is a WithDropout, but must be a LightningModule of lightning.pytorch, such"),
        (lambda: PersonalizedMoE, "model is the class PersonalizedMoE, but must be a LightningModule"),
        (lambda: PersonalizedMoE(WithState()), "expert._extra_state is 'a dict', but must be a tensor, because"),
        (MadeLater, "model is a MadeLater, but must be one that makes all layers in its constructor"),
        (Pretrained, r"Pretrained: setup is 'overridden', but must be moved .* it changes 'weight'\.$"),
        (PretrainedWithTrainer, r"WithTrainer: setup is 'overridden', .* never, and it changes 'weight'\.$"),
        (ShiftedLater, r"setup is 'overridden', .* evaluations never, and it changes 'shift'\.$"),
        (ScaledLater, r"configure_model is 'overridden', .* evaluations never, and it changes 'scale'\.$"),
        (Unconfigurable, r"without a Trainer it fails with Unconfigurable is not attached to a `Trainer`\.$"),
        (lambda: PersonalizedMoE(TooFew()), "one that gives a score for each of 3 classes"),
        (lambda: PersonalizedMoE(OwnNetwork(4, 3)), "mat1 and mat2 shapes cannot be multiplied"),
        (lambda: PersonalizedMoE(OwnNetwork(5, 2)), "one that gives a score for each of 3 classes"),
        (lambda: having(graph=torch.eye(3).to_sparse()), r"local_expert\.graph .*persistent=False"),
        (lambda: having(norm=nn.BatchNorm1d(3, track_running_stats=False)), "track_running_stats of local_expert.norm"),
        (lambda: having(lock=threading.Lock()), "PersonalizedMoE cannot be copied for each client: "),
        (lambda: having(x=2 * torch.ones(2, requires_grad=True)), "PersonalizedMoE cannot be copied for each client: "),
        (lambda: WithoutOptimizer(WithDropout(), None), "an optimizer, because Phase 'p' would train nothing"),
        (lambda: MixtureWithoutOptimizer(WithDropout()), "an optimizer, because Phase 'p' would train nothing"),
        (of_one_expert, r"'global_expert\.extractor\.0\.weight', but not 'local_expert\.extractor\.0\.weight'"),
    ],
)
def test_a_module_that_clients_cannot_train_is_refused(own, sentence, tmp_path):
    shared = "global_expert.*" if own is of_one_expert else "*"
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", FedAvg(shared))]).fit(own(), data())


def test_labels_that_begin_at_1_are_said_to_be_the_reason_why_there_are_too_few_scores(tmp_path):
    labelled = TensorData(torch.randn(8, 5), torch.arange(8) % 3 + 1, torch.arange(8).split(4))
    with pytest.raises(MisconfigurationException, match=r"4 classes, .* and no sample has class 0, with which labels"):
        federation(tmp_path, [Phase("p", FedAvg())]).fit(model(), labelled)


class SetUp(PersonalizedMoE):
    """Its setup changes nothing that it computes with; the gate is lazy, and the best accuracy so far is unknown."""

    best = float("nan")
    stage = None

    def setup(self, stage):
        self.best, self.stage = float("nan"), stage


def test_setup_that_changes_nothing_is_allowed(tmp_path):
    module = SetUp(WithDropout(), gate=LinearGate(), optimizer=sgd)
    federation(tmp_path, [Phase("p", FedAvg())]).check(module, data())


@pytest.mark.parametrize("trainable", ["local_expert.*", ["*gate*", "global_expert.extractor.0.*"]])
def test_a_tensor_is_trained_under_all_of_its_names_or_none(trainable, tmp_path):
    expert = WithDropout()
    phase, tied = Phase("p", FedAvg(trainable=trainable)), PersonalizedMoE(expert, gate=LinearGate(5))
    tied.local_expert = expert
    with pytest.raises(
        MisconfigurationException, match=r"trains '.*_expert\.extractor\.0\.weight', but not '.*_expert"
    ):
        federation(tmp_path, [phase]).fit(tied, data())
    expert.requires_grad_(False)
    check_phase(phase, tied, data(), 0)


class Regression(LightningModule):
    """A module without a mixture's loss."""

    def __init__(self):
        super().__init__()
        self.global_expert = torch.nn.Linear(5, 1)

    def loss(self, batch):
        return (self.global_expert(batch[0]) - batch[1]).square().mean(), {}

    def configure_optimizers(self):
        return sgd(self.parameters())


def numbers():
    return TensorData(torch.randn(8, 5), torch.randn(8, 1), torch.arange(8).split(4))


ONE_VALIDATES = partial(blobs, (13, 1), validation_fraction=0.2)
AVERAGED = Train(trainer={"callbacks": StochasticWeightAveraging(0.1)})
EACH_BATCH = "step_of_each_batch"
MISSING = [
    ("all_clients", "clients_per_round", {"clients_per_round": 2}),
    ("every_client", "clients", {"clients": [0, 2]}),
    ("validation_samples", "validation_fraction", {}),
    ("validation_samples_of_each", "validation_fraction", {}, mixture, ONE_VALIDATES),
    (EACH_BATCH, "train.trainer.accumulate_grad_batches", {"train": Train(trainer={"accumulate_grad_batches": 2})}),
    (EACH_BATCH, "train.callbacks", {"train": Train(callbacks=[GradientAccumulationScheduler({0: 1, 3: 2})])}),
    (EACH_BATCH, "train.trainer.callbacks", {"train": AVERAGED}),
    ("classes", "algorithm", {}, Regression, numbers),
    ("loss_of_outputs", "algorithm", {}, Regression, numbers),
    ("plain_steps", "train.trainer.gradient_clip_val", {"train": Train(trainer={"gradient_clip_val": 1.0})}),
    ("fresh_optimizers", "train.keep_optimizer", {"train": Train(keep_optimizer=True), "rounds": 2}),
    ("fixed_gate", "gate", {"gate": LinearGate(5)}),
    ("own_server_step", "server_optimizer", {"server_optimizer": sgd}),
    ("own_server_step", "aggregation", {"aggregation": CoordinateMedian()}),
]


@pytest.mark.parametrize("missing", MISSING)
def test_what_an_algorithm_declares_to_need_is_refused_where_it_is_missing(tmp_path, missing):
    need, argument, arguments, module, samples = (*missing, mixture, blobs)[:5]
    algorithm = FedAvg()
    algorithm.needs = (need,)
    with pytest.raises(InvalidArgumentError) as error:
        run([Phase("p", algorithm, evaluate=False, **arguments)], module(), samples(), tmp_path)
    assert error.value.argument == argument and error.value.because.startswith("FedAvg needs")


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        torch.rand(1)
        return super().step(closure)


def test_the_trial_of_a_kept_optimizer_draws_no_random_numbers():
    module, before = mixture(optimizer=partial(Noisy, lr=0.1)), torch.get_rng_state()
    check_kept_optimizers(Phase("p", FedAvg(), rounds=2, train=Train(keep_optimizer=True)), module, None)
    assert torch.equal(torch.get_rng_state(), before)


class Transfers(PersonalizedMoE):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return -batch[0], batch[1]


def test_a_hook_that_changes_batches_is_refused_where_clients_are_evaluated(tmp_path):
    module = Transfers(model().global_expert, gate=LinearGate(5), optimizer=sgd)
    with pytest.raises(InvalidArgumentError) as error:
        federation(tmp_path, [Phase("p", FedAvg())]).fit(module, data())
    assert (error.value.owner, error.value.argument) == ("Transfers", "on_after_batch_transfer")
    federation(tmp_path, [Phase("p", FedAvg(), evaluate=False)]).fit(module, data())


def test_a_client_without_a_validation_sample_is_named_where_it_waits_for_its_loss(tmp_path):
    train = Train(lr_scheduler=BY_VALIDATION, trainer={"limit_val_batches": 1.0})
    samples = blobs((12, 1, 9), dtype=torch.float32, validation_fraction=0.3)
    with pytest.raises(InvalidArgumentError, match="client 1 has no sample for it"):
        federation(tmp_path, [Phase("p", FedAvg(), train=train)]).fit(model(), samples)


class Logging(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("own", 1.0)


class LogsItself(PersonalizedMoE):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch)[0])


OWN = {
    "a callback's metric": (PersonalizedMoE, [Logging(), EarlyStopping("own")], {}),
    "a function's metric": (
        PersonalizedMoE,
        [LambdaCallback(on_train_epoch_end=lambda trainer, module: module.log("own", 1.0)), EarlyStopping("own")],
        {},
    ),
    "a module's metric": (LogsItself, [EarlyStopping("val_loss")], {"limit_val_batches": 1.0}),
    "a logger's metric": (PersonalizedMoE, [EarlyStopping("train_loss")], {"logger": True}),
    "none that must exist": (PersonalizedMoE, [EarlyStopping("val_loss", strict=False)], {}),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.few(1)
def test_early_stopping_may_wait_for_whatever_is_logged(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # clients log below it
    kind, callbacks, trainer = OWN[name]
    phase = Phase("p", FedAvg(), train=Train(callbacks=callbacks, trainer=trainer))
    module, samples = kind(WithDropout(), optimizer=sgd), data(validation_fraction=0.3)
    federation(tmp_path, [phase], failures=ClientFailures("raise")).fit(module, samples)


class InTrainMode(FedAvg):
    frozen_train_mode = True


HEAD = "*.classifier.*"


@pytest.mark.parametrize(
    ("algorithm", "is_refused"),
    [(FedAvg(trainable=HEAD), True), (InTrainMode(trainable=HEAD), False), (FedAvg(), False)],
    ids=["frozen", "frozen in train mode", "trained"],
)
def test_averaging_that_resets_the_statistics_of_frozen_batch_normalization_is_refused(algorithm, is_refused, tmp_path):
    """Frozen parts are in eval mode, in which nothing is estimated: they would keep a mean of 0 and a variance of 1."""
    phase = Phase("p", algorithm, train=Train(callbacks=[StochasticWeightAveraging(0.1)]))
    module = PersonalizedMoE(WithBatchNorm(), optimizer=sgd).double()
    sentence = (
        r"'StochasticWeightAveraging', but must be left out, .* of 'global_expert\.extractor\.1', which is frozen"
    )
    with pytest.raises(InvalidArgumentError, match=sentence) if is_refused else nullcontext():
        federation(tmp_path, [phase]).check(module, blobs())


SIZES = (13, 2, 30)  # without validation samples, 3, 1 and 6 batches of them; these have one


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"limit_train_batches": 0.5}, "limit_train_batches is 0.5, .* because client 1 has 1, and none is left"),
        ({"limit_val_batches": 0.9}, "limit_val_batches is 0.9, .* because client 0 has 1, and none is left"),
        ({"limit_val_batches": 1.0, "val_check_interval": 2}, "val_check_interval is 2, .* from 1 to 1, .*client 1 "),
        ({"limit_val_batches": 1.0, "val_check_interval": 0}, "val_check_interval is 0, .* from 1 to 1"),
        ({"limit_val_batches": 1.0, "check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0, "),
    ],
)
def test_a_client_with_few_batches_is_named_where_a_trainer_s_argument_asks_for_more(trainer, sentence, tmp_path):
    samples = blobs(SIZES, dtype=torch.float32, validation_fraction=0.2)
    for setting in ({"train": Train(trainer=trainer)}, {}):
        key = "train.trainer" if setting else "trainer"
        with pytest.raises(InvalidArgumentError, match=rf"^Phase 'p': {key}\.{sentence}"):
            common = {"accelerator": "cpu"} | ({} if setting else trainer)
            federation(tmp_path, [Phase("p", FedAvg(), **setting)], trainer=common).fit(model(), samples)
    assert not list(tmp_path.rglob("version_*"))
    phase = Phase("p", FedAvg(), train=Train(trainer={**trainer, "fast_dev_run": True}))
    federation(tmp_path, [phase]).fit(model(), samples)  # with one batch of each


@pytest.mark.parametrize(
    "trainer",
    [
        {"val_check_interval": 1},
        {"val_check_interval": 0.5},
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
    ],
)
def test_clients_validate_as_often_as_their_batches_allow(trainer, tmp_path):
    samples = blobs(SIZES, dtype=torch.float32, validation_fraction=0.2)
    phase = Phase("p", FedAvg(), train=Train(trainer={"limit_val_batches": 1.0, **trainer}, max_epochs=2))
    assert federation(tmp_path, [phase], failures=ClientFailures("raise")).fit(model(), samples)


class LeavesOneOut(FedAvg):
    def client_samples(self, client):
        return client.samples[: 0 if client.id == 1 else None]


def test_a_client_that_trains_on_none_of_its_samples_is_named(tmp_path):
    sentence = "^Phase 'p': client_samples of LeavesOneOut gives client 1 no sample"
    with pytest.warns(UserWarning, match=sentence):
        federation(tmp_path, [Phase("p", LeavesOneOut())]).check(model(), data())


def test_the_check_of_a_run_refuses_what_its_backend_cannot_train(tmp_path):
    run = federation(tmp_path, [Phase("p", FedAvg())], backend=StackedBackend())
    with pytest.raises(MisconfigurationException, match=r"^Phase .p.: StackedBackend cannot stack the clients"):
        run.check(Own(WithDropout(), sgd), data())


def test_batches_are_those_of_the_samples_that_the_algorithm_trains_on(tmp_path):
    """The gate's quarter of 16 samples makes one batch of 4, and the rest makes 3."""
    few = Train(trainer={"limit_train_batches": 0.4})
    tuned = Phase("tuned", FineTuning(gate_fraction=0.25), gate=LocalOnly(), train=few)
    gated = Phase("gated", PFLMoE(), gate=LinearGate(5), train=few)
    run = federation(tmp_path, [Phase("p", FedAvg("global_expert.*")), tuned, gated])
    with pytest.raises(InvalidArgumentError, match=r"^Phase 'gated': .*limit_train_batches is 0\.4, .*has 1, and none"):
        run.fit(model(), blobs((16, 16), dtype=torch.float32))


@pytest.mark.parametrize(
    ("limits", "callbacks"),
    [({"max_steps": 2}, []), ({}, [EarlyStopping("validation_loss", patience=0, min_delta=100)])],
)
def test_a_scheduler_may_have_fewer_steps_than_epochs_if_training_may_end_early(limits, callbacks, tmp_path):
    trainer = {"limit_val_batches": 1.0, **limits}
    scheduler = partial(OneCycleLR, max_lr=1, total_steps=2)
    train = Train(lr_scheduler=scheduler, max_epochs=9, trainer=trainer, callbacks=callbacks)
    run = federation(tmp_path, [Phase("p", FedAvg(), train=train)], failures=ClientFailures("raise"))
    run.fit(model(), data(validation_fraction=0.3))


def test_every_need_is_checked_but_that_of_the_number_of_rounds():
    of_all_phases = {"whole_batches"}  # in backends/test_distributed.py
    assert {need for need, *_ in MISSING} == {*get_args(Need)} - {"fixed_rounds"} - of_all_phases


TRAINERS = [
    ("accelerator", {"accelerator": "gpuu"}),
    ("accelerator is 'tpu', but must be", {"accelerator": "tpu"}),
    (r"devices is \[0\], but must be", {"devices": [0]}),
    ("devices", {"devices": 10**9}),
    ("max_epochs", {"max_epochs": None}),
    ("max_epochs", {"max_epochs": 10**9 + 1}),
    ("strategy", {"strategy": "ddp_spawn"}),
    ("num_nodes", {"num_nodes": 2}),
    ("precision", {"precision": "bf16-true"}),
    *(("accumulate_grad_batches", {"accumulate_grad_batches": value}) for value in (-1, 0, 2.5)),
    *(("overfit_batches.*limit_train_batches", {"overfit_batches": value}) for value in (1, 0.5)),
    ("limit_test_batches is 2, but must be left out, because evaluations are of all", {"limit_test_batches": 2}),
    ("limit_predict_batches", {"limit_predict_batches": 0.5}),
    ("limit_train_batches is 0, but must be above 0, or left out, because no client would", {"limit_train_batches": 0}),
    ("max_steps is 0", {"max_steps": 0}),
    ("max_time is '00:00:00:00", {"max_time": "00:00:00:00"}),
    ("max_time is {'seconds': -1", {"max_time": {"seconds": -1}}),
    ("max_epoch is 3, but must be left out, because it is not an argument of Trainer .max_epochs is", {"max_epoch": 3}),
]


@pytest.mark.parametrize(("argument", "arguments"), TRAINERS)
def test_a_trainer_that_no_client_can_have_is_refused(argument, arguments):
    with pytest.raises(MisconfigurationException, match=rf"[t ]rainer\b.*\b{argument}\b"):
        check_trainer({**LEAN_TRAINER, "accelerator": "cpu", "max_epochs": 1, **arguments})


@pytest.mark.parametrize("off", [0, 0.0])
def test_a_trainer_that_overfits_no_batches_is_allowed(off):
    assert check_trainer({**LEAN_TRAINER, "accelerator": "cpu", "devices": 1, "overfit_batches": off})


@pytest.mark.parametrize("strategy", ["single_device", SingleDeviceStrategy("cpu")], ids=["its name", "a strategy"])
def test_the_check_of_a_trainer_leaves_its_arguments_as_they_are(strategy):
    for _ in range(2):
        assert (
            check_trainer({**LEAN_TRAINER, "accelerator": "cpu", "devices": 2, "strategy": strategy})
            == [torch.device("cpu")] * 2
        )


class WithOwnOptimizer(PersonalizedMoE):
    def configure_optimizers(self):
        return sgd(self.parameters())


def test_noise_on_parameters_that_nobody_trains_is_refused(tmp_path):
    algorithm = FedAvg("global_expert.*", trainable="global_expert.classifier.*")
    phase = Phase("p", algorithm, gate=GlobalOnly(), aggregation=DifferentialPrivacy(1.0, 1.0, 0.01))
    with pytest.raises(InvalidArgumentError, match=r"nobody trains 'global_expert\.extractor.*'; do not share that"):
        federation(tmp_path, [phase]).fit(model(), data())


class WithMoreOptimizer(PersonalizedMoE):
    def configure_optimizers(self):
        configured = super().configure_optimizers()
        configured["optimizer"].param_groups[0]["weight_decay"] = 0.1
        return configured


def test_a_phase_s_optimizer_and_scheduler_are_used_by_a_configure_optimizers_that_extends_the_mixture_s():
    train = Train(optimizer=sgd, lr_scheduler=partial(StepLR, step_size=1))
    phase = Phase("p", FedAvg("global_expert.*"), train=train)
    module = phase_module(WithMoreOptimizer(WithDropout(), optimizer=torch.optim.Adam), phase)
    assert isinstance(module.configure_optimizers()["optimizer"], SGD)


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_a_phase_s_optimizer_is_refused_where_a_mixture_has_its_own(name, tmp_path):
    factory = {"optimizer": sgd, "lr_scheduler": partial(StepLR, step_size=1)}[name]
    phase = Phase("p", FedAvg("global_expert.*"), train=Train(**{name: factory}))
    with pytest.raises(InvalidArgumentError, match=f"^Phase 'p': train.{name} is 'given', but must be left out"):
        federation(tmp_path, [phase]).fit(WithOwnOptimizer(WithDropout(), optimizer=sgd), data())


class WithOwnLoss(PersonalizedMoE):
    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return 2 * loss, metrics


@pytest.mark.parametrize(("algorithm", "calls_it"), [(FedAvg(), True), (FedProx(0.1), True), (PerFedAvg(), False)])
def test_algorithms_that_would_not_call_a_mixture_s_own_loss_are_refused(algorithm, calls_it, tmp_path):
    phase = Phase("p", algorithm, gate=GlobalOnly())
    module = WithOwnLoss(WithDropout(), optimizer=sgd)
    if calls_it:
        return check_phase(phase, module, data(), 0)
    with pytest.raises(InvalidArgumentError, match=r"^Phase 'p': algorithm is a PerFedAvg, .* skip WithOwnLoss\.loss"):
        check_phase(phase, module, data(), 0)


def test_a_job_of_slurm_with_several_tasks_is_told_what_to_ask_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(InvalidArgumentError, match=r"^SLURM: --ntasks is 2, but must be 1, because .*--cpus-per-task"):
        federation(tmp_path).fit(model(), data())
