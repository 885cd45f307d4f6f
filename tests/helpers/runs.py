"""A short run of PFL-MoE and its baselines, what stops it, and how two of them are compared."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.models import ConstantGate, LinearGate
from helpers import blobs


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 3))

    def forward(self, x):
        return self.classifier(self.extractor(x))


def model(seed=0) -> PersonalizedMoE:
    torch.manual_seed(seed)
    return PersonalizedMoE(WithDropout(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))


def phases() -> list[Phase]:
    torch.manual_seed(1)  # as in a configuration, the phases' own gates follow from a seed
    return [
        Phase("Local", Local(), gate=ConstantGate(0.0)),
        Phase(
            "FedAvg",
            FedAvg("global_expert.*"),
            rounds=4,
            clients_per_round=2,
            gate=ConstantGate(1.0),
            select=Select("global_test"),
        ),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*", gate_fraction=0.25), gate=ConstantGate(0.0)),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(5), train=Train(max_epochs=3)),
    ]


def federation(path, phases=None, **kwargs) -> Federation:
    defaults = {
        "trainer": {"accelerator": "cpu"},
        "default_root_dir": path,
        "enable_progress_bar": False,
        "logger": False,
    }
    return Federation(phases or globals()["phases"](), **{**defaults, **kwargs})


def data(**kwargs):
    return blobs(dtype=torch.float32, **kwargs)


def assert_same(a, b):
    """Equal to the last bit, through dicts, lists, dataclasses and tensors; files of clients are read."""
    a, b = (dict(each) if isinstance(each, Mapping) else each for each in (a, b))
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif hasattr(a, "__dataclass_fields__"):
        assert_same(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)  # nan


class Kill(FederationCallback):
    """Stops the run at the n-th call of a hook."""

    def __init__(self, hook, n):
        setattr(self, hook, self.count)
        self.n = n

    def count(self, *arguments):
        self.n -= 1
        if self.n == 0:
            raise KeyboardInterrupt


class Notes(FederationCallback):
    """Notes what functions of the arguments of hooks give, at each call; the functions are given by the hook's name."""

    def __init__(self, **functions):
        self.noted = []
        for hook, function in functions.items():
            setattr(self, hook, lambda *arguments, function=function: self.noted.append(function(*arguments)))


def resumed_after(kill: Kill, make, model, data) -> Federation:
    """A run that was stopped, and went on from its last checkpoint with fresh objects, which the arguments make."""
    with pytest.raises(KeyboardInterrupt):
        make(callbacks=[kill]).fit(model(), data())
    run = make()
    run.fit(model(), data(), ckpt_path="last")
    return run
