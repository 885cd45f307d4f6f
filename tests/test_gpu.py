"""Runs on a GPU give what runs on a CPU give.

``pytest -m gpu`` needs a GPU. With PRETENDED_GPU set, most of these tests run on a device that the process pretends to
have, see ``helpers.pretended``; so they show, without a GPU, that no tensor is on the wrong device.
"""

import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import Expert, TensorData, blobs, mixture, phase, sparse_mixture
from helpers import pretended as device_of_tests
from helpers.backends import FEW, TwoGroups, WithBatchNorm, local_training
from helpers.clusters import all_phases, clustered
from helpers.configurations import REPOSITORY
from helpers.ingredients import build
from helpers.methods import METHODS
from helpers.methods import data as data_of_methods
from helpers.models import OnBase
from helpers.pfedmoe import model as three_architectures
from helpers.runs import Kill
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from fedmoe_pl import Federation, Train
from fedmoe_pl.algorithms import (
    FedAvg,
    FedMoEDA,
    FedProx,
    FineTuning,
    Local,
    PFedMoE,
    PFLMoE,
    Scaffold,
    SpecialistMixture,
)
from fedmoe_pl.backends import PoolBackend, StackedBackend, TrainerBackend, data_on, on_device
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.backends.untrained import DeviceCopies
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import RandomCrop, RandomHorizontalFlip
from fedmoe_pl.models import BiLSTM, FeatureGate, GlobalOnly, LeNet5, LinearGate, PersonalizedMoE, RepresentationMoE
from fedmoe_pl.setup import start
from fedmoe_pl.trees import is_borrowed

PRETENDED = "PRETENDED_GPU" in os.environ
BACKENDS = [TrainerBackend(), StackedBackend()]
only_cuda = pytest.mark.skipif(PRETENDED, reason="shows what only CUDA has")


@pytest.fixture(scope="module")
def accelerator():
    return device_of_tests.Accelerator() if PRETENDED else "gpu"


@pytest.fixture
def device(monkeypatch):
    if not PRETENDED:
        return torch.device("cuda", 0)
    monkeypatch.setattr(start, "data_on", device_of_tests.placed)
    return torch.device(device_of_tests.NAME, 0)


def made(path, phases, accelerator, backend="auto", trainer=None, **kwargs) -> Federation:
    trainer = {"max_epochs": 2, "accelerator": accelerator, "devices": 1, **(trainer or {})}
    arguments = {"logger": False, "enable_progress_bar": False, "seed": 2, **kwargs}
    return Federation(phases, trainer, backend=backend, default_root_dir=str(path), **arguments)


