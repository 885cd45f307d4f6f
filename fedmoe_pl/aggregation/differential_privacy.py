"""DP-FedAvg: McMahan et al., ICLR 2018 (https://arxiv.org/abs/1710.06963).

Adaptive clipping is Algorithm 1 of Andrew et al., NeurIPS 2021 (https://arxiv.org/abs/1905.03871).

=================  ==========================================  ====================================================
topic              papers                                      here
=================  ==========================================  ====================================================
cohort             each client by a draw of its own            the same; ``clients_per_round`` is the expected number
mean               the sum over the expected number            the same
weights            by samples, capped; uniform in Andrew et    uniform
                   al.
clipping           flat, or per layer                          flat
noise of the bits  m / 20 for m clients in a round             ``bit_noise``, by default the same
accountant         moments (Renyi)                             Renyi, by Opacus
=================  ==========================================  ====================================================
"""

from __future__ import annotations

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, Tensor

from fedmoe_pl.aggregation.accountant import epsilon
from fedmoe_pl.aggregation.aggregation import PREFIX, Aggregation, Cohort
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.trees import Tree, mean_of_two, names_of_same_tensors

_MAX_NORM, _BIT = PREFIX + "max_norm", PREFIX + "within_max_norm"


class DifferentialPrivacy(Aggregation):
    """Clients' changes are clipped and summed, and the server adds Gaussian noise to the sum.

    The change of all shared parameters is one vector, which a client scales down to ``max_norm`` if it is longer. The
    server adds noise with a standard deviation of ``noise_multiplier * max_norm`` to each coordinate of the sum, and
    divides by the expected number of clients. Every client joins each round with the probability that
    ``clients_per_round`` gives, by a draw of its own.

    With ``quantile``, ``max_norm`` follows this quantile of the norms of clients' changes: each client says in one bit
    whether its change was within ``max_norm``, the bits get noise of their own, and after the round ``max_norm`` is
    multiplied by ``exp(-max_norm_lr (share of clients within - quantile))``. The noise of the changes is a little
    higher, so that both together cost what ``noise_multiplier`` says.

    Args:
        noise_multiplier: z; 0 adds no noise, and epsilon is infinite.
        max_norm: the clipping norm; with ``quantile``, that of the first round.
        delta: the delta for which epsilon is computed, well below one over the number of clients.
        quantile: the quantile of the norms that ``max_norm`` follows; None keeps ``max_norm``.
        max_norm_lr: learning rate of ``max_norm``.
        bit_noise: standard deviation of the noise that is added to the sum of the bits; None is the expected number of
            clients over 20.
    """

    poisson_sampling = True
    is_uniform = True
    averages_changes = True

    def __init__(
        self,
        noise_multiplier: float,
        max_norm: float,
        delta: float,
        quantile: float | None = None,
        max_norm_lr: float | None = None,
        bit_noise: float | None = None,
    ) -> None:
        self.noise_multiplier = noise_multiplier
        self.max_norm = max_norm
        self.delta = delta
        self.quantile = quantile
        self.max_norm_lr = max_norm_lr
        self.bit_noise = bit_noise
        check_number(self, "noise_multiplier", noise_multiplier, least=0)
        if not (math.isinf(max_norm) and max_norm > 0 and not noise_multiplier and quantile is None):
            check_number(self, "max_norm", max_norm, above=0)  # infinite only without noise and quantile
        check_number(self, "delta", delta, above=0, below=1)
        check_number(self, "quantile", quantile, above=0, below=1)
        check_number(self, "max_norm_lr", max_norm_lr, above=0)
        check_number(self, "bit_noise", bit_noise, above=0)

    def check(self, shared: Tree, parameters: set[str], cohort: Cohort) -> None:
        """Refuses shared buffers and complex numbers, noise that hides no bits, and noise without Opacus."""
        if buffers := [name for name in shared if name not in parameters]:
            raise MisconfigurationException(
                f"DifferentialPrivacy: the buffer '{buffers[0]}' is shared, but must be kept by the clients, because "
                "noise would break it; use FedBN, GroupNorm, or another `shared`."
            )
        if imaginary := [name for name, tensor in shared.items() if tensor.is_complex()]:
            raise MisconfigurationException(
                f"DifferentialPrivacy: the complex '{imaginary[0]}' is shared, but must be kept by the clients, "
                "because noise and clipping are for real numbers, which torch.view_as_complex turns into complex ones."
            )
        self.noise_of_changes(cohort)
        self.epsilon([[self.probability(cohort), self.noise_multiplier, 1]])

    def probability(self, cohort: Cohort) -> float:
        """The probability with which a client joins a round."""
        return cohort.size / len(cohort.participants)

    def noise_of_bits(self, cohort: Cohort) -> float:
        """Standard deviation of the noise that is added to the sum of the bits; 0 if nothing is to be hidden."""
        if not self.noise_multiplier:
            return 0.0
        return cohort.size / 20 if self.bit_noise is None else self.bit_noise

    def noise_of_changes(self, cohort: Cohort) -> float:
        """The noise multiplier of the changes alone (Andrew et al., Theorem 1); refuses bits that alone cost more."""
        bits = self.noise_of_bits(cohort)
        if self.quantile is None or not bits:
            return self.noise_multiplier
        if self.noise_multiplier >= 2 * bits:
            because = "this is twice the noise of the bits; raise bit_noise, or clients_per_round"
            raise InvalidArgumentError(self, "noise_multiplier", self.noise_multiplier, f"below {2 * bits}", because)
        return (self.noise_multiplier**-2 - (2 * bits) ** -2) ** -0.5

    def epsilon(self, rounds: list[list[float]]) -> float:
        """The epsilon of some rounds; see :func:`accountant.epsilon`."""
        return epsilon(rounds, self.delta)

    def begin(self) -> Tree:
        """The first clipping norm, if it is adapted."""
        return {} if self.quantile is None else {_MAX_NORM: torch.tensor(self.max_norm, dtype=torch.float64)}

    def for_clients(self, state: Tree) -> Tree:
        """The clipping norm, if it is adapted."""
        return state

    def _max_norm(self, tensors: Tree) -> float:
        """The clipping norm: one that is sent counts only if it is adapted."""
        return self.max_norm if self.quantile is None else float(tensors.get(_MAX_NORM, self.max_norm))

    def of_client(self, client: Client, update: Update) -> Update:
        """The clipped change, 0 if it is not finite, and whether it was within the norm; its weight is 1."""
        change = {name: tensor - client.loaded[name] for name, tensor in update.sent.items()}
        again = {name for _, *others in names_of_same_tensors(client.module) for name in others}
        norm = math.sqrt(sum(float(change[name].double().square().sum()) for name in change if name not in again))
        max_norm = self._max_norm(client.loaded)
        if not math.isfinite(norm):  # no factor makes it short enough for the noise
            change = {name: torch.zeros_like(tensor) for name, tensor in change.items()}
        elif norm > max_norm:
            change = {name: tensor * (max_norm / norm) for name, tensor in change.items()}
        if self.quantile is not None:
            change[_BIT] = torch.tensor(float(norm <= max_norm), dtype=torch.float64)
        return Update(change, 1, update.state)

    def of_remote_client(self, client_id: int, update: Update) -> Update:
        """The update; refuses one that says more in its bit than yes or no, or says it where nobody asks."""
        bits = [tensor.tolist() for name, tensor in update.sent.items() if name.startswith(PREFIX)]
        if bits not in ([[]] if self.quantile is None else [[0.0], [1.0]]):
            raise ValueError("its bit is none")
        return update

    def combine(self, a: Update, b: Update) -> Update:
        """The mean."""
        if len(a.sent) < len(b.sent):
            a, b = b, a  # or what only b sends would be left out, not refused
        return Update(mean_of_two(a.sent, a.weight, b.sent, b.weight), a.weight + b.weight)

    def aggregate(
        self, start: Tree, combined: Update | None, state: Tree, cohort: Cohort, generator: Generator
    ) -> tuple[Update, Tree]:
        """Adds the noisy sum over the expected number of clients; adapts the clipping norm."""
        clients = 0 if combined is None else combined.weight
        max_norm = self._max_norm(state)
        std = self.noise_of_changes(cohort) * max_norm if self.noise_multiplier else 0.0
        sent = {}
        for name, before in start.items():
            total = torch.zeros_like(before) if combined is None else clients * combined.sent[name]
            if std:
                total = total + std * torch.randn(before.shape, generator=generator, dtype=before.dtype)
            sent[name] = before + total / cohort.size
        if self.quantile is not None:
            bits = 0.0 if combined is None else clients * float(combined.sent[_BIT])
            state = {_MAX_NORM: self._next_max_norm(max_norm, bits, clients, cohort, generator)}
        return Update(sent, clients), state

    def _next_max_norm(
        self, max_norm: float, bits: float, clients: float, cohort: Cohort, generator: Generator
    ) -> Tensor:
        """The next clipping norm; bits count as 1/2 or -1/2, so that one client changes their sum by 1/2."""
        assert self.quantile is not None
        noise = self.noise_of_bits(cohort) * float(torch.randn((), generator=generator, dtype=torch.float64))
        within = 0.5 + (bits - clients / 2 + noise) / cohort.size
        rate = 0.2 if self.max_norm_lr is None else self.max_norm_lr
        return torch.tensor(max_norm * math.exp(-rate * (within - self.quantile)), dtype=torch.float64)
