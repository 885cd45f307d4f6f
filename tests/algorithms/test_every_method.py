"""What holds for every method, whatever it sends and keeps."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import Expert, blobs, mixture, sparse_mixture
from helpers.adapted import adapted
from helpers.architectures import pair
from helpers.backends import FEW, begin, local_training
from helpers.clusters import clustered, only
from helpers.methods import METHODS, data
from helpers.mixtures_of_learners import learners
from helpers.prototypes import without_a_class
from helpers.runs import Kill, Notes, assert_same, federation
from helpers.workers import TwoInThisProcess
from lightning.pytorch import LightningModule

from fedmoe_pl import Phase, algorithms
from fedmoe_pl.aggregation import CoordinateMedian, MultiKrum, NearestNeighborMixing
from fedmoe_pl.algorithms import fedmoe_da
from fedmoe_pl.algorithms.shared.parts import distillation_loss, logits_loss, summed_loss
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.backend import fold, updated_server
from fedmoe_pl.models import GlobalOnly, MixtureWeights, PersonalizedMoE


def fitted(path, name, ckpt_path=None, **kwargs):
    trainer = {"accelerator": "cpu", "max_epochs": 2}
    run = federation(path, METHODS[name].phases(), trainer=trainer, **kwargs)
    run.fit(METHODS[name].model(), data(**METHODS[name].split), ckpt_path=ckpt_path)
    return run


@pytest.mark.few("Scaffold")
@pytest.mark.parametrize("name", METHODS)
def test_a_run_killed_in_its_last_round_ends_with_the_same_bits_and_stacked_clients_agree(tmp_path, name):
    trained = Notes(on_client_end=lambda run, phase, round, client: client)
    whole = fitted(tmp_path / "whole", name, callbacks=[trained], backend=TrainerBackend())
    kill = Kill("on_client_end", len(trained.noted) - 1)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "killed", name, callbacks=[kill], backend=TwoInThisProcess())
    resumed = fitted(tmp_path / "killed", name, "last", backend=TwoInThisProcess())
    for phase, state in whole.run.states.items():
        again = resumed.run.states[phase]
        assert_same(again.server, state.server)
        assert_same(*({client: dict(tree) for client, tree in each.clients.items()} for each in (again, state)))
        assert again.traffic == state.traffic
    if not METHODS[name].stacks:
        return
    stacked = fitted(tmp_path / "stacked", name, backend=StackedBackend(2), enable_checkpointing=False)
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    for phase, state in whole.run.states.items():
        close(stacked.run.states[phase].server, state.server)
        for client, tree in state.clients.items():
            close(dict(stacked.run.states[phase].clients[client]), dict(tree))


OWN_COMBINE = [
    (algorithms.FD(), mixture, 1e-12),
    (algorithms.FedProto(), mixture, 1e-12),
    (algorithms.FedPAC(), lambda: mixture(GlobalOnly()), 1e-9),
    (algorithms.FedKD(1, 1), lambda: pair(hidden=(6,)), 1e-12),
    (algorithms.FedMix(), lambda: sparse_mixture(4), 1e-12),
    (algorithms.FedMoEDA(), sparse_mixture, 1e-12),
    (algorithms.EpsilonGreedyIFCA(), lambda: clustered(gate=only(0)), 1e-12),
    (algorithms.HetLoRA([1, 3, 2]), lambda: adapted(3), 1e-12),
]


@pytest.mark.parametrize(("algorithm", "make", "tolerance"), OWN_COMBINE)
def test_the_order_in_which_updates_are_combined_changes_only_the_rounding(algorithm, make, tolerance):
    plan = begin(TrainerBackend(), local_training(make(), algorithm, without_a_class(FEW, batch_size=10)))
    groups = plan.train(algorithm.server_init(plan.training.module), plan.groups(range(3)), {}, 0)
    updates, combine = [group.update for group in groups], algorithm.combine
    expected = combine(combine(*updates[:2]), updates[2])
    for a, b, c in itertools.permutations(updates):
        for combined in (combine(combine(a, b), c), combine(a, combine(b, c))):
            torch.testing.assert_close(combined.sent, expected.sent, rtol=tolerance, atol=tolerance)
            assert combined.weight == expected.weight


@pytest.mark.parametrize(
    ("algorithm", "module", "constants"),
    [
        (algorithms.FML(0.3, 0.6), mixture(), {}),
        (algorithms.FedKD(), mixture(), {}),
        (algorithms.FedAPEN(), mixture(MixtureWeights()), {}),
        (algorithms.FedMix(entropy_weight=0.5), sparse_mixture(4), {"experts": [0, 2]}),
        (algorithms.FedMix(entropy_weight=0.5), sparse_mixture(4), {"experts": [3]}),
        (algorithms.FedEM(), learners(), {"received": {}, "log_pi": torch.tensor([0.5, 0.3, 0.2]).double().log()}),
    ],
)
def test_samples_without_a_label_do_not_count(algorithm, module, constants):
    x, y = blobs().x[:6], blobs().y[:6].clone()
    expected = algorithm.client_loss(module, (x[:4], y[:4]), constants)
    y[4:] = -100
    torch.testing.assert_close(algorithm.client_loss(module, (x, y), constants), expected, rtol=1e-14, atol=0)


class Masked(Expert):
    """An expert with masks as buffers: one of infinite values, and one of booleans."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("allowed", torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.parametrize("algorithm", [algorithms.Scaffold("global_expert.*"), algorithms.FedKD(), algorithms.PFedMe()])
