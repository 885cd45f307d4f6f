"""Adapters in peft's files and in the weights of their base, as peft and transformers load them."""

import copy
import dataclasses
import json
import shutil
import warnings
from functools import partial

import pytest
import torch
from helpers import assert_same_bits
from helpers.adapters import ScaledEmbedding
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import nn

from fedmoe_pl.models import (
    AdapterMoE,
    ClusteredAdapterMoE,
    ConstantGate,
    EqualWeights,
    GlobalOnly,
    LayerwiseAdapterMoE,
    LocalOnly,
    LoRA,
    TokenGate,
)
from fedmoe_pl.models.adapter_files import adapter_of, adapter_of_mixture, merged, peft_model, read_adapter, save_base

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft calls it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),  # by peft itself
    pytest.mark.filterwarnings("ignore:LoRA. modules_to_save is .* as it is"),
]
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])


class Pictures(nn.Module):
    """A scaled embedding, convolutions with kernels of 3 and 1, and a linear layer; no model of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding = ScaledEmbedding(9, 4)
        self.conv, self.pointwise = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.pointwise(self.conv(self.embedding(x)[:, None]).relu()).mean((2, 3)))


def gpt2():
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return transformers.GPT2Config(**sizes, num_labels=3, pad_token_id=0, bos_token_id=None, eos_token_id=None)


def classifier(name, **config):
    config = {"num_labels": 3, "pad_token_id": 0, "vocab_size": 9, **config}
    return getattr(transformers, f"{name}ForSequenceClassification")(getattr(transformers, f"{name}Config")(**config))


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
MODELS = {
    "Bert": lambda: classifier("Bert", **SMALL),
    "Roberta": lambda: classifier("Roberta", max_position_embeddings=16, **SMALL),
    "DistilBert": lambda: classifier("DistilBert", dim=8, hidden_dim=8, n_layers=1, n_heads=2),
    "GPT2": lambda: transformers.GPT2ForSequenceClassification(gpt2()),
    "Pictures": Pictures,
}
BERT = LoRA(["query", "dense"], r=2, lora_alpha=6, modules_to_save=["classifier"])
CONV1D = LoRA(["c_attn", "wte"], r=2, use_rslora=True, modules_to_save=["score"])


def mixture(name="Bert", lora=BERT, kind=LayerwiseAdapterMoE, gate=None, **arguments):
    """A mixture without a zero in its factors, and its base as it was."""
    torch.manual_seed(0)
    base = MODELS[name]().double()
    fresh = copy.deepcopy(base).eval()
    pad = None if name == "Pictures" else 0
    module = kind(base, lora, gate or ConstantGate(0.25), pad_token_id=pad, **arguments).double()
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return module.eval(), fresh


def logits_of(model, module):
    output = module.prepared(IDS)
    output = model(**output) if isinstance(output, dict) else model(output)
    return getattr(output, "logits", output)


def saved(module, fresh, adapter, folder, **arguments):
    peft_model(module.plain_base(), adapter).save_pretrained(str(folder), save_embedding_layers=False)
    return peft.PeftModel.from_pretrained(copy.deepcopy(fresh), str(folder), **arguments).eval()


LOADED = [
    ("Bert", BERT),
    ("GPT2", CONV1D),
    ("GPT2", LoRA(["c_attn", "c_proj"], r=2)),
    ("Pictures", LoRA("embedding|conv|pointwise", r=2, lora_alpha=3, modules_to_save=["head"])),
    ("Bert", LoRA("all-linear", r=2)),
    # heads and other layers, with adapters or trained as a whole
    ("GPT2", LoRA(["c_attn", "score"], r=2)),
    ("DistilBert", LoRA(["q_lin"], r=2, modules_to_save=["classifier"])),  # which pre_classifier ends with
    ("Bert", LoRA(["query", "word_embeddings"], r=2, modules_to_save=["embeddings", "classifier"])),
    ("Bert", LoRA(["classifier"], r=2)),
    ("Bert", LoRA(["query"], r=2, modules_to_save=["output"])),
    ("GPT2", LoRA("all-linear", r=2)),
    ("GPT2", LoRA("all-linear", r=2, modules_to_save=["score"])),
    ("Roberta", LoRA("all-linear", r=2)),
    ("Roberta", LoRA(["query"], r=2, modules_to_save=["classifier.out_proj"])),
    ("Roberta", LoRA(["query", "classifier.dense"], r=2, modules_to_save=["out_proj"])),
    ("DistilBert", LoRA("all-linear", r=2)),
    ("DistilBert", LoRA("all-linear", r=2, modules_to_save=["classifier"], exclude_modules=["pre_classifier"])),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "lora"), LOADED)
def test_experts_mixtures_and_merged_weights_have_the_same_logits_in_peft_and_transformers(name, lora, tmp_path):
    module, fresh = mixture(name, lora)
    before, expected = {key: tensor.clone() for key, tensor in module.state_dict().items()}, module(IDS)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-13)
    for expert in ("global_expert", "local_expert"):
        one = adapter_of(module, expert)
        close(logits_of(saved(module, fresh, one, tmp_path / expert), module), getattr(module, expert)(IDS))
    read = read_adapter(tmp_path / "global_expert", module)
    assert_same_bits(read, {key: before[key] for key in before if key.startswith(("global_expert.", "head."))})
    mixed = adapter_of_mixture(module)
    assert mixed.lora.r == 4, "the sum of ranks"
    close(logits_of(saved(module, fresh, mixed, tmp_path / "mixed"), module), expected)
    save_base(merged(module.plain_base(), mixed), tmp_path)
    if name == "Pictures":
        loaded = Pictures().double()
        loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    else:
        loaded = type(fresh).from_pretrained(tmp_path)
    close(logits_of(loaded.eval(), module), expected)
    assert_same_bits(module.state_dict(), before)
    assert torch.equal(module(IDS), expected)


@pytest.mark.parametrize("name", [0, 1, 2, 3])
@pytest.mark.few(1)
def test_peft_loads_every_expert_of_a_mixture_of_outputs(name, tmp_path):
    module, fresh = mixture(*LOADED[name], AdapterMoE)
    for expert in ("global_expert", "local_expert"):
        loaded = saved(module, fresh, adapter_of(module, expert), tmp_path / expert)
        torch.testing.assert_close(logits_of(loaded, module), getattr(module, expert)(IDS))
    assert not torch.allclose(module.global_expert(IDS), module.local_expert(IDS))


def test_peft_loads_every_expert_of_a_mixture_of_clusters_and_their_mixture(tmp_path):
    module, fresh = mixture(kind=ClusteredAdapterMoE, gate=EqualWeights(), max_clusters=2)
    for expert in module.weighed_parts:
        loaded = saved(module, fresh, adapter_of(module, expert), tmp_path / expert)
        torch.testing.assert_close(logits_of(loaded, module), module.get_submodule(expert)(IDS))
    torch.testing.assert_close(logits_of(merged(module.plain_base(), adapter_of_mixture(module)), module), module(IDS))


def test_a_gate_that_keeps_one_expert_gives_its_adapter():
    module, _ = mixture(kind=AdapterMoE, gate=GlobalOnly())
    own, expected = adapter_of_mixture(module), adapter_of(module, "global_expert")
    assert own.lora == expected.lora
    assert_same_bits(own.tensors, expected.tensors)


def test_layers_outside_of_blocks_have_the_first_expert_s_adapters_in_files(tmp_path):
    module, fresh = mixture(gate=LocalOnly(), blocks=["bert.encoder.layer.0.attention.self"])
    for expert in ("global_expert", "local_expert"):
        loaded = saved(module, fresh, adapter_of(module, expert), tmp_path / expert)
        torch.testing.assert_close(logits_of(loaded, module), getattr(module, expert)(IDS))
    torch.testing.assert_close(logits_of(merged(module.plain_base(), adapter_of_mixture(module)), module), module(IDS))


@pytest.mark.parametrize(
    ("kind", "gate", "arguments"),
    [
        (AdapterMoE, EqualWeights(), {}),
        (LayerwiseAdapterMoE, TokenGate(), {}),
        (LayerwiseAdapterMoE, EqualWeights(), {"blocks": ["bert.encoder.layer.0.attention.self"]}),
    ],
)
def test_outputs_tokens_and_blocks_are_mixed_by_no_adapter(kind, gate, arguments):
    assert adapter_of_mixture(mixture(kind=kind, gate=gate, **arguments)[0]) is None


def test_the_configuration_has_what_peft_needs(tmp_path):
    plain = {"peft_type": "LORA", "task_type": "SEQ_CLS", "lora_dropout": 0.0, "bias": "none", "inference_mode": True}
    of_bert = {"r": 2, "lora_alpha": 6, "use_rslora": False, "fan_in_fan_out": False}
    of_gpt2 = {"r": 2, "use_rslora": True, "fan_in_fan_out": True}
    for name, lora, expected in (("Bert", BERT, of_bert), ("GPT2", CONV1D, of_gpt2)):
        module, fresh = mixture(name, lora)
        saved(module, fresh, adapter_of(module, "global_expert"), tmp_path / name)
        written = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert {key: written[key] for key in plain | expected} == plain | expected
        assert sorted(written["target_modules"]) == sorted(lora.target_modules)
        assert {*lora.modules_to_save} <= {*written["modules_to_save"]}


DIFFERENT = {
    "LoRA: r is 4, but must be 2, as in '": {"r": 4},
    "LoRA: lora_alpha is 8, but must be 6, as in '": {"lora_alpha": 8},
    "LoRA: use_rslora is True, but must be False, as in '": {"use_rslora": True},
    r"^Only the folder .*dense.lora_A.*: its target_modules is \['dense', 'query'\], and .* \['query'\]\.$": {
        "target_modules": ["query"]
    },
    "^Only the model has .*key.lora_A.weight: its target_modules is": {"target_modules": ["key", "query", "dense"]},
    r"dense.lora_A.weight: its exclude_modules is None, and .* \['0.output": {"exclude_modules": ["0.output.dense"]},
    "^Only the folder '.*' has classifier.bias: its modules_to_save is .* the model None": {"modules_to_save": []},
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_an_adapter_that_differs_is_refused_with_both_values(message, tmp_path):
    module, fresh = mixture()
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path)
    with pytest.raises(MisconfigurationException, match=message):
        read_adapter(tmp_path, AdapterMoE(MODELS["Bert"](), dataclasses.replace(BERT, **DIFFERENT[message])))


def test_folders_without_an_adapter_or_with_a_damaged_one_are_refused(tmp_path):
    module, fresh = mixture()
    with pytest.raises(MisconfigurationException, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, module)
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(MisconfigurationException, match="is missing or damaged"):
        read_adapter(tmp_path, module)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(MisconfigurationException, match="cannot be read"):
        read_adapter(tmp_path, module)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("lora", [LoRA(["lm_head"]), LoRA(["wte"]), LoRA(["c_attn"], modules_to_save=["lm_head"])])
def test_tied_weights_are_not_merged(lora):
    module = LayerwiseAdapterMoE(transformers.GPT2LMHeadModel(gpt2()), lora, GlobalOnly())
    with pytest.raises(MisconfigurationException, match=r"without tied weights, because .*wte\.weight is also lm_head"):
        merged(module.plain_base(), adapter_of_mixture(module))


def test_quantized_weights_are_not_merged():
    module, fresh = mixture()
    fresh.bert.encoder.layer[0].attention.self.query.weight = nn.Parameter(
        torch.zeros(8, 8).char(), requires_grad=False
    )
    with pytest.raises(MisconfigurationException, match=r"without quantized weights, because .*query\.weight"):
        merged(fresh, adapter_of_mixture(module))


# --- keys of adapter_config.json ---

OF_LORA = ("r", "lora_alpha", "use_rslora")
DRAWN = {
    **dict.fromkeys((False, "gaussian", "orthogonal", "mica", "eva"), True),
    **dict.fromkeys(("pissa", "pissa_niter_2", "olora", "loftq", "corda", "lora_ga", "a later one"), False),
}
HARMLESS = {  # of no effect on an adapter that is there, or seen in its tensors, which this test leaves as they are
    "task_type": "FEATURE_EXTRACTION",
    "auto_mapping": {"base_model_class": "Other"},
    "peft_version": "0.1",
    "base_model_name_or_path": "other",
    "revision": "main",
    "inference_mode": False,
    "target_modules": ["bert.encoder.layer.0.attention.self.query", "dense"],
    "exclude_modules": ["pooler.other"],
    "lora_dropout": 0.5,
    "fan_in_fan_out": True,
    "modules_to_save": ["bert.other", "classifier"],
    "layers_to_transform": [0],
    "layers_pattern": ["layer"],
    "rank_pattern": {"none": 3},
    "megatron_core": "other",
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"verbose": True},
    "lora_ga_config": {"stable_gamma": 8},
    "qalora_group_size": 8,
    "runtime_config": {"ephemeral_gpu_offload": True},
}
OTHERS = {  # what peft computes with it is something else
    "peft_type": "IA3",
    "bias": "all",
    "alpha_pattern": {"query": 3},
    "megatron_config": {"a": 1},
    "trainable_token_indices": [0],
    "use_dora": True,
    "velora_config": {},
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "monteclora_config": {},
    "layer_replication": [[0, 1], [0, 1]],
    "lora_bias": True,
    "target_parameters": ["a.b"],
    "use_bdlora": {},
    "arrow_config": {},
    "kasa_config": {},
    "ensure_weight_tying": True,
    "of_a_later_peft": [1],
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A mixture, and the folder of its global expert."""
    module, fresh = mixture()
    folder = tmp_path_factory.mktemp("adapter")
    saved(module, fresh, adapter_of(module, "global_expert"), folder)
    return module, folder


