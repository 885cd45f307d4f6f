"""Models, losses and optimizers on which stacking or looking up would go wrong give what a plain Trainer gives."""

import random
from functools import partial, wraps

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import EveryBatch, Expert, TensorData, blobs, mixture, momentum_sgd, small_expert
from helpers.backends import begin, local_training, train, train_clients
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.stacked import StackedPlan
from fedmoe_pl.backends.stacked.members import StackedData
from fedmoe_pl.models import ConstantGate, LinearGate, PersonalizedMoE, ProxyGate, SmallMLP, SparseMoE

FROZEN = FedAvg("local_expert.classifier.*", "local_expert.classifier.*")
PLAIN = partial(torch.optim.SGD, lr=0.1)


class Changed(Expert):
    """An expert of which one call of ``change`` makes the input of the extractor, and that of the classifier."""

    def __init__(self, before=lambda self, x: x, after=lambda self, z: z, layer=None, **attributes):
        super().__init__()
        self.before, self.after = before, after
        vars(self).update(attributes)
        self.layer = nn.Identity() if layer is None else layer

    def forward(self, x):
        z = self.extractor(self.layer(self.before(self, x)))
        return self.classifier(self.after(self, z))


def with_expert(*arguments, gate=None, **attributes):
    return lambda: mixture(gate or ConstantGate(0.5), Changed(*arguments, **attributes))


def first(layer):
    """Both experts with a layer of their own in front."""
    return lambda: mixture(ConstantGate(0.5), Changed(layer=layer()))


def of_class(change, **made):
    """A mixture of a user's own, whose loss is changed."""

    class Own(PersonalizedMoE):
        def loss(self, batch):
            loss, values = super().loss(batch)
            return loss + change(self, batch, values), values

    def make():
        plain, other = mixture(LinearGate(5)), mixture(LinearGate(5))
        module = Own(other.global_expert, other.local_expert, other.gate, optimizer=momentum_sgd, **made).double()
        module.received = [plain]
        module.start = [p.detach().clone() for p in module.parameters()]
        return module

    return make


def pull(module, batch, values):
    """Zero at the start, as its gradient."""
    return sum((p - q).square().sum() for p, q in zip(module.parameters(), module.start, strict=True))


def by_epoch(module, batch, values):
    return values["logits"].square().mean() * (module.current_epoch > 0)


def swallowed(module, batch, values):
    try:
        return module.trainer.num_training_batches * values["logits"].square().mean()
    except Exception:
        return 0.0


def distilled(module, batch, values):
    """Towards the outputs of the received model: its gradient is zero at the start. It counts padding."""
    with torch.no_grad():
        plain = module.received[0](batch[0])
    return (values["logits"] - plain).square().sum(1).mean()


LATE = {
    "a pull to the start from a list": of_class(pull),
    "a loss of later epochs": of_class(by_epoch),
    "a question to the Trainer that is caught": of_class(swallowed),
    "distillation": of_class(distilled),
}


def stepping(change):
    """The mixture with an optimizer, or a scheduler, that a function has changed."""

    def make():
        module = mixture(LinearGate(5))
        module.optimizer = change
        return module

    return make


def pre_hook(parameters):
    optimizer = PLAIN(parameters)
    optimizer.register_step_pre_hook(lambda optimizer, *_: norm_of_all(optimizer))
    return optimizer


def post_hook(parameters):
    optimizer = PLAIN(parameters)
    optimizer.register_step_post_hook(lambda optimizer, *_: norm_of_all(optimizer))
    return optimizer


@torch.no_grad()
def norm_of_all(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.div_(1 + 0.1 * parameter.norm())


def replaced(parameters):
    optimizer = PLAIN(parameters)
    step = optimizer.step

    @wraps(step)
    def scaled(*arguments, **options):
        norm_of_all(optimizer)
        return step(*arguments, **options)

    optimizer.step = scaled
    return optimizer


class Touching(torch.optim.lr_scheduler.StepLR):
    def step(self, *arguments):
        if self.last_epoch >= 0:
            norm_of_all(self.optimizer)
        super().step(*arguments)


def scheduled(make_scheduler):
    def make():
        module = mixture(LinearGate(5), optimizer=PLAIN)
        module.lr_scheduler = make_scheduler
        return module

    return make


STEPS = {
    "a pre-hook": stepping(pre_hook),
    "a post-hook": stepping(post_hook),
    "a replaced step": stepping(replaced),
    "a scheduler that touches parameters": scheduled(partial(Touching, step_size=1)),
    "one inside another": scheduled(
        lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler([Touching(optimizer, 1)], optimizer)
    ),
}


def count(self, x):
    self.calls += 1
    return x * 0.9**self.calls


def note(self, x):
    next(self.parameters()).calls = calls = getattr(next(self.parameters()), "calls", 0) + 1
    return x * 0.9**calls


def listed(self, x):
    self.seen.append(len(self.seen))
    return x * 0.9 ** len(self.seen)


def own_generator(self, x):
    return x * torch.rand(1, generator=self.own, dtype=x.dtype)


def unsaved(self, x):
    self.scale = self.scale * 0.9
    return x * self.scale


class Unsaved(Changed):
    def __init__(self):
        super().__init__(unsaved)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)


