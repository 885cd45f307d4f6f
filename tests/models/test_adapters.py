"""Adapters in a frozen base: what they compute, how they are named, and what is refused."""

import copy
import pickle
import re
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs
from helpers.adapters import adapters, logits
from helpers.backends import local_training
from helpers.models import checkpoint
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.algorithms import FedALT, FedLEASE, Local
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.models import (
    AdapterMoE,
    AdaptiveTokenGate,
    ClusteredAdapterMoE,
    ConstantGate,
    EqualWeights,
    FeatureGate,
    GlobalOnly,
    LayerwiseAdapterMoE,
    LinearGate,
    LocalOnly,
    LoRA,
    MLPGate,
    NetworkGate,
    SmallFCN,
    TokenGate,
)
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import copy_module

peft = pytest.importorskip("peft")
X = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
LORA = LoRA(["layer"], r=1, lora_alpha=2)


class Identity(nn.Module):
    """One layer W = I of two features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        return self.layer(x)


class TwoLayers(nn.Module):
    """``W2 relu(W1 x)`` with W1 = -I and W2 = [[1, -1], [-2, 1]]; only the first layer is named ``layer``."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            self.layer.weight.copy_(-torch.eye(2))
            self.last.weight.copy_(torch.tensor([[1.0, -1.0], [-2.0, 1.0]]))

    def forward(self, x):
        return self.last(self.layer(x).relu())


class Tokens(nn.Module):
    """Ids of words (B, T), an embedding, a perceptron with a residual, and a classifier of the mean."""

    def __init__(self, width=6):
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.mlp = nn.Sequential(nn.Linear(width, 10), nn.GELU(), nn.Linear(10, width))
        self.classifier = Head(width)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        return self.classifier(x + self.mlp(x))


class Head(nn.Module):
    """Classes of sequences (B, T, F)."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x):
        return self.linear(x.mean(1))


def set_factors(module):
    """The adapters A1 = [1 0], B1 = [1; 0] and A2 = [0 1], B2 = [1; 2] of the layer."""
    values = ((1.0, 0.0), (1.0, 0.0)), ((0.0, 1.0), (1.0, 2.0))
    for expert, (a, b) in zip((module.global_expert, module.local_expert), values, strict=True):
        expert.layer.lora_A.weight.data = torch.tensor([a], dtype=torch.float64)
        expert.layer.lora_B.weight.data = torch.tensor([b], dtype=torch.float64).T
    return module


def drawn(module):
    """All that is trained, drawn anew, so that no factor is zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 2
    return module


def tokens(kind=LayerwiseAdapterMoE, gate=None, lora=None, **kwargs):
    torch.manual_seed(0)
    lora = lora or LoRA(["mlp.0", "mlp.2"], r=2, lora_alpha=4, modules_to_save=["classifier"])
    return drawn(kind(Tokens(), lora, gate, **kwargs)).eval()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])


# --- what mixtures compute ---


@pytest.mark.parametrize(("kind", "expected"), [(LayerwiseAdapterMoE, [-1.5, -1.0]), (AdapterMoE, [-2.0, -0.5])])
def test_before_a_nonlinearity_they_differ(kind, expected):
    module = set_factors(kind(TwoLayers(), LORA, ConstantGate(0.25)))
    torch.testing.assert_close(module(X), torch.tensor([expected], dtype=torch.float64))


def test_trained_layers_keep_the_attributes_of_their_parameters():
    base = Tokens()
    base.classifier.linear.weight.decays = False
    module = LayerwiseAdapterMoE(base, LoRA(["mlp.0"], r=1, modules_to_save=["classifier"]), GlobalOnly())
    trained = [weight for name, weight in module.named_parameters() if name.endswith("classifier.linear.weight")]
    assert [weight.decays for weight in trained if weight.requires_grad] == [False], "the head is one"


