"""Models of transformers by name."""

import json
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.command_line import configured
from fedmoe_pl.models import pretrained

transformers = pytest.importorskip("transformers")


@pytest.fixture
def config():
    return transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )


def test_a_configuration_names_a_folder_with_weights(tmp_path, config):
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    parser = ArgumentParser()
    parser.add_argument("--base", type=nn.Module)
    chosen = {"class_path": "fedmoe_pl.models.pretrained", "init_args": {"path": str(tmp_path)}}
    loaded = parser.instantiate_classes(parser.parse_object({"base": chosen})).base
    assert_same_bits(loaded.state_dict(), model.state_dict())


def test_without_weights_they_are_drawn(tmp_path, config):
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = pretrained(str(tmp_path), arguments={"num_labels": 5})
    torch.manual_seed(0)
    assert loaded.classifier.out_features == 5
    assert_same_bits(
        pretrained(str(tmp_path), "BertForSequenceClassification", {"num_labels": 5}).state_dict(), loaded.state_dict()
    )


def test_an_unknown_class_is_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(MisconfigurationException, match="auto_class is 'AutoModelForTexts'"):
        pretrained(str(tmp_path), "AutoModelForTexts")


def test_arguments_that_do_not_fit_the_weights_are_refused(tmp_path, config):
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError) as error:
        pretrained(str(tmp_path), arguments={"num_labels": 5})
    assert error.value.argument == "arguments"


@pytest.mark.parametrize("path", ["nowhere", "nowhere/at/all"])
@pytest.mark.few(1)
def test_what_is_no_model_is_refused_with_its_key(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nowhere").mkdir()
    Path("nowhere/model.safetensors").touch()
    base = {"class_path": "fedmoe_pl.models.pretrained", "init_args": {"path": path}}
    run = {
        "model": {"class_path": "AdapterMoE", "init_args": {"base": base, "lora": {"target_modules": ["query"]}}},
        "data": {"class_path": "Digits"},
        "federation": {"phases": [{"name": "FedIT", "algorithm": {"class_path": "FedAvg"}}]},
    }
    Path("run.yaml").write_text(json.dumps(run))
    sentence = f"model.init_args.base.init_args.path is '{path}', but must be a folder or name of which transformers"
    with pytest.raises(MisconfigurationException, match=f"^{sentence}"):
        configured(["--config", "run.yaml"], False)