class Remembering(nn.Module):
    """A running mean of its own, of all samples, padding included."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x - self.mean


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x):
        return self.norm(x[:, None])[:, 0]


NETWORKS = {
    "Python's random numbers": with_expert(lambda self, x: x * random.choice([0.5, 1.5, 1.5, 1.5])),
    "NumPy's random numbers": with_expert(lambda self, x: x * np.random.choice([0.5, 1.5, 1.5, 1.5])),
    "functional dropout": with_expert(lambda self, x: F.dropout(x, 0.3, self.training)),
    "a generator of its own": lambda: with_expert(own_generator, own=torch.Generator().manual_seed(0))(),
    "a counter": with_expert(count, calls=0),
    "a list": lambda: with_expert(listed, seen=[])(),
    "an attribute of a parameter": with_expert(note),
    "a buffer that is not saved": lambda: mixture(ConstantGate(0.5), Unsaved()),
    "a running mean": first(Remembering),
    "running statistics of instances": first(Statistics),
    "spectral normalization": first(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))),
    "old spectral normalization": first(lambda: nn.utils.spectral_norm(nn.Linear(5, 5))),
    "weight normalization": first(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))),
    "group normalization": first(lambda: nn.GroupNorm(1, 5)),
    "a softmax over samples": first(lambda: nn.Softmax(dim=0)),
}


def hooked():
    module = mixture(LinearGate(5))
    module.global_expert.register_forward_hook(lambda part, inputs, output: output - output.mean(0))
    return module


OTHERS = {
    "a hook that sees the batch": hooked,
    "a criterion of the user's": lambda: PersonalizedMoE(
        Expert(), optimizer=PLAIN, task="multiclass", loss=lambda outputs, y: F.cross_entropy(outputs, y) / len(y)
    ).double(),
    "class weights": lambda: PersonalizedMoE(
        Expert(), optimizer=PLAIN, loss=nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]).double())
    ).double(),
}
STACKS = {
    **dict.fromkeys(("a pull to the start from a list", "distillation"), "explicit"),
    **dict.fromkeys(("a hook that sees the batch", "a criterion of the user's"), "explicit"),
    **dict.fromkeys(("a running mean", "running statistics of instances", "weight normalization"), "auto explicit"),
    **dict.fromkeys(("group normalization", "a softmax over samples", "class weights"), "auto explicit"),
}
CASES = LATE | STEPS | NETWORKS | OTHERS


def close(actual, expected):
    torch.testing.assert_close(actual[0].sent, expected[0].sent, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-9, atol=1e-10)


def seeded(make):
    torch.manual_seed(0)
    return make()


def assert_right_or_refused(make, algorithm, data, max_epochs=2, is_promised=True, **arguments) -> str:
    """``auto`` gives what a plain Trainer for each client gives; so does an explicit stack, or it is refused.

    Returns whether each stacks: "auto", "explicit", both or none.
    """

    def training(**callbacks):
        return local_training(seeded(make), algorithm, data, max_epochs, **arguments, **callbacks)

    expected = train(TrainerBackend(), training(callbacks=[EveryBatch()]))
    plan, stacks = begin(AutoBackend(), training()), ""
    if isinstance(plan, StackedPlan):
        close(train_clients(plan), expected)
        stacks = "auto "
    try:
        plan = begin(StackedBackend(), training())
    except MisconfigurationException:
        return stacks
    if is_promised:
        close(train_clients(plan), expected)
    return stacks + "explicit"


@pytest.mark.few(8)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of weight normalization
@pytest.mark.parametrize("name", CASES)
def test_a_plain_trainer_s_result_or_a_refusal(name):
    data = blobs((13, 8, 11))
    stacks = assert_right_or_refused(CASES[name], FedAvg(), data, is_promised=name not in LATE)
    assert stacks == STACKS.get(name, "")


class Words(Expert):
    """Reads ids of words, of which 0 is padding; ``look_up`` computes their embeddings."""

    def __init__(self, table, look_up=None):
        super().__init__(features=4)
        self.table, self.look_up = table, look_up or nn.Module.__call__

    def forward(self, x):
        return super().forward(self.look_up(self.table, x).flatten(1).unflatten(1, (-1, 4)).mean(1))


def words():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 6, (32, 3), generator=generator)
    x[torch.rand(32, 3, generator=generator) < 0.3] = 0
    data = TensorData(x, x.sum(1) % 3, torch.arange(32).split([13, 8, 11]), dtype=torch.int64, batch_size=4)
    data.setup()
    return data


def seldom_padded():
    """The first samples of each client, which are tried, have no padding."""
    data = words()
    for samples in data.train_samples:
        data.x[samples[:4]] = data.x[samples[:4]].clamp_min(1)
    return data


def padded(table, x):
    return F.embedding(x, table.weight, padding_idx=0)


TABLES = {
    "padding": (lambda: Words(nn.Embedding(6, 4, padding_idx=0)), ""),
    "padding of a function": (lambda: Words(nn.Embedding(6, 4), padded), ""),
    "a largest norm": (lambda: Words(nn.Embedding(6, 4, max_norm=0.5)), ""),
    "padding of bags": (lambda: Words(nn.EmbeddingBag(6, 4, padding_idx=0)), ""),
    "a plain table": (lambda: Words(nn.Embedding(6, 4)), "auto explicit"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_words(name):
    expert, stacks = TABLES[name]
    make = lambda: mixture(ConstantGate(0.5), expert())  # noqa: E731
    assert assert_right_or_refused(make, FedAvg(), seldom_padded(), max_epochs=3) == stacks


def layers(*first):
    """Experts of PyTorch's layers, so that short batches may be padded."""
    return lambda: mixture(
        LinearGate(5), nn.Sequential(*(layer() for layer in first), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    )


class Own(nn.Linear):
    """A layer of a user's own, of which one cannot know what it does with other samples."""


def balanced():
    embedding = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid())
    return SparseMoE(embedding, small_expert(), 2, gate=ProxyGate(2, 6), optimizer=PLAIN, load_balancing=0.3).double()