def test_what_is_trained_as_a_whole_has_no_adapters():
    module = LayerwiseAdapterMoE(Tokens(), LoRA("all-linear", modules_to_save=["classifier"]), GlobalOnly())
    assert torch.equal(module(IDS), module.plain_base()(IDS))
    assert not [name for name in module.state_dict() if "classifier" in name and "lora" in name]


@pytest.mark.parametrize("gate", [GlobalOnly(), LocalOnly()])
def test_a_gate_that_keeps_one_expert_keeps_its_bits(gate):
    for kind in (AdapterMoE, LayerwiseAdapterMoE):
        module = tokens(kind, gate)
        expert = module.global_expert if isinstance(gate, GlobalOnly) else module.local_expert
        assert torch.equal(module(IDS), expert(IDS))


def test_an_expert_takes_a_dict_as_keyword_arguments_as_its_base_does():
    module = tokens(AdapterMoE, GlobalOnly())
    assert torch.equal(module.global_expert(input_ids=IDS), module.global_expert(IDS))
    assert torch.equal(call(module.global_expert, {"input_ids": IDS}), module({"input_ids": IDS}))


def expected_of_tokens(module, weigh):
    """The mixture in float64, layer by layer; ``weigh`` gives the weights of a layer from its input."""
    state = {name: tensor.double() for name, tensor in module.state_dict().items()}
    x = h = F.embedding(IDS, state["base.embedding.weight"])
    for name in ("mlp.0", "mlp.2"):
        out = F.linear(h, state[f"base.{name}.weight"], state[f"base.{name}.bias"])
        weights = weigh(name, h, state)
        for index, expert in enumerate(("global_expert", "local_expert")):
            a, b = (state[f"{expert}.{name}.lora_{factor}.weight"] for factor in "AB")
            out = out + weights[..., index, None] * 2 * (h @ a.T @ b.T)
        h = F.gelu(out) if name == "mlp.0" else out
    head = [state[f"head.classifier.linear.{part}"] for part in ("weight", "bias")]
    return F.linear((x + h).mean(1), *head)


def test_a_token_gate_weighs_every_token_in_every_layer():
    module = tokens(gate=TokenGate())

    def weigh(name, h, state):
        return (h @ state[f"gate.routers.{name}.weight"].T).softmax(-1)

    torch.testing.assert_close(module(IDS).double(), expected_of_tokens(module, weigh), rtol=1e-4, atol=1e-5)


def test_a_gate_of_samples_weighs_all_tokens_of_a_sample_alike():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 1))
    module = tokens(gate=NetworkGate(network))
    weights = module.mix(IDS)[1].double()

    def weigh(name, h, state):
        return weights[:, None].expand(-1, h.shape[1], -1)

    assert not torch.equal(weights[0], weights[1])
    torch.testing.assert_close(module(IDS).double(), expected_of_tokens(module, weigh), rtol=1e-4, atol=1e-5)
    assert torch.equal(module.mix_by(IDS, module.mix(IDS)[1]), module(IDS))


@pytest.mark.parametrize("kind", [TokenGate, AdaptiveTokenGate])
def test_routers_keep_their_precision_in_mixed_precision(kind):
    gate, x = kind(), torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    gate.fit_to_layers(gate, {"layer": 5}, 2)
    if isinstance(gate, AdaptiveTokenGate):
        gate.num_clusters.fill_(2)
    expected = gate.weights("layer", x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate.weights("layer", x), expected)


