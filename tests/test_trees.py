"""Means of trees, sums over them, parts of them, loading, what changed, and patterns."""

import copy
import copyreg

import numpy as np
import pytest
import torch
from helpers import Expert, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import trees
from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.algorithms.algorithm import Algorithm, Patterns
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends.backend import updated_server

numbers = st.floats(-1e3, 1e3)
client = st.tuples(st.lists(numbers, min_size=3, max_size=3), st.integers(1, 10_000))  # values and weight


def fold(updates):
    """The updates, combined one after another."""
    combined = updates[0]
    for update in updates[1:]:
        combined = Algorithm().combine(combined, update)
    return combined


@given(st.lists(client, min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_combining_updates_one_by_one_or_in_groups_is_their_weighted_mean(clients, data):
    updates = [Update({"w": torch.tensor(values, dtype=torch.float64)}, weight) for values, weight in clients]
    expected = np.average([values for values, _ in clients], axis=0, weights=[weight for _, weight in clients])
    combined = fold(updates)
    assert combined.weight == sum(weight for _, weight in clients)
    assert combined.state == {}
    np.testing.assert_allclose(combined.sent["w"].numpy(), expected, rtol=1e-12, atol=1e-9)
    cut = data.draw(st.integers(0, len(updates)))
    if 0 < cut < len(updates):
        grouped = Algorithm().combine(fold(updates[:cut]), fold(updates[cut:]))
        np.testing.assert_allclose(grouped.sent["w"].numpy(), expected, rtol=1e-12, atol=1e-9)


def test_the_mean_of_equal_clients_is_that_client_to_the_bit():
    tree = {"w": torch.randn(50)}
    combined = fold([Update(tree, weight) for weight in (3, 1, 7, 2)])
    assert_same_bits(combined.sent, tree)


def test_the_mean_leaves_its_inputs_alone_and_takes_the_larger_integers():
    a = {"w": torch.tensor([1.0]), "complex": torch.tensor([1.0 + 4j]), "num_batches_tracked": torch.tensor(3)}
    b = {"w": torch.tensor([5.0]), "complex": torch.tensor([5.0 + 0j]), "num_batches_tracked": torch.tensor(9)}
    mean = trees.mean_of_two(a, 3, b, 1)
    assert mean["w"].item() == 2.0 and mean["complex"].item() == 2.0 + 3j
    assert mean["num_batches_tracked"].item() == 9 and mean["num_batches_tracked"].dtype == torch.int64
    assert a["w"].item() == 1.0 and b["w"].item() == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_counts_the_last_clients_as_much_as_the_first(dtype):
    low, high = 100.0, 101.0  # a hundredth of their difference is a fraction of the last digit
    combined = fold([Update({"w": torch.tensor([value], dtype=dtype)}, 1) for value in [low] * 100 + [high] * 100])
    old = {"w": torch.zeros(1, dtype=dtype), "v": torch.zeros(1)}
    server = updated_server(Algorithm(), old, combined)
    assert {name: tensor.dtype for name, tensor in server.items()} == {"w": dtype, "v": torch.float32}
    torch.testing.assert_close(server["w"], torch.tensor([100.5], dtype=dtype), rtol=0, atol=0)
    torch.testing.assert_close(combined.sent["w"], torch.tensor([100.5]), rtol=1e-6, atol=0)


def test_clients_that_send_different_tensors_are_refused():
    one, other = {"w": torch.tensor(1.0), "v": torch.tensor(1.0)}, {"w": torch.tensor(1.0)}
    with pytest.raises(MisconfigurationException, match="A client sends v, and another one"):
        trees.mean_of_two(one, 1, other, 1)
    for combine in (Algorithm().combine, DifferentialPrivacy(0.0, 1.0, 1e-5).combine):
        for pair in ((one, other), (other, one)):  # whoever comes first
            with pytest.raises(MisconfigurationException, match="A client sends v, and another one"):
                combine(*(Update(tree, 1) for tree in pair))


@pytest.mark.parametrize("value", [-0.0, torch.inf])
def test_the_mean_of_equal_tensors_does_not_depend_on_where_they_are(value):
    tensor = torch.tensor(value)
    for other in (tensor, tensor.clone()):
        assert trees.same_bits(trees.mean_of_two({"w": tensor}, 3, {"w": other}, 1)["w"], tensor)


def test_sums_over_two_trees_are_those_of_their_flat_vectors_and_the_second_may_have_more_names():
    a = {"w": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn((), dtype=torch.float64)}
    b = {"more": torch.ones(7), "b": torch.randn((), dtype=torch.float64), "w": torch.randn(3, 2, dtype=torch.float64)}
    flat_a, flat_b = (torch.cat([tree[name].flatten() for name in ("w", "b")]) for tree in (a, b))
    torch.testing.assert_close(trees.inner_product(a, b), flat_a @ flat_b)
    torch.testing.assert_close(trees.squared_distance(a, b), ((flat_a - flat_b) ** 2).sum())
    assert_same_bits(trees.difference(a, b), {"w": a["w"] - b["w"], "b": a["b"] - b["b"]})
    assert trees.inner_product({}, b) == trees.squared_distance({}, b) == 0


def test_loading_a_tree_copies_the_values_and_leaves_the_other_tensors():
    expert, other = Expert(), Expert()
    tree = {name: tensor.clone() for name, tensor in other.state_dict().items() if name.startswith("classifier.")}
    before = {name: tensor.clone() for name, tensor in expert.state_dict().items()}
    trees.load_tree(expert, tree)
    assert_same_bits(expert.state_dict(), {**before, **tree})
    tree["classifier.1.bias"].zero_()
    assert expert.classifier[1].bias.any()
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in expert.parameters())


@pytest.mark.parametrize(("name", "shape"), [("classifier.1.bias", 1), ("head.bias", 3)])
def test_a_tensor_of_another_shape_or_of_an_unknown_name_is_refused_even_where_it_would_broadcast(name, shape):
    with pytest.raises(MisconfigurationException, match=rf"^`{name}` of shape \({shape},\) cannot be loaded"):
        trees.load_tree(Expert(), {name: torch.zeros(shape)})


def test_changed_gives_copies_of_what_differs_from_the_start_and_what_was_kept_itself():
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    loaded = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    kept = {"0.bias": torch.tensor([5.0]), "1.bias": torch.tensor([7.0])}
    trees.load_tree(module, {**kept, "0.weight": torch.tensor([[3.0]]), "1.bias": torch.tensor([8.0])})
    different = trees.changed(module.state_dict(), loaded, kept)
    assert {name: tensor.item() for name, tensor in different.items()} == {"0.weight": 3, "0.bias": 5, "1.bias": 8}
    assert different["0.bias"] is kept["0.bias"]  # not copied again
    nn.init.zeros_(module[0].weight)
    assert different["0.weight"].item() == 3.0


class Counting(nn.Module):
    """Has attributes of many kinds, some of which two parts share."""

    def __init__(self, shared):
        super().__init__()
        self.size, self.name, self.values, self.known, self.place = 3, "a", [1, [2]], shared, torch.zeros(2, 2)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1), persistent=False)


