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

from fedmoe_pl import Evaluate, Federation, PersonalizedMoE, Phase, Select
from fedmoe_pl.algorithms import Ditto, FedAvg, Local, PFLMoE
from fedmoe_pl.backends import BestEpoch, StackedBackend
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import LinearGate

REFUSED = [
    ("clients_per_round", {"clients_per_round": 4}),
    ("clients_per_round", {"clients_per_round": 1.5}),
    ("rounds", {"rounds": 0}),
    ("rounds", {"rounds": 2**63}),
    ("select.monitor", {"select": Select("accuracy")}),
    ("select.monitor", {"select": Select("validation")}),  # without validation samples
    ("select.from_round", {"select": Select("global_test", from_round=3)}),
    ("select.patience", {"select": Select("global_test", patience=0)}),
    ("select.min_delta", {"select": Select("global_test", min_delta=-0.1)}),
    ("select", {"select": Select("global_test"), "evaluate": False}),
    ("select", {"select": Select("global_test"), "evaluate": Evaluate(every_n_rounds=0)}),
    ("evaluate.after", {"algorithm": Local(), "evaluate": Evaluate(after="both")}),
    ("evaluate.after", {"evaluate": Evaluate(after="training")}),
    ("evaluate.every_n_epochs", {"evaluate": Evaluate(every_n_epochs=1)}),  # not alone
    ("start", {"start": "Fed"}),
    ("start", {"start": {"gate": "Local"}, "gate": LinearGate(5)}),
    ("start", {"algorithm": PFLMoE()}),
    ("lr", {"optimizer": partial(torch.optim.SGD, lr=-1)}),
    ("trainer", {"trainer": {"devices": 2}}),
    ("trainer", {"trainer": {"max_epochs": 3}}),
    ("trainer.callbacks", {"trainer": {"callbacks": ["EarlyStoping"]}}),
    ("trainer.logger", {"trainer": {"logger": {"class_path": "CSVLogger"}}}),
    ("trainer.limit_val_batchs", {"trainer": {"limit_val_batchs": 1.0}}),
    ("trainer.limit_val_batches", {"callbacks": [BestEpoch()]}),
    ("validation_fraction", {"callbacks": [BestEpoch()], "trainer": {"limit_val_batches": 1.0}}),
]


@pytest.mark.parametrize(("argument", "arguments"), REFUSED)
def test_a_phase_that_cannot_run_is_refused_before_any_training(tmp_path, argument, arguments):
    with pytest.raises(InvalidArgumentError) as error:
        phase = Phase(**{"name": "FedAvg", "algorithm": FedAvg(), **arguments})
        federation(tmp_path, [Phase("Local", Local(), evaluate=False), phase]).fit(model(), data())
    assert error.value.argument == argument
    assert not list(tmp_path.rglob("version_*"))


def test_a_gate_that_an_algorithm_refuses_is_the_phase_s(tmp_path):
    phase = Phase("Ditto", Ditto(), gate=LinearGate(5))
    with pytest.raises(MisconfigurationException, match=r"^Phase 'Ditto': PersonalizedMoE: gate is a LinearGate, but"):
        federation(tmp_path, [phase]).fit(model(), data())


@pytest.mark.parametrize(
    ("argument", "made"),
    [
        ("phases", lambda: Federation(Phase("p", FedAvg()))),  # type: ignore
        ("each of phases", lambda: Federation(["FedAvg"])),
        ("algorithm", lambda: Federation([Phase("p", FedAvg)])),
        ("gate", lambda: Federation([Phase("p", FedAvg(), gate=LinearGate)])),
        ("model", lambda: Federation([Phase("p", FedAvg(), model=nn.Linear(5, 3))])),
        ("trainer", lambda: Federation(phases(), Trainer(accelerator="cpu"))),
        ("each of callbacks", lambda: Federation(phases(), callbacks=[Timer()])),
        ("datamodule", lambda: Federation(phases()).fit(model(), BoringDataModule())),
        ("datamodule", lambda: Federation(phases()).fit(model(), DataLoader([1]))),
        ("model", lambda: Federation(phases()).fit(WithDropout(), data())),
        ("model", lambda: Federation(phases()).fit(nn.Linear, data())),
    ],
)
def test_an_object_of_another_kind_is_refused(argument, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError) as error:
        made()
    assert error.value.argument == argument


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
        (
            MadeLater,
            "model is a MadeLater, but must be one that makes all layers in its constructor",
        ),
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
    with pytest.raises(MisconfigurationException, match="at least one phase, and every name once"):
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