class Encoder(nn.Module):
    """Layers that torch computes in eval mode in a way of their own, past the ``forward`` of their parts."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x).mean(1)


@pytest.mark.parametrize("part", ["linear2", "norm2"])
def test_a_part_that_is_trained_as_a_whole_is_evaluated_in_encoder_layers_without_adapters(part):
    torch.manual_seed(0)
    module = LayerwiseAdapterMoE(Encoder(), LoRA(["layers.0.linear1"], r=1, modules_to_save=[f"layers.1.{part}"]))
    for parameter in module.head.parameters():
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(2, 3, 8)
    expected = module(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), expected)
        assert not torch.allclose(module.plain_base()(x), expected)


def test_an_adapted_embedding_does_not_train_padding():
    base = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten())
    module = drawn(LayerwiseAdapterMoE(base, LoRA(["0"], r=2), GlobalOnly()))
    module(IDS).sum().backward()
    gradient = getattr(module.global_expert, "0").lora_embedding_A.grad
    assert not gradient[:, 0].any() and gradient[:, 1:7].any()


# --- features, padding ---


def test_a_feature_gate_reads_what_the_head_does_without_padding():
    module = tokens(AdapterMoE, FeatureGate(6), pad_token_id=0)
    seen = []
    module.global_expert.classifier.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    weights = module.mix(IDS)[1]
    features = torch.stack((seen[0][0].mean(0), seen[0][1, :2].mean(0)))
    torch.testing.assert_close(weights, module.gate(features))
    module.pooling = "last"
    torch.testing.assert_close(module.mix(IDS)[1], module.gate(torch.stack((seen[0][0, 3], seen[0][1, 1]))))


@pytest.mark.parametrize("gate", [FeatureGate(), FeatureGate(6), MLPGate(2, 6)])
@pytest.mark.parametrize("kind", [AdapterMoE, LayerwiseAdapterMoE])
def test_a_gate_in_float32_reads_features_of_a_base_in_half_precision(kind, gate):
    lora = LoRA(["mlp.0"], r=2, modules_to_save=["classifier"])
    module = kind(Tokens().bfloat16(), lora, copy.deepcopy(gate)).eval()
    weights = module.mix(IDS)[1]
    base = module.base
    features = (x := base.embedding(IDS)) + base.mlp(x)  # adapters change nothing at first
    assert torch.equal(weights, module.gate(features.mean(1)))


def test_a_feature_gate_reads_images_as_they_are():
    base, x = SmallFCN(1, 3, channels=2), torch.randn(2, 1, 4, 5)
    features = base.extractor(x)  # adapters change nothing at first
    module = AdapterMoE(base, LoRA(["extractor.0"], r=1, modules_to_save=["classifier"]), FeatureGate())
    weights = module.mix(x)[1]
    assert torch.equal(weights, module.gate(features)) and module.gate.in_features == 40


def test_inside_layers_a_feature_gate_reads_the_local_experts_features():
    module = tokens(gate=FeatureGate(6), pad_token_id=0)
    weights = module.mix(IDS)[1]
    nn.init.ones_(getattr(module.global_expert.mlp, "0").lora_B.weight)
    assert torch.equal(module.mix(IDS)[1], weights)
    nn.init.ones_(getattr(module.local_expert.mlp, "0").lora_B.weight)
    assert not torch.equal(module.mix(IDS)[1], weights)


def test_the_mean_weights_of_a_token_gate_leave_padding_out():
    module = tokens(gate=TokenGate(), pad_token_id=0)
    weights, of_layers = module.mix(IDS)[1], module.mix_layers(IDS)[1]
    assert [*of_layers] == ["mlp.0", "mlp.2"]
    expected = torch.stack(
        [(layer[0].mean(0), layer[1, :2].mean(0))[i] for i in (0, 1) for layer in of_layers.values()]
    )
    torch.testing.assert_close(weights, expected.reshape(2, 2, 2).mean(1))


def test_a_layer_that_the_base_calls_twice_has_weights_of_both_calls():
    class Twice(Identity):
        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    gate = TokenGate()
    module = set_factors(LayerwiseAdapterMoE(Twice(), LORA, gate).double())
    router = gate.routers.layer.weight
    weights = module.mix_layers(X)[1]
    first = (X @ router.T).softmax(-1)
    # s B A x of the two adapters
    of_experts = 2 * X[:, :1] * X.new_tensor([1, 0]), 2 * X[:, 1:] * X.new_tensor([1, 2])
    x = (X + first[:, :1] * of_experts[0] + first[:, 1:] * of_experts[1]).tanh()
    second = (x @ router.T).softmax(-1)
    assert [*weights] == ["layer", "layer, call 2"]
    torch.testing.assert_close(weights["layer"], first)
    torch.testing.assert_close(weights["layer, call 2"], second)
    torch.testing.assert_close(module.mix(X)[1], (first + second) / 2)


class Block(TwoLayers):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


def called_by_keyword(layer):
    class Base(Identity):
        """Its layers and blocks are called by keyword, as those of transformers are."""

        def __init__(self):
            super().__init__()
            self.block = Block()
            if layer == "embedding":
                self.embedding = nn.Embedding(3, 2, dtype=torch.float64)

        def forward(self, x):
            x = self.embedding(input=(x[:, :1] > 0).long()).flatten(1) if layer == "embedding" else x
            return self.block(hidden_states=self.layer(input=x))

    return Base()


@pytest.mark.parametrize(
    ("lora", "arguments"),
    [
        (LoRA(["0.layer", "block.layer", "layer"], r=1), {}),
        (LoRA(["block.layer", "block.last"], r=1), {"blocks": ["block"]}),
        (LoRA(["last"], r=1, modules_to_save=["block.layer", "layer"]), {}),
        (LoRA(["embedding"], r=1, modules_to_save=["block"]), {}),
    ],
)
@pytest.mark.parametrize("gate", [ConstantGate(0.25), TokenGate()])
def test_layers_and_blocks_may_be_called_by_keyword(lora, arguments, gate):
    """A layer's call by place has the same outputs."""
    kind = "embedding" if lora.target_modules == ["embedding"] else "layer"
    if kind == "embedding" and isinstance(gate, TokenGate):
        return
    torch.manual_seed(0)
    module = drawn(LayerwiseAdapterMoE(called_by_keyword(kind), lora, copy.deepcopy(gate), **arguments).double())
    by_keyword = module(X)

    def by_place(self, x):
        x = self.embedding((x[:, :1] > 0).long()).flatten(1) if kind == "embedding" else x
        return self.block(self.layer(x))

    type(module.base).forward = by_place
    assert torch.equal(module(X), by_keyword)
    module.base.layer.weight.requires_grad_()
    by_keyword.sum().backward()


