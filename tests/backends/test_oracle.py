"""Every backend gives what plain Trainers on fresh copies and a mean give, or refuses by name before it trains.

Each case has an id of its ingredients and its seed; ``draw(seed)`` gives a drawn one again.
"""

from functools import cache
from importlib.metadata import entry_points
from itertools import count, filterfalse, islice

import pytest
from helpers import EveryBatch
from helpers.ingredients import ALGORITHMS, DATA, KEEPING, LOSSES, NETS, OPTIMIZERS, SCHEDULERS, SETTINGS
from helpers.oracle import Case, can_be_divided, differences, draw, expected_once, is_excluded
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities import registry

from fedmoe_pl.backends import StackedBackend, TrainerBackend

pytestmark = pytest.mark.filterwarnings("ignore")

IN_PLACE = "changed in place, frozen"
BY_ROUND, IGNORING = "rates over rounds", "criterion that ignores labels"
SHARED = "shared classifiers"  # what is frozen never changes, so that it need not be computed in each step
POINTS = {  # ways to a silently wrong result, by the kind of shortcut that was taken
    "features, dropout": Case("dropout, frozen", algorithm=SHARED),
    "features, noise": Case("noise, frozen", algorithm=SHARED),
    "features, mixed inputs": Case("mixed inputs, frozen", algorithm=SHARED),
    "features, epoch": Case("frozen", "input scaled by the epoch", algorithm=SHARED),
    "features, Python's numbers": Case("python random, frozen", data="batches of one", seed=10),
    "features, NumPy's numbers": Case("numpy random, frozen", data="batches of one", seed=10),
    "features, PyTorch's numbers": Case("torch random, frozen", data="batches of one", seed=10),
    "features, changed in place": Case(IN_PLACE, algorithm="classifiers only"),  # the gate needs no gradient
    "features, BatchNorm by each batch": Case("BatchNorm by each batch, frozen", algorithm=SHARED),
    "features, one round": Case("dropout, frozen", max_epochs=3),
    "epoch 0, gate": Case(loss="gate from epoch 1 on"),
    "epoch 0, term": Case(loss="term from epoch 1 on"),
    "epoch 0, dropout": Case("dropout", "raises Dropout.p"),
    "two clients, padding_idx": Case("padding_idx"),
    "padding, distillation": Case(algorithm="distillation"),
    "padding, drift": Case(algorithm="drift"),
    "padding, InstanceNorm": Case("InstanceNorm"),
    "padding, running mean": Case("running mean"),
    "padding, replaced mean": Case("replaced mean"),
    "padding, BatchNorm without parameters": Case("BatchNorm without parameters"),
    "padding, small term": Case(loss="small term of the batch"),
    "padding, max_norm": Case("max_norm", data="large batches", rounds=3),
    "optimizer, post hook": Case(optimizer="post hook"),
    "optimizer, pre hook": Case(optimizer="pre hook"),
    "optimizer, replaced step": Case(optimizer="replaced step"),
    "optimizer, some parameters": Case(optimizer="some parameters", setting="clip by norm"),
    "optimizer, hooks of parameters": Case(optimizer="hooks of parameters"),
    "optimizer, scheduler": Case(scheduler="touches parameters"),
    "random numbers, Python": Case("python random", seed=4),
    "random numbers, NumPy": Case("numpy random"),
    "listed parameters": Case(loss="listed parameters"),
    "samples, softmax": Case("softmax over samples"),
    "samples, class weights": Case(loss="criterion with class weights"),
    "modes, BatchNorm": Case("BatchNorm in eval mode"),
    "modes, input_shape": Case("BatchNorm in eval mode, input_shape"),
    "modes, own module": Case("BatchNorm in eval mode", is_mixture=False),
    "modes, dropout": Case("dropout in eval mode"),
    "modes, in turn": Case("BatchNorm in eval mode", algorithm="in turn"),
    "modes, evaluated": Case("BatchNorm in eval mode", setting="evaluated"),
    "state, extra": Case("extra state", rounds=2),
    "state, load hook": Case("load hook", rounds=2),
    "protocol, LBFGS": Case(optimizer="LBFGS"),
    "protocol, SAM": Case(optimizer="SAM"),
    "protocol, any arguments": Case(optimizer="any arguments"),
    "protocol, without gradients": Case(optimizer="without gradients"),
    "protocol, configure_optimizers": Case(hook="asks for max_epochs"),
    "protocol, catches Exception": Case(loss="catches Exception"),
    "protocol, None": Case(loss="None for short batches"),
    "protocol, None in a Trainer": Case(loss="None for short batches", hook="on_train_epoch_start"),
    "ignored labels": Case(loss=IGNORING),
    "ignored labels, no other in a batch": Case(loss=IGNORING, optimizer="momentum", data="batches of one"),
    "ignored labels, training_step": Case(loss=IGNORING, hook="training_step", data="batches of one"),
    "optimizer, rates over rounds": Case(optimizer="momentum", scheduler="StepLR", setting=BY_ROUND, rounds=3),
    "optimizer, kept momentum": Case(optimizer="momentum", setting="keep_optimizer", rounds=3),
    "optimizer, kept moments": Case(optimizer="Adam", setting="keep_optimizer", rounds=3),
    "in turn, itertools.count": Case("itertools.count"),
    "in turn, array.array": Case("array.array"),
    "in turn, attribute of a parameter": Case("attribute of a parameter"),
    "torchmetrics": Case(loss="torchmetrics"),
}
OF_KEEPING = {f"in turn, {name}": Case(name, rounds=2) for name in KEEPING}
POINTS |= OF_KEEPING
SIBLINGS = {  # of which another one is tested each time
    *("features, PyTorch's numbers", "features, changed in place", "features, BatchNorm by each batch"),
    *("features, one round", "padding, BatchNorm without parameters", "padding, small term", "padding, max_norm"),
    *("optimizer, some parameters", "modes, in turn", "modes, evaluated", "modes, dropout", "state, load hook"),
    *("ignored labels, training_step", "optimizer, kept moments"),
    *("in turn, array.array", "in turn, attribute of a parameter", "torchmetrics", *OF_KEEPING),
}
IN_WORKERS = ("modes, BatchNorm", "state, extra", "ignored labels, no other in a batch")
STACKED = {  # what a stack trains, and does not refuse
    "plain": Case(),
    "SmallMLP": Case("SmallMLP", optimizer="momentum", scheduler="StepLR"),
    "FedProx": Case(optimizer="Adam", algorithm="FedProx"),
    "chain": Case(algorithm="chain"),
    "clipped": Case(setting="clip by norm", data="one batch each"),
    "frozen": Case("frozen", algorithm=SHARED),
    "BatchNorm": Case("BatchNorm", optimizer="AdamW"),
    "batches that cannot be padded": Case(loss="term of the batch"),
    "two groups and a schedule": Case(optimizer="two groups", scheduler="StepLR"),
    "padded, some parameters": Case("SmallMLP", optimizer="some parameters"),
}
# the last client, alone in its stack, has tuned the statistics that its frozen experts normalize by
STACKED_ALONE = {"BatchNorm, chain": Case("BatchNorm", algorithm="chain", data="large batches", max_epochs=1)}
FEW_LABELS = {  # batches of which some samples, or all, have no label
    "plain": Case(optimizer="momentum", data="few labels", rounds=2),
    "uniform": Case(optimizer="Adam", algorithm="uniform", data="few labels"),
    "BatchNorm": Case("BatchNorm", data="few labels"),
    "class weights": Case(loss="criterion with class weights", data="few labels"),
    "own module": Case(algorithm="FedPer", data="few labels", is_mixture=False),
    "chain": Case(algorithm="chain", data="few labels"),
    "features": Case("frozen", algorithm=SHARED, data="few labels"),
    "features, softmax": Case("softmax over samples, frozen", algorithm="chain", data="few labels"),
}
OF_FIELDS = {"net": NETS, "loss": LOSSES, "optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "algorithm": ALGORITHMS}
OF_FIELDS |= {"setting": SETTINGS, "data": DATA}
ALONE = [Case(**{field: name, "rounds": 2}) for field, names in OF_FIELDS.items() for name in [*names][1:]]
ALONE = [each for each in ALONE if each not in (*POINTS.values(), *STACKED.values()) and each.net != IN_PLACE]
DRAWN = [*islice(filterfalse(is_excluded, map(draw, count())), 200)]
DIVIDED = {
    "plain": Case(),
    "class weights": Case(loss="class weights"),
    "sample weights": Case(loss="sample weights"),
    "term of the batch": Case(loss="term of the batch"),
    "term of large batches": Case(loss="term of large batches", data="large batches"),
    "drift": Case(algorithm="drift"),
    "Adam": Case(optimizer="Adam"),
    "accumulation": Case(setting="accumulation"),
    "clipping": Case(setting="clip by norm"),
}
BACKENDS = {
    "auto": {"backend": "auto"},
    "TrainerBackend": {"backend": TrainerBackend()},
    "StackedBackend": {"backend": StackedBackend()},
    "stacks of two": {"backend": StackedBackend(2)},
    "alone": {"backend": TrainerBackend(), "callbacks": [EveryBatch()]},  # a Trainer per client
    "workers": {"backend": TwoInThisProcess()},
    "two processes": {"devices": 2},
    "ddp": {"devices": 2, "strategy": "ddp"},
}
MAY_REFUSE = ("StackedBackend", "ddp")


def repeated(cases, *backends, fast=()):
    """Each case with each backend, one after another, so that they use the same result of the oracle."""
    named = cases if isinstance(cases, dict) else {str(case): case for case in cases}
    return [
        pytest.param(
            *(case, backend),
            id=f"{name}-{backend}",
            marks=[] if backend in fast and name not in SIBLINGS else [pytest.mark.slow],
        )
        for name, case in named.items()
        for backend in backends
    ]


@pytest.fixture(autouse=True)
def packages_read_once(monkeypatch):
    """Each Trainer searches all installed packages for callbacks, which takes longer than a client's training."""
    monkeypatch.setattr(registry, "entry_points", cache(entry_points), raising=False)


def check(case, backend, tmp_path):
    rounding = 1e-5 if case.setting == "float32" else 1e-9
    tolerance = 1e-12 if backend == "alone" and rounding == 1e-9 else rounding
    errors, refusal = differences(case, tolerance, tmp_path, **BACKENDS[backend])
    assert not refusal or backend in MAY_REFUSE, f"{backend} refuses {case!r}: {refusal}"
    assert not errors, "\n".join((f"{backend} with {case!r}:", *errors[:5]))
    return refusal


ONE_BY_ONE = ("TrainerBackend", "alone")
STACKED_OR_NOT = ("StackedBackend", "TrainerBackend")


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *repeated(POINTS, "auto", "StackedBackend", *ONE_BY_ONE, fast=("auto", "StackedBackend")),
        *repeated(FEW_LABELS, "auto", "StackedBackend", *ONE_BY_ONE, "two processes", fast=STACKED_OR_NOT),
        *repeated(ALONE, "auto"),
        *repeated([POINTS[name] for name in IN_WORKERS], "workers", fast=["workers"]),
        *repeated(DRAWN[:50], "auto", "StackedBackend", *ONE_BY_ONE),
        *repeated(DRAWN[50:], "auto", "StackedBackend", "TrainerBackend"),
    ],
)
def test_a_backend_gives_what_plain_trainers_give(case, backend, tmp_path):
    check(case, backend, tmp_path)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *repeated(STACKED, "StackedBackend", "auto", fast=["StackedBackend"]),
        *repeated(STACKED_ALONE, "stacks of two", fast=["stacks of two"]),
    ],
)
def test_plain_clients_are_stacked(case, backend, tmp_path):
    assert not check(case, backend, tmp_path), "a stack can train it"
    before = case.make()[0].state_dict()
    after = next(iter(expected_once(case).values()))["server"]
    moved = [(tensor - before[name]).abs().max() for name, tensor in after.items() if tensor.is_floating_point()]
    assert max(moved) > 1e-3, "something was trained"


@pytest.mark.parametrize(
    ("case", "backend"), repeated([Case("weight norm"), *[*POINTS.values()][::3], *DRAWN[:20]], "two processes")
)
def test_two_processes_give_what_plain_trainers_give(case, backend, tmp_path):
    check(case, backend, tmp_path)


@pytest.mark.parametrize(
    ("case", "backend"), [*repeated(DIVIDED, "ddp"), *repeated([*filter(can_be_divided, DRAWN)][:30], "ddp")]
)
def test_processes_that_share_batches_give_what_plain_trainers_give(case, backend, tmp_path):
    check(case, backend, tmp_path)
