"""A lean Trainer gives the bits of an ordinary one."""

import copy

import pytest
import torch
from helpers import EveryBatch, Expert, assert_same_bits, blobs, mixture, momentum_sgd
from helpers.backends import FEW, TwoGroups, local_training, train
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from fedmoe_pl.algorithms import FedAvg, FineTuning
from fedmoe_pl.backends import AutoBackend, TrainerBackend
from fedmoe_pl.backends.hooks import needs_every_batch
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import LinearGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase

LEAN = {
    "plain": {},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "half precision": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_lean_trainer_gives_the_bits_of_an_ordinary_one(name, dropout):
    made = mixture(LinearGate(5), expert=Expert(dropout=dropout), dtype=torch.float32)
    module = TwoGroups(made.global_expert, made.local_expert, made.gate)
    data = blobs(FEW, dtype=torch.float32)
    lean = local_training(module, FedAvg(), data, 3, **LEAN[name])
    ordinary = local_training(module, FedAvg(), data, 3, **LEAN[name], callbacks=[EveryBatch()])
    assert needs_every_batch(lean) is None
    assert needs_every_batch(ordinary)
    assert_same_bits(train(TrainerBackend(), lean)[0].sent, train(TrainerBackend(), ordinary)[0].sent)


def test_a_callback_ends_the_training_and_reads_the_parts_of_the_client_s_mixture():
    class Reading(Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append((trainer.current_epoch, pl_module.gate, pl_module.module.gate, hasattr(pl_module, "of_nobody")))

    seen = []
    stopping = EarlyStopping("validation_loss", patience=1, min_delta=0.02)
    arguments = {"limit_val_batches": 1.0, "max_epochs": 30, "callbacks": [stopping, Reading()]}
    data = blobs((40, 40), validation_fraction=0.3)
    train(TrainerBackend(), local_training(mixture(LinearGate(5)), FedAvg(), data, **arguments))
    for epochs, gate, of_module, has_any in seen:
        assert epochs < 29 and isinstance(gate, LinearGate) and gate is of_module and not has_any


def test_hooks_of_a_users_module_are_called_or_refused(tmp_path):
    class Hooked(PersonalizedMoE):
        called = 0

        def on_train_batch_end(self, *arguments):
            Hooked.called += 1

    made = mixture()
    module = Hooked(made.global_expert, copy.deepcopy(made.local_expert), None, momentum_sgd).double()
    training = local_training(module, FedAvg(), blobs((4, 4), batch_size=4), max_epochs=3)
    assert "its own training_step or hooks" in str(needs_every_batch(training))
    train(AutoBackend(), training)
    assert Hooked.called == 2 * 3
    federation = Federation([Phase("own loss", FineTuning(), start="initial")], default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match="on_train_batch_end"):
        federation.fit(module, blobs((4, 4)))