@pytest.mark.parametrize("lora", [LoRA(["mlp.2"]), LoRA(["c_proj"])])
def test_a_token_gate_of_a_block_reads_what_the_block_does(lora):
    base = Tokens()
    if lora.target_modules == ["c_proj"]:
        layers = pytest.importorskip("transformers.pytorch_utils").Conv1D
        base.mlp = nn.Sequential(OrderedDict(c_fc=layers(10, 6), c_proj=layers(6, 10)))
    module = LayerwiseAdapterMoE(base, lora, TokenGate(), blocks=["mlp"])
    assert module.gate.routers.mlp.weight.shape == (2, 6)
    assert module.mix_layers(IDS)[1]["mlp"].shape == (2, 4, 2)


def test_layers_outside_of_blocks_have_the_first_expert_whatever_the_gate():
    lora = LoRA(["mlp.0", "mlp.2", "linear"], r=2, lora_alpha=4)
    module = tokens(gate=LocalOnly(), lora=lora, blocks=["mlp"])
    of_local = module.mix_by(IDS, torch.tensor([[0.0, 1.0]] * 2))
    torch.testing.assert_close(module(IDS), of_local)
    torch.testing.assert_close(module.local_expert(IDS), of_local)
    assert module.idle_parts == [] and module.layers_outside_blocks == ["classifier.linear"]
    alone = tokens(gate=LocalOnly(), blocks=["mlp"])
    assert alone.idle_parts == ["global_expert"] and not alone.layers_outside_blocks


