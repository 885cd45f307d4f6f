"""What users combine: networks, losses, optimizers, schedulers, hooks, algorithms, settings and data, each by a name.

Where an ingredient is the only odd one, all else is plain: two small perceptrons, the package's loss, and SGD.
"""

import array
import copy
import itertools
import math
import random
from contextlib import suppress
from functools import partial
from types import MethodType

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, StepLR
from torchmetrics import MeanMetric

from fedmoe_pl.algorithms import FedAvg, FedProx, FineTuning, PFLMoE
from fedmoe_pl.models import LinearGate, PersonalizedMoE, SmallMLP

RATE = 0.1


class Net(nn.Module):
    """5 values to 3 scores, by a front without parameters, an extractor of 6 features and a classifier."""

    def __init__(self, extractor: nn.Module, front: nn.Module | None = None, is_frozen=False):
        super().__init__()
        self.front = nn.Identity() if front is None else front
        self.extractor = extractor.requires_grad_(not is_frozen)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.extractor(self.front(x)))


class Function(nn.Module):
    """A function of the input and of whether the module is in train mode."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


class Extractor(nn.Module):
    """A linear layer; subclasses do something with its features (B, 6)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x).tanh())


class RunningMean(Extractor):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def then(self, features):
        centered = features - self.mean
        if self.training:
            self.update(features.detach().mean(0))
        return centered

    def update(self, mean):
        self.mean.mul_(0.9).add_(0.1 * mean)


class ReplacedMean(RunningMean):
    def update(self, mean):
        self.mean = 0.9 * self.mean + 0.1 * mean


class Growing(RunningMean):
    def then(self, features):
        self.mean = torch.cat((self.mean, self.mean[:1]))
        return features - self.mean[:6]


class CountsCalls(Extractor):
    """Keeps what it counts where a comparison of attributes does not look."""

    def __init__(self, where):
        super().__init__()
        self.where, self.counter, self.numbers = where, itertools.count(), array.array("d", [0])

    def then(self, features):
        if not self.training:
            return features
        if self.where == "count":
            number = next(self.counter)
        elif self.where == "array":
            number = self.numbers[0] = self.numbers[0] + 1
        else:
            number = self.layer.weight.calls = getattr(self.layer.weight, "calls", 0) + 1
        return features * 0.9**number


class Temperature(Extractor):
    """Its state dict has a number that is no buffer, as ``set_extra_state`` gets it."""

    temperature = 1.0

    def then(self, features):
        self.temperature *= 0.9 if self.training else 1
        return features / self.temperature

    def get_extra_state(self):
        return torch.tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state):
        self.temperature = state.item()


class CachedNorm(Extractor):
    """Computes something of its weights whenever they are loaded."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(_cache_norm)
        _cache_norm(self)

    def then(self, features):
        return features / self.norm


def _cache_norm(module, incompatible_keys=None):
    module.norm = module.layer.weight.detach().double().norm().item()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 6)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(x).tanh()).tanh())


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(1, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., None])[0][:, -1]


class Words(nn.Module):
    """Five words for each sample, of a vocabulary of seven."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding((2 * x).round().long().abs() % 7)
        return embedded.mean(1) if embedded.dim() == 3 else embedded


def noise(x, training):
    return x + 0.5 * torch.randn_like(x) if training else x


def mix_inputs(x, training):
    return 0.6 * x + 0.4 * x.flip(0) if training else x


def python_random(x, training):
    return x * 2 if random.random() < 0.2 else x


def numpy_random(x, training):
    return x * 2 if np.random.rand() < 0.2 else x


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh())


def over_places(norm) -> nn.Module:
    """Six channels of four places, without a bias that the normalization would take out again."""
    return nn.Sequential(
        nn.Linear(5, 24, bias=False), nn.Unflatten(1, (6, 4)), norm, nn.Tanh(), nn.AvgPool1d(4), nn.Flatten()
    )


def over_features(norm) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias=False), norm, nn.Tanh())


class InputShape(Net):
    """With a shape that mixtures ask for, to try it once."""

    input_shape = (5,)


