"""The rule of early stopping, by hand."""


def stopped_by_hand(checks, patience, min_delta):
    """The check with the lowest loss, and how many checks there were.

    They end once so many in a row were not lower, by more than ``min_delta``, than the last one that was.
    """
    improved, waited, number = 0, 0, 0
    for number in range(1, len(checks)):
        better = checks[number][0] < checks[improved][0] - min_delta
        improved, waited = (number, 0) if better else (improved, waited + 1)
        if waited == patience:
            break
    losses = [loss for loss, _ in checks[: number + 1]]
    return losses.index(min(losses)), len(losses)