def test_every_key_of_peft_is_known():
    names = {each.name for each in dataclasses.fields(peft.LoraConfig)}
    unknown = names - {*OF_LORA, *HARMLESS, *OTHERS, "init_lora_weights"}
    assert not unknown, "what do these do to an adapter of a folder?"


@pytest.mark.filterwarnings("ignore")  # peft's, of keys that others make useless
@pytest.mark.parametrize(
    ("key", "value", "is_read"),
    [
        *((key, value, True) for key, value in HARMLESS.items()),
        *((key, value, False) for key, value in OTHERS.items()),
        *(("init_lora_weights", value, is_read) for value, is_read in DRAWN.items()),
    ],
)
def test_a_key_is_harmless_or_the_reason_of_a_refusal(key, value, is_read, adapter, tmp_path):
    module, folder = adapter
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapter_config.json"
    needed = {"layers_pattern": {"layers_to_transform": [0]}}.get(key, {})
    needed |= {"loftq_config": {"loftq_bits": 4}} if value == "loftq" else {}
    path.write_text(json.dumps(json.loads(path.read_text()) | needed | {key: value}))
    if is_read:
        assert read_adapter(tmp_path, module)
    else:
        with pytest.raises(
            MisconfigurationException, match=rf"^('.*adapter_config.json'|LoRA): {key} is .*, but must be"
        ):
            read_adapter(tmp_path, module)