def in_eval_mode(kind=Net, **kwargs) -> Net:
    """As a pretrained network that is fine-tuned with the statistics that it has."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean += 0.3
    norm.running_var *= 2
    return kind(over_features(norm), **kwargs)


NETS = {
    "mlp": lambda: Net(linear()),
    "SmallMLP": lambda: SmallMLP(5, 6, 3),
    "frozen": lambda: Net(linear(), is_frozen=True),
    "dropout": lambda: Net(linear(), nn.Dropout(0.4)),
    "dropout, frozen": lambda: Net(linear(), nn.Dropout(0.4), is_frozen=True),
    "noise, frozen": lambda: Net(linear(), Function(noise), is_frozen=True),
    "mixed inputs": lambda: Net(linear(), Function(mix_inputs)),
    "mixed inputs, frozen": lambda: Net(linear(), Function(mix_inputs), is_frozen=True),
    "python random": lambda: Net(linear(), Function(python_random)),
    "numpy random": lambda: Net(linear(), Function(numpy_random)),
    "padding_idx": lambda: Net(Words(nn.Embedding(7, 6, padding_idx=0))),
    "max_norm": lambda: Net(Words(nn.Embedding(7, 6, max_norm=1.0))),
    "EmbeddingBag": lambda: Net(Words(nn.EmbeddingBag(7, 6))),
    "BatchNorm": lambda: Net(over_features(nn.BatchNorm1d(6))),
    "BatchNorm in eval mode": in_eval_mode,
    "BatchNorm in eval mode, frozen": lambda: in_eval_mode(is_frozen=True),
    "BatchNorm in eval mode, input_shape": lambda: in_eval_mode(InputShape),
    "dropout in eval mode": lambda: Net(linear(), nn.Dropout(0.4)).eval(),
    "InstanceNorm": lambda: Net(over_places(nn.InstanceNorm1d(6, affine=True, track_running_stats=True))),
    "GroupNorm": lambda: Net(over_places(nn.GroupNorm(2, 6))),
    "LayerNorm": lambda: Net(over_features(nn.LayerNorm(6))),
    "running mean": lambda: Net(RunningMean()),
    "replaced mean": lambda: Net(ReplacedMean()),
    "growing buffer": lambda: Net(Growing()),
    "itertools.count": lambda: Net(CountsCalls("count")),
    "array.array": lambda: Net(CountsCalls("array")),
    "attribute of a parameter": lambda: Net(CountsCalls("attribute")),
    "extra state": lambda: Net(Temperature()),
    "load hook": lambda: Net(CachedNorm()),
    "LSTM": lambda: Net(Recurrent(nn.LSTM)),
    "GRU": lambda: Net(Recurrent(nn.GRU)),
    "weight norm": lambda: Net(nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh())),
    "spectral norm": lambda: Net(nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh())),
    "tied weights": lambda: Net(Tied()),
    "convolution": lambda: Net(nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten())),
}
DRAW = {"dropout", "dropout, frozen", "noise, frozen", "python random", "numpy random"}
READ_BATCHES = {"mixed inputs", "mixed inputs, frozen", "BatchNorm", "InstanceNorm", "running mean", "replaced mean"}
COUNT_STEPS = {"itertools.count", "array.array", "attribute of a parameter", "extra state", "spectral norm"}


class Own(LightningModule):
    """A user's module with a ``training_step``, and nothing that knows of federations."""

    def __init__(self, net, optimizer, lr_scheduler=None):
        super().__init__()
        self.net, self.optimizer, self.lr_scheduler = net, optimizer, lr_scheduler

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1]), {}

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0]

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}


class Loss:
    """Changes the loss of the class after it; ``change`` gets it with the batch."""

    def loss(self, batch):
        loss, values = super().loss(batch)
        return self.change(loss, *batch), values


class FromEpoch1(Loss):
    """Trains a head of its own from epoch 1 on."""

    def prepare(self):
        self.head = nn.Linear(5, 3).to(next(self.parameters()))

    def change(self, loss, x, y):
        return loss if self.current_epoch < 1 else loss + F.cross_entropy(self(x) + self.head(x), y)


class RaisesDropout:
    def loss(self, batch):
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.5 if self.current_epoch else 0.0
        return super().loss(batch)


class ScalesInput:
    def loss(self, batch):
        x, y = batch
        return super().loss((x * 1.5 if self.current_epoch else x, y))


class ListedParameters(Loss):
    """Pulls a parameter that is in a plain list towards its start."""

    def prepare(self):
        self.listed = [next(parameter for parameter in self.parameters() if parameter.requires_grad)]
        self.register_buffer("start", self.listed[0].detach().clone())

    def change(self, loss, x, y):
        return loss + 5 * (self.listed[0] - self.start).square().sum()


class CatchesAll(Loss):
    def change(self, loss, x, y):
        try:
            batches = self.trainer.num_training_batches
        except Exception:
            batches = 0
        return loss * (1 + batches)


class ReadsSteps(Loss):
    def change(self, loss, x, y):
        return loss * (1 + 0.2 * self.global_step)


class ReadsMaxEpochs(Loss):
    def change(self, loss, x, y):
        return loss * (1 + self.trainer.max_epochs)


class SkipsShort(Loss):
    def change(self, loss, x, y):
        return None if len(y) % 4 else loss


