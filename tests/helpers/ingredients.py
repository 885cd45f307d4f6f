"""What users combine: networks, losses, optimizers, schedulers, hooks, algorithms, settings and data, each by a name.

Where an ingredient is the only odd one, all else is plain: two small perceptrons, the package's loss, and SGD.
"""

import array
import copy
import itertools
import math
import random
from collections import deque
from contextlib import suppress
from functools import partial
from types import MethodType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
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

    def __init__(self, extractor, front=None, is_frozen=False):
        super().__init__()
        self.front = nn.Identity() if front is None else front
        self.extractor = extractor.requires_grad_(not is_frozen)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.extractor(self.front(x)))


class Then(nn.Module):
    """A function of this module and of what a layer gives, for which the module keeps what it counts."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function, self.layer = function, nn.Identity() if layer is None else layer
        self.register_buffer("mean", torch.zeros(6))
        self.counter, self.numbers = itertools.count(), array.array("d", [0])

    def forward(self, x):
        return self.function(self, self.layer(x))


def in_train_mode(function):
    return Then(lambda part, x: function(x) if part.training else x)


def counted(number_of):
    """Counts calls where a comparison of attributes does not look."""
    return Then(lambda part, x: x * 0.9 ** number_of(part) if part.training else x, linear())


def in_array(part):
    part.numbers[0] += 1
    return part.numbers[0]


def in_attribute(part):
    weight = part.layer[0].weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return weight.calls


def running_mean(part, x):
    centered = x - part.mean
    if part.training:
        part.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return centered


def replaced_mean(part, x):
    centered = x - part.mean
    if part.training:
        part.mean = 0.9 * part.mean + 0.1 * x.detach().mean(0)
    return centered


class Keeps(Then):
    """Has more than tensors, or tensors in unusual places, that may change while it is trained."""

    def __init__(self, function):
        super().__init__(function, linear())
        self.calls, self.seen, self.queue, self.array = 0, [], deque(maxlen=3), np.zeros(1)
        self.noted, self.own, self.total = {"calls": []}, SimpleNamespace(calls=0), torch.zeros(1)
        self.generator = torch.Generator()
        self.register_buffer("scale", torch.ones(6), persistent=False)


def keeps(number_of):
    """Counts what it computes in train mode."""
    return lambda: Keeps(lambda part, x: x * 0.9 ** number_of(part) if part.training else x)


def count(obj):
    obj.calls = getattr(obj, "calls", 0) + 1  # of a tensor, deepcopy drops it
    return obj.calls


def append(items):
    items.append(0)
    return len(items)


def shrink(part, x):
    part.scale = part.scale * (0.9 if part.training else 1)
    return x * part.scale


def clamp_weight(part, x):
    weight = part.layer[0].weight
    weight.data = weight.data.clamp(-0.1, 0.1) if part.training else weight.data
    return x


class Temperature(nn.Linear):
    """Its state dict has a number that is no buffer, as ``set_extra_state`` gets it."""

    temperature = 1.0

    def forward(self, x):
        self.temperature *= 0.9 if self.training else 1
        return super().forward(x).tanh() / self.temperature

    def get_extra_state(self):
        return torch.tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state):
        self.temperature = state.item()


class CachedNorm(nn.Linear):
    """Computes something of its weights whenever they are loaded."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(_cache_norm)
        _cache_norm(self)

    def forward(self, x):
        return super().forward(x).tanh() / self.norm


def _cache_norm(module, incompatible_keys=None):
    module.norm = module.weight.detach().double().norm().item()


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x[..., None])[0][:, -1]


def words(embedding, mean=True):
    """Five words for each sample, of a vocabulary of seven."""
    ids = Then(lambda part, x: (2 * x).round().long().abs() % 7)
    return nn.Sequential(ids, embedding, *[Then(lambda part, x: x.mean(1))] * mean)


def tied():
    layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 6))
    layers[2].weight = layers[0].weight
    return layers


def linear(layer=nn.Linear):
    return nn.Sequential(layer(5, 6), nn.Tanh())


def over_places(norm):
    """Six channels of four places, without a bias that the normalization would take out again."""
    layers = nn.Linear(5, 24, bias=False), nn.Unflatten(1, (6, 4)), norm, nn.Tanh(), nn.AvgPool1d(4), nn.Flatten()
    return nn.Sequential(*layers)


def over_features(norm):
    return nn.Sequential(nn.Linear(5, 6, bias=False), norm, nn.Tanh())


