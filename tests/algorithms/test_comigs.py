"""CoMiGS against closed forms, a bare rewrite with two optimizers, and its limits."""

from functools import partial
from itertools import chain, islice, repeat

import pytest
import torch
import torch.nn.functional as F
from helpers import TensorData, client_generator, run
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import CoMiGS
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import EqualWeights, LayerwiseAdapterMoE, LoRA, TokenGate
from fedmoe_pl.models.routers import balance_loss
from fedmoe_pl.seeds import derive_seed

pytest.importorskip("peft")
SEED, EPOCHS, ROUNDS = 3, 2, 3
LAYERS = ("mixer", "mlp.0", "mlp.2")  # the first one is in no block, so that it has the global expert alone
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class Words(nn.Module):
    """Ids of words (B, T), two layers of words and a classifier of the mean of those that are no padding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.mixer = nn.Linear(5, 5)
        self.mlp = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        self.classifier = nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask):
        x = self.mixer(self.embedding(input_ids))
        x, mask = x + self.mlp(x), attention_mask[..., None]
        return self.classifier((x * mask).sum(1) / mask.sum(1))


def model(gate=None, optimizer=adamw, blocks=("mlp",)) -> LayerwiseAdapterMoE:
    torch.manual_seed(0)
    lora = LoRA([*LAYERS], r=2, lora_alpha=4, modules_to_save=["classifier"])
    gate = gate or TokenGate(top_k=1, init_std=1.0)
    module = LayerwiseAdapterMoE(Words(), lora, gate, blocks=blocks, pad_token_id=0, optimizer=optimizer).double()
    torch.manual_seed(1)  # the same with any gate
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return module


def data(sizes=(13, 10), **kwargs) -> TensorData:
    generator, n = torch.Generator().manual_seed(0), sum(sizes)
    x, y = torch.randint(1, 9, (n, 4), generator=generator), torch.randint(3, (n,), generator=generator)
    x[::2, 3] = 0
    arguments = {"dtype": torch.int64, "batch_size": 4, "validation_fraction": 0.3, **kwargs}
    datamodule = TensorData(x, y, torch.arange(n).split(list(sizes)), **arguments)
    datamodule.setup()
    return datamodule


def phase(algorithm, rounds=ROUNDS, **kwargs) -> Phase:
    return Phase("it", algorithm, rounds=rounds, train=Train(keep_optimizer=True, **kwargs), evaluate=False)


def fitted(tmp_path, algorithm, module=None, rounds=ROUNDS, **kwargs):
    run_ = run([phase(algorithm, rounds)], module or model(), data(), tmp_path, EPOCHS, seed=SEED, **kwargs)
    return run_.run.states["it"]


def test_the_balance_loss_of_three_words():
    logits = torch.tensor([[[2.0, 0], [1, 3], [0.5, 0]]], dtype=torch.float64)
    everything = torch.ones(1, 3)
    both = logits.softmax(-1)
    best = both * F.one_hot(logits.argmax(-1), 2)
    assert balance_loss(both, everything, 2, 0.9).item() == pytest.approx(2.596357, abs=1e-6)
    assert balance_loss(best, everything, 1, 0.5).item() == pytest.approx(0.863847, abs=1e-6)
    assert balance_loss(both, everything, None, 0.5).item() == pytest.approx(1, rel=1e-12)
    padded = torch.cat((best, torch.tensor([[[0.0, 1.0]]])), 1)
    mask = torch.tensor([[1, 1, 1, 0]])
    torch.testing.assert_close(balance_loss(padded, mask, 1, 0.5), balance_loss(best, everything, 1, 0.5))


def test_the_factors_of_three_experts_and_the_mean_of_several_layers():
    shares = torch.tensor([[[0.5, 0.5, 0.0], [0.8, 0.0, 0.2]]], dtype=torch.float64)
    p, d, f = (0.65, 0.25, 0.1), (0.5, 0.25, 0.25), (1 / 0.6, 2 / 2.4, 2 / 2.4)
    expected = 3 * sum(a * b * c for a, b, c in zip(p, d, f, strict=True))
    assert balance_loss(shares, torch.ones(1, 2), 2, 0.2).item() == pytest.approx(expected, rel=1e-12)
    # with two experts, both among the top k and of equal importance, that of each layer is 1
    module, batch = model(TokenGate(top_k=2), blocks=()), next(iter(data().batches(torch.arange(8))))
    losses = [CoMiGS(balance=balance).client_loss(module, batch, {}) for balance in (0, 0.3)]
    assert (losses[1] - losses[0]).item() == pytest.approx(0.3, rel=1e-12)


def rewritten_loss(state, x, y, importance, balance):
    """The loss of a batch from all tensors by name, with one expert for each word."""
    mask = (x != 0).double()

    def adapted(layer, expert, h):
        a, b = (state[f"{expert}_expert.{layer}.lora_{factor}.weight"] for factor in "AB")
        return F.linear(h, state[f"base.{layer}.weight"], state[f"base.{layer}.bias"]) + 2 * h @ a.T @ b.T

    h = adapted("mixer", "global", F.embedding(x, state["base.embedding.weight"]))
    probabilities = (h @ state["gate.routers.mlp.weight"].T).softmax(-1)
    chosen = F.one_hot(probabilities.argmax(-1), 2)
    weights = probabilities * chosen
    outputs = [
        adapted("mlp.2", expert, F.gelu(adapted("mlp.0", expert, h))) * weights[..., index, None]
        for index, expert in enumerate(("global", "local"))
    ]
    pooled = ((h + sum(outputs)) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    logits = F.linear(pooled, *(state[f"head.classifier.{part}"] for part in ("weight", "bias")))
    p, d = (sum((mask * each[..., i]).sum() / mask.sum() for i in (0,)) for each in (weights, chosen))
    q, e = ((mask * each[..., 1]).sum() / mask.sum() for each in (weights, chosen))
    balanced = 2 * (p * d / (2 * importance) + q * e / (2 * (1 - importance)))
    return F.cross_entropy(logits, y) + balance * balanced


def rewritten(module, data, every, number, importance, balance):
    """Server and clients after all rounds, with an optimizer of the experts and one of the routers for each client."""
    initial = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    server = {name: tensor for name, tensor in initial.items() if name.startswith("global_expert.")}
    states = [{name: tensor.clone() for name, tensor in initial.items()} for _ in range(2)]
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    of_routers = [name for name in trained if name.startswith("gate.")]
    of_experts = [name for name in trained if not name.startswith(("gate.", "local_expert.mixer."))]
    optimizers = [[adamw([state[name] for name in names]) for names in (of_experts, of_routers)] for state in states]
    lives = [0, 0]
    for round in range(ROUNDS):
        for client, state in enumerate(states):
            for name, tensor in server.items():
                state[name].detach().copy_(tensor)
            samples = data.validation_samples[client]
            generator = torch.Generator().manual_seed(derive_seed(SEED, 76, client, round))
            validation = chain.from_iterable(repeat(data.batches(samples, generator=generator)))
            batches = data.batches(data.train_samples[client], generator=client_generator(SEED, client, round))

            def step(optimizer, names, batch, state=state):
                leaves = [state[name].requires_grad_() for name in names]
                loss = rewritten_loss(state, *batch, importance, balance)
                for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                    leaf.grad = gradient
                optimizer.step()
                for leaf in leaves:
                    leaf.requires_grad_(False)

            for batch in chain.from_iterable(repeat(batches, EPOCHS)):
                step(optimizers[client][0], of_experts, batch)
                lives[client] += 1
                if lives[client] % every == 0:
                    for other in islice(validation, number):
                        step(optimizers[client][1], of_routers, other)
        server = {name: (states[0][name] + states[1][name]) / 2 for name in server}
    return server, states, lives


def test_it_is_the_rewrite_with_two_optimizers_whose_states_last(tmp_path):
    datamodule = data()
    sizes = [(len(datamodule.train_samples[i]), len(datamodule.validation_samples[i])) for i in (0, 1)]
    assert sizes == [(9, 4), (7, 3)], "6 and 4 steps of experts in a round, so that turns begin anywhere in it"
    arguments = {"importance": 0.7, "balance": 0.3}
    state = fitted(tmp_path, CoMiGS(5, 3, **arguments))
    server, clients, lives = rewritten(model(), datamodule, 5, 3, **arguments)
    torch.testing.assert_close(dict(state.server), server, rtol=0, atol=1e-10)
    for client, expected in enumerate(clients):
        kept = dict(state.clients[client])
        assert kept.pop("comigs/steps").item() == lives[client] + lives[client] // 5 * 3
        own = {name: tensor for name, tensor in kept.items() if "/" not in name}
        assert {name.split(".")[0] for name in own} == {"local_expert", "gate", "head"}
        torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=0, atol=1e-10)


def test_routers_that_a_limit_of_steps_cut_short_have_had_their_turn(tmp_path):
    """Of client 0's six steps, five train experts, and one the routers, which would take two more; client 1 has 4."""
    it = phase(CoMiGS(5, 3), 1, trainer={"max_steps": 6})
    kept = run([it], model(), data(), tmp_path, EPOCHS).run.states["it"].clients
    assert [kept[client]["comigs/steps"].item() for client in (0, 1)] == [8, 4]


def test_what_it_cannot_train_is_refused(tmp_path):
    it = phase(CoMiGS())
    with pytest.raises(MisconfigurationException, match="with a TokenGate"):
        run([it], model(EqualWeights()), data(), tmp_path)
    with pytest.raises(MisconfigurationException, match="StackedBackend cannot stack the clients: CoMiGS trains on"):
        run([it], model(), data(), tmp_path, backend=StackedBackend())
    for datamodule in (data(validation_fraction=0.0), data((13, 1))):
        with pytest.raises(MisconfigurationException, match="CoMiGS needs validation samples of every client"):
            run([it], model(), datamodule, tmp_path)