def with_class_to_ignore():
    loss = nn.CrossEntropyLoss(ignore_index=1)
    return PersonalizedMoE(SmallMLP(5, num_classes=3), optimizer=PLAIN, loss=loss).double()


PADDED = {
    "torch's layers": (layers(), True),
    "layers that treat samples apart": (layers(lambda: nn.LayerNorm(5), lambda: nn.GroupNorm(1, 5), nn.Identity), True),
    "the package's layers": (lambda: mixture(LinearGate(5), SmallMLP(5, num_classes=3)), True),
    "a layer of the user's": (layers(lambda: Own(5, 5)), False),
    "batch normalization": (layers(lambda: nn.BatchNorm1d(5)), False),
    "a softmax over samples": (layers(lambda: nn.Softmax(dim=0)), False),
    "a balance of experts over the batch": (balanced, False),
    "a loss of another class to ignore": (with_class_to_ignore, False),
}


@pytest.mark.parametrize("name", PADDED)
def test_short_batches_are_padded_only_where_samples_are_apart(name, monkeypatch):
    make, pads = PADDED[name]
    seen = []
    epoch = StackedData.epoch
    monkeypatch.setattr(StackedData, "epoch", lambda self, pads: seen.append(pads) or epoch(self, pads))
    assert assert_right_or_refused(make, FedAvg(), blobs((13, 8, 11))) == "auto explicit"
    assert {*seen} == {pads}


def noise(self, x):
    return x + torch.randn_like(x) if self.training else x


def mixed(self, x):
    return 0.5 * (x + x.flip(0)) if self.training else x


LOOKED_UP = {
    "dropout before": (with_expert(lambda self, x: F.dropout(x, 0.5, self.training), gate=ConstantGate(0)), False),
    "a layer of dropout before": (lambda: mixture(ConstantGate(0), Changed(layer=nn.Dropout(0.5))), False),
    "dropout in it, and after": (lambda: mixture(ConstantGate(0), Expert(dropout=0.5)), True),
    "noise before": (with_expert(noise, gate=ConstantGate(0)), False),
    "mixing before": (with_expert(mixed, gate=ConstantGate(0)), False),
    "dropout after": (with_expert(after=lambda self, z: F.dropout(z, 0.5, True), gate=ConstantGate(0)), True),
    "inputs that are changed in place": (
        with_expert(lambda self, x: x.sub_(0.5).div_(0.25), gate=ConstantGate(0)),
        False,
    ),
    "nothing": (lambda: mixture(ConstantGate(0)), True),
    **{
        f"a draw that seldom matters, of {name}": (
            with_expert(lambda self, x, draw=draw: x / 2 if draw() < 0.1 else x, gate=ConstantGate(0)),
            False,
        )
        for name, draw in (("PyTorch", lambda: torch.rand(())), ("NumPy", np.random.rand), ("Python", random.random))
    },
}


class Scaled(PersonalizedMoE):
    """Inputs that grow with the epoch."""

    def mix(self, x):
        try:
            return super().mix(x * (1 + self.trainer.current_epoch))
        except Exception:
            return super().mix(x)


def scaled():
    plain = mixture(ConstantGate(0))
    return Scaled(plain.global_expert, plain.local_expert, plain.gate, optimizer=momentum_sgd).double()


LOOKED_UP["inputs of an epoch"] = (scaled, False)


@pytest.mark.parametrize("name", LOOKED_UP)
def test_outputs_are_looked_up_only_where_steps_compute_them_from_samples(name, monkeypatch):
    make, looks_up = LOOKED_UP[name]
    data, found, find = blobs((13, 8, 11)), [], FeatureCache.find
    monkeypatch.setattr(FeatureCache, "find", lambda *arguments: found.append(find(*arguments)) or found[-1])
    expected = train(TrainerBackend(), local_training(make(), FROZEN, data, 3, callbacks=[EveryBatch()]))
    close(train(TrainerBackend(), local_training(make(), FROZEN, data, 3)), expected)
    assert {features is not None for features in found} == {looks_up}
    assert_right_or_refused(make, FROZEN, data, max_epochs=3)
