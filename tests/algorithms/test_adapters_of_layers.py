"""Methods of low-rank adapters with the layers for which peft makes adapters, and with a real ``AdapterMoE``."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, phase, run
from helpers.adapters import ScaledEmbedding
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, FedExLoRA, FlexLoRA, HetLoRA
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import AdapterMoE, ConstantGate, GlobalOnly, LayerwiseAdapterMoE, LoRA
from fedmoe_pl.models.adapter_files import read_adapter
from fedmoe_pl.trees import load_tree, of_module

peft = pytest.importorskip("peft")
pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
SIZES = [13, 8, 11]
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # peft, of Conv1D
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups"),
]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LAYERS = {  # square where a layer has a width, so that a wrong orientation would raise nothing
    "Linear": (lambda: nn.Linear(4, 4), drawn(5, 4)),
    "Conv1D": (lambda: pytorch_utils.Conv1D(4, 4), drawn(5, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), drawn(1, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), drawn(1, 2, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=2), drawn(1, 2, 4, 4, 4)),
    "Embedding": (lambda: nn.Embedding(4, 4), torch.arange(4)),
    "ScaledEmbedding": (lambda: ScaledEmbedding(4, 4), torch.arange(4)),
}
# what the adapter of a convolution computes is no change of its weight, because peft does not take these over
UNLIKE = {
    "groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), drawn(1, 4, 5, 5)),
    "dilation": (lambda: nn.Conv2d(4, 4, 3, padding="same", dilation=2), drawn(1, 4, 5, 5)),
    "padding_mode": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), drawn(1, 4, 5, 5)),
}
ALL = LAYERS | UNLIKE
EXACT = [(FedExLoRA(weighting="samples"), 1, kind) for kind in LAYERS]
EXACT += [(FlexLoRA([1]), 3, kind) for kind in ALL if kind != "groups"]


def of_one_layer(kind, r):
    torch.manual_seed(0)
    base = nn.Sequential(OrderedDict(layer=ALL[kind][0]()))
    return AdapterMoE(base, LoRA(["layer"], r=r, lora_alpha=2 * r), GlobalOnly()).double()


@pytest.mark.parametrize(("algorithm", "r", "kind"), EXACT)
def test_exact_methods_have_the_mean_of_the_outputs_of_clients_models(kind, algorithm, r):
    """A layer's output is linear in its weight, so that the mean weight has the mean output."""
    x, model = ALL[kind][1], of_one_layer(kind, r)
    server, generator = algorithm.server_init(model), torch.Generator().manual_seed(1)
    updates, outputs = [], []
    for _ in range(3):
        sent = {
            name: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in algorithm.server_send(server, 0, {}).items()
            if "lora" in name
        }
        updates.append(sent)
        model_of_client = of_one_layer(kind, 1)
        load_tree(model_of_client, {name.removeprefix("cut/"): tensor for name, tensor in sent.items()})
        outputs.append(model_of_client.global_expert(x))
    weights = (1, 2, 5)
    folded, *others = (Update(sent, weight) for sent, weight in zip(updates, weights, strict=True))
    for other in others:
        folded = algorithm.combine(folded, other)
    load_tree(model, of_module(algorithm.server_update(server, folded)))
    exact = sum(weight * output for weight, output in zip(weights, outputs, strict=True)) / sum(weights)
    torch.testing.assert_close(model.global_expert(x), exact, rtol=0, atol=1e-12)


