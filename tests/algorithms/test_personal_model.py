"""What all methods of personalization must do: agree in both backends, resume, and serve newcomers."""

import functools

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import UNEQUAL, WithBatchNorm, assert_agree, local_training
from helpers.bare import sgd, two_experts
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import APFL, FML, Ditto, FedBN, FedKD, FedRep, PerFedAvg, PFedMe
from fedmoe_pl.algorithms.shared.parts import warn_of_mixture
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import ConstantGate, EqualWeights, GlobalOnly, LocalOnly
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.trees import of_module, subtree

MIXED = "gate is {}, so that a mixture of both experts is evaluated; with LocalOnly it is the personal model"
CASES = {
    "Ditto": (lambda: Ditto(0.7), LocalOnly),
    "FedRep": (lambda: FedRep(head_epochs=1), GlobalOnly),
    "FedBN": (lambda: FedBN("global_expert.*"), GlobalOnly),
    "APFL": (lambda: APFL(0.3, 0.1), LocalOnly),
    "pFedMe": (lambda: PFedMe(3.0, inner_lr=0.05), LocalOnly),
    "Per-FedAvg": (lambda: PerFedAvg(0.1), GlobalOnly),
    "Per-FedAvg, second order": (lambda: PerFedAvg(0.1, second_order=True), GlobalOnly),
}


def model(name):
    """Two experts; for FedBN, with batch normalization."""
    return mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd) if name == "FedBN" else two_experts()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("FedBN", "Per-FedAvg, second order")])
def test_stacks_have_the_statistics_of_batch_normalization_of_clients_alone(name):
    module = mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd)
    assert_agree(local_training(module, CASES[name][0](), blobs(UNEQUAL, batch_size=10)), 1e-10)


def test_second_order_through_batch_normalization_is_not_stacked():
    module = mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd)
    training = local_training(module, PerFedAvg(0.1, second_order=True), blobs(UNEQUAL, batch_size=10))
    with pytest.raises(MisconfigurationException, match="stacking changes the gradient of 'global_expert"):
        StackedBackend().plan(training)


def fitted(path, name, ckpt_path=None, **kwargs):
    algorithm, gate = CASES[name]
    phases = [Phase(name, algorithm(), rounds=3, clients_per_round=2, gate=gate())]
    trainer = {"max_epochs": 2, "accelerator": "cpu"}
    one = federation(path, phases, trainer=trainer, seed=3, **kwargs)
    one.fit(model(name), blobs(), ckpt_path=ckpt_path)
    return one


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Gives the finished run of a method, which is made once."""
    return functools.cache(lambda name: fitted(tmp_path_factory.mktemp("whole"), name))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in CASES if name != "Per-FedAvg, second order"])
def test_a_newcomer_has_a_model_of_its_own_around_what_the_server_sends(name, whole_run, tmp_path):
    first = whole_run(name)
    algorithm, gate = CASES[name]
    data = blobs(sizes=(9, 8))
    data.x = data.x + 0.5
    phases = [Phase(name, algorithm(), gate=gate())]
    later = federation(tmp_path / "later", phases, trainer={"max_epochs": 2, "accelerator": "cpu"}, seed=3)
    later.personalize(model(name), data, str(first.run_dir / "checkpoints/last.ckpt"), rounds=3)
    server = of_module(first.run.states[name].server)
    w = subtree(server, "global_expert.")
    for client in range(2):
        samples = data.train_samples[client]
        batch = data.x[samples], data.y[samples]
        module, start = later.client_module(name, client), model(name)
        start.load_state_dict(server, strict=False)
        start.local_expert.load_state_dict(w, strict=False)
        start.gate = gate()
        start.check_parts()
        with torch.no_grad():
            assert module.loss(batch)[0] < start.eval().loss(batch)[0]
        received = [tensor for tensor_name, tensor in server.items() if tensor_name.startswith("global_expert.")]
        used = [module.state_dict()[tensor_name] for tensor_name in server if tensor_name.startswith("global_expert.")]
        assert all(map(torch.equal, received, used)) == (name != "Per-FedAvg")
        assert not torch.equal(module(batch[0]), start(batch[0]))


@pytest.mark.parametrize("algorithm", [Ditto(), APFL(), PFedMe(), FML(), FedKD()])
def test_a_gate_that_would_evaluate_a_mixture_is_warned_of(algorithm):
    with pytest.warns(match=f"{type(algorithm).__name__}: {MIXED.format('EqualWeights')}"):
        warn_of_mixture(algorithm, mixture(EqualWeights()))
    with pytest.warns(match=MIXED.format("ConstantGate")):
        warn_of_mixture(algorithm, mixture(ConstantGate(0.3)))
    for gate in (LocalOnly(), GlobalOnly(), ConstantGate(0.0)):
        warn_of_mixture(algorithm, mixture(gate))
