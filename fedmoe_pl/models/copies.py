"""What a copy of a module would not carry over: each client trains one, and would train something else without a word.

Python's ``deepcopy`` copies modules, tensors, bound methods and partials; it drops the hooks of parameters, gives
tensors memory of their own, and keeps functions and weak references as they are, with the original that they refer to.
"""

from __future__ import annotations

from torch import nn

from fedmoe_pl.checks import InvalidArgumentError


def check_copies(module: nn.Module) -> None:
    """Refuses a module whose copies would not compute or train what the module does."""
    _check_hooks(module)


def _check_hooks(module: nn.Module) -> None:
    """Refuses hooks of parameters, which Python does not copy; those of modules are copied."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            allowed = "without hooks of its own; use on_after_backward, or a full backward hook of a layer"
            raise InvalidArgumentError(module, name, "with a hook", allowed, "clients train copies, which lack it")
