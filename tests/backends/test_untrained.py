"""What no client trains is in memory once, and nothing else changes."""

import re

import pytest
import torch
from helpers import assert_same_bits, blobs, mixture, run
from helpers.backends import begin
from helpers.models import Adapted, OnBase
from helpers.runs import assert_same
from helpers.workers import InThisProcess, TwoInThisProcess, training
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local
from fedmoe_pl.backends import LocalTraining, TrainerBackend
from fedmoe_pl.models import GlobalOnly, LocalOnly
from fedmoe_pl.trees import copy_module, is_borrowed, load_tree

SIZES = (13, 8, 11, 9)


class Memory(Callback):
    """Where each client's tensors are."""

    def __init__(self, found):
        self.found = found

    def __deepcopy__(self, memo):
        return self

    def on_train_end(self, trainer, pl_module):
        parameters = dict(getattr(pl_module, "module", pl_module).named_parameters())
        self.found.append({name: parameter.data_ptr() for name, parameter in parameters.items()})


def fitted(path, module, algorithm=None, **kwargs):
    phases = [Phase("FedAvg", algorithm or FedAvg(), rounds=2, **kwargs)]
    return run(phases, module, blobs(SIZES), path, backend=TrainerBackend())


def both_ways(path, monkeypatch, algorithm, module=OnBase):
    """The same run with what nobody trains in memory once, and with copies of it."""
    runs = []
    for name in ("shared", "alone"):
        if name == "alone":
            monkeypatch.setattr(LocalTraining, "untrained", frozenset())
        runs.append(fitted(path / name, module(), algorithm()).run.states["FedAvg"])
    return runs


def test_clients_share_a_frozen_base_after_the_first_one(tmp_path):
    found = []
    federation = fitted(tmp_path, OnBase(), train=Train(callbacks=[Memory(found)]))
    assert len(found) == 8
    first, *others = (of_client["base.weight"] for of_client in found)
    assert len({*others}) == 1 and first not in others
    state = federation.run.states["FedAvg"]
    assert {state.server["base.weight"].data_ptr(), state.initial["base.weight"].data_ptr()} == {*others}
    assert state.server["head.weight"].data_ptr() != state.initial["head.weight"].data_ptr()


def test_what_a_phase_does_not_train_is_shared_too_and_still_has_each_client_s_values(tmp_path):
    """What a client loads does not reach the next one."""
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase("tuned", FineTuning(), gate=LocalOnly()),
        Phase("again", Local("local_expert.classifier.*"), gate=LocalOnly(), start="tuned"),
    ]
    federation = run(phases, mixture(), blobs(SIZES), tmp_path, backend=TrainerBackend())
    for client in range(4):
        before, after = (federation.client_module(name, client).state_dict() for name in ("tuned", "again"))
        assert not torch.equal(after["local_expert.classifier.1.bias"], before["local_expert.classifier.1.bias"])
        assert_same_bits(*({name: t for name, t in each.items() if "extractor" in name} for each in (before, after)))


def follow(module, steps):
    """A teacher's moving average, in a way that PyTorch does not notice."""
    module.base.weight.data.mul_(0.9).add_(module.head.weight.mean(), alpha=0.1)


def test_a_frozen_parameter_that_the_module_changes_itself_is_each_client_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr(OnBase, "change", staticmethod(follow))
    shared, alone = both_ways(tmp_path, monkeypatch, FedAvg)
    assert_same_bits(shared.server, alone.server)
    assert not torch.equal(shared.server["base.weight"], OnBase().base.weight)


def add_where_nobody_looks(module):
    module.base.weight.data[200:] += 1


def add_and_fail(module):
    add_where_nobody_looks(module)
    raise ValueError("late")


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.base.bias.requires_grad_(False).add_(1),
        lambda module: module.base.bias.data.add_(1),
        add_where_nobody_looks,
        add_and_fail,
    ],
)
def test_a_change_that_begins_later_is_refused(change, tmp_path, monkeypatch):
    def late(module, steps):
        if steps == 11:  # the first client has 8
            change(module)

    monkeypatch.setattr(OnBase, "change", staticmethod(late))
    monkeypatch.setattr(OnBase, "steps", 0)
    with pytest.raises(MisconfigurationException, match=re.escape("OnBase: 'base.") + "(weight|bias)' was changed in"):
        fitted(tmp_path, OnBase())


class OnAdapted(OnBase):
    def __init__(self):
        super().__init__()
        self.base = Adapted(5, 300).double()


