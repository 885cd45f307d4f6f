"""Hooks that FedAvg leaves alone, each shown by an algorithm made for it."""

from dataclasses import replace

import pytest
import torch
from helpers import blobs, mixture, run
from helpers.reports import csv_rows
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Messages, Phase
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import FeatureGate, GlobalOnly
from fedmoe_pl.phases.client_failures import ClientError


class NearestMean(FedAvg):
    """Predicts the class whose mean training sample is nearest; the means are each client's own."""

    def predictor(self, client, server):
        data, classes = client.datamodule, client.datamodule.num_classes
        x, y = data.x[client.samples], data.y[client.samples]
        means = torch.stack(
            [x[y == c].mean(0) if (y == c).any() else torch.full_like(x[0], 1e6) for c in range(classes)]
        )
        return lambda samples: -torch.cdist(samples, means)


@pytest.mark.parametrize("federated", [True, False])
def test_clients_predict_in_the_algorithm_s_way_where_it_has_one(tmp_path, federated):
    class Alone(Local):
        predictor = NearestMean.predictor

    algorithm = NearestMean("global_expert.*") if federated else Alone()
    data = blobs(validation_fraction=0.2, test_fraction=0.3)
    method = Phase("nearest", algorithm, gate=GlobalOnly() if federated else None)
    fed = run([method], mixture(FeatureGate(6)), data, tmp_path, enable_checkpointing=True)
    tested = {"local_test": data.test_samples, "validation": data.validation_samples}
    assert fed.results["nearest"].model == f"predictor of {type(algorithm).__name__}"
    accuracies = set()
    for client in range(3):
        samples = data.train_samples[client]
        centers = {c: data.x[samples][data.y[samples] == c].mean(0) for c in data.y[samples].unique().tolist()}

        def nearest(samples, centers=centers):
            distances = {c: ((data.x[samples] - center) ** 2).sum(1) for c, center in centers.items()}
            return torch.tensor([*distances])[torch.stack([*distances.values()]).argmin(0)]

        evaluated = fed.results["nearest"].clients[client]
        for metric, parts in tested.items():
            right = (nearest(parts[client]) == data.y[parts[client]]).double().mean().item()
            assert getattr(evaluated, metric) == pytest.approx(right, abs=1e-6)
        right = (nearest(data.global_test) == data.y[data.global_test]).double().mean().item()
        assert evaluated.global_test == pytest.approx(right, abs=1e-6)
        assert evaluated.gate_weights is None, "the gate has no part in it"
        accuracies.add(right)
    assert len(accuracies) > 1, "each client has means of its own"
    fed.predict(mixture(FeatureGate(6)), blobs(validation_fraction=0.2, test_fraction=0.3))
    rows = [row for row in csv_rows(fed.run_dir / "predictions.csv") if row["client"] == "2"]
    assert [int(row["prediction"]) for row in rows] == nearest(data.test_samples[2]).tolist()
    assert {row["gate_weight"] for row in rows} == {""}


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(clients_per_stack=2)])
def test_what_the_server_computes_does_not_depend_on_the_number_of_threads(tmp_path, backend):
    class Counted(FedAvg):
        def combine(self, a, b):
            threads.append(torch.get_num_threads())
            return super().combine(a, b)

        def server_update(self, server, combined):
            threads.append(torch.get_num_threads())
            return super().server_update(server, combined)

    threads: list[int] = []
    torch.set_num_threads(2)
    try:
        run([Phase("it", Counted(), rounds=2)], mixture(FeatureGate(6)), blobs(), tmp_path, backend=backend)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert len(threads) >= 4 and {*threads} == {1}


@pytest.mark.filterwarnings("ignore:.* are left out")
@pytest.mark.parametrize(
    ("final", "sentence"),
    [
        (lambda update: (update.sent, 1), "client_final of Changed returned a tuple, but must return an Update"),
        (lambda update: replace(update, weight=-2), "its weight is -2, but must be at least 0"),
        (lambda update: replace(update, weight=0), "all clients' updates have weight 0"),
    ],
)
def test_an_update_that_cannot_be_averaged_is_refused_in_a_sentence(final, sentence, tmp_path):
    class Changed(FedAvg):
        def client_final(self, client, constants):
            return final(super().client_final(client, constants))

    with pytest.raises((ClientError, MisconfigurationException), match=sentence):
        federation(tmp_path, [Phase("A", Changed(), gate=GlobalOnly())]).fit(mixture(), blobs())


def test_a_loss_that_is_never_returned_is_warned_of_as_in_lightning(tmp_path):
    class Nothing(FedAvg):
        def client_loss(self, module, batch, constants):
            super().client_loss(module, batch, constants)

    with pytest.warns(UserWarning, match="`client_loss` returned `None`"):
        federation(tmp_path, [Phase("A", Nothing(), gate=GlobalOnly())]).fit(mixture(), blobs())


def test_what_belongs_to_single_clients_is_not_sent_to_all_by_default():
    class OfClients(FedAvg):
        messages = Messages(per_client=("of/",))

    server = {name: torch.zeros(1) for name in ("fc.weight", "of/0", "of/1", "momentum/fc.weight")}
    assert [*OfClients().server_send(server, 0, {})] == ["fc.weight", "momentum/fc.weight"]
    assert [*FedAvg().server_send(server, 0, {})] == [*server]
