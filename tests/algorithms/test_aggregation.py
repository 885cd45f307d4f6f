"""The rows of FedMoE-DA's aggregation matrix, by hand."""

import math

import torch

from fedmoe_pl import Update
from fedmoe_pl.algorithms import FedMoEDA
from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix, aggregation_rows

E = math.e


def test_an_expert_is_averaged_with_the_most_alike_by_a_softmax_of_cosines():
    proxies = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    c = math.sqrt(0.5)  # cosine of 45 degrees; rows 0 and 1 are at right angles
    neighbours, weights = aggregation_rows(proxies, top_p=1)
    assert neighbours.tolist() == [[0, 2], [1, 2], [2, 0]]
    expected = torch.tensor([E, math.exp(c)], dtype=torch.float64) / (E + math.exp(c))
    torch.testing.assert_close(weights, expected.expand(3, 2), rtol=1e-11, atol=0)
    neighbours, weights = aggregation_rows(proxies, "all", temperature=0.5)
    assert neighbours.tolist() == [[0, 2, 1], [1, 2, 0], [2, 0, 1]]
    first = torch.tensor([E**2, math.exp(2 * c), 1], dtype=torch.float64)
    last = torch.tensor([E**2, math.exp(2 * c), math.exp(2 * c)], dtype=torch.float64)
    torch.testing.assert_close(weights, torch.stack([r / r.sum() for r in (first, first, last)]), rtol=1e-11, atol=0)


def test_of_equal_cosines_the_first_are_taken_and_the_expert_itself_comes_first():
    """Four clients with the same two proxies: rows 0, 2, 4, 6 are equal, and so are 1, 3, 5, 7."""
    proxies = torch.randn(2, 50).repeat(4, 1)
    neighbours, weights = aggregation_rows(proxies, top_p=2)
    assert neighbours.tolist() == [
        [0, 2, 4],
        [1, 3, 5],
        [2, 0, 4],
        [3, 1, 5],
        [4, 0, 2],
        [5, 1, 3],
        [6, 0, 2],
        [7, 1, 3],
    ]
    torch.testing.assert_close(weights, torch.full((8, 3), 1 / 3))


def test_other_experts_of_the_own_client_can_be_left_out():
    proxies = torch.tensor(
        [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64
    )  # two of client 0, one of client 1
    neighbours, weights = aggregation_rows(proxies, "all", owners=torch.tensor([0, 0, 1]))
    dense = torch.zeros(3, 3, dtype=torch.float64).scatter(1, neighbours, weights)
    other = 1 / (1 + E)
    expected = [[1 - other, 0, other], [0, 1 - other, other], [1 / (2 + E), 1 / (2 + E), E / (2 + E)]]
    torch.testing.assert_close(dense, torch.tensor(expected, dtype=torch.float64))
    assert aggregation_rows(proxies, 1)[0][0].tolist() == [0, 1]
    assert aggregation_rows(proxies, 1, owners=torch.tensor([0, 0, 1]))[0][0].tolist() == [0, 2]


def test_the_matrix_of_the_server_is_dense_again_and_its_rows_add_up_to_1():
    algorithm = FedMoEDA(1, interval=1)
    assert aggregation_matrix({"embedding.w": torch.zeros(1)}) is None
    proxies = {"proxies/1": torch.tensor([[0.0, 1.0]]), "proxies/0": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}
    found = aggregation_matrix(algorithm.server_update({}, Update(proxies, 2)))
    assert found is not None
    other = 1 / (1 + E)
    torch.testing.assert_close(found[0], torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [other, 0, 1 - other]]))
    assert found[1].tolist() == [0, 0, 1]
