"""Losses and metrics in a configuration."""

import pytest
import torch
import yaml
from helpers.configurations import REPOSITORY
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from fedmoe_pl.cli.cli import FederationCLI
from fedmoe_pl.federation import Federation

LOSSES = {"my_losses.half": "half", "HuberLoss": nn.HuberLoss}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_a_class_or_a_function_and_metrics_have_names(loss, tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def half(outputs, targets):\n    return (outputs - targets).abs().mean()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load((REPOSITORY / "configs/diabetes.yaml").read_text())
    config["model"]["init_args"]["loss"] = loss
    f1 = {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass", "num_classes": 3}}
    config["federation"] |= {"metrics": {"rmse": "MeanSquaredError", "f1": f1}}
    seen = []
    monkeypatch.setattr(Federation, "fit", lambda self, model, datamodule, **kwargs: seen.append((self, model)))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    FederationCLI(["fit", "--config", str(path)])
    ((federation, model),) = seen
    assert isinstance(federation.metrics["f1"], MulticlassF1Score) and {*federation.metrics} == {"rmse", "f1"}
    criterion = model.criterion
    assert criterion.function.__name__ == "half" if loss.endswith("half") else isinstance(criterion, LOSSES[loss])
    assert model.loss_of(torch.ones(2, 1), torch.zeros(2)).dim() == 0
