"""Adaptive server optimizers: Reddi et al., ICLR 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

Each is a ``torch.optim.Optimizer`` for ``server_optimizer`` of a phase. Its gradient is minus the mean change of the
clients' models, ``-D``. FedAvgM, the fourth one of the paper, is ``torch.optim.SGD`` with ``lr: 1.0`` and a momentum.

===============  ======================  ==========================================  ===========================
topic            paper, Algorithm 2      others                                      here
===============  ======================  ==========================================  ===========================
v_-1             at least tau^2          0 (authors' code, Flower)                   ``v0``, by default tau^2
bias correction  none                    Keras (authors' code), Flower's FedAdam     none
beta2            0.99                    0.999 (authors' code)                       ``beta2``, 0.99
beta1            0.9, FedAdagrad 0                                                   ``beta1``, the same
===============  ======================  ==========================================  ===========================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fedmoe_pl.checks import check_number


class AdaptiveServerOptimizer(Optimizer, ABC):
    """``m = beta1 m + (1 - beta1) D`` and ``x = x + lr m / (sqrt(v) + tau)``, with a ``v`` for every element.

    Args:
        params: the server's parameters.
        lr: the server's learning rate.
        beta1: decay of ``m``, which starts at 0.
        beta2: decay of ``v``.
        tau: degree of adaptivity; the smaller, the more steps differ from element to element.
        v0: the first ``v``; None for ``tau**2``, the paper's smallest one.
    """

    def __init__(self, params: ParamsT, lr: float, beta1: float, beta2: float, tau: float, v0: float | None) -> None:
        for argument, value in (("lr", lr), ("tau", tau)):
            check_number(self, argument, value, above=0)
        for argument, value in (("beta1", beta1), ("beta2", beta2)):
            check_number(self, argument, value, least=0, below=1)
        check_number(self, "v0", v0, least=0)
        v0 = tau**2 if v0 is None else v0
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "v0": v0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a step with every parameter that has a gradient, ``-D``."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(x), torch.full_like(x, group["v0"])
                m, v = state["m"], state["v"]
                m.mul_(group["beta1"]).sub_(x.grad, alpha=1 - group["beta1"])
                self.accumulate(v, x.grad**2, group["beta2"])
                x.addcdiv_(m, v.sqrt().add_(group["tau"]), value=group["lr"])

    @abstractmethod
    def accumulate(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        """Changes ``v`` in place, given ``D**2``."""


class FedAdagrad(AdaptiveServerOptimizer):
    """The server steps by Adagrad, ``v = v + D**2``; arguments as in :class:`AdaptiveServerOptimizer`."""

    def __init__(
        self, params: ParamsT, lr: float, beta1: float = 0.0, tau: float = 1e-3, v0: float | None = None
    ) -> None:
        super().__init__(params, lr, beta1, 0.0, tau, v0)

    def accumulate(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        """Changes ``v`` in place, given ``D**2``."""
        v.add_(squared)


class FedAdam(AdaptiveServerOptimizer):
    """The server steps by Adam, ``v = beta2 v + (1 - beta2) D**2``; see :class:`AdaptiveServerOptimizer`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        v0: float | None = None,
    ) -> None:
        super().__init__(params, lr, beta1, beta2, tau, v0)

    def accumulate(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        """Changes ``v`` in place, given ``D**2``."""
        v.mul_(beta2).add_(squared, alpha=1 - beta2)


class FedYogi(FedAdam):
    """The server steps by Yogi, ``v = v - (1 - beta2) D**2 sign(v - D**2)``; arguments as in :class:`FedAdam`."""

    def accumulate(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        """Changes ``v`` in place, given ``D**2``."""
        v.sub_(squared * (v - squared).sign(), alpha=1 - beta2)
