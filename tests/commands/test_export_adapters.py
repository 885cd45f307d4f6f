"""Export of clients' adapters, and a federation that starts from one."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.runs import data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedExLoRA, FineTuning, PFLMoE
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.commands.export import _compared
from fedmoe_pl.evaluation import measure
from fedmoe_pl.models import (
    AdapterMoE,
    ConstantGate,
    EqualWeights,
    GlobalOnly,
    LayerwiseAdapterMoE,
    LinearGate,
    LocalOnly,
    LoRA,
)
from fedmoe_pl.models.adapter_files import adapter_of_mixture
from fedmoe_pl.models.adapter_files import merged as merge

peft = pytest.importorskip("peft")
GLOBAL = ["global_expert.*", "head.*"]
X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def mixture(kind=LayerwiseAdapterMoE, **arguments):
    lora = LoRA(**{"target_modules": ["0"], "r": 2, "lora_alpha": 4, "modules_to_save": ["2"], **arguments})
    return kind(base(), lora, optimizer=partial(torch.optim.SGD, lr=0.1))


def phases():
    personal = Train(max_epochs=2)
    return [
        Phase("FedIT", FedAvg(GLOBAL), rounds=2, gate=GlobalOnly()),
        Phase("own", FineTuning("local_expert.*", gate_fraction=0.25), gate=LocalOnly(), train=personal),
        Phase("equal", PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0)),
        Phase("gate", PFLMoE(), gate=LinearGate(5), train=personal),
    ]


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    run = federation(tmp_path_factory.mktemp("run"), phases())
    run.fit(mixture(), data())
    return run


def loaded(folder):
    return peft.PeftModel.from_pretrained(base(), str(folder)).eval()


def merged(folder):
    module = base()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    return module


@pytest.mark.slow
def test_the_experts_of_all_clients_are_folders_of_peft(fed, capsys):
    fed.export(mixture(), data(), method="gate", client="all", format="peft")
    folder = fed.run_dir / "exported" / "gate"
    for client in range(3):
        module = fed.client_module("gate", client)
        assert {path.name for path in (folder / f"client_00{client}").iterdir()} == {"global_expert", "local_expert"}
        for expert in ("global_expert", "local_expert"):
            own = loaded(folder / f"client_00{client}" / expert)
            torch.testing.assert_close(own(X), module.get_submodule(expert)(X))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[1].startswith(f"Client 0 of gate: {folder}/client_000/local_expert (outputs differ by at most ")


@pytest.mark.slow
def test_a_constant_mixture_is_an_adapter_too_or_the_weights_of_a_base(fed, tmp_path):
    fed.export(mixture(), data(), method="equal", client=1, format="peft", output=str(tmp_path / "adapters"))
    fed.export(mixture(), data(), method="equal", client=1, format="merged", output=str(tmp_path / "merged"))
    expected = fed.client_module("equal", 1)(X)
    torch.testing.assert_close(merged(tmp_path / "merged")(X), expected)
    torch.testing.assert_close(loaded(tmp_path / "adapters" / "mixture")(X), expected)
    assert not torch.allclose(base()(X), expected)


@pytest.mark.slow
def test_an_export_that_is_cut_short_leaves_no_folder_and_a_repeated_one_leaves_other_files(fed, tmp_path, monkeypatch):
    folder = tmp_path / "adapters" / "global_expert"
    choices = {"method": "gate", "format": "peft", "output": str(folder.parent)}

    def full(model, path, **kwargs):
        Path(path, "adapter_config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(MisconfigurationException, match=r"cannot be written: No space"):
        patch.setattr(peft.PeftModel, "save_pretrained", full)
        fed.export(mixture(), data(), **choices)
    assert [*folder.parent.iterdir()] == []
    fed.export(mixture(), data(), **choices)
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "notes.txt").write_text("mine")
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    fed.export(mixture(), data(), **choices)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**written, "notes.txt": b"mine"}
    assert {path.name for path in folder.parent.iterdir()} == {"global_expert", "local_expert"}


def test_what_has_no_adapters_or_no_merged_weights_is_refused(fed, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"method is 'gate', but must be one whose gate uses one expert, or"):
        fed.export(mixture(), data(), method="gate", format="merged")
    other = federation(tmp_path)
    other.fit(model(), data())
    for format in ("peft", "merged"):
        with pytest.raises(InvalidArgumentError, match=r"whose model is an AdapterMoE.* is a PersonalizedMoE"):
            other.export(model(), data(), method="PFL-MF", format=format)


def compared(module, model, x):
    return _compared(module.eval(), module, model, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merged_weights_in_half_precision_may_differ_by_their_rounding_and_by_no_more(dtype):
    torch.manual_seed(0)
    sizes = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)
    module = LayerwiseAdapterMoE(nn.Sequential(*sizes).to(dtype), LoRA(["0", "2"], r=2), ConstantGate(0.25))
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    x, weights = torch.randn(64, 16).to(dtype), merge(module.plain_base(), adapter_of_mixture(module))
    assert float(re.search(r"at most (\S+) from", compared(module, weights, x))[1]) > 1e-3
    with pytest.raises(InvalidArgumentError, match="one that peft computes in the same way"):
        compared(module, module.plain_base(), x)


def test_logits_of_the_vocabulary_are_compared_of_a_few_samples_at_once(monkeypatch):
    torch.manual_seed(0)
    base, sizes = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), []
    module = LayerwiseAdapterMoE(base, LoRA(["1"], r=2), ConstantGate(0.25), task="causal_lm")
    model, x = merge(module.plain_base(), adapter_of_mixture(module)), torch.randint(9, (7, 6))
    for part in (module.base, model):
        part.register_forward_hook(lambda part, inputs, output: sizes.append(output.numel()))
    monkeypatch.setattr(measure, "_MOST_VALUES", 2 * 6 * 9)
    compared(module, model, x)
    assert max(sizes) == 2 * 6 * 9 and sum(sizes) >= 2 * 7 * 6 * 9
    nn.init.zeros_(model[1].bias)
    with pytest.raises(InvalidArgumentError, match="one that peft computes in the same way"):
        compared(module, model, x)


def test_a_base_that_the_server_changed_is_merged_only(tmp_path):
    fed = federation(tmp_path, [Phase("FedEx", FedExLoRA(GLOBAL), rounds=2, gate=GlobalOnly())])
    fed.fit(mixture(), data())
    with pytest.raises(InvalidArgumentError, match=r"leaves the base as it is, because it has changed 0\.weight"):
        fed.export(mixture(), data(), method="FedEx", format="peft")
    fed.export(mixture(), data(), method="FedEx", format="merged", output=str(tmp_path / "merged"))
    torch.testing.assert_close(merged(tmp_path / "merged")(X), fed.client_module("FedEx", 0)(X))


@pytest.mark.parametrize(("kind", "shared"), [(AdapterMoE, "global_expert.*"), (LayerwiseAdapterMoE, GLOBAL)])
@pytest.mark.few(1)
def test_a_phase_starts_from_a_folder_of_peft(kind, shared, tmp_path):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"], modules_to_save=["2"])
    given = peft.get_peft_model(base(), config)
    for parameter in given.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    given.save_pretrained(str(tmp_path / "given"))
    start = Phase("given", FedAvg(shared), gate=GlobalOnly(), ckpt_path=str(tmp_path / "given"))
    fed = federation(tmp_path, [start, Phase("own", FineTuning(), gate=LocalOnly(), train=Train(max_epochs=0))])
    fed.fit(mixture(kind), data())
    for method in ("given", "own"):
        torch.testing.assert_close(fed.client_module(method, 2)(X), given.eval()(X))


def test_a_folder_that_does_not_fit_the_phase_is_refused_before_any_training(fed, tmp_path):
    fed.export(mixture(), data(), method="equal", client=0, format="peft", output=str(tmp_path))
    folder = str(tmp_path / "global_expert")

    def refused(message, module, algorithm):
        other = federation(tmp_path, [Phase("given", algorithm, gate=GlobalOnly(), ckpt_path=folder)])
        with pytest.raises(MisconfigurationException, match=message):
            other.fit(module, data())

    refused(r"^Phase 'given': LoRA: r is 3, but must be 2, as in '", mixture(r=3), FedAvg(GLOBAL))
    refused(r"^Phase 'given': ckpt_path is '.*its FedAvg does not share global_expert", mixture(), FedAvg("*lora_B*"))
    refused(r"^Phase 'given': ckpt_path is '.*the model is no AdapterMoE", model(), FedAvg("global_expert.*"))
