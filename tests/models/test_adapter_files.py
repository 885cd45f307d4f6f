"""Adapters in peft's files and in the weights of their base, as peft and transformers load them."""

import copy
import json

import pytest
import torch
from helpers import assert_same_bits
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import nn

from fedmoe_pl.models import AdapterMoE, ConstantGate, EqualWeights, GlobalOnly, LayerwiseAdapterMoE, LoRA, TokenGate
from fedmoe_pl.models.adapter_files import (
    adapter_of,
    adapter_of_mixture,
    merged,
    peft_model,
    read_adapter,
    save_base,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])


class Pictures(nn.Module):
    """An embedding, convolutions with kernels of 3 and 1, and a linear layer; no model of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.conv, self.pointwise = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.pointwise(self.conv(self.embedding(x)[:, None]).relu()).mean((2, 3)))


def bert():
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    return transformers.BertForSequenceClassification(config), LoRA(
        ["query", "dense"], r=2, lora_alpha=6, modules_to_save=["classifier"]
    )


def gpt2():
    return transformers.GPT2Config(
        vocab_size=9,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


BASES = {
    "linear": bert,
    "Conv1D and embedding": lambda: (
        transformers.GPT2ForSequenceClassification(gpt2()),
        LoRA(["c_attn", "wte"], r=2, use_rslora=True, modules_to_save=["score"]),
    ),
    "no head": lambda: (transformers.GPT2ForSequenceClassification(gpt2()), LoRA(["c_attn", "c_proj"], r=2)),
    "Conv2d and embedding": lambda: (
        Pictures(),
        LoRA("embedding|conv|pointwise", r=2, lora_alpha=3, modules_to_save=["head"]),
    ),
}


def mixture(name="linear", kind=LayerwiseAdapterMoE, gate=None, **arguments):
    """A mixture without a zero in its factors, and its base as it was."""
    torch.manual_seed(0)
    base, lora = BASES[name]()
    fresh = copy.deepcopy(base).eval()
    pad = None if name.startswith("Conv2d") else 0
    module = kind(base, lora, gate or ConstantGate(0.3), pad_token_id=pad, **arguments)
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return module.eval(), fresh


def logits_of(model, module):
    output = module.prepared(IDS)
    output = model(**output) if isinstance(output, dict) else model(output)
    return getattr(output, "logits", output)


def saved(module, fresh, adapter, folder):
    peft_model(module.plain_base(), adapter).save_pretrained(str(folder), save_embedding_layers=False)
    return peft.PeftModel.from_pretrained(copy.deepcopy(fresh), str(folder)).eval()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("kind", [AdapterMoE, LayerwiseAdapterMoE])
def test_peft_loads_every_expert_with_the_same_logits(name, kind, tmp_path):
    module, fresh = mixture(name, kind)
    for expert in ("global_expert", "local_expert"):
        loaded = saved(module, fresh, adapter_of(module, expert), tmp_path / expert)
        torch.testing.assert_close(logits_of(loaded, module), getattr(module, expert)(IDS))
    assert not torch.allclose(module.global_expert(IDS), module.local_expert(IDS))


@pytest.mark.parametrize("name", BASES)
def test_constant_weights_inside_of_layers_are_one_adapter_of_the_sum_of_ranks(name, tmp_path):
    module, fresh = mixture(name)
    adapter = adapter_of_mixture(module)
    assert adapter.lora.r == 4
    loaded = saved(module, fresh, adapter, tmp_path)
    torch.testing.assert_close(logits_of(loaded, module), module(IDS))


@pytest.mark.parametrize("name", BASES)
def test_merged_weights_compute_the_mixture_and_leave_the_module_as_it_is(name, tmp_path):
    module, fresh = mixture(name)
    before, expected = {key: tensor.clone() for key, tensor in module.state_dict().items()}, module(IDS)
    save_base(merged(module.plain_base(), adapter_of_mixture(module)), tmp_path)
    if isinstance(fresh, transformers.PreTrainedModel):
        loaded = type(fresh).from_pretrained(tmp_path).eval()
    else:
        loaded = Pictures()
        loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits_of(loaded, module), expected)
    assert_same_bits(module.state_dict(), before)
    assert torch.equal(module(IDS), expected)


def test_a_gate_that_keeps_one_expert_gives_its_adapter():
    module, _ = mixture(kind=AdapterMoE, gate=GlobalOnly())
    own, expected = adapter_of_mixture(module), adapter_of(module, "global_expert")
    assert own.lora == expected.lora
    assert_same_bits(own.tensors, expected.tensors)


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
    module, fresh = mixture()
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["dense", "query"]
    expected = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 2,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    assert {key: written[key] for key in expected} == expected
    assert "classifier" in written["modules_to_save"]
    module, fresh = mixture("Conv1D and embedding")
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path / "gpt2")
    written = json.loads((tmp_path / "gpt2" / "adapter_config.json").read_text())
    assert (written["fan_in_fan_out"], written["use_rslora"]) == (True, True)


@pytest.mark.parametrize("name", BASES)
def test_what_was_written_is_read_again(name, tmp_path):
    module, fresh = mixture(name)
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path)
    tensors = read_adapter(tmp_path, module)
    state = module.state_dict()
    assert {*tensors} == {key for key in state if key.startswith(("global_expert.", "head."))}
    assert_same_bits(tensors, {key: state[key] for key in tensors})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"r": 4}, r"LoRA: r is 4, but must be 2, as in '"),
        ({"lora_alpha": 8}, r"LoRA: lora_alpha is 8, but must be 6, as in '"),
        ({"use_rslora": True}, r"LoRA: use_rslora is True, but must be False, as in '"),
        ({"target_modules": ["query"]}, r"target_modules is \['query'\], but must be \['dense', 'query'\], as in '"),
        ({"target_modules": ["key", "query", "dense"]}, r"must be \['dense', 'query'\], .*only the model has .*key"),
        (
            {"modules_to_save": []},
            r"modules_to_save is \[\], but must be \['classifier'.*only the folder has cl",
        ),
    ],
)
def test_an_adapter_that_differs_is_refused_with_both_values(other, message, tmp_path):
    module, fresh = mixture()
    saved(module, fresh, adapter_of(module, "global_expert"), tmp_path)
    base, lora = bert()
    with pytest.raises(MisconfigurationException, match=message):
        read_adapter(tmp_path, AdapterMoE(base, LoRA(**{**vars(lora), **other})))


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
