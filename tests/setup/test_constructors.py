"""A user's class whose constructor does not call the base's is refused in one sentence, before any training."""

import inspect

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fedmoe_pl import Federation, Phase
from fedmoe_pl.aggregation import TrimmedMean
from fedmoe_pl.algorithms import FedAvg, FedProx
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends import RayBackend, StackedBackend
from fedmoe_pl.callbacks import AccuracyMonitor
from fedmoe_pl.checks import InvalidArgumentError, check_made
from fedmoe_pl.cli.help import _known_subclasses
from fedmoe_pl.cli.kinds import KINDS
from fedmoe_pl.data import Digits, Dirichlet, Partitioner
from fedmoe_pl.models import Gate, PersonalizedMoE, SmallMLP


def forgetful(base):
    """A class with a constructor of its own, which calls no other."""
    methods = (
        {name: lambda self, *arguments: None for name in base.__abstractmethods__} if inspect.isabstract(base) else {}
    )
    return type("Mine", (base,), {"__init__": lambda self: vars(self).update(mine=1), **methods})()


@pytest.mark.parametrize(
    ("base", "argument", "give"),
    [
        (Algorithm, "algorithm", lambda each: Phase("A", each)),
        (FedProx, "algorithm", lambda each: Phase("A", each)),
        (TrimmedMean, "aggregation", lambda each: Phase("A", FedAvg(), aggregation=each)),
        (StackedBackend, "backend", lambda each: Federation([Phase("A", FedAvg())], backend=each)),
        (AccuracyMonitor, "callbacks", lambda each: Federation([Phase("A", FedAvg())], callbacks=[each])),
        (Dirichlet, "partitioner", lambda each: Digits(num_clients=2, partitioner=each)),
        (Digits, "datamodule", lambda each: Federation([Phase("A", FedAvg())]).fit(PersonalizedMoE(SmallMLP()), each)),
        (Gate, "gate", lambda each: PersonalizedMoE(SmallMLP(), gate=each)),
        (Gate, "gate", lambda each: Phase("A", FedAvg(), gate=each)),
        (torch.nn.Module, "global_expert", lambda each: PersonalizedMoE(each)),
    ],
)
def test_a_constructor_that_does_not_call_its_base_s_is_refused(base, argument, give):
    with pytest.raises(
        InvalidArgumentError, match=rf"{argument} is a Mine, but .* calls super\(\).__init__\(\), because"
    ):
        give(forgetful(base))


@pytest.mark.parametrize("kind", KINDS)
def test_no_class_of_the_package_that_is_made_is_refused(kind):
    others = (torch.nn.Module, Optimizer, RayBackend)  # Ray is optional
    for each in (each for each in KINDS[kind] if not issubclass(each, others)):
        parameters = inspect.signature(each).parameters.values()
        if all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
            check_made("it", "is", each())


class _Hint:
    def __init__(self, kind):
        self._typehint = kind


@pytest.mark.parametrize("kind", [Algorithm, Partitioner, StackedBackend.__base__, LightningModule])
def test_help_lists_the_package_s_public_classes_only(kind):
    shown = _known_subclasses(_Hint(kind)).removeprefix(", known subclasses: ").split(", ")
    own = {path.rpartition(".")[2] for path in shown if path.startswith("fedmoe_pl.")}
    public = {each.__name__ for classes in KINDS.values() for each in classes if issubclass(each, kind)}
    assert public <= own and all(path.count(".") <= 2 for path in shown if "fedmoe_pl" in path)