def given(base, folder, **arguments):
    """An adapter of peft's own without a zero in its factors, in a folder, and its logits."""
    config = {"r": 2, "lora_alpha": 6, "target_modules": ["query", "dense"], "modules_to_save": ["classifier"]}
    model = peft.get_peft_model(base, peft.LoraConfig(**config | arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) / 2
    return model.eval()


@pytest.mark.parametrize("way", [True, False, "gaussian", "orthogonal", "mica", "pissa", "pissa_niter_2", "olora"])
def test_an_adapter_of_peft_starts_with_the_logits_that_peft_gives_it_or_is_refused(way, tmp_path):
    torch.manual_seed(0)
    base, lora = MODELS["Bert"](), BERT
    model = given(copy.deepcopy(base), tmp_path, init_lora_weights=way)
    model.save_pretrained(str(tmp_path))
    module = AdapterMoE(base, lora, GlobalOnly(), pad_token_id=0).eval()
    if DRAWN.get(way, True):
        module.load_state_dict(read_adapter(tmp_path, module), strict=False)
        torch.testing.assert_close(module(IDS), logits_of(model, module))
        return
    with pytest.raises(MisconfigurationException, match=rf"init_lora_weights is '{way}'.*path_initial_model"):
        read_adapter(tmp_path, module)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")
def test_an_adapter_that_peft_has_converted_starts_with_its_logits(tmp_path):
    torch.manual_seed(0)
    base, lora = MODELS["Bert"](), BERT
    model = given(copy.deepcopy(base), tmp_path, init_lora_weights="pissa", modules_to_save=None)
    first = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(model.peft_config["default"]))
    first.peft_config["default"].init_lora_weights = True  # as in peft's documentation
    first.save_pretrained(str(tmp_path / "first"))
    model.save_pretrained(str(tmp_path / "it"), path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    lora = dataclasses.replace(lora, r=4, lora_alpha=12, modules_to_save=None)
    module = AdapterMoE(base, lora, GlobalOnly(), pad_token_id=0).eval()
    module.load_state_dict(read_adapter(tmp_path / "it", module), strict=False)
    torch.testing.assert_close(module(IDS), logits_of(model, module), rtol=1e-3, atol=1e-4)


def test_the_base_s_embedding_in_a_folder_is_no_part_of_an_adapter_and_another_one_is_refused(tmp_path):
    torch.manual_seed(0)
    base, lora = MODELS["GPT2"](), CONV1D
    arguments = {"target_modules": ["c_attn", "wte"], "lora_alpha": 8, "use_rslora": True, "modules_to_save": ["score"]}
    model = given(copy.deepcopy(base), tmp_path, fan_in_fan_out=True, **arguments)
    model.save_pretrained(str(tmp_path), save_embedding_layers=True)
    assert [name for name in load_file(tmp_path / "adapter_model.safetensors") if "base_layer" in name]
    module = AdapterMoE(base, lora, GlobalOnly(), pad_token_id=0).eval()
    module.load_state_dict(read_adapter(tmp_path, module), strict=False)
    torch.testing.assert_close(module(IDS), logits_of(model, module))
    nn.init.ones_(base.transformer.wte.weight)
    with pytest.raises(MisconfigurationException, match=r"^Only the folder '.*' has transformer.wte.base_layer.weight"):
        read_adapter(tmp_path, module)


def test_what_peft_would_train_as_a_whole_and_adapt_is_refused_before_training():
    lora = LoRA("all-linear", r=2, modules_to_save=["classifier"])
    with pytest.raises(MisconfigurationException, match=r"modules_to_save is \['classifier'\].* 'pre_classifier'"):
        AdapterMoE(MODELS["DistilBert"](), lora, GlobalOnly(), pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "lora", "head"),
    [
        ("DistilBert", LoRA(["q_lin"], modules_to_save=["classifier"]), "pre_classifier"),
        ("DistilBert", LoRA(["q_lin"], modules_to_save=["pre_classifier", "classifier"]), None),
        ("DistilBert", LoRA("all-linear"), None),
        ("Roberta", LoRA(["query"], modules_to_save=["classifier.out_proj"]), "classifier.dense"),
        ("Roberta", LoRA(["query"], modules_to_save=["classifier"]), None),
        ("GPT2", LoRA(["c_attn"]), "score"),
        ("Pictures", LoRA(["conv"]), None),
    ],
)
def test_a_head_of_transformers_that_is_not_trained_is_warned_of(name, lora, head):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AdapterMoE(MODELS[name](), lora, GlobalOnly())
    sentences = [str(each.message) for each in caught if str(each.message).startswith("LoRA: ")]
    assert len(sentences) == (head is not None)
    assert all(f"leaves the {name}ForSequenceClassification's {head} as it is" in sentence for sentence in sentences)