class CopiesItself(Counting):
    """Looks into its parts when it is copied."""

    def __deepcopy__(self, memo):
        new = CopiesItself({})
        new.layer = copy.deepcopy(self.layer, memo)
        new.name = f"a copy of {new.layer.in_features}"
        return new


def test_a_copied_module_has_all_attributes_and_what_its_parts_share_is_shared_by_the_copies():
    shared = {}
    module = nn.ModuleList([Counting(shared), CopiesItself({}), Counting(shared), Counting({}), nn.LSTM(2, 2)])
    module[3].layer = module[0].layer
    module[3].weight = module[1].layer.weight
    vars(module[0])["owner"] = vars(module[0])["others"] = [module]
    copied = trees.copy_module(module)
    assert not {id(part) for part in module.modules()} & {id(part) for part in copied.modules()}
    assert not {id(each) for each in module.parameters()} & {id(each) for each in copied.parameters()}
    assert_same_bits(copied.state_dict(), module.state_dict())
    first, second, third, fourth, _ = copied
    assert (first.size, first.name, first.values, first.training) == (3, "a", [1, [2]], True)
    assert first.values[1] is not module[0].values[1] and first.place is not module[0].place
    assert first.known is third.known and first.known is not shared and fourth.known is not first.known
    assert first.owner is first.others and first.owner[0] is copied
    assert second.name == "a copy of 2"
    assert fourth.layer is first.layer and fourth.weight is second.layer.weight
    assert first.seen is not module[0].seen and "seen" not in first.state_dict()
    assert torch.equal(copied[4](torch.ones(1, 2))[0], module[4](torch.ones(1, 2))[0])


class Remembers(nn.Linear):
    """Makes an object of the moment when it is copied, and looks at its weight when it is made."""

    def __getstate__(self):
        return {**vars(self), "moment": {"now": [object()]}}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.total = self.weight.sum().item()


