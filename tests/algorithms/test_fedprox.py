"""FedProx against closed forms."""

import pytest
from helpers import PureOneWeight, phase, run, two_quadratics
from helpers.quadratics import LOSSES, RATE, STEPS, weight_of

from fedmoe_pl.algorithms import FedProx


@pytest.mark.parametrize("mu", [0.0, 0.5, 20.0])
def test_fedprox_on_two_quadratics_is_at_the_closed_form_after_a_round(mu, tmp_path):
    start = 2.0
    federation = run([phase("FedProx", FedProx(mu))], PureOneWeight(start=start), two_quadratics(), tmp_path, STEPS)
    ends = []
    for a, b in LOSSES:  # gradient a (w - b) + mu (w - start): a quadratic of curvature a + mu around its own minimum
        minimum = (a * b + mu * start) / (a + mu)
        ends.append(minimum + (1 - RATE * (a + mu)) ** STEPS * (start - minimum))
    assert weight_of(federation, "FedProx") == pytest.approx(sum(ends) / 2, rel=1e-13)