class WithMetric(Loss):
    def prepare(self):
        self.seen = MeanMetric()

    def change(self, loss, x, y):
        self.seen.update(loss.detach())
        return loss * self.seen.compute()


class ClassWeighted(Loss):
    def change(self, loss, x, y):
        return F.cross_entropy(self(x), y, torch.tensor([0.2, 1, 3]).to(x))


class SampleWeighted(Loss):
    def change(self, loss, x, y):
        weights = x[:, 0].abs()
        return (weights * F.cross_entropy(self(x), y, reduction="none")).sum() / weights.sum()


class OfBatch(Loss):
    def change(self, loss, x, y):
        return loss + self(x).mean(0).square().sum()


class OfLargeBatches(Loss):
    def change(self, loss, x, y):
        return loss + (self(x).square().mean() if len(y) >= 8 else 0)


class GateFromEpoch1:
    def mix(self, x):
        scores, weights = super().mix(x)
        return (scores, weights) if self.current_epoch else (self.global_expert(x), weights.detach())


LOSSES = {
    "": None,
    "term from epoch 1 on": FromEpoch1,
    "raises Dropout.p": RaisesDropout,
    "input scaled by the epoch": ScalesInput,
    "listed parameters": ListedParameters,
    "catches Exception": CatchesAll,
    "global_step": ReadsSteps,
    "max_epochs": ReadsMaxEpochs,
    "None for short batches": SkipsShort,
    "torchmetrics": WithMetric,
    "class weights": ClassWeighted,
    "sample weights": SampleWeighted,
    "term of the batch": OfBatch,
    "term of large batches": OfLargeBatches,
    "gate from epoch 1 on": GateFromEpoch1,
    "criterion with class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
    "criterion that ignores labels": nn.CrossEntropyLoss(ignore_index=0),
}
OF_MIXTURES = {"gate from epoch 1 on", "criterion with class weights", "criterion that ignores labels"}


@torch.no_grad()
def limit_norm(optimizer, *arguments):
    """Couples all parameters, in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = math.sqrt(sum(parameter.square().sum() for parameter in parameters))
    for parameter in parameters:
        parameter.mul_(min(1, 2 / norm))


@torch.no_grad()
def double_gradients(optimizer, *arguments):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)


def with_post_hook(parameters, lr):
    optimizer = SGD(parameters, lr=lr)
    optimizer.register_step_post_hook(limit_norm)
    return optimizer


def with_pre_hook(parameters, lr):
    optimizer = SGD(parameters, lr=lr)
    optimizer.register_step_pre_hook(double_gradients)
    return optimizer


def _step_and_limit(optimizer, closure=None):
    loss = SGD.step(optimizer, closure)
    limit_norm(optimizer)
    return loss


def with_replaced_step(parameters, lr):
    optimizer = SGD(parameters, lr=lr)
    optimizer.step = MethodType(_step_and_limit, optimizer)
    return optimizer


class Limited(SGD):
    step = _step_and_limit


class AnyArguments(SGD):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


class SAM(SGD):
    """Sharpness-aware minimization, which takes a closure where it gets one (https://arxiv.org/abs/2010.01412)."""

    def step(self, closure=None):
        if closure is None:
            return super().step()
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        offsets = [0.5 * parameter.grad for parameter in parameters]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, offset in zip(parameters, offsets, strict=True):
                    parameter.add_(offset, alpha=sign)
            if sign == 1:
                closure()
        super().step()
        return loss


def two_groups(parameters, lr):
    first, *others = parameters
    return SGD([{"params": [first], "momentum": 0.9}, {"params": others, "weight_decay": 0.1}], lr=lr)


OPTIMIZERS = {
    "": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "two groups": two_groups,
    "post hook": with_post_hook,
    "pre hook": with_pre_hook,
    "replaced step": with_replaced_step,
    "subclass": Limited,
    "any arguments": AnyArguments,
    "SAM": SAM,
    "LBFGS": partial(torch.optim.LBFGS, max_iter=2),
}


class LimitsNorm(ExponentialLR):
    def step(self, *arguments):
        super().step(*arguments)
        if self.last_epoch:
            limit_norm(self.optimizer)


SCHEDULERS = {
    "": None,
    "StepLR": partial(StepLR, step_size=1, gamma=0.5),
    "cosine": partial(CosineAnnealingLR, T_max=4),
    "touches parameters": partial(LimitsNorm, gamma=0.9),
}


class AfterBackward:
    def on_after_backward(self):
        double_gradients(self.optimizers())


class EpochStart:
    def on_train_epoch_start(self):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class BeforeStep:
    def on_before_optimizer_step(self, optimizer):
        double_gradients(optimizer)


class AsksForEpochs:
    def configure_optimizers(self):
        epochs = 1
        with suppress(RuntimeError):  # without a Trainer
            epochs = self.trainer.max_epochs
        return torch.optim.SGD(self.parameters(), lr=RATE / (1 + epochs))


class NeedsEpochs:
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE / (1 + self.trainer.max_epochs))


