"""No gate and no base sees the future of a text: what a position predicts is the same whatever follows it."""

import inspect
from functools import partial

import pytest
import torch
from helpers import TensorData, small_expert
from helpers.data import refused_argument
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.data import IID, FromDatasets
from fedmoe_pl.models import AdapterMoE, ClusteredAdapterMoE, LayerwiseAdapterMoE, LoRA, PersonalizedMoE, SparseMoE
from fedmoe_pl.models.gates import Gate
from fedmoe_pl.setup.check_run import check_phase

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


@pytest.mark.parametrize(
    "make",
    [
        *(partial(adapted, kind, gate()) for kind in BOTH for gate, kinds in GATES.values() if not kinds),
        lambda: adapted(AdapterMoE, models.TokenGate()),
        lambda: PersonalizedMoE(Base(), gate=models.NetworkGate(nn.Embedding(V, 2)), task="causal_lm"),
        lambda: SparseMoE(nn.Embedding(V, 6), small_expert(), 2, task="causal_lm"),
    ],
)
def test_a_gate_that_reads_whole_texts_is_refused_and_other_mixtures_take_fixed_gates_only(make):
    assert refused_argument(make) == "gate"


# --- bases ---


class Recurrent(nn.Module):
    def __init__(self, bidirectional=False):
        super().__init__()
        self.embedding = nn.Embedding(V, F)
        self.lstm = nn.LSTM(F, F, batch_first=True, bidirectional=bidirectional)
        self.head = nn.LazyLinear(V)
        self(TEXTS)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])


class Prefix(Base):
    """Each token reads the first one and the prompt, which are the first three tokens, as a whole."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids) + self.embedding(input_ids[:, :3]).mean(1).sum()


def of_transformers(name, **arguments):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**small, intermediate_size=8, pad_token_id=0, **arguments)
    return getattr(transformers, f"{name}ForCausalLM" if name == "Llama" else f"{name}LMHeadModel")(config)


def in_memory(prompt=0):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 2], [3, 1, 6, 2, 4, 5, 1]] * 3)
    return TensorData(ids, ids.index_fill(1, torch.arange(prompt), -100), [[0, 1, 2], [3, 4, 5]], dtype=ids.dtype)


def of_dicts(prompt=0):
    """Texts of several lengths, all of which are padded to eight tokens."""
    texts = [[1, 2, 3, 4, 5], [1, 6], [3, 1, 6, 2, 4, 5, 1], [2, 5, 1]]

    def collate(texts):
        ids = torch.tensor([[*text, *[0] * (8 - len(text))] for text in texts])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}

    return FromDatasets(texts, texts, num_clients=2, batch_size=2, collate_fn=collate, partitioner=IID())


OF_ADAPTERS = {
    "gpt": (lambda: of_transformers("Llama"), ["q_proj"], True),
    "BERT": (lambda: of_transformers("Bert"), ["query"], False),
    "BERT, is_decoder": (lambda: of_transformers("Bert", is_decoder=True), ["query"], True),
}


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("data", [in_memory, of_dicts])
@pytest.mark.parametrize("name", OF_ADAPTERS)
def test_a_base_that_reads_later_tokens_is_refused_before_training(name, data, dtype):
    torch.manual_seed(0)
    make, layers, is_causal = OF_ADAPTERS[name]
    module = AdapterMoE(make().to(dtype), LoRA(layers, r=2), task="causal_lm", pad_token_id=0)
    _assert_refused_unless(is_causal, module, data())


@pytest.mark.parametrize(
    ("make", "prompt", "is_causal"),
    [(Recurrent, 0, True), (lambda: Recurrent(True), 0, False), (Prefix, 0, False), (Prefix, 3, True)],
)
def test_so_is_an_expert_but_for_tokens_that_are_not_predicted(make, prompt, is_causal):
    torch.manual_seed(0)
    _assert_refused_unless(is_causal, PersonalizedMoE(make(), task="causal_lm"), in_memory(prompt))


def test_texts_of_one_token_which_show_nothing_are_passed_over():
    torch.manual_seed(0)
    data = in_memory(0)
    data.setup()
    data.x[data.train_samples.indices[:2]] = 1
    _assert_refused_unless(False, PersonalizedMoE(Recurrent(True), task="causal_lm"), data)


def _assert_refused_unless(is_causal, module, data):
    data.setup()
    of_phase = Phase("it", FedAvg(), evaluate=False)
    if is_causal:
        return check_phase(of_phase, module, data, 0)
    with pytest.raises(
        MisconfigurationException, match=r"model is .*, but must be one that reads no later tokens, because"
    ):
        check_phase(of_phase, module, data, 0)
