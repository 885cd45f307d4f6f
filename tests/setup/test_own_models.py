"""A phase with a model of its own."""

import pytest
import torch
from helpers import Expert, assert_same_bits, mixture, tensors
from helpers.runs import Kill, assert_same, data, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.models import ConstantGate, GlobalOnly, LinearGate, LocalOnly


def wide(seed=4, hidden=9):
    module = mixture(ConstantGate(0.5), Expert(hidden=hidden), dtype=torch.float32)
    torch.manual_seed(seed)
    torch.nn.init.normal_(module.global_expert.classifier[1].weight)
    return module


def narrow():
    return mixture(LinearGate(5), dtype=torch.float32)


def phases(own=wide) -> list[Phase]:
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), 2, gate=GlobalOnly()),
        Phase("wide", FedAvg("global_expert.*"), 2, model=own(), gate=GlobalOnly(), start="initial"),
        Phase("wide tuned", FineTuning(), start="wide"),
        Phase("tuned", FineTuning(gate_fraction=0.25), start="FedAvg", gate=LocalOnly()),
        Phase("gate", PFLMoE(), start="tuned"),
    ]


@pytest.mark.slow
def test_methods_with_different_models_give_the_bits_of_federations_of_their_own(tmp_path):
    both = federation(tmp_path / "both", phases())
    both.fit(narrow(), data())
    of_narrow = federation(tmp_path / "narrow", [phases()[0], *phases()[3:]])
    of_narrow.fit(narrow(), data())
    of_wide = federation(
        tmp_path / "wide",
        [Phase("wide", FedAvg("global_expert.*"), 2, gate=GlobalOnly()), Phase("wide tuned", FineTuning())],
    )
    of_wide.fit(wide(), data())
    for alone, names in ((of_narrow, ("FedAvg", "tuned", "gate")), (of_wide, ("wide", "wide tuned"))):
        for name in names:
            assert_same(both.results[name], alone.results[name])
            for client in range(3):
                modules = [run.client_module(name, client) for run in (both, alone)]
                assert_same_bits(tensors(modules[0]), tensors(modules[1]))
    assert both.client_module("wide tuned", 0).local_expert.classifier[1].in_features == 9
    assert both.client_module("gate", 0).local_expert.classifier[1].in_features == 6


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_models_that_it_began_with(tmp_path):
    whole = federation(tmp_path / "whole", phases())
    results = whole.fit(narrow(), data())
    killed = federation(tmp_path / "killed", phases(), callbacks=[Kill("on_round_start", 2)])
    with pytest.raises(KeyboardInterrupt):
        killed.fit(narrow(), data())
    again = federation(tmp_path / "killed", phases(own=lambda: wide(seed=99)))
    assert_same(again.fit(narrow(), data(), ckpt_path="last"), results)

    newcomers = [
        federation(tmp_path / "whole", phases(own=lambda seed=seed: wide(seed))).personalize(narrow(), data(), rounds=1)
        for seed in (4, 99)
    ]
    assert_same(*newcomers)


def test_a_start_whose_tensors_do_not_fit_the_own_model_is_refused(tmp_path):
    other = Phase("other", FedAvg("global_expert.*"), model=wide(hidden=7), start="FedAvg")
    with pytest.raises(
        MisconfigurationException, match=r"Phase 'other': start is 'FedAvg', .* the model of 'FedAvg' differs"
    ):
        federation(tmp_path, [phases()[0], other]).fit(narrow(), data())


def test_a_start_whose_tensors_fit_is_what_the_own_model_begins_with(tmp_path):
    same = Phase(
        "same",
        FedAvg("global_expert.*"),
        model=wide(seed=1),
        start="wide",
        train=Train(max_epochs=0),
        gate=GlobalOnly(),
    )
    run = federation(tmp_path, [phases()[1], same])
    run.fit(narrow(), data())
    assert_same_bits(run.run.states["same"].server, run.run.states["wide"].server)


class Linear(LightningModule):
    """A module of someone else's, whose scheduler may follow what it validates."""

    def __init__(self, follows=False):
        super().__init__()
        self.net, self.follows = torch.nn.Sequential(torch.nn.Linear(5, 3)), follows

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, **({"lr_scheduler": scheduler} if self.follows else {})}


class OfPairs(Linear):
    def forward(self, x, y):
        return self.net(x)


def test_a_module_whose_forward_takes_more_than_samples_is_told_not_to_be_evaluated(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"not accept the samples .* with evaluate: false"):
        federation(tmp_path, [Phase("FedAvg", FedAvg())]).fit(OfPairs(), data())
    federation(tmp_path, [Phase("FedAvg", FedAvg(), evaluate=False)]).fit(OfPairs(), data())


class OfFour(Linear):
    def forward(self, x):
        return self.net(x[:, :4])


def test_a_module_that_fails_on_the_samples_is_refused_with_its_own_error(tmp_path):
    with pytest.raises(MisconfigurationException, match="mat1 and mat2 shapes cannot be multiplied"):
        federation(tmp_path, [Phase("FedAvg", FedAvg())]).fit(OfFour(), data())


@pytest.mark.parametrize("waits", ["scheduler", "callback"])
def test_what_waits_for_a_metric_that_nobody_validates_is_told_how_clients_validate(waits, tmp_path):
    callbacks = [EarlyStopping("val_loss")] if waits == "callback" else []

    def fit(limit, fraction):
        trainer = {"accelerator": "cpu", "limit_val_batches": limit, "callbacks": callbacks}
        run = federation(tmp_path, [Phase("FedAvg", FedAvg())], trainer=trainer)
        return run.fit(Linear(follows=not callbacks), data(validation_fraction=fraction))

    for limit, fraction in ((0, 0.0), (1.0, 0.0), (0, 0.3)):
        with pytest.raises(MisconfigurationException, match=r"val_loss.*limit_val_batches .*validation_fraction"):
            fit(limit, fraction)
    assert fit(1.0, 0.3)


@pytest.mark.slow
def test_a_pattern_without_the_name_of_a_compiled_layer_is_told_how_to_compile():
    module = Linear()
    module.net = torch.compile(module.net)
    with pytest.raises(
        MisconfigurationException, match=r"it has net._orig_mod.\*. .*_orig_mod .*layer.compile\(\) does"
    ):
        FedAvg("net.0.*").server_init(module)
    module = Linear()
    module.net.compile()
    assert FedAvg("net.0.*").server_init(module).keys() == {"net.0.weight", "net.0.bias"}