class OverSteps:
    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class EndsEpoch:
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class OwnStep:
    def training_step(self, batch, batch_idx):
        return 2 * self.loss(batch)[0]


HOOKS = {
    "": None,
    "on_after_backward": AfterBackward,
    "on_train_epoch_start": EpochStart,
    "on_before_optimizer_step": BeforeStep,
    "on_train_batch_start": EndsEpoch,
    "training_step": OwnStep,
    "asks for max_epochs": AsksForEpochs,
    "needs max_epochs": NeedsEpochs,
    "scheduler over steps": OverSteps,
}
CONFIGURE = {"asks for max_epochs", "needs max_epochs", "scheduler over steps"}


class TowardsReceived(FedAvg):
    """Compares scores with those of the model that the client received: a term without a gradient at the start."""

    def __init__(self, compare):
        super().__init__()
        self.compare = compare

    def client_init(self, client, sent):
        super().client_init(client, sent)
        return {"received": {name: tensor.clone() for name, tensor in sent.items()}}

    def client_loss(self, module, batch, constants):
        return super().client_loss(module, batch, constants) + self.term(module, batch, constants["received"])

    def term(self, module, batch, received):
        with torch.no_grad():
            copies = {name: tensor.clone() for name, tensor in received.items()}
            expected = functional_call(module, copies, (batch[0],))
        return self.compare(module(batch[0]), expected)


def distillation(scores, expected):
    return 3 * F.kl_div(scores.log_softmax(1), expected.softmax(1), reduction="batchmean")


def drift(scores, expected):
    return 3 * (scores.mean(0) - expected.mean(0)).square().sum()


class InTurn(FedAvg):
    """Trains the classifiers in even epochs, and all else in odd ones."""

    def is_trainable(self, name, round, epoch):
        return ("classifier" in name) == (epoch % 2 == 0)


def chain():
    shared = "global_expert.*"
    return FedAvg(shared, trainable=shared), FineTuning("local_expert.*", gate_fraction=0.25), PFLMoE(0.25)


ALGORITHMS = {
    "": lambda: (FedAvg(),),
    "uniform": lambda: (FedAvg(weighting="uniform"),),
    "FedPer": lambda: (FedAvg("*extractor.*"),),
    "shared classifiers": lambda: (FedAvg("*classifier.*"),),
    "FedProx": lambda: (FedProx(0.5),),
    "distillation": lambda: (TowardsReceived(distillation),),
    "drift": lambda: (TowardsReceived(drift),),
    "in turn": lambda: (InTurn(),),
    "classifiers only": lambda: (FedAvg(trainable="*classifier.*"),),
    "chain": chain,
}
OWN_LOSS = {"FedProx", "distillation", "drift"}

SETTINGS = {
    "": {},
    "clip by norm": {"trainer": {"gradient_clip_val": 0.1}},
    "clip by value": {"trainer": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
    "keep_optimizer": {"train": {"keep_optimizer": True}},
    "rates over rounds": {"train": {"round_lr_scheduler": partial(ExponentialLR, gamma=0.5)}},
    "two of the clients": {"phase": {"clients_per_round": 2}},
    "evaluated": {"phase": {"evaluate": True}},
    "float32": {"dtype": torch.float32},
}

DATA = {
    "": ((14, 6, 11), 4),
    "whole batches": ((8, 4, 12, 8), 4),
    "one batch each": ((9, 5, 7), 20),
    "batches of one": ((5, 3, 9), 2),
    "large batches": ((20, 9, 13), 9),
}


def build(net="mlp", loss="", optimizer="", scheduler="", hook="", is_mixture=True, dtype=torch.float64):
    """The user's module, the same at every call."""
    torch.manual_seed(1)
    of_loss, of_hook = LOSSES[loss], HOOKS[hook]
    criterion = of_loss if isinstance(of_loss, nn.Module) else None
    base = PersonalizedMoE if is_mixture else Own
    parts = [part for part in (of_hook, None if criterion else of_loss) if part is not None]
    kind = type("UsersModule", (*parts, base), {}) if parts else base
    arguments = {"optimizer": partial(OPTIMIZERS[optimizer], lr=RATE), "lr_scheduler": SCHEDULERS[scheduler]}
    if is_mixture:
        arguments |= {"local_expert": NETS[net](), "gate": LinearGate(5), "loss": copy.deepcopy(criterion)}
    module = kind(NETS[net](), **arguments).to(dtype)
    if hasattr(module, "prepare"):
        module.prepare()
    return module
