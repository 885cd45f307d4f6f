"""The clients' samples in one tensor against a list of tensors."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl.data import ClientSamples


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_are_those_of_a_list_of_tensors(sizes, draw):
    samples = torch.randperm(sum(sizes))
    parts, expected = ClientSamples(samples, torch.tensor(sizes)), list(samples.split(sizes))

    def as_lists(tensors):
        return [tensor.tolist() for tensor in tensors]

    assert len(parts) == len(expected) and as_lists(parts) == as_lists(expected)
    assert as_lists(parts[i] for i in range(-len(sizes), 0)) == as_lists(expected)
    assert as_lists(parts[1:-1:2]) == as_lists(expected[1:-1:2])
    chosen = draw.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=30))
    selected = parts.select(torch.tensor(chosen, dtype=torch.int64))
    assert as_lists(selected) == as_lists(expected[i] for i in chosen)
    assert selected.sizes.tolist() == [sizes[i] for i in chosen]
    assert parts.indices.data_ptr() == samples.data_ptr()  # nothing is copied
    with pytest.raises(IndexError):
        parts[len(sizes)]


def test_parts_are_pickled_as_two_tensors():
    parts = ClientSamples(torch.arange(10_000), torch.ones(10_000, dtype=torch.int64))
    pickled = pickle.dumps(parts)
    assert len(pickled) < 2 * 8 * 10_000 + 2000
    assert [part.tolist() for part in pickle.loads(pickled)] == [[i] for i in range(10_000)]
