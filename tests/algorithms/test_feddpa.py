"""FedALT and FedDPA, mixtures of two adapters, against closed forms, bare rewrites, FedAvg and local training."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, phase, run
from helpers.adapters import adapters, constant, logits, own_of, routed, sgd, stepped
from helpers.bare import COHORTS, SEED, round_batches
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.algorithms import FedALT, FedAvg, FedDPA, FineTuning, Local
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared import uploads
from fedmoe_pl.models import AdapterMoE, FeatureGate, GlobalOnly, LayerwiseAdapterMoE, LoRA, SimilarityGate, TokenGate

pytest.importorskip("peft")
OWN = ("local_expert.", "gate.")
near = partial(torch.testing.assert_close, rtol=0, atol=1e-10)

# FedALT


def test_fedalt_takes_the_steps_of_a_bare_rewrite_also_for_clients_that_come_late(tmp_path):
    """The rest of the world is the mean of the others' last uploads, also of those that do not train in a round."""
    data, module, uploaded = blobs(), adapters(TokenGate()), {}
    it = phase("FedALT", FedALT(), rounds=3, clients_per_round=2)
    state = run([it], module, data, tmp_path, 1, seed=SEED).run.states["FedALT"]
    start = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    own = [start] * 3

    def rest_of_the_world(client):
        others = [expert for other, expert in uploaded.items() if other != client]
        names = others[0] if others else {}
        return {f"global_expert.{name}": sum(each[name] for each in others) / len(others) for name in names}

    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            own[client] = {**own[client], **rest_of_the_world(client)}
        for client in cohort:
            for x, y in round_batches(data, client, round, 1):
                own[client] = stepped(own[client], OWN, lambda s, x=x, y=y: F.cross_entropy(logits(s, x, routed(s)), y))
            uploaded[client] = own_of(own[client], "local_expert.")
    for client in range(3):
        actual = {**start, **state.clients[client], **FedALT().server_send(state.server, client, {})}
        near(actual, {**own[client], **rest_of_the_world(client)})
    of_all = {name: tensor for name, tensor in state.server.items() if not name.startswith(FedALT.messages.per_client)}
    for server in (state.server, of_all):
        near(FedALT().server_send(server, 7, {}), rest_of_the_world(7))  # a newcomer's


def test_a_single_client_has_no_rest_of_the_world(tmp_path):
    module = adapters(TokenGate())
    federation = run([phase("it", FedALT(), rounds=2)], module, blobs((9,)), tmp_path, 1)
    state = federation.client_module("it", 0).state_dict()
    assert_same_bits(own_of(state, "global_expert."), own_of(module.state_dict(), "global_expert."))


def test_an_upload_does_not_change_with_the_module_that_trains_the_next_client():
    weight = torch.ones(2, requires_grad=True)
    sent = uploads.upload(3, {"A": weight})
    weight.data.fill_(2.0)
    assert sent["uploads/tensors/A"].tolist() == [[1, 1]] and sent["uploads/ids"].tolist() == [3]


def test_what_a_client_cannot_have_made_is_named():
    algorithm, initial = FedALT(), {"local_expert.A": torch.zeros(1), "global_expert.A": torch.zeros(1)}
    sent = {"uploads/tensors/A": torch.zeros(1, 1), "uploads/ids": torch.tensor([2])}
    assert algorithm.problem_of_update(2, Update(sent, 1), initial, SimpleNamespace(), 0) == ""
    assert "another client" in algorithm.problem_of_update(1, Update(sent, 1), initial, SimpleNamespace(), 0)
    wrong = {**sent, "uploads/tensors/A": torch.zeros(2, 1)}
    assert "shape (2, 1)" in algorithm.problem_of_update(2, Update(wrong, 1), initial, SimpleNamespace(), 0)


# FedDPA


