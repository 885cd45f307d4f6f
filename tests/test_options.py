"""No argument of a public class is ignored without a word.

Every argument of every public class that a user constructs is in one of three tables. ALWAYS: it has an effect whatever
the others are. REFUSED: in some combination it has none or a wrong one, and that is refused. ACCEPTED: in some
combination it has none and is accepted all the same, for the reason given. A new argument fails the test until it is in
one of them. REFUSED is below, the others are in tests/helpers/options.py.
"""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Embedding, Expert, OneWeight, blobs, mixture, small_expert, sparse_mixture
from helpers.clusters import clustered, only
from helpers.data import Own, set_up
from helpers.options import ACCEPTED, ALWAYS, INTERNAL
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import TensorDataset

import fedmoe_pl
from fedmoe_pl import Algorithm, Federation, Phase, aggregation, algorithms, backends, callbacks, data, models
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, GaussianNoise, UnderAttack
from fedmoe_pl.algorithms import (
    APFL,
    FML,
    Ditto,
    EpsilonGreedyIFCA,
    FedAPEN,
    FedAvg,
    FedBN,
    FedJETs,
    FedKD,
    FedMix,
    FedMoEDA,
    FedRep,
    FineTunedCluster,
    KNNPer,
    LabelPrior,
    Local,
    PerFedAvg,
    PersonalizedExpert,
    PFedMe,
    PFLMoE,
)
from fedmoe_pl.callbacks import ClientCheckpoint, CostToTarget, GateMonitor, ProgressBar, RepresentationMonitor
from fedmoe_pl.data import (
    Arrays,
    Dirichlet,
    FromDataModule,
    FromDatasets,
    MapStyleData,
    NpzFile,
    Pathological,
    RandomCrop,
)
from fedmoe_pl.logs.loggers import Boards
from fedmoe_pl.models import ClusteredMoE, EqualWeights, LinearGate, SparseMoE
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.rounds.checks import check_phase
from fedmoe_pl.rounds.trainer_checks import check_trained

ADAM = partial(torch.optim.Adam, lr=0.1)
POINTS = Arrays(torch.zeros(4, 5), torch.arange(4), torch.zeros(4, 5), torch.arange(4))
NATURAL = replace(POINTS, client_train=np.arange(4), client_test=np.arange(4))


def of_module(module, **arguments):
    """Makes the phase's module."""
    phase_module(module, Phase("p", FedAvg(), **arguments))


def checked(algorithm, module=None, **arguments):
    """Checks a phase on data without held-out samples."""
    phase = Phase("p", algorithm, **arguments)
    check_phase(phase, phase_module(module or mixture(LinearGate(5)), phase), blobs(), seed=0, max_epochs=1)


def untrained(max_epochs=0, algorithm=FedAvg, gate=None, **arguments):
    """Checks a phase of no epochs, or one that has nothing to train."""
    phase = Phase("p", algorithm(), gate=gate, **arguments)
    check_trained(phase, phase_module(mixture(LinearGate(5)), phase), max_epochs)


def started(callback, datamodule=None):
    """The start of a run with a callback and a phase that is not evaluated."""
    phases = [Phase("p", FedAvg(), evaluate=False)]
    run = {"phases": phases, "models": {"": mixture()}, "metrics": {}, "datamodule": datamodule or blobs()}
    callback.on_fit_start(SimpleNamespace(**run, boards=Boards()))


def outside_of_main_thread():
    """Calls fit there, and raises what it raises."""
    federation = Federation([Phase("p", Local())], client_timeout=1.0)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(federation.fit, OneWeight(), POINTS).result()


def npz(tmp_path, **arguments):
    """Reads a file of texts."""
    ids, labels = np.ones((4, 3), dtype=np.int64), np.arange(4)
    np.savez(tmp_path / "texts.npz", x_train=ids, y_train=labels, x_test=ids, y_test=labels)
    set_up(NpzFile(str(tmp_path / "texts.npz"), num_clients=2, **arguments))


def of_numbers(**arguments):
    """Deals four samples that are read one by one."""
    set_up(FromDatasets([(0.0, 0)] * 4, [(0.0, 0)] * 4, num_clients=2, **arguments))