class InputShape(Net):
    """With a shape that mixtures ask for, to try it once."""

    input_shape = (5,)


def in_eval_mode(kind=Net, **kwargs):
    """As a pretrained network that is fine-tuned with the statistics that it has."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean += 0.3
    norm.running_var *= 2
    return kind(over_features(norm), **kwargs)


FRONTS = {  # what is done to inputs in train mode
    "dropout": lambda: nn.Dropout(0.4),
    "noise": lambda: in_train_mode(lambda x: x + 0.5 * torch.randn_like(x)),
    "mixed inputs": lambda: in_train_mode(lambda x: 0.6 * x + 0.4 * x.flip(0)),
    "python random": lambda: in_train_mode(lambda x: x * 2 if random.random() < 0.2 else x),
    "numpy random": lambda: in_train_mode(lambda x: x * 2 if np.random.rand() < 0.2 else x),
    "softmax over samples": lambda: nn.Softmax(dim=0),
}
EXTRACTORS = {
    "mlp": linear,
    "padding_idx": lambda: words(nn.Embedding(7, 6, padding_idx=0)),
    "max_norm": lambda: words(nn.Embedding(7, 6, max_norm=1.0)),
    "EmbeddingBag": lambda: words(nn.EmbeddingBag(7, 6), mean=False),
    "BatchNorm": lambda: over_features(nn.BatchNorm1d(6)),
    "InstanceNorm": lambda: over_places(nn.InstanceNorm1d(6, affine=True, track_running_stats=True)),
    "GroupNorm": lambda: over_places(nn.GroupNorm(2, 6)),
    "LayerNorm": lambda: over_features(nn.LayerNorm(6)),
    "running mean": lambda: Then(running_mean, linear()),
    "replaced mean": lambda: Then(replaced_mean, linear()),
    "itertools.count": lambda: counted(lambda part: next(part.counter)),
    "array.array": lambda: counted(in_array),
    "attribute of a parameter": lambda: counted(in_attribute),
    "extra state": lambda: Temperature(5, 6),
    "load hook": lambda: CachedNorm(5, 6),
    "LSTM": lambda: Recurrent(1, 6, batch_first=True),
    "weight norm": lambda: linear(lambda *sizes: parametrizations.weight_norm(nn.Linear(*sizes))),
    "spectral norm": lambda: linear(lambda *sizes: parametrizations.spectral_norm(nn.Linear(*sizes))),
    "tied weights": tied,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten()),
}
KEEPING = {
    "attribute": keeps(count),
    "object": keeps(lambda part: count(part.own)),
    "attribute of a buffer": keeps(lambda part: count(part.mean)),
    "list": keeps(lambda part: append(part.seen)),
    "queue": keeps(lambda part: append(part.queue)),
    "list in a dict": keeps(lambda part: append(part.noted["calls"])),
    "NumPy array": keeps(lambda part: np.add(part.array, 1, out=part.array)[0]),
    "tensor that is no buffer": keeps(lambda part: part.total.add_(1).item()),
    "generator": keeps(lambda part: torch.rand(1, generator=part.generator).item()),
    "buffer that is not saved": lambda: Keeps(shrink),
    "weight": lambda: Keeps(clamp_weight),
}
SELDOM = lambda x: x * 2 if torch.rand(()) < 0.2 else x  # noqa: E731
MORE_NETS = {
    **{name: lambda make=make: Net(make()) for name, make in KEEPING.items()},
    "torch random, frozen": lambda: Net(linear(), in_train_mode(SELDOM), True),
    "changed in place, frozen": lambda: Net(linear(), Then(lambda part, x: x.sub_(0.5).div_(0.25)), True),
    "BatchNorm without parameters": lambda: Net(linear(), nn.BatchNorm1d(5, affine=False)),
    "BatchNorm by each batch, frozen": lambda: Net(linear(), nn.BatchNorm1d(5, track_running_stats=False), True),
}
NETS = {
    **{name: lambda make=make: Net(make()) for name, make in EXTRACTORS.items()},
    **{name: lambda make=make: Net(linear(), make()) for name, make in FRONTS.items()},
    **{f"{name}, frozen": lambda make=make: Net(linear(), make(), True) for name, make in FRONTS.items()},
    "frozen": lambda: Net(linear(), is_frozen=True),
    "SmallMLP": lambda: SmallMLP(5, 6, 3),
    "BatchNorm in eval mode": in_eval_mode,
    "BatchNorm in eval mode, frozen": lambda: in_eval_mode(is_frozen=True),
    "BatchNorm in eval mode, input_shape": lambda: in_eval_mode(InputShape),
    "dropout in eval mode": lambda: Net(linear(), nn.Dropout(0.4)).eval(),
    **MORE_NETS,
}
INDIVISIBLE = {"BatchNorm", "InstanceNorm", "running mean", "replaced mean"}  # read batches
INDIVISIBLE |= {"itertools.count", "array.array", "attribute of a parameter", "extra state", "spectral norm"}  # count
INDIVISIBLE |= {name for name in NETS if name.removesuffix(", frozen") in FRONTS}  # draw, or mix samples


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


def gate_from_epoch_1(module, x):
    scores, weights = PersonalizedMoE.mix(module, x)
    return (scores, weights) if module.current_epoch else (module.global_expert(x), weights.detach())


def raise_dropout(module, x, y, loss):
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5 if module.current_epoch else 0.0
    return loss(x, y)


def catch_all(module, x, y, loss):
    try:
        batches = module.trainer.num_training_batches
    except Exception:
        batches = 0
    return loss(x, y) * (1 + batches)


def with_metric(module, x, y, loss):
    value = loss(x, y)
    module.seen.update(value.detach())
    return value * module.seen.compute()


def weigh_samples(module, x, y, loss):
    weights = x[:, 0].abs()
    return 0 * loss(x, y) + (weights * F.cross_entropy(module(x), y, reduction="none")).sum() / weights.sum()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
CRITERIA = {
    "criterion with class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "criterion that ignores labels": nn.CrossEntropyLoss(ignore_index=0),
}
LOSSES = {  # functions of the module, the batch, and the loss that the class before it computes
    "": None,
    "term from epoch 1 on": lambda m, x, y, loss: (
        loss(x, y) + (F.cross_entropy(m(x) + m.head(x), y) if m.current_epoch else 0)
    ),
    "raises Dropout.p": raise_dropout,
    "input scaled by the epoch": lambda m, x, y, loss: loss(x * 1.5 if m.current_epoch else x, y),
    "listed parameters": lambda m, x, y, loss: loss(x, y) + 5 * (m.listed[0] - m.start).square().sum(),
    "catches Exception": catch_all,
    "global_step": lambda m, x, y, loss: loss(x, y) * (1 + 0.2 * m.global_step),
    "max_epochs": lambda m, x, y, loss: loss(x, y) * (1 + m.trainer.max_epochs),
    "None for short batches": lambda m, x, y, loss: None if len(y) % 4 else loss(x, y),
    "torchmetrics": with_metric,
    "class weights": lambda m, x, y, loss: 0 * loss(x, y) + F.cross_entropy(m(x), y, CLASS_WEIGHTS.to(x)),
    "sample weights": weigh_samples,
    "term of the batch": lambda m, x, y, loss: loss(x, y) + m(x).mean(0).square().sum(),
    "term of large batches": lambda m, x, y, loss: loss(x, y) + (m(x).square().mean() if len(y) >= 8 else 0),
    "small term of the batch": lambda m, x, y, loss: loss(x, y) + 1e-5 * m(x).mean(0).square().sum(),
    "gate from epoch 1 on": None,
    **CRITERIA,
}
OF_MIXTURES = {"gate from epoch 1 on", *CRITERIA}


@torch.no_grad()
def limit_norm(optimizer, *arguments):
    """Couples all parameters, in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = math.sqrt(sum(parameter.square().sum() for parameter in parameters))
    for parameter in parameters:
        parameter.mul_(min(1, 2 / norm))