class OfKind(nn.Module):
    """A layer of a kind, made of a sample's five features, and a head."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, example = ALL[kind][0](), ALL[kind][1]
        self.shape = example.shape[1:] if example.is_floating_point() else None
        self.head = nn.LazyLinear(3)
        self.double()(torch.zeros(1, 5, dtype=torch.float64))

    def forward(self, x):
        if self.shape is None:
            return self.head(self.layer((x > 0).long()).flatten(1))
        places = torch.arange(self.shape.numel()) % 5
        return self.head(self.layer(x[:, places].reshape(-1, *self.shape)).tanh().flatten(1))


def export(algorithm, kind, format, tmp_path):
    """The client's model after two rounds, and the one that was exported and loaded again."""
    lora = LoRA(["layer"], r=2, lora_alpha=4, modules_to_save=["head"])
    optimizer = partial(torch.optim.SGD, lr=0.3)
    module = LayerwiseAdapterMoE(OfKind(kind), lora, ConstantGate(0.25), optimizer=optimizer).double()
    run = federation(tmp_path, [Phase("it", algorithm, rounds=2)])
    run.fit(module, blobs(SIZES))
    run.export(module, blobs(SIZES), method="it", client=1, format=format, output=str(tmp_path / "exported"))
    if format == "peft":
        loaded = peft.PeftModel.from_pretrained(OfKind(kind), str(tmp_path / "exported" / "mixture"))
        own = run.client_module("it", 1)
        read = read_adapter(tmp_path / "exported" / "global_expert", own)
        assert_same_bits({name: own.state_dict()[name] for name in read}, read)
    else:
        loaded = OfKind(kind)
        loaded.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    return run.client_module("it", 1).eval(), loaded.eval(), module


@pytest.mark.few("groups-HetLoRA")
@pytest.mark.parametrize(
    ("algorithm", "format"),
    [(FedAvg("global_expert.*"), "peft"), (FedExLoRA(), "merged"), (HetLoRA([2]), "peft"), (FlexLoRA([2]), "peft")],
    ids=["peft", "merged", "HetLoRA", "FlexLoRA"],
)
@pytest.mark.parametrize("kind", ALL)
def test_every_layer_is_trained_averaged_exported_and_loaded(kind, algorithm, format, tmp_path):
    refused = ""
    if format == "merged" and kind in UNLIKE:
        refused = r"lora is a LoRA, but must be .*base\.layer\.weight is a conv"
    elif isinstance(algorithm, HetLoRA | FlexLoRA) and kind == "groups":
        refused = r"no groups, because .*lora_B\.weight is that of a conv"
    if refused:
        with pytest.raises(MisconfigurationException, match=refused):
            export(algorithm, kind, format, tmp_path)
        return
    ours, theirs, new = export(algorithm, kind, format, tmp_path)
    x = drawn(7, 5)
    torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=1e-14)
    assert not torch.allclose(ours(x), new(x))


def network(rank=2) -> AdapterMoE:
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    lora = LoRA(["0", "2"], r=rank, lora_alpha=2 * rank, modules_to_save=["4"])
    return AdapterMoE(base, lora, GlobalOnly(), optimizer=partial(torch.optim.SGD, lr=0.1)).double()


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [FedExLoRA(), HetLoRA([1, 3, 2]), FlexLoRA([1, 3, 2]), FedAvg("global_expert.*")])
def test_backends_agree_and_nothing_of_the_base_leaves_a_client(algorithm, tmp_path):
    servers = []
    for backend in (TrainerBackend(), StackedBackend(2)):
        federation = run([phase("it", algorithm, rounds=2)], network(3), blobs(SIZES), tmp_path, backend=backend)
        servers.append(federation.run.states["it"].server)
        assert not [name for tree in federation.run.states["it"].clients.values() for name in tree if "base" in name]
    torch.testing.assert_close(*servers, rtol=1e-7, atol=1e-9)
    saved = "global_expert.4.weight"
    assert not torch.equal(servers[0][saved], network(3).state_dict()[saved]), "the classifier is averaged, too"


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.")  # peft warns, too
def test_a_language_model_s_tied_weight_is_refused_and_its_attention_is_not():
    from transformers import GPT2Config, GPT2LMHeadModel

    def model(target):
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        return AdapterMoE(GPT2LMHeadModel(config), LoRA([target], r=1), GlobalOnly())

    assert "transposed/base.transformer.h.0.attn.c_attn.weight" in FedExLoRA().server_init(model("c_attn"))
    with pytest.raises(MisconfigurationException, match=r"without tied weights.*base.transformer.wte.weight"):
        FedExLoRA().server_init(model("lm_head"))
