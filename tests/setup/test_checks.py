"""What is refused before any training."""

from functools import partial

import pytest
import torch
from helpers.runs import WithDropout, data, federation, model, phases
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn
from torch.utils.data import DataLoader

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select
from fedmoe_pl.algorithms import Ditto, FedAvg, Local, PFLMoE
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import LinearGate

REFUSED = {
    "clients_per_round is 4, but must be at most the number of clients, 3": {"clients_per_round": 4},
    "clients_per_round is 1.5": {"clients_per_round": 1.5},
    "rounds is 0, but must be an integer from 1 to 1,000,000,000": {"rounds": 0},
    "rounds is 9223372036854775808, but must be an integer from 1 to 1,000,000,000": {"rounds": 2**63},
    "rounds is 1000000000000000000000000000000, but must be an integer from": {"rounds": 10**30},
    "max_epochs is 9223372036854775808, but must be an integer from 0 to 1,000,000,000": {"max_epochs": 2**63},
    "batch_size is 9223372036854775808, but must be an integer from 1 to 1,000,000,000": {"batch_size": 2**63},
    "select.monitor is 'accuracy', but must be one of local_test": {"select": Select("accuracy")},
    "select.monitor is 'validation', but validation_fraction is 0": {"select": Select("validation")},
    "select.from_round is 3, but must be an integer from 1 to 1": {"select": Select("global_test", from_round=3)},
    "start is 'Fed', but must be 'initial' or an earlier phase": {"start": "Fed"},
    "PFLMoE starts from an earlier phase, but none": {"algorithm": PFLMoE()},
    "shared is 'global_exprt.*', which matches no parameter": {"algorithm": FedAvg("global_exprt.*")},
    "Invalid learning rate: -1": {"optimizer": partial(torch.optim.SGD, lr=-1)},
    "^Phase 'FedAvg': trainer.callbacks is 'EarlyStoping', but": {"trainer": {"callbacks": ["EarlyStoping"]}},
    "^Phase 'FedAvg': trainer.logger is {'class_path': 'CSVLogger'}, but": {
        "trainer": {"logger": {"class_path": "CSVLogger"}}
    },
    "ckpt_path is 'none.ckpt', but there is no such file": {"ckpt_path": "none.ckpt"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_phase_that_cannot_run_is_refused_before_any_training(tmp_path, sentence):
    with pytest.raises(MisconfigurationException, match=sentence.replace("*", r"\*")):
        phase = Phase(**{"name": "FedAvg", "algorithm": FedAvg(), **REFUSED[sentence]})
        federation(tmp_path, [Phase("Local", Local(), evaluate=False), phase]).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


def test_a_gate_that_an_algorithm_refuses_is_the_phase_s(tmp_path):
    phase = Phase("Ditto", Ditto(), gate=LinearGate(5))
    with pytest.raises(MisconfigurationException, match=r"^Phase 'Ditto': PersonalizedMoE: gate is a LinearGate, but"):
        federation(tmp_path, [phase]).fit(model(), data())


@pytest.mark.parametrize(
    ("sentence", "made"),
    [
        ("Federation: phases is a Phase, but must be a", lambda: Federation(Phase("p", FedAvg()))),  # type: ignore
        ("Federation: each of phases is 'FedAvg', but must be a Phase.", lambda: Federation(["FedAvg"])),
        ("Phase 'p': algorithm is the class FedAvg, but must be a", lambda: Federation([Phase("p", FedAvg)])),
        ("Phase 'p': algorithm is 'FedAvg', but must be a", lambda: Federation([Phase("p", "FedAvg")])),
        ("Phase 'p': gate is the class LinearGate", lambda: Federation([Phase("p", FedAvg(), gate=LinearGate)])),
        ("Phase 'p': model is a Linear, but", lambda: Federation([Phase("p", FedAvg(), model=nn.Linear(5, 3))])),
        ("trainer is a Trainer, but must be a dict", lambda: Federation(phases(), Trainer(accelerator="cpu"))),
        (
            "each of callbacks is a Timer, but must be a FederationCallback; a Callback of Lightning belongs in",
            lambda: Federation(phases(), callbacks=[Timer()]),
        ),
        (
            "datamodule is a BoringDataModule, but must be a FederatedDataModule, such as FromDataModule(BoringData",
            lambda: Federation(phases()).fit(model(), BoringDataModule()),
        ),
        (
            "datamodule is a DataLoader, but must be a FederatedDataModule, such as FromDatasets",
            lambda: Federation(phases()).fit(model(), DataLoader([1])),
        ),
        ("model is a WithDropout, but must be a Lightn", lambda: Federation(phases()).fit(WithDropout(), data())),
        ("model is the class Linear", lambda: Federation(phases()).fit(nn.Linear, data())),
    ],
)
def test_an_object_of_another_kind_is_refused(sentence, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisconfigurationException) as error:
        made()
    assert sentence in str(error.value)


class Several(WithDropout, LightningModule):
    def forward(self, x):
        return super().forward(x), x


class MadeLater(WithDropout, LightningModule):
    def configure_model(self):
        self.last = getattr(self, "last", nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (Several, r"\(its forward must return the scores as one tensor, and not a tuple\)\.$"),
        (MadeLater, "^model is a MadeLater whose configure_model makes 'last.bias', but must make all layers in its"),
    ],
)
def test_an_own_module_that_clients_cannot_train_is_refused(own, sentence, tmp_path):
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", FedAvg())]).fit(own(), data())


def test_a_gate_that_does_not_fit_the_data_is_named_with_its_phase_and_layer(tmp_path):
    sentence = r"^Phase 'p': gate is a LinearGate that does not accept .* samples of shape \(5,\) \(gate\.linear: "
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", FedAvg(), gate=LinearGate(4))]).fit(model(), data())


def test_a_model_that_does_not_fit_the_data_is_refused(tmp_path):
    class TooFew(WithDropout):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(4, 2)

    class Wide(WithDropout):
        def __init__(self):
            super().__init__()
            self.extractor = nn.Linear(50, 4)

    wide = r"^model is a .* samples of shape \(5,\) \(local_expert\.extractor: .*1x5 and 50x4\)"
    for expert, sentence in ((TooFew(), "have 3 classes"), (Wide(), wide)):
        with pytest.raises(MisconfigurationException, match=sentence):
            federation(tmp_path).fit(PersonalizedMoE(expert), data())
    with pytest.raises(MisconfigurationException, match="at least one phase and every name once"):
        federation(tmp_path, [phases()[0], phases()[0]])


def test_a_backend_that_cannot_train_a_phase_names_it(tmp_path):
    trainer = {"accelerator": "cpu", "accumulate_grad_batches": 2}
    run = federation(tmp_path, phases()[1:2], trainer=trainer, backend=StackedBackend())
    with pytest.raises(
        MisconfigurationException,
        match=r"Phase 'FedAvg': StackedBackend cannot stack the clients: trainer\.accumulate_grad_batches is 2",
    ):
        run.fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


def test_a_tensor_is_shared_under_all_of_its_names_or_none(tmp_path):
    expert = WithDropout()
    phase = Phase("FedAvg", FedAvg("global_expert.*"))
    with pytest.raises(MisconfigurationException) as error:
        federation(tmp_path, [phase]).fit(PersonalizedMoE(expert, expert), data())
    assert str(error.value) == (
        "Phase 'FedAvg': FedAvg shares 'global_expert.extractor.0.weight', but not 'local_expert.extractor.0.weight', "
        "another name of the same tensor of the PersonalizedMoE; share all of its names or none."
    )