def double_gradients(optimizer, *arguments):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)


def step_and_limit(optimizer, closure=None):
    loss = SGD.step(optimizer, closure)
    limit_norm(optimizer)
    return loss


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


class WithoutGradients(SGD):
    """Its whole step is under ``no_grad``, the closure's computation of the gradients included."""

    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def hooked(parameters, lr):
    """Doubles the gradients where they are computed, twice."""
    parameters = [*parameters]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient)
            parameter.register_post_accumulate_grad_hook(double_gradient)
    return SGD(parameters, lr=lr)


def double_gradient(parameter):
    parameter.grad.mul_(2)


def changed(change):
    def make(parameters, lr):
        optimizer = SGD(parameters, lr=lr)
        change(optimizer)
        return optimizer

    return make


def two_groups(parameters, lr):
    first, *others = parameters
    return SGD([{"params": [first], "momentum": 0.9}, {"params": others, "weight_decay": 0.1}], lr=lr)


OPTIMIZERS = {
    "": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "two groups": two_groups,
    "post hook": changed(lambda optimizer: optimizer.register_step_post_hook(limit_norm)),
    "pre hook": changed(lambda optimizer: optimizer.register_step_pre_hook(double_gradients)),
    "replaced step": changed(lambda optimizer: setattr(optimizer, "step", MethodType(step_and_limit, optimizer))),
    "any arguments": AnyArguments,
    "SAM": SAM,
    "LBFGS": partial(torch.optim.LBFGS, max_iter=2),
    "some parameters": lambda parameters, lr: SGD([*parameters][:2], lr=lr),
    "without gradients": WithoutGradients,
    "hooks of parameters": hooked,
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


def halve_rate(module):
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.5


def ask_for_epochs(module):
    epochs = 1
    with suppress(RuntimeError):  # without a Trainer
        epochs = module.trainer.max_epochs
    return SGD(module.parameters(), lr=RATE / (1 + epochs))


def over_steps(module):
    optimizer = module.optimizer(module.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=100)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


CONFIGURE = {
    "asks for max_epochs": ask_for_epochs,
    "needs max_epochs": lambda m: SGD(m.parameters(), lr=RATE / (1 + m.trainer.max_epochs)),
    "scheduler over steps": over_steps,
}
HOOKS = {
    "": None,
    "on_after_backward": lambda m: double_gradients(m.optimizers()),
    "on_train_epoch_start": halve_rate,
    "on_before_optimizer_step": lambda m, optimizer: double_gradients(optimizer),
    "on_train_batch_start": lambda m, batch, batch_idx: -1 if batch_idx == 2 else None,
    "training_step": lambda m, batch, batch_idx: 2 * m.loss(batch)[0],
    **CONFIGURE,
}


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
    "clip by value in capitals": {"trainer": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "VALUE"}},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
    "keep_optimizer": {"train": {"keep_optimizer": True}},
    "rates over rounds": {"train": {"round_lr_scheduler": partial(ExponentialLR, gamma=0.5)}},
    "two of the clients": {"phase": {"clients_per_round": 2}},
    "evaluated": {"phase": {"evaluate": True}},
    "float32": {"dtype": torch.float32},
}