def heads(gate=None, dropout=0.0, kind=LayerwiseAdapterMoE):
    """Adapters in the first layer, with the last one as a head, whose input are the features."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    lora = LoRA(["0"], r=2, lora_dropout=dropout, modules_to_save=["2"])
    return kind(base, lora, gate, optimizer=sgd).double()


def test_the_weight_is_the_factor_times_the_mean_cosine():
    gate = SimilarityGate(2, num_references=3, weighted_expert="global_expert")
    gate.references.copy_(torch.tensor([[1.0, 0.0], [3.0, 4.0], [-1.0, 1.0]]))
    torch.testing.assert_close(gate(torch.ones(1, 2)), torch.tensor([[0.282843, 0.717157]]))
    gate.weighted_expert = "local_expert"
    torch.testing.assert_close(gate(torch.ones(1, 2)), torch.tensor([[0.717157, 0.282843]]))


def test_missing_references_do_not_count_and_weights_stay_between_0_and_1():
    gate = SimilarityGate(2, num_references=3, factor=3.0)
    assert gate(torch.ones(1, 2)).tolist() == [[1.0, 0.0]]
    gate.references[0] = 1
    assert gate(torch.tensor([[1.0, 1.0], [-1.0, -1.0]])).tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_a_gate_reads_features_through_which_the_local_adapter_does_not_learn():
    module, x = heads(FeatureGate(6)), torch.randn(4, 5, dtype=torch.float64)
    for parameter in module.parameters():  # otherwise the adapters are 0, whatever their weights
        nn.init.normal_(parameter)
    scores, weights = module.mix(x)
    adapter = [parameter for name, parameter in module.named_parameters() if name.startswith("local_expert.")]
    expected = torch.autograd.grad(module(x, weights.detach()).square().sum(), adapter)
    torch.testing.assert_close(torch.autograd.grad(scores.square().sum(), adapter), expected)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3


def test_feddpa_takes_the_steps_of_a_bare_rewrite(tmp_path):
    data, module = blobs(), adapters()
    algorithm = FedDPA(local_weight=0.3)
    state = run([phase("FedDPA", algorithm, rounds=3)], module, data, tmp_path, 2, seed=3).run.states["FedDPA"]
    start = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    server, local = own_of(start, "global_expert."), [own_of(start, "local_expert.")] * 3
    for round in range(3):
        trained = []
        for client in range(3):
            own = start | {f"global_expert.{name}": t for name, t in server.items()}
            own |= {f"local_expert.{name}": t for name, t in local[client].items()}
            alone = own
            for x, y in round_batches(data, client, round, 2):
                if round:
                    of_mixture = lambda s, x=x, y=y: F.cross_entropy(logits(s, x, constant(0.7, 0.3)), y)  # noqa: E731
                    own = stepped(own, ("local_expert.",), of_mixture)
                of_global = lambda s, x=x, y=y: F.cross_entropy(logits(s, x, constant(1.0, 0.0)), y)  # noqa: E731
                alone = stepped(alone, ("global_expert.",), of_global)
            local[client] = own_of(own, "local_expert.")
            trained.append(own_of(alone, "global_expert."))
        server = {name: sum(each[name] for each in trained) / 3 for name in server}
    near(own_of(state.server, "global_expert."), server)
    for client in range(3):
        near(own_of(state.clients[client], "local_expert."), local[client])


def test_clients_keep_the_features_of_some_of_their_samples(tmp_path):
    data, module = blobs(sizes=(13, 3, 11)), heads(SimilarityGate(6), dropout=0.5)
    federation = run([phase("FedDPA", FedDPA(), rounds=2)], module, data, tmp_path, 1)
    for client, number in ((0, 5), (1, 3)):
        own = federation.client_module("FedDPA", client).eval()
        references = own.gate.references
        features = own.local_features(data.x[data.train_samples[client]])
        distances = torch.cdist(references[:number].double(), features.detach())
        assert (distances.min(1).values < 1e-6).all()
        assert len(distances.argmin(1).unique()) == number
        assert client or distances.argmin(1).tolist() != [*range(number)], "drawn, not the first ones"
        assert not references[number:].any()
        assert "gate.references" not in federation.run.states["FedDPA"].server


def test_f_is_fedavg_and_fine_tuning_whose_clients_compare_samples_with_their_own(tmp_path):
    data, module = blobs(sizes=(13, 3, 11)), heads(SimilarityGate(6, factor=0.9))
    shared = ["global_expert.*", "head.*"]
    phases = [
        phase("FedAvg", FedAvg(shared, shared), rounds=2, gate=GlobalOnly()),
        phase("FedDPA-F", FineTuning(), evaluate=True),
    ]
    federation = run(phases, module, data, tmp_path, 1)
    evaluation = federation.run.states["FedDPA-F"].evaluations[-1]
    for client, number in ((0, 5), (1, 3)):
        own = federation.client_module("FedDPA-F", client).eval()
        x = data.x[data.train_samples[client]]
        features = own.local_features(x).detach()
        references = own.gate.references[:number].double()
        assert (torch.cdist(references, features).min(1).values < 1e-6).all()
        weights = (0.9 * F.normalize(features) @ F.normalize(references).T).mean(1).clamp(0, 1)
        assert weights.max() > 0.1, "0 for each sample without references"
        torch.testing.assert_close(own.mix(x)[1], torch.stack((1 - weights, weights), 1), rtol=0, atol=1e-6)
        assert evaluation.clients[client].gate_weights[:, 1].max() > 0.1


@pytest.mark.parametrize(("kind", "algorithm"), [(LayerwiseAdapterMoE, Local()), (AdapterMoE, FineTuning())])
def test_a_gate_whose_samples_nobody_notes_is_refused(kind, algorithm, tmp_path):
    module = heads(SimilarityGate(6), kind=kind)
    fedavg = phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly())
    with pytest.raises(
        MisconfigurationException, match="gate is a SimilarityGate, but must be another one, because onl"
    ):
        run([fedavg, phase("it", algorithm, evaluate=True)], module, blobs(), tmp_path, 1)


def test_a_language_model_without_a_trained_head_gives_the_features_of_its_output_layer():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, pad_token_id=0)
    base, gate = transformers.GPT2LMHeadModel(config), SimilarityGate(8, num_references=2)
    arguments = {"pooling": "last", "pad_token_id": 0, "task": "causal_lm"}
    module = LayerwiseAdapterMoE(base, LoRA(["c_attn"], r=2), gate, **arguments)
    for parameter in (parameter for parameter in module.parameters() if parameter.requires_grad):
        nn.init.normal_(parameter)
    module.eval()
    texts, hidden = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [9, 1, 2, 0]]), []
    hook = module.base.transformer.ln_f.register_forward_hook(lambda layer, inputs, output: hidden.append(output))
    module.local_expert(texts)
    hook.remove()
    last = hidden[0][range(3), [3, 1, 2]]
    torch.testing.assert_close(module.local_features(texts), last)
    gate.references.copy_(last[:2])
    weights = (0.5 * F.normalize(hidden[0], dim=2) @ F.normalize(last[:2]).T).mean(2).clamp(0, 1)  # of each token
    expected = module.mix_by(texts, torch.stack((1 - weights, weights), 2))
    torch.testing.assert_close(module(texts), expected)
    assert not module.plain_base().lm_head._forward_pre_hooks


@pytest.mark.slow
def test_newcomers_train_the_local_adapter_beside_the_federation_s_global_one(tmp_path):
    data, module, its_phase = blobs((5, 4)), adapters(), phase("FedDPA", FedDPA(local_weight=0.3))
    federation = run([its_phase], module, data, tmp_path, 1, enable_checkpointing=True, seed=3)
    server, start = federation.run.states["FedDPA"].server, own_of(module.state_dict(), "local_expert.")
    federation.personalize(module, data, rounds=2)
    state = federation.run.states["FedDPA"]
    assert_same_bits(state.server, server)
    own = {**module.state_dict(), **server} | {f"local_expert.{name}": tensor for name, tensor in start.items()}
    for round in range(2):
        for x, y in round_batches(data, 0, round, 1):
            loss = lambda s, x=x, y=y: F.cross_entropy(logits(s, x, constant(0.7, 0.3)), y)  # noqa: E731
            own = stepped(own, ("local_expert.",), loss)
    near(own_of(state.clients[0], "local_expert."), own_of(own, "local_expert."))
