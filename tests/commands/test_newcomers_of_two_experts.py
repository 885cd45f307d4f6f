"""Newcomers of methods in which a private and a shared model teach each other."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, tensors
from helpers.architectures import pair, train_bare

from fedmoe_pl.algorithms import FML, FedAPEN, FedKD
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import LocalOnly, MixtureWeights
from fedmoe_pl.phases.phase import Phase

ALGORITHMS = {"FML": FML(), "FedAPEN": FedAPEN(0.4, 0.1), "FedKD": FedKD(hidden_states=False)}
ROUNDS = 2


def federation(path, name):
    gate = MixtureWeights() if name == "FedAPEN" else LocalOnly()
    phase = Phase(name, ALGORITHMS[name], rounds=3, gate=gate)
    trainer = {"max_epochs": 1, "accelerator": "cpu"}
    return Federation([phase], trainer, default_root_dir=str(path), logger=False, enable_progress_bar=False)


def new_data():
    """Two clients, whose samples are none of the federation's."""
    data = blobs(sizes=(9, 6))
    data.x = data.x + 0.5
    return data


@pytest.fixture(scope="module", params=ALGORITHMS)
def joined(request, tmp_path_factory):
    """A finished federation, and newcomers that have trained for two rounds."""
    path, name = tmp_path_factory.mktemp("run"), request.param
    run, later = federation(path / "first", name), federation(path / "later", name)
    run.fit(pair(), blobs())
    later.personalize(pair(), new_data(), str(run.run_dir / "checkpoints/last.ckpt"), ROUNDS)
    return name, run.run.states[name], later


@pytest.mark.few(1)
def test_newcomers_have_the_federation_s_shared_model_and_train_a_private_one(joined):
    name, state, later = joined
    shared = {key: tensor for key, tensor in state.server.items() if key.startswith("global_expert.")}
    for client in (0, 1):
        module = later.client_module(name, client)
        assert_same_bits(tensors(module, "global_expert."), shared)
        private = tensors(module, "local_expert.")
        assert private and not any(torch.equal(tensor, pair().state_dict()[key]) for key, tensor in private.items())
        assert later.results[name].clients[client].global_test > 0.2
    assert not {key for key in later.run.states[name].server if key.startswith("update/")}


@pytest.mark.parametrize("joined", ["FedAPEN"], indirect=True)
def test_newcomers_of_fedapen_learn_their_weight(joined):
    name, _, later = joined
    weights = [later.client_module(name, client).gate.weights[0].item() for client in (0, 1)]
    assert len({0.5, *weights}) == 3


def kl(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


def private_loss(meme, private, x, y):
    """The meme is the federation's: it teaches, and does not learn."""
    z = private(x)
    return (F.cross_entropy(z, y) + kl(z, meme(x))) / 2


@pytest.mark.parametrize("joined", ["FML"], indirect=True)
def test_newcomers_of_fml_learn_from_the_federation_s_meme(joined):
    name, state, later = joined
    for client in (0, 1):
        own = pair().state_dict()
        for round in range(ROUNDS):
            own = train_bare(client, round, {**own, **state.server}, later.run.datamodule, private_loss)
        expected = {key: tensor for key, tensor in own.items() if key.startswith("local_expert.")}
        actual = tensors(later.client_module(name, client), "local_expert.")
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