class KeepsItsLayer(nn.Module):
    """Decides that its copies share its layer, and a module that is not copied."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(2, 2), NeverCopied()

    def __deepcopy__(self, memo):
        new = KeepsItsLayer()
        new.layer, new.other = self.layer, self.other
        return new


class NeverCopied(nn.Module):
    def __reduce_ex__(self, protocol):
        raise AssertionError("this has been copied")


class WithItems(nn.Module, dict):
    """Is a dict, too."""

    __hash__ = object.__hash__


class Registered(nn.Module):
    """Is copied as a function says that the module `copyreg` knows."""


def test_a_copy_is_what_python_makes():
    copyreg.pickle(Registered, lambda module: (Registered, ()))
    parts = [Remembers(2, 2) for _ in range(50)]
    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with_items, registered = WithItems(), Registered()
    with_items["one"] = registered.one = [1]
    module = nn.ModuleList([*parts, KeepsItsLayer(), weight_norm, with_items, registered])
    handle = parts[0].register_forward_hook(lambda part, arguments, output: output + 1)
    module.handle = handle
    for copied in (trees.copy_module(module), copy.deepcopy(module)):
        moments = [copied[i].moment["now"][0] for i in range(50)]
        assert len({id(moment) for moment in moments}) == 50
        assert [copied[i].total for i in range(50)] == [part.weight.sum().item() for part in parts]
        assert copied[50].layer is module[50].layer and copied[50].other is module[50].other
        assert torch.equal(copied[51](torch.ones(1, 2)), weight_norm(torch.ones(1, 2)))
        assert copied[51].parametrizations.weight.original1 is not weight_norm.parametrizations.weight.original1
        assert dict(copied[52]) == {"one": [1]} and copied[52]["one"] is not with_items["one"]
        assert not hasattr(copied[53], "one")
        assert torch.equal(copied[0](torch.ones(1, 2)), parts[0](torch.ones(1, 2))), "with its hook"
        copied.handle.remove()  # the copy's own
        assert torch.equal(copied[0](torch.ones(1, 2)) + 1, parts[0](torch.ones(1, 2)))


def test_the_copies_of_parameters_have_copies_of_their_attributes_and_marks_of_their_own():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), KeepsItsLayer())
    weight, frozen = module[0].weight, module[1].weight
    weight._no_weight_decay, weight.groups, weight.layer = True, ["a"], module[0]
    frozen._no_weight_decay = module[2].layer.weight.is_shared = True
    first = trees.copy_module(module)
    copied = trees.copy_module(first, {"0.weight"})
    assert copied[0].weight._no_weight_decay and copied[0].weight.groups == ["a"] and copied[1].weight._no_weight_decay
    assert copied[0].weight.groups is not first[0].weight.groups is not weight.groups
    assert copied[0].weight.layer is copied[0] and not hasattr(copied[0].bias, "_no_weight_decay")
    assert trees.is_borrowed(copied[0].weight) and not trees.is_borrowed(trees.copy_module(copied)[0].weight)
    assert copied[2].layer.weight is module[2].layer.weight


@pytest.mark.parametrize(
    ("patterns", "matched"),
    [
        ("*", {"global_expert.fc.weight", "global_expert.fc.bias", "gate.weight"}),
        ("global_expert.*", {"global_expert.fc.weight", "global_expert.fc.bias"}),
        (["*.bias", "gate.*"], {"global_expert.fc.bias", "gate.weight"}),
        ("gate", set()),
        ("GATE.*", set()),
        ([], set()),
    ],
)
def test_patterns_match_whole_names_with_stars_over_dots(patterns, matched):
    names = ["global_expert.fc.weight", "global_expert.fc.bias", "gate.weight"]
    assert {name for name in names if name in Patterns(patterns)} == matched
    assert {name for name in names if FedAvg(shared=patterns).is_shared(name)} == matched
    assert {name for name in names if FedAvg(trainable=patterns).is_trainable(name, 0, 0)} == matched
    assert not any(Local(trainable=patterns).is_shared(name) for name in names)


def test_updates_of_weight_0_count_nothing_beside_one_that_has_a_weight():
    without = trees.mean_of_two({"w": torch.tensor(1.0)}, 0, {"w": torch.tensor(2.0)}, 0)
    assert trees.mean_of_two(without, 0, {"w": torch.tensor(5.0)}, 3)["w"] == 5
