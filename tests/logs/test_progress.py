"""Progress counts the samples that are trained, also those of newcomers."""

from helpers import blobs, mixture
from helpers.runs import Notes, federation

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import Ditto, FedAvg, Local
from fedmoe_pl.models import GlobalOnly, LocalOnly


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
