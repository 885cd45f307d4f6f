"""Progress counts the samples and steps of training, also those of newcomers."""

from helpers import blobs, mixture
from helpers.runs import Notes, federation

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import Ditto, FedAvg, FineTuning, Local
from fedmoe_pl.models import GlobalOnly, LocalOnly


class FewestErrors(FedAvg):
    """Trains on the samples that the client's model gets right."""

    def client_samples(self, client):
        x, y = client.datamodule.x[client.samples], client.datamodule.y[client.samples]
        return client.samples[client.module(x).argmax(1) == y]


def test_an_algorithm_may_choose_samples_by_the_client_s_model(tmp_path):
    run = federation(tmp_path, [Phase("it", FewestErrors("global_expert.*"), gate=GlobalOnly())])
    run.fit(mixture(GlobalOnly()), blobs())
    assert run.run.progress.completed(run.run.states) == run.run.progress.total > 0


def test_the_work_is_that_of_the_samples_and_steps(tmp_path):
    """A step costs as much as 20 samples; three quarters of the samples are that share of the work."""
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly(), train=Train(max_epochs=1, batch_size=4)),
        Phase("FB", FineTuning(gate_fraction=0.25), rounds=2, gate=LocalOnly(), train=Train(max_epochs=3)),
    ]
    run = federation(tmp_path, phases)
    run.fit(mixture(), blobs(sizes=(8, 12, 4), batch_size=8))
    # the clients of the second phase have six samples on average, which are one step
    assert run.run.progress.total == 24 * (1 + 20 / 4) + 2 * 3 * (0.75 * 24 + 3 * 20)


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
