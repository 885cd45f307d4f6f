"""A client's machine works alone with what it keeps: it tests, predicts, exports, and makes models for others."""

import pytest
import torch
from helpers import blobs
from helpers.deployed import Deployment, federation, method_of, name_of, of_client, simulated, split
from helpers.methods import data
from helpers.reports import csv_rows
from lightning.fabric.utilities.exceptions import MisconfigurationException

SPLIT = {"validation_fraction": 0.2, "test_fraction": 0.2}
NAMES = ("PFLMoE", "IFCA", "FedMoEDA", "PFedMoE", "SpecialistMixture", "FedProto")
CLIENT = 3


@pytest.fixture(scope="module", params=NAMES)
def deployed(request, tmp_path_factory):
    """A method, its folder, the simulation of it, and what the client's machine keeps of its run."""
    folder, method = tmp_path_factory.mktemp(request.param), method_of(request.param, evaluate=True)
    simulation = simulated(method, folder, data(**SPLIT))
    server = Deployment(method, folder, datamodule=data(**SPLIT)).run()
    return method, folder, simulation, folder / f"client {CLIENT}" / name_of(server)


def alone(method, folder):
    own = of_client(data(), CLIENT, **split(data(**SPLIT)))
    return federation(method.phases(), folder / "alone", backend="auto"), method.model(), own


@pytest.mark.few("FedProto")
def test_its_accuracies_are_those_of_the_simulation(deployed):
    method, folder, simulation, run = deployed
    settings, model, own = alone(method, folder)
    settings.test(model, own, str(run / "checkpoints/last.ckpt"))
    assert settings.results.keys() == simulation.results.keys()
    for name, expected in simulation.results.items():
        (client,) = settings.results[name].clients
        there = expected.clients[CLIENT]
        assert (client.client, client.n_train) == (CLIENT, there.n_train)
        for metric in ("local_test", "reweighted_test", "global_test"):
            assert client.value(metric) == there.value(metric)
        ours, theirs = (each.client_module(name, CLIENT).state_dict() for each in (settings, simulation))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.few("FedProto")
def test_it_predicts_and_exports_its_own_samples_only(deployed, capsys):
    method, folder, simulation, run = deployed
    settings, model, own = alone(method, folder)
    settings.predict(model, own, str(run / "checkpoints/last.ckpt"))
    rows = csv_rows(run / "predictions.csv")
    assert {row["client"] for row in rows} == {str(CLIENT)}
    with pytest.raises(MisconfigurationException, match="client is 0, but must be 3, whose machine it is"):
        settings.export(model, own, str(run / "checkpoints/last.ckpt"), method=next(iter(simulation.results)), client=0)


@pytest.mark.few("FedProto")
def test_it_makes_models_for_newcomers(deployed):
    method, folder, simulation, run = deployed
    if len(method.phases()) > 1 and method.phases()[0].name == "Local":
        pytest.skip("newcomers have no local experts of the first phase")
    newcomers = blobs((10, 12), validation_fraction=0.2, test_fraction=0.2)
    settings = federation(method.phases(), folder / "new_clients", backend="auto")
    results = settings.personalize(method.model(), newcomers, str(run / "checkpoints/last.ckpt"), rounds=1)
    assert results.keys() == simulation.results.keys()


@pytest.mark.few("FedProto")
def test_a_damaged_file_of_the_client_is_named(deployed):
    method, folder, _, run = deployed
    whole = (run / "client.json").read_text()
    (run / "client.json").write_text("{")
    settings, model, own = alone(method, folder)
    with pytest.raises(MisconfigurationException, match=r"client\.json' is damaged; it must be as the run wrote it"):
        settings.test(model, own, str(run / "checkpoints/last.ckpt"))
    (run / "client.json").write_text(whole)
