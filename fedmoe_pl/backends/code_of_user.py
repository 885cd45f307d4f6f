"""Whose code runs in the steps of clients, because short cuts follow from what PyTorch and this package wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fedmoe_pl.backends.attributes import attributes, changed_attributes
from fedmoe_pl.backends.training import LocalTraining

_KNOWN = {"fedmoe_pl", "torch", "lightning", "numpy", "jsonargparse", *sys.stdlib_module_names}


def code_of_user(training: LocalTraining) -> str:
    """Names code outside experts and gates that neither PyTorch nor this package wrote; empty if there is none.

    Experts and gates may be anyone's, because a trial shows what they do. No trial can show this of other code, such
    as a loss: it may count its calls, or act differently in a later epoch.
    """
    algorithm = training.algorithm
    if any(map(_is_of_user, (type(algorithm), *vars(algorithm).values()))):
        return f"the algorithm {type(algorithm).__name__}"
    return _beside_algorithm(training)


def code_in_losses(training: LocalTraining) -> str:
    """Like ``code_of_user``, but of an algorithm only what computes losses."""
    if _is_of_user(type(training.algorithm).client_loss):
        return f"client_loss of {type(training.algorithm).__name__}"
    return _beside_algorithm(training)


def _beside_algorithm(training: LocalTraining) -> str:
    module, data = training.module, training.datamodule
    criterion = getattr(module, "criterion", None)
    # the factories of optimizer and scheduler run only before the steps; the trial's checks see what they made
    given = {name: value for name, value in vars(module).items() if name not in ("optimizer", "lr_scheduler")}
    code = {
        f"the model {type(module).__name__}": (type(module),),
        **{f"{name} of the model": (value,) for name, value in given.items() if callable(value)},
        "the loss": criterion.modules() if isinstance(criterion, nn.Module) else (),
        "a hook or a method that a part was given": _given(module),
        "the augmentation": data.augmentation,
        f"the data module {type(data).__name__}": (type(data).batches, type(data).augment),
    }
    return next((what for what, values in code.items() if any(map(_is_of_user, values))), "")


def branches(module: nn.Module) -> bool:
    """Whether layers of a user's may not compute all batches in the same way.

    Where Python decides by the values or the shape of a tensor what is computed, symbolic tracing fails.
    """
    parts = dict(module.named_modules())
    of_user = [name for name, part in parts.items() if name and _is_of_user(type(part))]
    outer = [name for name in of_user if not any(name.startswith(f"{other}.") for other in of_user)]
    try:
        for part in (parts[name] for name in outer):
            before = attributes(part)
            _Tracer().trace(part)
            if changed_attributes(part, before):
                return True
    except Exception:  # whatever a user's code raises for symbols
        return True
    return False


class _Tracer(fx.Tracer):
    """Follows the code of a user's layers, and no other."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(_is_of_user(type(part)) for part in m.modules())


def changes_steps(stepping: Optimizer | lr_scheduler.LRScheduler) -> bool:
    """Whether a user's code runs in the steps of an optimizer or scheduler: its class, a hook, a method or a lambda."""
    hooks = (value for name, value in vars(stepping).items() if name.endswith("_hooks"))
    of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    methods = (value for name, value in vars(stepping).items() if hasattr(type(stepping), name) and callable(value))
    lambdas = getattr(stepping, "lr_lambdas", ())
    is_of_user = any(map(_is_of_user, (type(stepping), type(stepping).step, *methods, *lambdas)))
    inner = getattr(stepping, "_schedulers", ())  # of a SequentialLR or a ChainedScheduler
    return is_of_user or any(map(len, (*hooks, *of_all))) or any(map(changes_steps, inner))


def _given(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks"):
                yield from value.values()
            elif callable(value) and hasattr(type(part), name):
                yield value


def _is_of_user(code: Any) -> bool:
    """Whether a user wrote a function, a class or one of its bases, an object's class, or an item of a collection."""
    if isinstance(code, (list, tuple, set, dict)):
        return any(map(_is_of_user, code.values() if isinstance(code, dict) else code))
    if isinstance(code, partial):
        return any(map(_is_of_user, (code.func, code.args, code.keywords)))
    code = getattr(code, "__func__", code)
    if isinstance(code, FunctionType):
        # the globals tell the module, because `functools.wraps` copies `__module__`
        return _is_foreign(code.__globals__.get("__name__", "")) or _is_of_user(getattr(code, "__wrapped__", None))
    kinds = code if isinstance(code, type) else type(code)
    return any(_is_foreign(kind.__module__) for kind in kinds.__mro__)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in _KNOWN
