"""Progress counts the samples that are trained, also those of newcomers."""

from helpers import blobs, mixture
from helpers.runs import federation

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import Ditto, FedAvg, Local
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.models import GlobalOnly, LocalOnly


class Watch(FederationCallback):
    """Notes the share of the work that is done after each round."""

    def on_fit_start(self, run):
        self.shares, self.total = [], run.progress.total

    def on_round_end(self, run, phase, round):
        self.shares.append(run.progress.completed(run.states) / self.total)


def test_the_local_rounds_of_newcomers_are_work(tmp_path):
    def phases():
        return [
            Phase("FedAvg", FedAvg("global_expert.*", "global_expert.*"), gate=GlobalOnly()),
            Phase("Ditto", Ditto(), gate=LocalOnly()),
            Phase("Local", Local(), gate=LocalOnly()),
        ]

    federation(tmp_path, phases()).fit(mixture(GlobalOnly()), blobs())
    watch = Watch()
    federation(tmp_path, phases(), callbacks=[watch]).personalize(mixture(GlobalOnly()), blobs(), rounds=3)
    assert watch.shares == [0.25, 0.5, 0.75, 1.0], "three rounds of Ditto and one of Local, all of the same size"