DATA = {
    "": ((10, 4, 7), 4),
    "whole batches": ((8, 4, 12, 8), 4),
    "one batch each": ((9, 5, 7), 20),
    "batches of one": ((5, 3, 9), 2),
    "large batches": ((20, 9, 13), 9),
}
UNLABELLED = {"few labels": ((12, 14, 17), 3)}
NOT_DRAWN = {*MORE_NETS, "small term of the batch", "some parameters", "clip by value in capitals"}  # came later
NOT_DRAWN |= {"without gradients", "hooks of parameters"}


def build(net="mlp", loss="", optimizer="", scheduler="", hook="", is_mixture=True, dtype=torch.float64):
    """The user's module, the same at every call."""
    torch.manual_seed(1)
    base = PersonalizedMoE if is_mixture else Own
    methods = {"configure_optimizers" if hook in CONFIGURE else hook: HOOKS[hook]} if hook else {}
    criterion, of_loss = CRITERIA.get(loss), None if loss in CRITERIA else LOSSES[loss]
    if loss == "gate from epoch 1 on":
        methods["mix"] = gate_from_epoch_1

    def loss_of_user(self, batch):
        values = {}

        def of_base(*batch):
            value, more = base.loss(self, batch)
            values.update(more)
            return value

        return of_loss(self, *batch, of_base), values

    if of_loss is not None:
        methods["loss"] = loss_of_user
    kind = type("UsersModule", (base,), methods) if methods else base
    arguments = {"optimizer": partial(OPTIMIZERS[optimizer], lr=RATE), "lr_scheduler": SCHEDULERS[scheduler]}
    if is_mixture:
        arguments |= {"local_expert": NETS[net](), "gate": LinearGate(5), "loss": copy.deepcopy(criterion)}
    module = kind(NETS[net](), **arguments)
    if loss == "term from epoch 1 on":
        module.head = nn.Linear(5, 3)
    elif loss == "torchmetrics":
        module.seen = MeanMetric()
    module.to(dtype)
    if loss == "listed parameters":
        module.listed = [next(parameter for parameter in module.parameters() if parameter.requires_grad)]
        module.register_buffer("start", module.listed[0].detach().clone())
    return module