def images(**kwargs) -> TensorData:
    """Three clients with 9, 5 and 6 small images."""
    x = torch.randint(256, (20, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    parts = torch.arange(20).split([9, 5, 6])
    return TensorData(x, torch.arange(20) % 4, parts, dtype=torch.float64, batch_size=4, **kwargs)


def words() -> TensorData:
    """Two clients with sentences of six words."""
    x = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(0))
    return TensorData(x, torch.arange(24) % 2, torch.arange(24).split(12), dtype=torch.int64, batch_size=4)


def points() -> TensorData:
    return blobs(FEW, batch_size=10, test_fraction=0.2)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def lenet(optimizer=plain_sgd) -> PersonalizedMoE:
    torch.manual_seed(3)
    return PersonalizedMoE(LeNet5(3, 4), gate=FeatureGate(), optimizer=optimizer).double()


def readers() -> PersonalizedMoE:
    torch.manual_seed(3)
    return PersonalizedMoE(BiLSTM(20, 3, 4, 2), gate=FeatureGate(), optimizer=plain_sgd).double()


def two_groups() -> TwoGroups:
    torch.manual_seed(3)
    return TwoGroups(Expert(), gate=LinearGate(5)).double()


def pfl_moe() -> list:
    expert = FineTuning("local_expert.classifier.*", 0.25)
    return [phase("F", FedAvg("global_expert.*")), phase("FB", expert), phase("last", PFLMoE(), evaluate=True)]


def weighted() -> PersonalizedMoE:
    torch.manual_seed(3)
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    return PersonalizedMoE(Expert(), gate=LinearGate(5), optimizer=plain_sgd, loss=loss).double()


def augmented() -> TensorData:
    return images(augmentation=[RandomCrop(2), RandomHorizontalFlip()])


# phases, of which the last one is compared, model, data
CASES = {
    "FedAvg": (lambda: [phase("last", FedAvg(), rounds=3, evaluate=True)], lambda: mixture(LinearGate(5)), points),
    "FedProx": (lambda: [phase("last", FedProx(0.1), rounds=2)], mixture, points),
    "Scaffold": (lambda: [phase("last", Scaffold(), rounds=2)], lambda: mixture(optimizer=plain_sgd), points),
    "groups": (lambda: [phase("last", FedAvg(), rounds=2)], two_groups, points),
    "batch norm": (lambda: [phase("last", FedAvg())], lambda: mixture(expert=WithBatchNorm()), points),
    "PFL-MoE": (pfl_moe, lambda: mixture(FeatureGate(6), optimizer=adam), points),
    "convolutions": (lambda: [phase("last", FedAvg(), rounds=2, evaluate=True)], lenet, images),
    "a loss with tensors": (
        lambda: [phase("last", FedAvg(), evaluate=True)],
        weighted,
        lambda: blobs(FEW, validation_fraction=0.2),
    ),
    "augmentation": (pfl_moe, partial(lenet, adam), augmented),
    "clusters": (all_phases, clustered, points),
    "FedMoE-DA": (lambda: [phase("last", FedMoEDA(2, 1), rounds=3, evaluate=True)], sparse_mixture, points),
    "pFedMoE": (lambda: [phase("last", PFedMoE(), rounds=2, evaluate=True)], three_architectures, points),
}
# not stacked: optimizers that clients keep, what steps leave in a module, an LSTM
ALONE = {
    "interleaved": (
        lambda: [
            phase("F", FedAvg()),
            phase("last", PFLMoE(interleaved=True), rounds=4, train=Train(keep_optimizer=True)),
        ],
        lambda: mixture(FeatureGate(6), optimizer=adam),
        points,
    ),
    "a queue in the module": (
        lambda: [phase("last", FedAvg("*.extractor.*"), rounds=2)],
        lambda: build("queue"),
        points,
    ),
    "LSTM": (
        lambda: [phase("F", FedAvg()), phase("E", FineTuning()), phase("last", SpecialistMixture())],
        readers,
        words,
    ),
}


def finished(path, name, accelerator, backend, **kwargs) -> Federation:
    phases, model, data = {**CASES, **ALONE}[name]
    federation = made(path, phases(), accelerator, backend, **kwargs)
    federation.fit(model(), data())
    return federation


def assert_agree(federation, expected):
    """The servers, what clients keep, all on the CPU, and the accuracies."""
    name = expected.run.phases[-1].name
    state, expected_state = (each.run.states[name] for each in (federation, expected))
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(state.server, expected_state.server)
    assert state.clients.keys() == expected_state.clients.keys()
    for client in state.clients:
        close(dict(state.clients[client]), dict(expected_state.clients[client]))
    assert federation.results.keys() == expected.results.keys()
    for method, evaluation in expected.results.items():
        for own, other in zip(federation.results[method].clients, evaluation.clients, strict=True):
            for metric in ("reweighted_test", "global_test", "mean_gate_weight", "validation_loss"):
                assert getattr(own, metric) == pytest.approx(getattr(other, metric), abs=1e-6, nan_ok=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=["trainer", "stacked"])
@pytest.mark.parametrize("name", CASES)
def test_both_backends_give_what_a_cpu_gives(tmp_path, accelerator, device, name, backend):
    if name == "clusters" and isinstance(backend, StackedBackend):
        backend = "auto"  # the ensemble trains nothing
    expected = finished(tmp_path / "cpu", name, "cpu", TrainerBackend())
    federation = finished(tmp_path / "gpu", name, accelerator, backend)
    assert federation.run.devices == [device]
    assert federation.run.training_data.x.device == device
    assert_agree(federation, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_it_gives_on_a_cpu(tmp_path, accelerator, device, name):
    method, states = METHODS[name], []
    # PyTorch has no vmap of an index with a stacked list for the pretended device
    stacks = method.stacks and not (PRETENDED and name in ("FedMix", "FedJETs"))
    backends = [TrainerBackend(), *([StackedBackend(2)] if stacks else [])]
    for number, (place, backend) in enumerate([("cpu", TrainerBackend()), *((accelerator, each) for each in backends)]):
        run = made(tmp_path / str(number), method.phases(), place, backend, enable_checkpointing=False)
        run.fit(method.model(), data_of_methods(**method.split))
        states.append(run.run.states)
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    for other in states[1:]:
        for phase_name, state in states[0].items():
            close(other[phase_name].server, state.server)
            assert other[phase_name].clients.keys() == state.clients.keys()
            for client, tree in state.clients.items():
                close(dict(other[phase_name].clients[client]), dict(tree))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["interleaved", "a queue in the module", pytest.param("LSTM", marks=only_cuda)])
def test_clients_that_cannot_be_stacked_give_what_they_give_on_a_cpu(tmp_path, accelerator, device, name):
    expected = finished(tmp_path / "cpu", name, "cpu", TrainerBackend())
    assert_agree(finished(tmp_path / "gpu", name, accelerator, "auto"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=["trainer", "stacked"])
def test_clipping_and_a_trainer_per_client_give_what_they_give_on_a_cpu(tmp_path, accelerator, device, backend):
    clipped = {"gradient_clip_val": 0.1}
    expected = finished(tmp_path / "cpu", "FedAvg", "cpu", TrainerBackend(), trainer=clipped)
    assert_agree(finished(tmp_path / "gpu", "FedAvg", accelerator, backend, trainer=clipped), expected)
    if isinstance(backend, TrainerBackend):
        every_batch = clipped | {"detect_anomaly": True}
        assert_agree(finished(tmp_path / "all", "FedAvg", accelerator, backend, trainer=every_batch), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=["trainer", "stacked"])
def test_data_that_do_not_fit_stay_on_the_cpu(tmp_path, accelerator, device, monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    monkeypatch.setattr(start, "data_on", data_on)
    expected = finished(tmp_path / "cpu", "PFL-MoE", "cpu", TrainerBackend())
    federation = finished(tmp_path / "gpu", "PFL-MoE", accelerator, backend)
    assert federation.run.training_data.x.device.type == "cpu"
    assert_agree(federation, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("first_on_gpu", [True, False])
def test_a_run_goes_on_on_the_other_device(tmp_path, accelerator, device, first_on_gpu):
    def phases():
        return [phase("last", FedAvg("global_expert.*"), rounds=4, gate=GlobalOnly(), evaluate=True)]

    def model():
        return mixture()

    first, second = (accelerator, "cpu") if first_on_gpu else ("cpu", accelerator)
    whole = made(tmp_path / "whole", phases(), "cpu")
    whole.fit(model(), points())
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "parts", phases(), first, callbacks=[Kill("on_round_end", 2)]).fit(model(), points())
    resumed = made(tmp_path / "parts", phases(), second)
    resumed.fit(model(), points(), ckpt_path="last")
    assert_agree(resumed, whole)


class Places(Callback):
    """Where each client's frozen base is when its training ends, and that of a forward pass of the user's own."""

    def __init__(self, found):
        self.found = found

    def __deepcopy__(self, memo):
        return self

    def on_train_end(self, trainer, pl_module):
        base = dict(pl_module.named_parameters())["base.weight"]
        assert pl_module(torch.zeros(1, 5, dtype=torch.float64, device=base.device)).device == base.device
        self.found.append((base.device, base.data_ptr()))


@pytest.mark.gpu
def test_a_frozen_base_is_on_the_device_once(tmp_path, accelerator, device):
    found = []
    phases = [phase("last", FedAvg(), rounds=2, evaluate=True, train=Train(callbacks=[Places(found)]))]
    federation = made(tmp_path / "gpu", phases, accelerator, TrainerBackend())
    federation.fit(OnBase(), points())
    _, *others = found  # the first has it to itself
    assert len(others) == 7 and len({*others}) == 1 and others[0][0] == device
    phases = [phase("last", FedAvg(), rounds=2, evaluate=True, train=Train(callbacks=[Places([])]))]
    expected = made(tmp_path / "cpu", phases, "cpu", TrainerBackend())
    expected.fit(OnBase(), points())
    assert_agree(federation, expected)
    assert federation.run.states["last"].server["base.weight"].device.type == "cpu"


def add_where_nobody_looks(module, steps):
    if steps == 17:  # in the second round
        module.base.weight.data[200:] += 1


@pytest.mark.gpu
def test_a_change_of_what_clients_share_on_the_device_is_refused(tmp_path, accelerator, device, monkeypatch):
    monkeypatch.setattr(OnBase, "change", staticmethod(add_where_nobody_looks))
    monkeypatch.setattr(OnBase, "steps", 0)
    with pytest.raises(MisconfigurationException, match=re.escape("OnBase: 'base.weight' was changed in place")):
        made(tmp_path, [phase("last", FedAvg(), rounds=2)], accelerator, TrainerBackend()).fit(OnBase(), points())


class PredictsAtTheEnd(OnBase):
    def training_step(self, batch, batch_idx):
        self.seen = batch[0]
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        assert self(self.seen).device == self.base.weight.device == self.seen.device == self.device


@pytest.mark.gpu
def test_a_module_is_on_the_device_in_its_own_hook_at_the_end_of_training(tmp_path, accelerator, device):
    made(tmp_path, [phase("last", FedAvg(), rounds=2)], accelerator, TrainerBackend()).fit(PredictsAtTheEnd(), points())


@pytest.mark.gpu
def test_what_clients_share_leaves_the_device_at_the_end_of_a_phase(tmp_path, accelerator, device, monkeypatch):
    found, alive = [], []
    init = DeviceCopies.__init__

    def noted(self):
        init(self)
        found.append(weakref.ref(self))

    class Count(FederationCallback):
        def on_round_start(self, run, phase, round):
            alive.append(sum(bool(copies and copies.tensors) for copies in (each() for each in found)))

    monkeypatch.setattr(DeviceCopies, "__init__", noted)
    phases = [phase(name, FedAvg(), rounds=2) for name in ("one", "two", "three")]
    made(tmp_path, phases, accelerator, TrainerBackend(), callbacks=[Count()]).fit(OnBase(), points())
    assert alive == [0, 1] * 3 and not any(copies and copies.tensors for copies in (each() for each in found))


class ChangesInEvaluations(RepresentationMoE):
    """Of three architectures; those of the second and the third add to their expert when they are evaluated."""

    def mix(self, x):
        expert = next(self.local_experts.parameters())
        if torch.is_inference_mode_enabled() and is_borrowed(expert):
            expert.data.add_(1)
        return super().mix(x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*no phase trains it")
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_a_change_of_what_one_architecture_shares_is_refused(tmp_path, accelerator, device, place):
    model = three_architectures()
    model.__class__ = ChangesInEvaluations
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("gate."))
    phases = [phase("last", Local("gate.*"), evaluate=True)]
    federation = made(tmp_path, phases, "cpu" if place == "cpu" else accelerator, TrainerBackend())
    data = blobs((13, 8, 11, 9, 12, 10, 9), batch_size=10, test_fraction=0.2)
    with pytest.raises(MisconfigurationException, match=r"ChangesInEvaluations: 'local_experts.* was changed in"):
        federation.fit(model, data)


@pytest.mark.gpu
def test_features_are_on_the_device_and_the_module_is_back_on_the_cpu(device):
    training = local_training(mixture(FeatureGate(6)), PFLMoE(), points(), max_epochs=2)
    training.datamodule.setup()
    training = replace(training, device=device)
    module = training.module
    client, constants, samples = begin_client(training, module, {}, 1, {}, 0)
    features = FeatureCache().find(training, client, on_device(constants, device), samples)
    assert features is not None and features.parts.names
    assert {rows.device for rows in features.rows.values()} == {device}
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


@pytest.mark.gpu
@only_cuda
@pytest.mark.parametrize("backend", BACKENDS, ids=["trainer", "stacked"])
def test_bfloat16_trains_what_single_precision_trains_to_rounding(tmp_path, backend):
    """To 8 bits: a fifth of the largest change of a weight finds a wrong client, batch order or learning rate."""
    servers, start_of = {}, mixture(dtype=torch.float32).state_dict()
    for precision in ("32-true", "bf16-mixed"):
        federation = made(tmp_path / precision, [phase("it", FedAvg())], "gpu", backend, {"precision": precision})
        federation.fit(mixture(dtype=torch.float32), blobs(FEW, dtype=torch.float32, batch_size=10))
        servers[precision] = federation.run.states["it"].server
    exact, rounded = servers.values()
    moved = max((exact[name] - start_of[name]).abs().max().item() for name in exact)
    difference = max((exact[name] - rounded[name]).abs().max().item() for name in exact)
    assert 0 < difference <= 0.2 * moved
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())


@pytest.mark.gpu
@only_cuda
def test_worker_processes_on_one_gpu_give_what_one_process_gives(tmp_path):
    cuda = torch.device("cuda", 0)
    expected = finished(tmp_path / "one", "FedAvg", "gpu", TrainerBackend())
    workers = PoolBackend(TrainerBackend(), [cuda, cuda])
    phases, model, data = CASES["FedAvg"]
    federation = Federation(
        phases(),
        {"max_epochs": 2, "accelerator": "gpu"},
        backend=workers,
        default_root_dir=str(tmp_path / "two"),
        logger=False,
        enable_progress_bar=False,
        seed=2,
    )
    federation.fit(model(), data())
    assert_agree(federation, expected)


@pytest.mark.gpu
@only_cuda
@pytest.mark.parametrize("number", [1, 2])
def test_gpus_that_train_each_client_together_give_what_one_gives(number, tmp_path):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    phases, model, data = CASES["FedAvg"]
    runs = []
    for name, trainer in (("one", {}), ("together", {"strategy": "ddp", "devices": number})):
        runs.append(made(tmp_path / name, phases(), "gpu", TrainerBackend(), trainer))
        runs[-1].fit(model(), data())
    assert_agree(*reversed(runs))


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_warns_of_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="GPU available but not used"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    finished(tmp_path, "FedAvg", "cpu", TrainerBackend())  # here, warnings are errors


@pytest.mark.slow
@pytest.mark.skipif(not device_of_tests.can_register(), reason="this release of PyTorch has no devices in Python")
def test_on_a_device_that_is_pretended_no_tensor_is_on_the_wrong_one():
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    environment = {**os.environ, "PRETENDED_GPU": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    summary = done.stdout.splitlines()[-1]
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", summary)}
    assert counts["passed"] >= 2 * len(CASES) and not counts.keys() & {"failed", "error", "errors"}, summary
