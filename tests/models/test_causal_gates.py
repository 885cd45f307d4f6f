"""No gate sees the future of a text: what a position predicts is the same whatever follows it."""

import inspect

import pytest
import torch
from helpers import small_expert
from helpers.data import refused_argument
from torch import nn

from fedmoe_pl import models
from fedmoe_pl.models import AdapterMoE, ClusteredAdapterMoE, LayerwiseAdapterMoE, LoRA, PersonalizedMoE, SparseMoE
from fedmoe_pl.models.gates import Gate

pytest.importorskip("peft")
V, F = 7, 6
TEXTS = torch.tensor([[1, 2, 3, 4, 5, 6, 2], [3, 1, 6, 2, 4, 0, 0], [5, 5, 0, 0, 0, 0, 0]])  # 0 is padding


class Base(nn.Module):
    """A causal language model: a position reads its token and the mean of those so far."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, F), nn.Linear(F, V)
        self.mlp = nn.Sequential(nn.Linear(F, 8), nn.Tanh(), nn.Linear(8, F))

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        return self.head(x + self.mlp(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]))


def drawn(module):
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.double().state_dict().items():
        if tensor.is_floating_point() and name != "gate.weights":
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return module.eval()


def adapted(kind, gate, pooling="mean", **kwargs):
    lora = LoRA(
        ["mlp.0", "mlp.2", "embedding"] if kind is AdapterMoE else ["mlp.0", "mlp.2"], r=2, modules_to_save=["head"]
    )
    return drawn(kind(Base(), lora, gate, pooling=pooling, pad_token_id=0, task="causal_lm", **kwargs))


BOTH = (AdapterMoE, LayerwiseAdapterMoE)
GATES = {  # each with the mixtures that take it for language models
    models.FeatureGate: (lambda: models.FeatureGate(F), BOTH),
    models.MLPGate: (lambda: models.MLPGate(2, F), BOTH),
    models.SimilarityGate: (lambda: models.SimilarityGate(F, 3, factor=0.9), BOTH),
    models.TokenGate: (models.TokenGate, (LayerwiseAdapterMoE,)),
    models.AdaptiveTokenGate: (models.AdaptiveTokenGate, (LayerwiseAdapterMoE,)),
    models.GlobalOnly: (models.GlobalOnly, BOTH),
    models.LocalOnly: (models.LocalOnly, BOTH),
    models.EqualWeights: (models.EqualWeights, BOTH),
    models.MixtureWeights: (models.MixtureWeights, BOTH),
    models.ConstantGate: (lambda: models.ConstantGate(0.3), BOTH),
    models.LinearGate: (models.LinearGate, ()),
    models.ProxyGate: (lambda: models.ProxyGate(2), ()),
    models.NetworkGate: (lambda: models.NetworkGate(nn.Embedding(V, 2)), ()),
    models.SwitchNormGate: (lambda: models.SwitchNormGate(7), ()),
}
CASES = [(kind, gate) for gate, (_, kinds) in GATES.items() for kind in kinds]


def test_every_gate_of_the_package_is_tried():
    found = {each for each in vars(models).values() if inspect.isclass(each) and issubclass(each, Gate)}
    assert {each for each in found if not inspect.isabstract(each)} == {*GATES}


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(("kind", "gate"), CASES)
def test_a_position_predicts_the_same_whatever_follows_it(kind, gate, pooling):
    module = adapted(kind, GATES[gate][0](), pooling)
    _assert_causal(module)
    weights = module.mix(TEXTS)[1]
    torch.testing.assert_close(weights.sum(1).double(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("gate", [models.FeatureGate(F), models.TokenGate()])
def test_nor_in_blocks(gate):
    _assert_causal(adapted(LayerwiseAdapterMoE, gate, blocks=["mlp"]))


def test_nor_with_the_places_of_clusters():
    module = adapted(ClusteredAdapterMoE, None, max_clusters=3)
    module.gate.num_clusters.fill_(2)
    _assert_causal(module)


def _assert_causal(module):
    logits = module(TEXTS)
    for last in range(1, TEXTS.shape[1]):
        torch.testing.assert_close(module(TEXTS[:, :last]), logits[:, :last])
        others = TEXTS.clone()
        others[:, last:] = torch.randint(V, others[:, last:].shape, generator=torch.Generator().manual_seed(last))
        torch.testing.assert_close(module(others)[:, :last], logits[:, :last])


@pytest.mark.parametrize(
    ("pooling", "features_of"), [("mean", lambda seen: seen.mean(0)), ("last", lambda seen: seen[-1])]
)
def test_a_gate_reads_the_features_of_the_tokens_so_far(pooling, features_of):
    module, text = adapted(AdapterMoE, models.FeatureGate(F), pooling), TEXTS[:1]
    seen = []
    module.global_expert.head.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0][0]))
    logits, mean = module.mix(text)
    experts = [expert(text)[0] for expert in (module.global_expert, module.local_expert)]
    weights = module.gate(torch.stack([features_of(seen[0][: last + 1]) for last in range(len(seen[0]))]))
    torch.testing.assert_close(logits[0], weights[:, :1] * experts[0] + weights[:, 1:] * experts[1])
    torch.testing.assert_close(mean[0], weights.mean(0))


def test_the_mean_weights_of_a_text_leave_padding_out():
    module = adapted(AdapterMoE, models.FeatureGate(F))
    torch.testing.assert_close(module.mix(TEXTS)[1][2], module.mix(TEXTS[2:, :2])[1][0])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("gate", [gate for gate in GATES if not GATES[gate][1]])
def test_a_gate_that_reads_whole_texts_is_refused(kind, gate):
    assert refused_argument(lambda: adapted(kind, GATES[gate][0]())) == "gate"


@pytest.mark.parametrize(
    "make",
    [
        lambda: PersonalizedMoE(Base(), gate=models.NetworkGate(nn.Embedding(V, 2)), task="causal_lm"),
        lambda: SparseMoE(nn.Embedding(V, 6), small_expert(), 2, task="causal_lm"),
        lambda: adapted(AdapterMoE, models.TokenGate()),
    ],
)
def test_other_mixtures_take_fixed_gates_only(make):
    assert refused_argument(make) == "gate"
