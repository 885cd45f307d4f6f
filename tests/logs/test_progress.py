"""Progress counts the samples that are trained, also those of newcomers."""

from helpers import blobs, mixture
from helpers.runs import Notes, federation

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import Ditto, FedAvg, Local
from fedmoe_pl.models import GlobalOnly, LocalOnly


class FewestErrors(FedAvg):
    """Trains on the samples that the client's model gets right."""

    def client_samples(self, client):
        x, y = client.datamodule.x[client.samples], client.datamodule.y[client.samples]
        return client.samples[client.module(x).argmax(1) == y]


def test_an_algorithm_may_choose_samples_by_the_client_s_model(tmp_path):
    run = federation(tmp_path, [Phase("it", FewestErrors("global_expert.*"), gate=GlobalOnly())])
    run.fit(mixture(GlobalOnly()), blobs())
    assert run.run.progress.completed(run.run.states) == run.run.progress.total == 32, "as if on all of them"


def test_the_local_rounds_of_newcomers_are_work(tmp_path):
    def phases():
        return [
            Phase("FedAvg", FedAvg("global_expert.*", "global_expert.*"), gate=GlobalOnly()),
            Phase("Ditto", Ditto(), gate=LocalOnly()),
            Phase("Local", Local(), gate=LocalOnly()),
        ]

    federation(tmp_path, phases()).fit(mixture(GlobalOnly()), blobs())
    # without a progress bar, nothing else has asked for the progress before
    watch = Notes(on_round_end=lambda run, *_: run.progress.completed(run.states) / run.progress.total)
    federation(tmp_path, phases(), callbacks=[watch]).personalize(mixture(GlobalOnly()), blobs(), rounds=3)
    assert watch.noted == [0.25, 0.5, 0.75, 1.0], "three rounds of Ditto and one of Local, all of the same size"
