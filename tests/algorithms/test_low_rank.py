"""Truncated singular value decompositions against their definition."""

import pytest
import torch

from fedmoe_pl.algorithms.fedkd import compressed, expanded


def matrix(values, m=7, n=5):
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    s = torch.tensor(values, dtype=torch.float64)
    return (u[:, : len(s)] * s) @ v[:, : len(s)].T


@pytest.mark.parametrize(("energy", "rank"), [(0.01, 1), (0.63, 1), (0.65, 2), (0.79, 2), (0.81, 3)])
def test_the_smallest_rank_that_reaches_the_energy_is_kept(energy, rank):
    """The squares of 8, 4, 4, 2 are 64, 16, 16, 4: together 100; 3 * (20 + 20 + 1) is less than 400 values."""
    tree = compressed({"w": matrix([8, 4, 4, 2], 20, 20)}, energy)
    assert {name: tuple(factor.shape) for name, factor in tree.items()} == {
        "w/u": (20, rank),
        "w/s": (rank,),
        "w/v": (rank, 20),
    }
    torch.testing.assert_close(tree["w/s"], torch.tensor([8.0, 4, 4][:rank]).double())
    lost = (expanded(tree)["w"] - matrix([8, 4, 4, 2], 20, 20)).square().sum()
    torch.testing.assert_close(lost, torch.tensor([36.0, 20, 4][rank - 1]).double())


def test_kernels_are_matrices_with_a_row_per_output_channel():
    kernels = matrix([3.0], 7, 18).reshape(7, 2, 3, 3)
    tree = compressed({"conv": kernels}, 0.95)
    assert {name: tuple(factor.shape) for name, factor in tree.items()} == {
        "conv/u": (7, 1),
        "conv/s": (1,),
        "conv/v": (1, 18),
    }
    torch.testing.assert_close(expanded(tree)["conv"].reshape(7, 2, 3, 3), kernels)


def test_an_update_of_0_has_rank_1_and_one_that_is_not_finite_stays_whole():
    zeros = compressed({"w": torch.zeros(7, 5)}, 0.95)
    assert zeros["w/s"].tolist() == [0] and not expanded(zeros)["w"].any()
    assert compressed({"w": torch.full((7, 5), torch.nan)}, 0.95).keys() == {"w"}


def test_factors_hold_no_more_memory_than_they_have_values():
    for factor in compressed({"w": matrix([1.0])}, 0.95).values():
        assert factor.untyped_storage().nbytes() == factor.nbytes