# --- names, copies, files ---


def test_tensors_have_the_names_of_the_layers_and_the_base_keeps_its_own():
    module, base = tokens(), Tokens()
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    of_experts = [f"{layer}.lora_{factor}.weight" for layer in ("mlp.0", "mlp.2") for factor in "AB"]
    expected = [f"{expert}.{name}" for expert in ("global_expert", "local_expert") for name in of_experts]
    assert sorted(names) == sorted([*expected, "head.classifier.linear.weight", "head.classifier.linear.bias"])
    assert [*module.base.state_dict()] == [*base.state_dict()]
    own_heads = {name for name in tokens(AdapterMoE).state_dict() if "classifier" in name and "base" not in name}
    assert {name.split(".")[0] for name in own_heads} == {"global_expert", "local_expert"}


def test_the_experts_are_drawn_independently():
    module = LayerwiseAdapterMoE(Identity(), LORA)
    assert not torch.equal(module.global_expert.layer.lora_A.weight, module.local_expert.layer.lora_A.weight)
    assert not module.global_expert.layer.lora_B.weight.any()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy_module, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_with_its_own_adapters(duplicate):
    module = tokens(gate=TokenGate())
    expected, own = module(IDS), duplicate(module)
    assert torch.equal(own(IDS), expected)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert not own(IDS).any()
    assert torch.equal(module(IDS), expected)


def test_a_lightning_checkpoint_makes_the_mixture_again(tmp_path):
    module = tokens(gate=TokenGate(), blocks=["mlp"], pad_token_id=0)
    load = partial(LayerwiseAdapterMoE.load_from_checkpoint, checkpoint(tmp_path, module), base=Tokens())
    for given in ({}, {"lora": module.lora}, {"lora": copy.deepcopy(module.lora), "gate": TokenGate()}):
        loaded = load(**given).eval()
        assert_same_bits(loaded.state_dict(), module.state_dict())
        assert torch.equal(loaded(IDS), module(IDS))
    assert (loaded.lora, loaded.blocks, loaded.pad_token_id) == (module.lora, ["mlp"], 0)
    for wrong, sentence in {
        "pooling": ": pooling cannot be used: Expected a typing.Literal['mean', 'last']. Got value: 3.",
        "optimizer": ": optimizer cannot be used: Expected an import path or a subclass spec, but got 3.",
        "gate": ": gate cannot be used: Not a valid subclass of Gate. Got value: 3.",
        "other": " cannot be used: MixtureOfExperts.__init__() got an unexpected keyword argument 'other'.",
    }.items():
        with pytest.raises(MisconfigurationException, match=f"^LayerwiseAdapterMoE{re.escape(sentence)}$"):
            load(**{wrong: 3})


# --- refusals ---


@pytest.mark.parametrize(
    ("lora", "refused"),
    [
        (LoRA(["out_proj"]), r"target_modules is 'self_attn\.out_proj'.*that the base calls"),
        (LoRA(["self_attn"]), r"target_modules is 'self_attn', but must be linear layers.* it is a MultiheadAttention"),
        (LoRA(["linear1"], modules_to_save=["out_proj"]), r"modules_to_save is '.*out_proj', but must be layers"),
    ],
)
def test_torch_s_attention_is_refused(lora, refused):
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(MisconfigurationException, match=refused):
        LayerwiseAdapterMoE(attention, lora, GlobalOnly())(torch.zeros(2, 3, 8))


def test_a_fused_layer_of_torch_asks_its_adapters_in_eval_mode_too():
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
    module = drawn(LayerwiseAdapterMoE(attention, LoRA(["linear1"]), GlobalOnly()))
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), module.train()(x))


