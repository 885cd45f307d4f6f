"""What counts as a difference of rounding."""

import pytest
import torch

from fedmoe_pl.backends.rounding import is_close, largest_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_leaves_of_zero_is_close_to_zero_and_a_difference_is_not(dtype):
    """A sum of n values of size v is off by about n eps v; any more is a difference, as it is without larger values."""
    eps = torch.finfo(dtype).eps
    zero, rounding = torch.zeros(3, dtype=dtype), torch.tensor([0, 40 * eps, -90 * eps], dtype=dtype)
    assert is_close(rounding, zero, largest_of_all=1.0)
    assert not is_close(2 * rounding, zero, largest_of_all=1.0)
    assert not is_close(rounding, zero)
    assert not is_close(torch.ones(3, dtype=dtype), 1 + 2000 * rounding, largest_of_all=1.0)
    assert largest_value([None, zero, torch.tensor([-3.0, float("nan")]), torch.empty(0)]) == 3
