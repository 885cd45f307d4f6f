"""Two clients with the losses a/2 (w - b)^2, and where their local steps lead (`helpers.two_quadratics`)."""

import torch

LOSSES = [(1.0, 0.0), (4.0, 5.0)]  # (a, b) of each client
CURVATURES, MINIMA = torch.tensor(LOSSES, dtype=torch.float64).T
STEPS, RATE = 10, 0.05
REMAINS = (1 - RATE * CURVATURES) ** STEPS  # of the distance to b after a client's local steps


def fixed_point(shares):
    """Where w = sum_i p_i (b_i + r_i (w - b_i)), and what remains of the distance to it after a round."""
    away = shares * (1 - REMAINS)
    return (away * MINIMA).sum() / away.sum(), (shares * REMAINS).sum()


def weight_of(federation, name, client=0) -> float:
    """The one weight of a client's `OneWeight`."""
    return federation.client_module(name, client).weight.item()