MLP = LoRA(["mlp.0"])
REFUSED = [
    ("r is 0", lambda: LoRA(["layer"], r=0)),
    ("lora_dropout is 1.0", lambda: LoRA(["layer"], lora_dropout=1.0)),
    ("lora_alpha is 0", lambda: LoRA(["layer"], lora_alpha=0)),
    (
        "modules_to_save is 'clasifier'.*, mlp",
        lambda: AdapterMoE(Tokens(), LoRA(["mlp.0"], modules_to_save=["clasifier"])),
    ),
    (r"target_modules is \['q_proj'\].* peft says: .*not found", lambda: AdapterMoE(Tokens(), LoRA(["q_proj"]))),
    ("AdapterMoE: lora is {.*a fedmoe_pl.models.LoRA", lambda: AdapterMoE(Tokens(), {"target_modules": ["mlp.0"]})),
    ("blocks is 'mpl'", lambda: LayerwiseAdapterMoE(Tokens(), MLP, blocks=["mpl"])),
    (
        r"blocks is \['mlp'\], but must be names of modules in which layers have adapters",
        lambda: LayerwiseAdapterMoE(Tokens(), LoRA(["linear"]), blocks=["mlp"]),
    ),
    ("no linear layer", lambda: LayerwiseAdapterMoE(Tokens(), LoRA(["embedding"]), TokenGate())),
    ("top_k is 3", lambda: LayerwiseAdapterMoE(Tokens(), MLP, TokenGate(3))),
    ("mixing is 'probabilities'", lambda: LayerwiseAdapterMoE(Tokens(), MLP, mixing="probabilities")),
    ("pooling is 'first'", lambda: AdapterMoE(Tokens(), MLP, pooling="first")),
    ("max_clusters is 1", lambda: ClusteredAdapterMoE(Tokens(), MLP, max_clusters=1)),
    ("does not read features", lambda: ClusteredAdapterMoE(Tokens(), MLP, FeatureGate(6))),
    ("weighs 3", lambda: AdapterMoE(Tokens(), MLP, ConstantGate([0.2, 0.3, 0.5]))),
    ("base is 'bert', but must be a module", lambda: AdapterMoE("bert", MLP)),
    (
        "base is a PeftModel, but .* without adapters of peft",
        lambda: LayerwiseAdapterMoE(peft.PeftModel(Tokens(), MLP.config()), MLP),
    ),
    ("modules_to_save", lambda: AdapterMoE(Tokens(), MLP, FeatureGate(6))(IDS)),
    ("gate is a TokenGate.* unless the model is a Layerwise", lambda: AdapterMoE(Tokens(), MLP, TokenGate())(IDS)),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_does_not_fit_is_refused(message, make):
    with pytest.raises(MisconfigurationException, match=message):
        make()


def test_a_base_that_computes_layers_again_is_refused():
    base = Tokens()
    base.mlp.gradient_checkpointing = False
    module = LayerwiseAdapterMoE(base, LoRA(["mlp.0"]), EqualWeights())
    base.mlp.gradient_checkpointing = True
    with pytest.raises(MisconfigurationException, match="without checkpointing"):
        module(IDS)


class Pair(nn.Linear):
    """A layer that returns two values, as attention does."""

    def forward(self, x):
        return super().forward(x), None


def test_a_block_that_returns_a_tuple_is_refused():
    base = Tokens()
    base.mlp = nn.Sequential(nn.Linear(6, 6), Pair(6, 6))
    module = LayerwiseAdapterMoE(base, MLP, EqualWeights(), blocks=["mlp"])
    with pytest.raises(MisconfigurationException, match=r"^LoRA: blocks is 'mlp', but must be a module that returns"):
        module(IDS)


# --- places for clusters ---


def test_a_mixture_of_clusters_weighs_its_places_by_the_number_of_clusters():
    module = tokens(ClusteredAdapterMoE, max_clusters=3)
    names = {name.split(".mlp")[0] for name in module.state_dict() if "lora" in name}
    assert names == {f"global_experts.{place}" for place in range(3)} == {*module.weighed_parts}
    assert module.mix(IDS)[1].tolist() == [[1.0, 0, 0]] * 2
    module.gate.num_clusters.fill_(2)
    weights = module.mix_layers(IDS)[1]["mlp.0"]
    assert weights.shape == (2, 4, 3)
    assert not weights[..., 2].any() and weights[..., 1].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))


