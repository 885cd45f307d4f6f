"""A mixture in Lightning's tuner, and with several loaders."""

from functools import partial

import pytest
import torch
import yaml
from helpers import blobs, mixture, run
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, LinearGate, SmallMLP

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, of workers
sgd = partial(torch.optim.SGD, lr=0.1)


def plain(path) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(max_epochs=9, accelerator="cpu", default_root_dir=path, **quiet)


def test_the_tuner_finds_and_sets_the_rate_of_all_but_a_gate_with_its_own(tmp_path):
    module = mixture(LinearGate(5), optimizer=sgd)
    module.gate_lr = 0.7
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(0)
    suggested = Tuner(plain(tmp_path)).lr_find(module, blobs(), num_training=30, early_stop_threshold=None).suggestion()
    assert [group["lr"] for group in module.configure_optimizers().param_groups] == [suggested, 0.7]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_clients_train_with_the_rate_that_is_set_unless_their_phase_has_an_optimizer(tmp_path):
    trained = []
    for lr, optimizer, own in ((None, partial(torch.optim.SGD, lr=0.4), None), (0.4, sgd, None), (9.0, sgd, 0.4)):
        module = mixture(optimizer=optimizer)
        module.lr = lr
        train = Train(optimizer=own and partial(torch.optim.SGD, lr=own))
        federation = run([Phase("Local", Local(), train=train)], module, blobs(), tmp_path)
        trained.append(federation.run.states["Local"].clients[0])
    for other in trained[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in trained[0].items())


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_a_finder_among_the_callbacks_of_clients_is_refused_before_training(finder, tmp_path):
    phase = Phase("Local", Local(), train=Train(callbacks=[finder()]))
    with pytest.raises(InvalidArgumentError, match=f"callbacks is '{finder.__name__}', but must be left out"):
        run([phase], mixture(), blobs(), tmp_path)


def test_a_mixture_is_tested_on_several_loaders(tmp_path):
    data, trainer = blobs(), plain(tmp_path)
    loaders = [data.train_dataloader(), data.test_dataloader()]
    for call in (trainer.validate, trainer.test):
        both = call(mixture(), loaders, verbose=False)
        alone = call(mixture(), loaders[1], verbose=False)[0]
        assert {name.partition("/dataloader_idx")[0]: value for name, value in both[1].items()} == alone
    assert [len(batches) for batches in trainer.predict(mixture(), loaders)] == [8, 8]


def test_a_plain_trainer_logs_what_a_mixture_was_made_with(tmp_path):
    """So that TensorBoard compares runs; what the constructor got is known, and the rate is the one that is used."""
    module = PersonalizedMoE(SmallMLP(num_classes=7), gate=ConstantGate(0.25), mixing="probabilities", optimizer=sgd)
    module.lr = 0.3
    trainer = plain(tmp_path)
    trainer.loggers = [TensorBoardLogger(tmp_path)]
    x, y = torch.randn(4, 64), torch.tensor([0, 1, 2, 3])
    trainer.fit(module, DataLoader(TensorDataset(x, y), 4))
    logged = yaml.safe_load((tmp_path / "lightning_logs/version_0/hparams.yaml").read_text())
    assert logged["global_expert"]["init_args"]["num_classes"] == 7 and logged["mixing"] == "probabilities"
    assert logged["gate"]["init_args"] == {"weight": 0.25}
    assert (logged["optimizer"], logged["lr"], logged["momentum"]) == ("SGD", 0.3, 0)
    assert not module.hparams, "checkpoints describe the arguments by themselves"


def test_torch_scripts_an_expert():
    expert, x = SmallMLP(), torch.randn(2, 64)
    assert torch.equal(torch.jit.script(expert)(x), expert(x))
