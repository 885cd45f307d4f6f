"""Tensors in files in memory: what copies share, and that writing to one changes no other."""

import gc
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits
from torch import nn
from torch.nn.parameter import is_lazy

from fedmoe_pl.backends.workers.shared import SharedObject
from fedmoe_pl.mapped import copy_on_write, file_at, is_mapped, map_tensors
from fedmoe_pl.trees import copy_module, load_tree, map_frozen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no files in memory")


def is_in_file(tensor):
    return file_at(tensor.data_ptr(), tensor.nbytes) is not None


def private_pages(tensor):
    """KiB of the tensor's mapping that this process alone has, as the system counts them."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if "-" in key and not key.endswith(":"):
            start, end = (int(address, 16) for address in key.split("-"))
            found = start <= tensor.data_ptr() < end
        elif found and key == "Private_Dirty:":
            return int(values[0])
    raise AssertionError


def test_tensors_keep_values_strides_and_dtypes_and_what_they_share():
    values = torch.randn(6, 4)
    tensors = {
        "transposed": values.T,
        "part": values[1:3],
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(-0.0),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    once = map_tensors(tensors)
    for moved, shares in ((once, True), (copy_on_write(once), False)):
        assert_same_bits(moved, tensors)
        assert {name: tensor.stride() for name, tensor in moved.items()} == {
            name: tensor.stride() for name, tensor in tensors.items()
        }
        moved["part"][0, 0] = 7
        assert bool(moved["transposed"][0, 1] == 7) is shares and values[1, 0] != 7
        moved["part"][0, 0] = values[1, 0]
    assert map_tensors({"empty": torch.empty(0)}) == map_tensors({}) == copy_on_write(tensors) == {}


def test_a_copy_takes_no_memory_until_it_is_written_to():
    one = map_tensors({"w": torch.randn(1000, 1000)})
    (other,) = copy_on_write(one).values()
    assert other.data_ptr() != one["w"].data_ptr() and torch.equal(other, one["w"])
    assert private_pages(one["w"]) == private_pages(other) == 0
    before = one["w"].clone()
    other[0, 0] += 1
    assert 0 < private_pages(other) <= 64 and torch.equal(one["w"], before)
    assert copy_on_write({"w": other}) == {}, "a file does not have what was written"


def open_files():
    """How many files in memory this process has open."""
    gc.collect()
    return sum("memfd" in os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd"))


def test_copies_keep_no_file_open():
    before = open_files()
    one = map_tensors({"w": torch.randn(10)})
    copies = [copy_on_write(one) for _ in range(20)]
    assert open_files() == before + 1
    del one, copies
    assert open_files() == before


class Tied(nn.Module):
    """Frozen layers, of which one shares its weight with a trained one, and a buffer that shares a frozen one's."""

    def __init__(self):
        super().__init__()
        self.frozen, self.kept, self.trained = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.kept.requires_grad_(False).weight.data = self.trained.weight.data
        self.register_buffer("seen", self.frozen.bias.data)


def test_only_frozen_parameters_with_memory_of_their_own_are_put_into_a_file():
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    map_frozen(module)
    copied = copy_module(module)
    assert_same_bits(copied.state_dict(), before)
    assert_same_bits(module.state_dict(), before)
    assert module.state_dict()["seen"].data_ptr() == module.frozen.bias.data_ptr()
    mapped = {name for name, parameter in copied.named_parameters() if is_mapped(parameter)}
    assert mapped == {"frozen.weight", "kept.bias"}
    assert not any(parameter.requires_grad for parameter in (copied.frozen.weight, copied.kept.bias))


def mapped_once():
    """Two experts of which equal parameters are the same mapped memory, as a process maps what was written once."""
    weights = {name: tensor.detach() for name, tensor in nn.Linear(4, 4).named_parameters()}
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    shared = SharedObject({f"{i}.{name}": tensor for i in range(2) for name, tensor in weights.items()}).load()
    for name, parameter in experts.named_parameters():
        parameter.data = shared[name]
    return experts


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_of_parameters_in_the_same_mapped_memory_are_independent(depth):
    experts = copied = mapped_once()
    assert experts[0].weight.data_ptr() == experts[1].weight.data_ptr() and is_in_file(experts[0].weight)
    for _ in range(depth):
        copied = copy_module(copied)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    load_tree(copied, {"0.weight": before["0.weight"] + 1})
    with torch.no_grad():
        copied[1].bias += 1
    assert_same_bits(experts.state_dict(), before)
    changed = {"0.weight": before["0.weight"] + 1, "1.bias": before["1.bias"] + 1}
    assert_same_bits(copied.state_dict(), {**before, **changed})


def test_tied_parameters_stay_tied_in_copies():
    experts = mapped_once()
    experts[1].weight = experts[0].weight
    copied = copy_module(experts)
    assert copied[1].weight is copied[0].weight is not experts[0].weight


def test_a_module_that_is_in_a_file_stays_there_until_it_is_written_to():
    module = nn.Linear(4, 300).requires_grad_(False)
    map_frozen(module)
    places = [module.weight.data_ptr(), module.bias.data_ptr()]
    with torch.no_grad():
        module.bias[0] = 7
    map_frozen(module)
    assert module.weight.data_ptr() == places[0] and module.bias.data_ptr() != places[1] and module.bias[0] == 7
    assert is_mapped(copy_module(module).bias)


class Unusual(nn.Module):
    """Tensors that are more than bytes, strides and a dtype, or less."""

    def __init__(self):
        super().__init__()
        values = torch.randn(3, 3)
        self.register_buffer("adjacency", values.to_sparse())
        self.conjugate = nn.Parameter(values.to(torch.complex64).conj(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.meta = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
        self.integers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.lazy = nn.LazyLinear(2)


def test_unusual_tensors_stay_as_they_are():
    module = Unusual()
    map_frozen(module)
    copied = copy_module(module)
    parameters = {name: parameter for name, parameter in copied.named_parameters() if not is_lazy(parameter)}
    assert [name for name, parameter in parameters.items() if is_mapped(parameter)] == ["integers"]
    assert module.conjugate.is_conj() and torch.equal(copied.conjugate, module.conjugate)
    assert torch.equal(copied.integers, torch.arange(3))


def test_loading_writes_only_what_differs():
    module = nn.Linear(4, 300).requires_grad_(False)
    map_frozen(module)
    copied, weight = copy_module(module), module.weight.clone()
    load_tree(copied, {"weight": weight})
    assert private_pages(copied.weight) == 0
    load_tree(copied, {"weight": weight + 1})
    assert torch.equal(copied.weight, weight + 1) and torch.equal(module.weight, weight)
    assert torch.equal(copy_module(copied).weight, weight + 1)


def test_what_is_in_a_file_is_sent_to_workers_as_this_file():
    frozen, trained = map_tensors({"w": torch.randn(500, 500)})["w"], torch.randn(10)
    sent = {"frozen": frozen, "trained": trained, "empty": frozen[:0]}
    shared = SharedObject(sent)
    assert_same_bits(pickle.loads(pickle.dumps(shared)).load(), sent)
    paths = {path for path, _, size in shared.spans if size == frozen.nbytes}
    assert len(paths) == 1 and os.path.getsize(*paths) == frozen.nbytes
    frozen[0] += 1
    received = SharedObject({"frozen": frozen}).load()["frozen"]
    assert torch.equal(received, frozen) and is_in_file(received)