def test_masks_stay_as_they_are_and_nothing_else_depends_on_them(algorithm):
    servers = []
    for expert in (Expert(), Masked()):
        sgd = partial(torch.optim.SGD, lr=0.1)
        plan = begin(TrainerBackend(), local_training(mixture(GlobalOnly(), expert, optimizer=sgd), algorithm, blobs()))
        start = algorithm.server_begin(algorithm.server_init(plan.training.module), [SimpleNamespace(rounds=1)])
        groups = [*plan.train(start, plan.groups(range(3)), {}, 0)]
        assert not any(group.failed for group in groups)
        servers.append(updated_server(algorithm, start, fold(algorithm, [group.update for group in groups])))
    without, masked = servers
    assert_same({name: masked[name] for name in without}, without)
    for name in ("global_expert.mask", "global_expert.allowed"):
        assert torch.equal(masked[name], start[name])


# Models in bfloat16: what torch cannot compute in it is computed in float32, and the server stays in it


def test_the_loss_of_logits_in_half_precision_is_that_of_float32_for_any_module():
    generator, y = torch.Generator().manual_seed(0), torch.arange(999) % 3
    logits, teacher = (torch.randn(999, 3, generator=generator).bfloat16() for _ in range(2))
    for module in (LightningModule(), mixture().bfloat16()):
        assert torch.equal(logits_loss(module, logits, y), logits_loss(module, logits.float(), y))
        assert torch.equal(summed_loss(module, logits, y), summed_loss(module, logits.float(), y))
    assert torch.equal(distillation_loss(logits, teacher, y), distillation_loss(logits.float(), teacher.float(), y))


class Halving(torch.nn.Module):
    """A gate whose weights have no rounding in half precision, but their shares would."""

    def forward(self, x):
        return x.new_tensor([0.5, 0.25, 0.125, 0.125]).expand(len(x), 4)


def of_logits(make, gate=None):
    """A mixture whose experts return their inputs."""
    module = make()
    module.gate = module.gate if gate is None else gate
    module.embedding = torch.nn.Identity()
    module.experts = torch.nn.ModuleList(torch.nn.Identity() for _ in module.experts)
    return module


OF_LOGITS = {
    "FD": lambda x, y: algorithms.FD().client_loss(
        PersonalizedMoE(torch.nn.Identity()),
        (x, y),
        {"targets": torch.eye(3), "known": torch.ones(3, dtype=torch.bool)},
    ),
    "FedMix": lambda x, y: algorithms.FedMix().client_loss(
        of_logits(partial(sparse_mixture, 4), Halving()), (x, y), {"experts": [0, 2]}
    ),
    "FedEM": lambda x, y: algorithms.FedEM().client_loss(
        of_logits(learners), (x, y), {"received": {}, "log_pi": torch.tensor([0.5, 0.3, 0.2]).log()}
    ),
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_the_loss_of_logits_in_half_precision_is_that_of_float32(name):
    x, y = torch.randn(99, 3, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(99) % 3
    assert torch.equal(OF_LOGITS[name](x, y), OF_LOGITS[name](x.float(), y))


PHASES = {
    "FedAvg": lambda: [Phase("it", algorithms.FedAvg(), rounds=2)],
    "MultiKrum": lambda: [Phase("it", algorithms.FedAvg(), aggregation=MultiKrum(1))],
    "NearestNeighborMixing": lambda: [
        Phase("it", algorithms.FedAvg(), aggregation=NearestNeighborMixing(CoordinateMedian(), 1))
    ],
    "FedProto": lambda: [Phase("it", algorithms.FedProto(prediction="prototype"))],
    **{name: METHODS[name].phases for name in ("FedKD", "KNNPer", "LabelPrior")},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PHASES)
def test_a_model_in_bfloat16_is_trained_aggregated_and_evaluated(name, tmp_path):
    model = (METHODS[name].model() if name in METHODS else mixture()).to(torch.bfloat16)
    trainer = {"accelerator": "cpu", "max_epochs": 1}
    run = federation(tmp_path, PHASES[name](), trainer=trainer, backend=TrainerBackend())
    run.fit(model, data(dtype=torch.bfloat16, **(METHODS[name].split if name in METHODS else {})))
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for state in run.run.states.values():
        assert all(tensor.dtype == types.get(name, tensor.dtype) for name, tensor in state.server.items())
    assert all(not math.isnan(result.spread("global_test").mean) for result in run.results.values())


def test_means_of_fedmoe_da_count_each_of_300_clients():
    """In bfloat16, a sum of so many small addends would stop growing, and each weight would be rounded."""
    trees = [{"w": torch.tensor([1.0 + client % 2], dtype=torch.bfloat16)} for client in range(300)]
    _, weights = fedmoe_da.aggregation_rows(torch.ones(300, 2, dtype=torch.bfloat16), "all")
    mean = fedmoe_da._mean(trees[0], [*zip(trees, weights[0], strict=True)])
    torch.testing.assert_close(mean, {"w": torch.tensor([1.5], dtype=torch.bfloat16)}, rtol=0, atol=0)
