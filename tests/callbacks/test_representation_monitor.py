"""Pictures of representations."""

import math
from types import SimpleNamespace

import pytest
import threadpoolctl
import torch
from helpers import Expert, blobs, mixture, run
from helpers.map_style import Dicts, WordModel, padded
from lightning.pytorch import LightningModule
from sklearn.manifold import TSNE
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.callbacks.representation_monitor import RepresentationMonitor, embed, representations_of
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FromDatasets
from fedmoe_pl.models import GlobalOnly, LocalOnly, ProxyGate, SparseMoE


def shown(path, module, phases, datamodule=None, clients=None, samples=100):
    """A fitted federation with a monitor that shows its clients in TensorBoard, and the monitor."""
    monitor = RepresentationMonitor(clients, samples_per_client=samples)
    datamodule = datamodule or blobs(dtype=torch.float32)
    return run(phases, module.float(), datamodule, path, callbacks=[monitor], logger=True), monitor


def test_the_representations_of_any_model_are_the_outputs_of_its_extractors():
    """Also where the gate leaves an expert out, and where the model itself has the extractor."""
    x = torch.randn(7, 5, dtype=torch.float64)
    module = mixture()
    found = representations_of(module, (x, None), 7)
    assert [*found] == ["global expert", "local expert"]
    assert torch.equal(found["local expert"], module.local_expert.extractor(x))
    assert [*representations_of(mixture(GlobalOnly()), (x, None), 7)] == ["global expert"]
    expert = Alone().double()
    assert torch.equal(representations_of(expert, (x, None), 7)["extractor"], expert.extractor(x).flatten(1))


def test_experts_of_which_each_gets_a_part_of_the_samples_are_shown_with_all(tmp_path):
    """They were left out, because their outputs have fewer rows than there are samples; without a word."""
    torch.manual_seed(0)
    module = SparseMoE(nn.Identity(), Expert(), num_experts=2, gate=ProxyGate(2)).double()
    x = torch.randn(40, 5, dtype=torch.float64)
    assert 0 < module.mix(x)[1].argmax(dim=1).sum() < 40, "both experts are chosen"
    found = representations_of(module, (x, None), 40)
    assert [*found] == ["experts 0", "experts 1"]
    assert torch.equal(found["experts 1"], module.experts[1].extractor(x))


@pytest.mark.few(1)
@pytest.mark.parametrize(("samples", "spoil"), [(1, 0.0), (9, math.nan)])
def test_what_cannot_be_drawn_is_named_and_does_not_end_the_run(samples, spoil, tmp_path):
    datamodule = blobs(dtype=torch.float32)
    datamodule.x = datamodule.x + spoil
    with pytest.warns(match="Phase 'p': local expert representations are not shown"):
        phases = [Phase("p", Local(), train=Train(max_epochs=0))]
        fed, _ = shown(tmp_path, mixture(LocalOnly()), phases, datamodule, [0, 1], samples)
    assert not [*fed.run_dir.rglob("projector*")]


class Tuple(nn.Module):
    """An extractor whose output is no tensor, such as that of an LSTM."""

    def forward(self, x):
        return x, None


def test_a_model_whose_extractor_gives_no_tensor_is_named(tmp_path):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.extractor, self.classifier = Tuple(), nn.Linear(5, 3)

        def forward(self, x):
            return self.classifier(self.extractor(x)[0])

    with pytest.warns(match=r"Phase 'p' is not shown, because no extractor of its model gave a tensor with a row"):
        shown(tmp_path, mixture(expert=Network()), [Phase("p", Local())])


class Alone(Expert, LightningModule):
    """An expert as a client's whole module."""


class WordExtractor(WordModel):
    """A module that reads dicts, with an extractor."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.EmbeddingBag(6, 4, padding_idx=0)

    def forward(self, batch):
        return self.head(self.extractor(batch["words"]))


@pytest.mark.slow
def test_batches_may_be_dicts(tmp_path):
    """They were taken for pairs, which failed at the end of the phase."""
    data = FromDatasets(Dicts(30), Dicts(6), targets="label", groups="user", collate_fn=padded)
    fed, monitor = shown(tmp_path, WordExtractor(), [Phase("words", Local())], data, [0, 2], 4)
    found, classes, clients = monitor.compute(fed.run, "words")
    assert (found["extractor"].shape, clients.tolist()) == ((4, 4), [0, 0, 2, 2])
    assert torch.equal(classes, torch.cat([data.y[data.test_samples[client]] for client in (0, 2)]))
    assert [*fed.run_dir.glob("words/00001/extractor")]


@pytest.mark.slow
def test_models_without_an_extractor_are_named_and_unknown_clients_refused(tmp_path):
    phases = [Phase("p", Local(), evaluate=False), Phase("q", Local())]
    with pytest.warns(match=r"Phase 'q' is not shown, because its PersonalizedMoE has no extractor\.") as warned:
        fed, _ = shown(tmp_path, mixture(expert=nn.Linear(5, 3)), phases)
    assert not list(fed.run_dir.rglob("projector*"))
    assert not [warning for warning in warned if "'p'" in str(warning.message)]
    for clients in ([0, 7], [-1], []):
        with pytest.raises(InvalidArgumentError) as error:
            run([Phase("p", Local())], mixture(), blobs(), tmp_path, callbacks=[RepresentationMonitor(clients)])
        assert error.value.argument == "clients"


def test_groups_far_apart_stay_apart_in_the_plane_and_nothing_is_drawn():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(40, 8, generator=generator) + 50 * (torch.arange(40) % 2)[:, None]
    state = torch.get_rng_state()
    found = torch.from_numpy(embed(points, seed=0)).double()
    assert torch.equal(found, torch.from_numpy(embed(points, seed=0)).double())
    assert torch.equal(state, torch.get_rng_state())
    distances = torch.cdist(found, found).fill_diagonal_(math.inf)
    assert (distances.argmin(1) % 2 == torch.arange(40) % 2).all(), "everybody's neighbour is of the own group"


def test_few_points_have_a_third_of_the_others_as_neighbours_and_every_seed_draws_other_starts(monkeypatch):
    """As many as the default of 30 needs three times as many others."""
    found = []
    monkeypatch.setattr(TSNE, "fit_transform", lambda self, _: found.append((self.perplexity, self.random_state)))
    for seed, number in enumerate((4, 31, 91, 200)):
        embed(torch.zeros(number, 2), seed)
    assert found == [(1, 0), (10, 1), (30, 2), (30, 3)]


def test_points_are_computed_with_one_thread(monkeypatch):
    threads = []

    def seen(self, values):
        threads.extend(pool["num_threads"] for pool in threadpoolctl.threadpool_info())
        return fit(self, values)

    fit = TSNE.fit_transform
    monkeypatch.setattr(TSNE, "fit_transform", seen)
    with threadpoolctl.threadpool_limits(2):
        embed(torch.randn(9, 4), seed=0)
        after = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    assert {*threads} == {1} and 2 in after


def test_of_two_clients_both_are_shown_by_default():
    monitor, data = RepresentationMonitor(), blobs((13, 8))
    data.setup()
    monitor.on_fit_start(SimpleNamespace(datamodule=data, loggers=SimpleNamespace(take_images=True), phases=[]))
    assert monitor.clients == [0, 1]