# --- types ---


@pytest.mark.parametrize("is_cast", [True, False])
def test_factors_have_the_types_and_bits_that_peft_gives_them(is_cast, tmp_path):
    """On a base in bfloat16, float32 unless asked otherwise."""
    base, lora = MODELS["Bert"](), BERT
    base.to(torch.bfloat16)
    fresh = copy.deepcopy(base)
    torch.manual_seed(1)
    config = {"r": 2, "lora_alpha": 6, "target_modules": ["query", "dense"], "modules_to_save": ["classifier"]}
    theirs = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config), autocast_adapter_dtype=is_cast)
    torch.manual_seed(1)
    module = AdapterMoE(base, dataclasses.replace(lora, autocast_adapter_dtype=is_cast), GlobalOnly(), pad_token_id=0)
    own = adapter_of(module, "global_expert").tensors
    assert_same_bits(own, {name: own[name] for name in own} | peft.get_peft_model_state_dict(theirs))
    assert {own[name].dtype for name in own if ".lora_" in name} == {torch.float32 if is_cast else torch.bfloat16}
    for parameter in module.global_expert.parameters():
        nn.init.normal_(parameter, std=0.5)
    one = adapter_of(module, "global_expert")
    loaded = saved(module, fresh, one, tmp_path, autocast_adapter_dtype=is_cast)
    assert_same_bits(load_file(tmp_path / "adapter_model.safetensors"), adapter_of(module, "global_expert").tensors)
    assert torch.equal(logits_of(loaded, module), module.eval()(IDS))
