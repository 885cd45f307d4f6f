"""What cannot be stacked is refused with a reason, before any training."""

import pytest
import torch
from helpers import Expert, OneWeight, blobs, mixture
from helpers.backends import FEW, local_training
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend, StackedBackend
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.federation import Federation
from fedmoe_pl.phases.phase import Phase

REFUSED = {
    "dropout": (lambda: (mixture(expert=Expert(dropout=0.3)), {}), "random"),
    "callbacks": (lambda: (mixture(), {"callbacks": [EarlyStopping("validation_loss")]}), "callbacks"),
    "best epoch": (lambda: (mixture(), {"callbacks": [BestEpoch()]}), "callbacks"),
    "accumulation": (lambda: (mixture(), {"accumulate_grad_batches": 2}), "accumulate_grad_batches is 2"),
    "precision": (lambda: (mixture(), {"precision": "16-mixed"}), "precision is 16-mixed"),
    "optimizer": (
        lambda: (mixture(dtype=torch.float32, optimizer=torch.optim.Adafactor), {}),
        "Adafactor may not step every parameter element by element",
    ),
    "own training_step": (lambda: (OneWeight(), {}), "OneWeight has its own training_step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_is_refused_with_a_reason_and_auto_takes_the_other_way(name):
    make, reason = REFUSED[name]
    module, trainer = make()
    training = local_training(module, FedAvg(), blobs(FEW, dtype=next(module.parameters()).dtype), **trainer)
    with pytest.raises(MisconfigurationException, match=reason):
        StackedBackend().plan(training)
    plan = AutoBackend().plan(training)
    assert isinstance(plan, TrainerPlan)
    assert reason in plan.description


def test_an_error_of_the_user_s_hooks_is_reported_as_one_of_the_trial():
    class Broken(FedAvg):
        def client_init(self, client, sent):
            return {"share": 1 / len(client.state)}

    plan = AutoBackend().plan(local_training(mixture(), Broken(), blobs(FEW)))
    assert isinstance(plan, TrainerPlan)
    assert "a trial step of two stacked clients failed with ZeroDivisionError: division by zero" in plan.description
    assert "PyTorch" not in plan.description


def test_a_federation_refuses_an_explicit_choice_before_training_and_names_the_phase(tmp_path):
    phases = [Phase("first", FedAvg(), evaluate=False), Phase("second", FedAvg(), evaluate=False)]
    federation = Federation(phases, backend=StackedBackend(), logger=False, default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"'first'.*StackedBackend.*random"):
        federation.fit(mixture(expert=Expert(dropout=0.3)), blobs(FEW))
    assert not list(tmp_path.iterdir())