def of_loaders(**arguments):
    """The same of a LightningDataModule."""
    samples = TensorDataset(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    set_up(FromDataModule(LightningDataModule.from_datasets(samples, samples), num_clients=2, **arguments))


REFUSED = {
    "DifferentialPrivacy": {
        "max_norm_lr": (lambda: DifferentialPrivacy(1.0, 1.0, 1e-5, max_norm_lr=0.1), "left out without quantile"),
        "bit_noise": (lambda: DifferentialPrivacy(1.0, 1.0, 1e-5, bit_noise=1.0), "left out without quantile"),
    },
    "UnderAttack": {
        "attackers": (lambda: checked(FedAvg(), aggregation=UnderAttack(GaussianNoise(), [3])), "which 3 is not"),
    },
    "Algorithm": {"weighting": (lambda: Algorithm(weighting="sampels"), "must be one of samples, uniform")},
    "APFL": {"weighting": (lambda: APFL(weighting="sampels"), "must be one of samples, uniform")},
    "Ditto": {"weighting": (lambda: Ditto(weighting="sampels"), "must be one of samples, uniform")},
    "FedBN": {
        "shared": (lambda: checked(FedBN("global_expert.*")), "must match batch normalization"),
        "weighting": (lambda: FedBN(weighting="sampels"), "must be one of samples, uniform"),
    },
    "FedRep": {"weighting": (lambda: FedRep(weighting="sampels"), "must be one of samples, uniform")},
    "PerFedAvg": {"weighting": (lambda: PerFedAvg(weighting="sampels"), "must be one of samples, uniform")},
    "PFedMe": {"weighting": (lambda: PFedMe(weighting="sampels"), "must be one of samples, uniform")},
    "FML": {"weighting": (lambda: FML(weighting="sampels"), "must be one of samples, uniform")},
    "FedAPEN": {
        "weighting": (lambda: FedAPEN(weighting="sampels"), "must be one of samples, uniform"),
        "weight_epochs": (lambda: FedAPEN(weight_epochs=0), "must be at least 1"),
    },
    "FedAvg": {"weighting": (lambda: FedAvg(weighting="sampels"), "must be one of samples, uniform")},
    "KNNPer": {"kernel": (lambda: KNNPer(kernel="cosine"), "must be squared or euclidean")},
    "LabelPrior": {"tau": (lambda: checked(LabelPrior("auto")), "validation_fraction is 0")},
    "PersonalizedExpert": {
        "trainable": (lambda: checked(PersonalizedExpert("gate.*")), "matches no parameter of the local expert"),
        "keep_better": (lambda: checked(PersonalizedExpert(keep_better=True)), "validation_fraction is 0"),
    },
    "PFLMoE": {"trainable": (lambda: PFLMoE(trainable="local_expert.*"), "left out unless interleaved")},
    "EpsilonGreedyIFCA": {
        "epsilon": (lambda: EpsilonGreedyIFCA(0.1, "inverse"), "left out with the schedule 'inverse'"),
        "schedule": (lambda: EpsilonGreedyIFCA(schedule="cosine"), "must be one of constant"),
        "decay_rounds": (lambda: EpsilonGreedyIFCA(decay_rounds=9), "left out with the schedule 'constant'"),
        "weighting": (lambda: EpsilonGreedyIFCA(weighting="size"), "must be one of samples, uniform"),
        "patience": (
            lambda: checked(EpsilonGreedyIFCA(patience=3), clustered(gate=only(0))),
            "validates, but validation_fraction is 0",
        ),
        "check_every_n_rounds": (lambda: EpsilonGreedyIFCA(check_every_n_rounds=3), "left out without patience"),
        "good_init": (lambda: EpsilonGreedyIFCA(good_init=0.4).check(clustered(gate=only(0))), "at most 1 / 3"),
    },
    "FineTunedCluster": {
        "trainable": (lambda: FineTunedCluster("local_expert.*").check(clustered(gate=only(0))), "no parameter of the"),
    },
    "FedKD": {"weighting": (lambda: FedKD(weighting="sampels"), "must be one of samples, uniform")},
    "FedJETs": {"experts_per_client": (lambda: FedJETs(3).check(sparse_mixture()), "at most the number of experts, 2")},
    "FedMix": {"experts_per_client": (lambda: FedMix(3).check(sparse_mixture()), "at most the number of experts, 2")},
    "FedMoEDA": {
        "similarity": (lambda: FedMoEDA(similarity="features"), "must be one of proxies, updates"),
        "temperature": (lambda: FedMoEDA(0, temperature=2.0), "temperature is 2.0, but must be left out with top_p 0"),
        "sync_matrix": (lambda: FedMoEDA(0, sync_matrix=True), "sync_matrix is True, but must be left out"),
        "exclude_own_client": (lambda: FedMoEDA(0, exclude_own_client=True), "exclude_own_client is True, but must be"),
    },
    "Phase": {
        "clients_per_round": (
            lambda: checked(FineTunedCluster(), clustered(gate=only(0)), clients_per_round=2),
            "must be left out, because FineTunedCluster needs all clients",
        ),
        "gate": (lambda: of_module(OneWeight(), gate=EqualWeights()), "only a MixtureOfExperts lets"),
        "mixing": (lambda: of_module(OneWeight(), mixing="logits"), "only a MixtureOfExperts lets"),
        "start": (lambda: Federation([Phase("p", FedAvg(), start="q")]), "must be 'initial' or an earlier phase"),
        "batch_size": (lambda: untrained(batch_size=3), "must be left out, because max_epochs is 0"),
        "optimizer": (lambda: of_module(OneWeight(), optimizer=ADAM), "only a MixtureOfExperts lets"),
        "optimizer of nothing": (
            lambda: untrained(2, PFLMoE, EqualWeights(), optimizer=ADAM),
            "must be left out, because its model has no parameter that it trains",
        ),
        "lr_scheduler": (lambda: of_module(OneWeight(), lr_scheduler=torch.optim.lr_scheduler.StepLR), "only a Mix"),
        "keep_optimizer": (lambda: Phase("p", FedAvg(), keep_optimizer=True), "must be False for rounds 1"),
        "server_optimizer": (lambda: Phase("p", Local(), server_optimizer=ADAM), "because Local aggregates nothing"),
        "server_optimizer of FedKD": (
            lambda: Phase("p", FedKD(), server_optimizer=ADAM),
            "because FedKD sends clients changes of the parameters",
        ),
        "aggregation": (lambda: checked(Local(), aggregation=CoordinateMedian()), "because Local aggregates nothing"),
        "evaluate_after": (lambda: Phase("p", Local(), evaluate_after="both"), "because Local aggregates nothing"),
        "evaluate_after nothing": (
            lambda: Phase("p", FedAvg(), evaluate_after="both", evaluate=False),
            "needs evaluate to be true",
        ),
        "callbacks": (lambda: untrained(callbacks=[Callback()]), "must be left out, because max_epochs is 0"),
        "trainer": (lambda: untrained(trainer={"limit_val_batches": 1.0}), "must be left out, because max_epochs is 0"),
        "monitor": (lambda: Phase("p", FedAvg(), monitor="validation", evaluate=False), "needs evaluate to be true"),
        "monitor_from_round": (lambda: Phase("p", FedAvg(), 3, monitor_from_round=2), "2, which needs a monitor"),
        "patience": (lambda: Phase("p", FedAvg(), patience=2), "patience is 2, which needs a monitor"),
        "min_delta": (lambda: Phase("p", FedAvg(), monitor="validation", min_delta=0.1), "which needs a patience"),
        "evaluate_every_n_rounds": (
            lambda: Phase("p", FedAvg(), evaluate=False, evaluate_every_n_rounds=2),
            "needs evaluate to be true",
        ),
        "evaluate_every_n_epochs": (
            lambda: Phase("p", FedAvg(), evaluate_every_n_epochs=2),
            "must be left out, except in evaluated phases of one round in which clients train alone",
        ),
    },
    "Federation": {
        "evaluate_every_n_rounds": (
            lambda: Federation([Phase("p", FedAvg(), monitor="global_test")], evaluate_every_n_rounds=0),
            "must be at least 1",
        ),
        "enable_progress_bar": (
            lambda: Federation([Phase("p", Local())], callbacks=[ProgressBar()], enable_progress_bar=False),
            "must be True, because callbacks has a ProgressBar",
        ),
        "evaluation_clients": (
            lambda: Federation([Phase("p", Local())], evaluation_clients=0),
            "must be an integer from 1 to 1,000,000,000",
        ),
        "min_clients": (
            lambda: Federation([Phase("p", Local())], min_clients=2, on_client_failure="raise"),
            "must be left out with on_client_failure 'raise'",
        ),
        "client_timeout": (outside_of_main_thread, "must be left out where fit runs outside of the main thread"),
        "store": (lambda: Federation([Phase("p", Local())], store="disk", enable_checkpointing=False), "'disk', which"),
    },
    "ClusteredMoE": {
        "clusters_share_fc": (lambda: ClusteredMoE(Expert(), clusters_share_fc=True), "is True, but must be False"),
    },
    "SparseMoE": {"mixing": (lambda: SparseMoE(Embedding(), small_expert(), mixing="probabilities"), "must be logits")},
    "Pathological": {"concentration": (lambda: Pathological(concentration=2.0), "left out with the share 'uniform'")},
    "Arrays": {
        "client_test": (lambda: replace(POINTS, client_test=np.arange(4)).check(), "client_train is None, but must be"),
        "mean": (lambda: replace(POINTS, mean=[0.5], std=[0.5]).check(), "mean is .*, but must be None"),
        "std": (lambda: replace(POINTS, std=[0.5]).check(), "either both must be given, or neither"),
    },
    "FederatedDataModule": {
        "num_clients": (lambda: set_up(Own(NATURAL, num_clients=3)), "the data have 4 natural clients"),
        "partitioner": (lambda: Own(POINTS, partitioner=Dirichlet(0.5), rotations=[0]), "must be None with rotations"),
        "test_fraction": (lambda: set_up(Own(NATURAL, test_fraction=0.5)), "must be 0, because the data have test"),
        "augmentation": (lambda: set_up(Own(POINTS, num_clients=2, augmentation=[RandomCrop()])), "must be left out"),
        "stratify": (
            lambda: Own(POINTS, stratify=True),
            "must be False if test_fraction and validation_fraction are 0",
        ),
        "rotations": (lambda: set_up(Own(POINTS, num_clients=2, rotations=[0, 90])), "cannot be rotated"),
    },
    "MapStyleData": {
        "client_test": (lambda: MapStyleData([0], client_test=np.arange(0)).check(False), "client_train is None, but"),
    },
    "FromDatasets": {
        "targets": (lambda: of_numbers(targets=lambda dataset: [0.5] * 4), "must give a class for each sample"),
        "groups": (lambda: of_numbers(groups=lambda dataset: [0] * 4, partitioner=Dirichlet(0.5)), "must be left out"),
    },
    "FromDataModule": {
        "targets": (lambda: of_loaders(targets=lambda dataset: [0.5] * 4), "must give a class for each sample"),
        "groups": (lambda: of_loaders(groups=lambda dataset: [0] * 4, partitioner=Dirichlet(0.5)), "must be left out"),
    },
    "NpzFile": {
        "image_size": (lambda tmp_path: npz(tmp_path, image_size=8), "cannot be resized"),
        "mean": (lambda tmp_path: npz(tmp_path, mean=(0.5,), std=(0.5,)), "must be None for torch.int64 samples"),
        "std": (lambda tmp_path: npz(tmp_path, std=(0.5,)), "either both must be given, or neither"),
    },
    "ClientCheckpoint": {"methods": (lambda: started(ClientCheckpoint(["p"])), "must be names of evaluated phases")},
    "CostToTarget": {"metric": (lambda: started(CostToTarget(0.9)), "is 'local_test', but test_fraction is 0")},
    "GateMonitor": {
        "max_clients": (lambda: started(GateMonitor(5)), "left out without a logger that takes histograms")
    },
    "RepresentationMonitor": {
        "clients": (lambda: started(RepresentationMonitor([7])), "must be ids below num_clients")
    },
}


def public_classes() -> dict[str, type]:
    """The classes that a user constructs, by name."""
    modules = (fedmoe_pl, aggregation, algorithms, backends, callbacks, data, models)
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: each for name, each in found.items() if inspect.isclass(each) and name not in INTERNAL}


def test_every_argument_of_every_public_class_is_in_one_of_the_tables():
    classes = public_classes()
    assert {*ALWAYS, *REFUSED, *(name for name, _ in ACCEPTED)} <= classes.keys()
    for name, each in classes.items():
        parameters = [
            parameter.name
            for parameter in list(inspect.signature(each.__init__).parameters.values())[1:]
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        refused = {argument.split()[0] for argument in REFUSED.get(name, {})}
        accepted = [argument for owner, argument in ACCEPTED if owner == name]
        assert sorted([*ALWAYS.get(name, "").split(), *refused, *accepted]) == sorted(parameters), name


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in REFUSED for argument in REFUSED[name]])
def test_an_argument_that_would_have_no_effect_is_refused(name, argument, tmp_path):
    make, sentence = REFUSED[name][argument]
    arguments = [tmp_path] if "tmp_path" in inspect.signature(make).parameters else []
    with pytest.raises(MisconfigurationException, match=sentence) as error:
        make(*arguments)
    assert re.search(rf"\b{argument.split()[0]}\b|{name} with these arguments", str(error.value)), "it says which"


def test_an_argument_that_is_accepted_says_why():
    assert all(reason for reason in ACCEPTED.values())