class SequenceFirst(nn.Module):
    """Layers or a head that read samples (B, T, F) as (T, B, F), as recurrent layers of torch do by default."""

    def __init__(self, head_alone=False):
        super().__init__()
        self.layer, self.last, self.head_alone = nn.Linear(2, 2), nn.Linear(2, 3), head_alone

    def forward(self, x):
        if self.head_alone:
            return self.last(self.layer(x).tanh().transpose(0, 1)).mean(0)
        return self.last(self.layer(x.transpose(0, 1)).tanh().mean(0))


@pytest.mark.parametrize("tokens_of_sample", [3, 4, 5])
@pytest.mark.parametrize("gate", [FeatureGate(2), LinearGate(), EqualWeights(), TokenGate(), None])
def test_layers_and_features_that_have_the_sequence_first_are_refused_also_if_there_are_as_many_tokens_as_samples(
    gate, tokens_of_sample
):
    lora, allowed = LoRA(["layer"], r=1, modules_to_save=["last"]), "target_modules is 'layer', but .*"
    if gate is None:
        module, allowed = AdapterMoE(SequenceFirst(head_alone=True), lora, FeatureGate(2)), "modules_to_save that"
    else:
        module = LayerwiseAdapterMoE(SequenceFirst(), lora, copy.deepcopy(gate))
    with pytest.raises(MisconfigurationException, match=f"{allowed} keeps the samples apart"):
        module(torch.zeros(4, tokens_of_sample, 2))


class OfOnesOwn(TokenGate):
    """Weights of which a function makes others."""

    def __init__(self, change):
        super().__init__(init_std=1.0)
        self.change = change

    def weights(self, path, x):
        return self.change(super().weights(path, x))


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (lambda weights: 2 * weights, "at least 0"),
        (lambda weights: 9 * weights - 4, "at least 0"),
        (lambda weights: weights.mean(1, keepdim=True).expand_as(weights), "by itself"),  # of all tokens
        (lambda weights: weights.mean(0, keepdim=True).expand_as(weights), "by itself"),  # of all samples
    ],
)
def test_a_token_gate_of_ones_own_keeps_to_what_a_gate_is(change, allowed):
    torch.manual_seed(0)
    with pytest.raises(MisconfigurationException, match=allowed):
        tokens(LayerwiseAdapterMoE, gate=OfOnesOwn(change))


@pytest.mark.parametrize(
    ("kind", "algorithm", "experts"),
    [
        (LayerwiseAdapterMoE, FedALT(), ("global_expert", "local_expert")),
        (ClusteredAdapterMoE, FedLEASE(), tuple(f"global_experts.{place}" for place in range(4))),
        (LayerwiseAdapterMoE, Local(), ("global_expert", "local_expert")),
    ],
)
def test_dropout_leaves_out_the_same_values_for_all_experts_of_a_layer(kind, algorithm, experts):
    """FedALT's official code, and FedLEASE's: ``h = W x + s sum_e g_e B_e A_e drop(x)``, with g of x as it is."""
    module = adapters(TokenGate() if kind is LayerwiseAdapterMoE else None, kind, lora_dropout=0.5)
    if kind is ClusteredAdapterMoE:
        module.gate.num_clusters.fill_(4)
    data = blobs()
    Freezing(local_training(module, algorithm, data), module, 5).freeze(0)
    x = data.x[:9].double()
    torch.manual_seed(7)
    actual = module(x)
    torch.manual_seed(7)
    torch.testing.assert_close(actual, logits(module.state_dict(), x, module.gate.weights, experts, F.dropout))
