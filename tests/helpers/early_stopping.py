"""The rule of early stopping, by hand."""


def stopped_by_hand(checks, patience, min_delta):
    """The best check, by rule: only a loss lower by more than ``min_delta`` counts; and how many checks there were."""
    best, waited = 0, 0
    for number in range(1, len(checks)):
        better = checks[number][0] < checks[best][0] - min_delta
        best, waited = (number, 0) if better else (best, waited + 1)
        if waited == patience:
            return best, number + 1
    return best, len(checks)