def test_adapters_that_are_merged_in_eval_mode(tmp_path, monkeypatch):
    shared, alone = both_ways(tmp_path, monkeypatch, FedAvg, OnAdapted)
    assert_same(shared.evaluations, alone.evaluations)
    assert_same_bits(shared.server, alone.server)
    assert torch.equal(shared.server["base.weight"], OnAdapted().base.weight)
    monkeypatch.setattr(Adapted, "merges", False)
    assert_same(fitted(tmp_path / "reference", OnAdapted()).run.states["FedAvg"].evaluations, alone.evaluations)


class WritesToItsModule(FedAvg):
    """Its clients predict with a model that it makes in the module that it is given."""

    def personal_tensors(self, client, server):
        load_tree(client.module, server)
        for tensor in client.module.state_dict().values():
            tensor.mul_(1 + client.id)
        return client.module.state_dict()


def test_a_hook_may_write_to_the_module_of_an_evaluation(tmp_path, monkeypatch):
    shared, alone = both_ways(tmp_path, monkeypatch, WritesToItsModule)
    assert_same(shared.evaluations, alone.evaluations)


class WritesToTheServer(FedAvg):
    def server_update(self, server, combined):
        server["base.weight"][200:] += 1
        return super().server_update(server, combined)


def add_in_evaluations(module, x):
    if not module.training:
        add_where_nobody_looks(module)
    return module.head(module.base(x))


@pytest.mark.parametrize(
    ("forward", "algorithm"), [(add_in_evaluations, FedAvg()), (OnBase.forward, WritesToTheServer())]
)
def test_a_change_after_the_last_training_is_refused(forward, algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(OnBase, "forward", forward)
    with pytest.raises(MisconfigurationException, match=re.escape("OnBase: 'base.weight' was changed in place")):
        fitted(tmp_path, OnBase(), algorithm)


def test_a_zero_with_another_sign_is_another_value():
    of_phase = training(OnBase(), blobs(SIZES))
    of_phase.initial["base.bias"].zero_()
    of_phase.module.load_state_dict(of_phase.initial)
    negative = -of_phase.initial["base.bias"]
    assert of_phase.copies.known({"base.bias": negative})["base.bias"] is negative
    assert of_phase.copies.known({"base.bias": -negative})["base.bias"] is of_phase.initial["base.bias"]


def test_a_parameter_that_was_given_other_memory_is_not_borrowed():
    borrower = copy_module(lender := nn.Linear(3, 2), {"weight"})
    borrower.weight.data = memory = lender.weight.data + 1
    assert not is_borrowed(borrower.weight)
    load_tree(borrower, {"weight": memory + 1})
    assert borrower.weight.data_ptr() == memory.data_ptr(), "what has the memory, such as an average, sees the values"


def test_a_frozen_parameter_that_is_a_view_of_a_larger_tensor(tmp_path):
    """As of a file that was read at once: it begins at no multiple of eight bytes."""
    module = OnBase().float()
    flat = torch.zeros(1501)
    flat[1:] = module.base.weight.flatten()
    module.base.weight.data = flat[1:].view(300, 5)
    phases = [Phase("FedAvg", FedAvg(), rounds=2)]
    federation = run(phases, module, blobs(SIZES, dtype=torch.float32), tmp_path, backend=TrainerBackend())
    assert_same_bits({"": federation.run.states["FedAvg"].server["base.weight"]}, {"": flat[1:].view(300, 5)})


class Measured(InThisProcess):
    """Says how many bytes a worker was sent with the server's state, and how many it answered."""

    def submit(self, phase, server, groups):
        future = super().submit(phase, server, groups)
        self.log.append((len(server or b""), len(future.result())))
        return future


def test_workers_have_a_frozen_base_from_the_phase_and_neither_the_server_nor_they_send_it_again():
    backend = TwoInThisProcess()
    backend.worker = Measured
    plan = begin(backend, training(OnBase(), blobs(SIZES)))
    server = plan.training.copies.known(plan.training.algorithm.server_init(plan.training.module))
    groups = list(plan.train(server, [[0], [1], [2], [3]], {}, 0))
    sizes = [entry for entry in backend.log if len(entry) == 2]
    trained, base = (
        sum(tensor.nbytes for name, tensor in server.items() if name[:4] == part) for part in ("head", "base")
    )
    assert len(sizes) == 4 and all(max(size) < trained + base / 2 for size in sizes), (sizes, trained, base)
    alone = list(begin(TrainerBackend(), training(OnBase(), blobs(SIZES))).train(server, [[0], [1], [2], [3]], {}, 0))
    assert_same_bits(*({i: group.update.sent for i, group in enumerate(each)} for each in (groups, alone)))
