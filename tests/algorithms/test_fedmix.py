"""FedMix against three rounds in bare PyTorch, what is sent, and its limits."""

import copy

import pytest
import torch
from helpers import assert_same_bits, blobs, phase, run, tensors
from helpers.backends import local_training
from helpers.shared_experts import FOUR, choosy, logits_of_gate, loss_of_likelihood, rounds_by_hand
from lightning.pytorch import Callback

from fedmoe_pl import Federation, Phase, Train
from fedmoe_pl.algorithms import FedMix
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.phases.participation import sample_cohort


@torch.no_grad()
def responsibilities(module, pair, x, y):
    """Their sums over a client's samples."""
    z = module.embedding(x)
    p = logits_of_gate(module, z)[:, pair].softmax(1)
    joint = p * torch.stack([module.experts[expert](z).softmax(1)[range(len(y)), y] for expert in pair], 1)
    return (joint / joint.sum(1, keepdim=True)).sum(0).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("clients_per_round", [None, 2])
def test_three_rounds_are_those_of_bare_pytorch(tmp_path, clients_per_round, entropy_weight):
    data, model = blobs(FOUR), choosy()
    algorithm = FedMix(entropy_weight=entropy_weight)
    mix = phase("FedMix", algorithm, rounds=3, clients_per_round=clients_per_round)
    state = run([mix], model, data, tmp_path).run.states["FedMix"]
    cohorts = [sample_cohort(range(4), clients_per_round or 4, 0, round) for round in range(3)]
    server, trained, asked = rounds_by_hand(model, data, cohorts, 2, responsibilities, entropy_weight)
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-10)
    assert {client: tree["experts/asked"].tolist() for client, tree in state.clients.items()} == asked
    if clients_per_round is None:
        assert trained[0] == {0: [0, 3], 1: [2, 3], 2: [0, 3], 3: [0, 2]}, "clients differ, and an expert is left"


def test_what_leaves_a_client_has_only_the_experts_that_it_trained():
    training = local_training(choosy(), FedMix(), blobs(FOUR))
    server = FedMix().server_init(training.module)
    for request in ({}, {"experts/asked": torch.tensor([1, 3])}):
        module = copy.deepcopy(training.module)
        client, constants, _ = begin_client(training, module, server, 0, {0: request}, 0)
        update = FedMix().client_final(client, constants)
        experts = constants["experts"]
        assert experts == [1, 3] or not request
        numbers = {name.split(".")[1] for name in update.sent if name.startswith("experts.")}
        assert numbers == {str(expert) for expert in experts}
        assert update.state.keys() == {"experts/asked"}
        weights = [update.sent[f"experts/weight/{expert}"].item() for expert in experts]
        assert sum(weights) == pytest.approx(13) and min(weights) > 0


def test_where_the_gate_s_weights_underflow_the_losses_share_a_sample_out():
    data, model = blobs(FOUR), choosy()
    with torch.no_grad():
        for proxy, far in zip(model.gate.proxies, (0.0, 0.0, 1e6, 0.0), strict=True):
            proxy.weight.fill_(far)  # embeddings are above 0: the weights of all but expert 2 are 0
    samples = data.train_samples[0]
    weights = FedMix().expert_weights(Client(0, 0, 0, model, samples, {}, data), [0, 3])
    z, y = model.embedding(data.x[samples]), data.y[samples]
    right = torch.stack([model.experts[expert](z).softmax(1)[range(len(y)), y] for expert in (0, 3)], 1)
    torch.testing.assert_close(weights, (right / right.sum(1, keepdim=True)).sum(0).detach())


def test_responsibilities_are_computed_without_dropout():
    data, model = blobs(FOUR), choosy()
    samples, before = data.train_samples[0], model.embedding
    weights = []
    for model.embedding in (before, torch.nn.Sequential(before, torch.nn.Dropout(0.5))):
        weights.append(FedMix().expert_weights(Client(0, 0, 0, model.train(), samples, {}, data), [0, 3]))
    assert torch.equal(*weights)


def test_clients_and_newcomers_are_evaluated_with_the_best_expert_of_all_for_each_sample(tmp_path):
    arguments = {"enable_progress_bar": False, "logger": False}
    phases = [Phase("FedMix", FedMix(), rounds=2)]
    federation = Federation(phases, default_root_dir=str(tmp_path), **arguments)
    federation.fit(choosy(), blobs(FOUR))
    server = federation.run.states["FedMix"].server
    later = Federation(phases, default_root_dir=str(tmp_path / "later"), **arguments)
    path = str(federation.run_dir / "checkpoints/last.ckpt")
    later.personalize(choosy(), blobs((9, 6)), path, rounds=3)
    for one, client in ((federation, 3), (later, 1)):
        assert_same_bits(tensors(one.client_module("FedMix", client)), server)
        data = one.run.datamodule
        module, x, y = one.client_module("FedMix", client).eval(), data.x[data.global_test], data.y[data.global_test]
        z = module.embedding(x)
        chosen = logits_of_gate(module, z).argmax(1)
        outputs = torch.stack([expert(z) for expert in module.experts])[chosen, range(len(x))]
        accuracy = (outputs.argmax(1) == y).double().mean().item()
        assert one.results["FedMix"].clients[client].global_test == pytest.approx(accuracy)


def test_the_validation_loss_is_that_of_the_likelihood_with_which_clients_train(tmp_path):
    data, seen = blobs((20, 13, 16, 15), validation_fraction=0.3), []

    class Seen(Callback):
        def on_validation_end(self, trainer, pl_module):
            ((x, y),) = trainer.val_dataloaders
            of_own_experts = loss_of_likelihood(pl_module, x, y, pl_module.training_step.__self__.constants["experts"])
            seen.append((trainer.callback_metrics["validation_loss"].item(), of_own_experts))

    mix = phase(
        "it", FedMix(), rounds=2, evaluate=True, train=Train(callbacks=[Seen()], trainer={"limit_val_batches": 1.0})
    )
    federation = run([mix], choosy(), data, tmp_path)
    for client in range(4):
        samples = data.validation_samples[client]
        loss = loss_of_likelihood(federation.client_module("it", client).eval(), data.x[samples], data.y[samples])
        assert federation.results["it"].clients[client].validation_loss == pytest.approx(loss, abs=1e-10)
    assert len(seen) == 2 * 4 * 2  # rounds, clients, epochs
    for logged, expected in seen:
        assert logged == pytest.approx(expected, abs=1e-6)
