"""Which hooks an algorithm has of its own, and what follows from that."""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm


def overrides(algorithm: Algorithm, hook: str) -> bool:
    """Whether the algorithm has a hook of its own."""
    return getattr(type(algorithm), hook) is not getattr(Algorithm, hook)


def changes_kept(algorithm: Algorithm) -> bool:
    """Whether what clients keep may change after their local training."""
    return overrides(algorithm, "exchange") or overrides(algorithm, "client_after_aggregation")


def chooses_model(algorithm: Algorithm) -> bool:
    """Whether clients' models may differ although all received the same tensors and kept none."""
    return overrides(algorithm, "personal_tensors")


def needs_server_state(algorithm: Algorithm) -> bool:
    """Whether a client's model, or how it predicts, may follow from more than what the client received and kept."""
    return chooses_model(algorithm) or algorithm.has_predictor
