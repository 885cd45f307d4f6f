"""Traffic, operations and the cost of reaching an accuracy, counted by hand."""

import math
from functools import partial

import pytest
import torch
from helpers import Expert, OneWeight, TensorData, blobs, mixture, phase, run, two_quadratics
from helpers.backends import WithBatchNorm, local_training
from helpers.pfedmoe import model
from helpers.reports import csv_rows
from helpers.runs import Kill, assert_same, federation, resumed_after
from lightning.pytorch.callbacks import Timer
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, FedRep, FineTuning, Local, PFedMoE, PFLMoE
from fedmoe_pl.evaluation.flops import FlopCounter
from fedmoe_pl.models import BiLSTM, ConstantGate, LinearGate, PersonalizedMoE

SGD = partial(torch.optim.SGD, lr=0.1)
SIZES = (13, 8, 11, 9)


def linear(inputs: int, outputs: int, passes: int) -> int:
    """Operations of a linear layer for one sample: a product for the output, one for the weight's gradient, one for the
    input's, which a network's first layer has not."""
    return passes * 2 * inputs * outputs


def of_round(training, cohort=None, round=0) -> float:
    server = training.algorithm.server_init(training.module)
    return FlopCounter(training).of_round(server, cohort or range(training.datamodule.num_clients), {}, round)


def test_a_linear_model_takes_two_passes_and_no_gradient_of_its_input():
    module = PersonalizedMoE(nn.Linear(5, 3), nn.Linear(5, 3), ConstantGate(1), optimizer=SGD).double()
    training = local_training(module, FedAvg("global_expert.*"), blobs(SIZES), max_epochs=3)
    assert of_round(training) == 3 * sum(SIZES) * linear(5, 3, passes=2)
    assert of_round(training, cohort=[1]) == 3 * 8 * linear(5, 3, passes=2)


@pytest.mark.parametrize(("limit", "samples"), [(1, 4 * 4), (0.5, 8 + 4 + 4 + 4), (1.0, sum(SIZES)), (9, sum(SIZES))])
def test_only_the_batches_of_a_limit_are_counted(limit, samples):
    """Batches of 4: clients have 4, 2, 3 and 3 of them."""
    module = PersonalizedMoE(nn.Linear(5, 3), nn.Linear(5, 3), ConstantGate(1), optimizer=SGD).double()
    training = local_training(module, FedAvg("global_expert.*"), blobs(SIZES), 3, limit_train_batches=limit)
    assert of_round(training) == 3 * samples * linear(5, 3, passes=2)
    for limited in ({"max_steps": 2}, {"callbacks": [Timer("00:01:00:00")]}):
        assert math.isnan(of_round(local_training(module, FedAvg(), blobs(SIZES), **limited)))


def test_a_frozen_expert_has_a_forward_pass_alone():
    """PFL-MF trains the gate, on a quarter of the samples; the two frozen experts are Linear(5, 6), Linear(6, 3)."""
    training = local_training(mixture(LinearGate(5)), PFLMoE(), blobs((16, 8)), max_epochs=5)
    experts = 2 * (linear(5, 6, passes=1) + linear(6, 3, passes=1))
    assert of_round(training) == 5 * (4 + 2) * (experts + linear(5, 1, passes=2))
    head = FineTuning("local_expert.classifier.*")
    training = local_training(mixture(), head, blobs((16, 8)), max_epochs=5)
    assert of_round(training) == 5 * 24 * (linear(5, 6, passes=1) + linear(6, 3, passes=2))


def test_epochs_that_train_other_parts_take_other_operations():
    """Two epochs of the head, in which the extractor has a forward pass alone, and three of the extractor."""
    fedrep = FedRep("global_expert.extractor.*", head_epochs=2)
    training = local_training(mixture(ConstantGate(1)), fedrep, blobs((16, 8)), max_epochs=5)
    of_head = linear(5, 6, passes=1) + linear(6, 3, passes=2)
    of_body = linear(5, 6, passes=2) + linear(6, 3, passes=2)
    assert of_round(training) == 24 * (2 * of_head + 3 * of_body)


def test_rounds_that_train_other_parts_take_other_operations():
    training = local_training(mixture(LinearGate(5)), PFLMoE(interleaved=True), blobs((16, 8)), 1, rounds=2)
    counter = FlopCounter(training)
    server = training.algorithm.server_init(training.module)
    expert = (12 + 6) * (linear(5, 6, passes=1) + linear(6, 3, passes=2))
    gate = (4 + 2) * (2 * (linear(5, 6, passes=1) + linear(6, 3, passes=1)) + linear(5, 1, passes=2))
    assert [counter.of_round(server, [0, 1], {}, round) for round in (0, 1, 0)] == [expert, gate, expert]


class Staged(FedAvg):
    """A loss of as many forward passes, and of a product as wide, as the constants of the round say."""

    losses = 0

    def __init__(self, views, widths):
        super().__init__("global_expert.*")
        self.views, self.widths = views, widths

    def client_init(self, client, sent):
        super().client_init(client, sent)
        width = torch.ones(3, self.widths[client.round], dtype=torch.float64) * client.round
        return {"views": self.views[client.round], "nested": [{"width": width}]}

    def client_loss(self, module, batch, constants):
        type(self).losses += 1
        loss = sum(module.loss(batch)[0] for _ in range(constants["views"]))
        return loss + (module(batch[0]) @ constants["nested"][0]["width"]).sum()


def test_a_loss_that_changes_between_rounds_is_counted_when_its_constants_differ():
    """Linear(5, 3) ``views + 1`` times, and a product of its 3 outputs, whose other factor needs no gradient."""
    views, widths = (1, 1, 2, 2, 1), (4, 4, 4, 7, 4)
    module = PersonalizedMoE(nn.Linear(5, 3), nn.Linear(5, 3), ConstantGate(1), optimizer=SGD).double()
    training = local_training(module, Staged(views, widths), blobs((12, 8)), max_epochs=3, rounds=5)
    counter, server = FlopCounter(training), training.algorithm.server_init(module)
    Staged.losses = 0
    for round in range(5):
        one = (views[round] + 1) * linear(5, 3, passes=2) + linear(3, widths[round], passes=2)
        assert counter.of_round(server, [0, 1], {}, round) == 3 * (12 + 8) * one
    assert Staged.losses == 3, "the values of tensors make no difference"


def test_the_operations_of_a_changing_loss_are_in_the_results_also_of_a_resumed_run(tmp_path):
    def module():
        return PersonalizedMoE(nn.Linear(5, 3), nn.Linear(5, 3), ConstantGate(1), optimizer=SGD).double()

    make = partial(federation, tmp_path, [Phase("staged", Staged((1, 2, 1), (4, 4, 5)), rounds=3)])
    resumed = resumed_after(Kill("on_round_end", 2), make, module, partial(blobs, (8, 3)))
    once = linear(5, 3, passes=2)
    rounds = (2 * once + linear(3, 4, 2), 3 * once + linear(3, 4, 2), 2 * once + linear(3, 5, 2))
    assert [row["flops"] for row in resumed.run.rows] == [11 * sum(rounds[: last + 1]) for last in range(3)]


def test_a_loss_that_a_client_s_own_state_decides_is_that_of_the_cohort_s_first():
    class OwnStage(Staged):
        def client_init(self, client, sent):
            constants = super().client_init(client, sent)
            return {**constants, "views": len(client.state) + 1}

    module = PersonalizedMoE(nn.Linear(5, 3), nn.Linear(5, 3), ConstantGate(1), optimizer=SGD).double()
    training = local_training(module, OwnStage((1,), (4,)), blobs((12, 8)), max_epochs=1)
    server, kept = training.algorithm.server_init(module), {1: {"own/a": torch.zeros(1), "own/b": torch.zeros(1)}}
    product = linear(3, 4, passes=2)
    assert FlopCounter(training).of_round(server, [0], kept, 0) == 12 * (2 * linear(5, 3, passes=2) + product)
    assert FlopCounter(training).of_round(server, [1], kept, 0) == 8 * (4 * linear(5, 3, passes=2) + product)


def test_clients_of_several_architectures_take_their_own_operations():
    """Hidden widths 2 (shared) and 6, 4, 3 by turns; the header 2 to 3 and the gate 5 to 1 are everybody's."""

    def extractor(hidden):
        return linear(5, hidden, passes=2) + linear(hidden, 2, passes=3)

    common = extractor(2) + linear(2, 3, passes=3) + linear(5, 1, passes=2)
    expected = sum(n * (common + extractor(h)) for n, h in zip(SIZES, (6, 4, 3, 6), strict=True))
    assert of_round(local_training(model(), PFedMoE(), blobs(SIZES), max_epochs=2)) == 2 * expected
    alone = local_training(model(ConstantGate(0)), Local(), blobs(SIZES), max_epochs=1)
    head = linear(2, 3, passes=3)
    assert of_round(alone) == sum(n * (head + extractor(h)) for n, h in zip(SIZES, (6, 4, 3, 6), strict=True))


def test_a_sample_that_makes_no_batch_is_not_counted():
    """Batches of 4 and batch normalization: 13 samples leave one, 8 and 11 leave none."""
    training = local_training(mixture(ConstantGate(1), WithBatchNorm()), FedAvg(), blobs((13, 8, 11)), max_epochs=1)
    assert of_round(training) == (12 + 8 + 11) * (linear(5, 6, passes=2) + linear(6, 3, passes=3))


def test_an_lstm_takes_the_matrix_products_of_its_gates():
    """Texts of 10 words, embedded in 8 numbers, 16 units each way: 4 gates of (8 + 16) products a word and direction.

    Nothing asks for the gradient of the first state; the embedding, a look-up, asks for that of its rows.
    """
    module = PersonalizedMoE(BiLSTM(50, 8, 16), gate=ConstantGate(1), optimizer=SGD)
    x, y = torch.arange(60).view(6, 10) % 50, torch.arange(6) % 4
    data = TensorData(x, y, [torch.arange(6)], dtype=torch.int64, batch_size=3)
    data.setup()
    training = local_training(module, FedAvg("global_expert.*"), data, max_epochs=1)
    of_words = 10 * 2 * (linear(8, 4 * 16, passes=3) + linear(16, 4 * 16, passes=3))
    of_first_state = 2 * linear(16, 4 * 16, passes=1)
    assert of_round(training) == 6 * (of_words - of_first_state + linear(32, 4, passes=3))


def test_a_module_that_needs_its_trainer_is_not_counted_and_the_column_is_empty(tmp_path):
    fed = run([phase("FedAvg", FedAvg())], OneWeight(), two_quadratics(), tmp_path)
    assert math.isnan(fed.run.states["FedAvg"].flops)


def test_counting_changes_no_result_and_draws_nothing(tmp_path, monkeypatch):
    """Dropout draws in every batch, the counted one included."""

    def states():
        phases = [phase("FedAvg", FedAvg(), rounds=3, clients_per_round=2)]
        module = mixture(LinearGate(5), Expert(dropout=0.5))
        return run(phases, module, blobs(SIZES), tmp_path).run.states["FedAvg"]

    counted = states()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    module = mixture(LinearGate(5), Expert(dropout=0.5))
    torch.set_rng_state(before)
    of_round(local_training(module, FedAvg(), blobs(SIZES)))
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(FlopCounter, "of_round", lambda *arguments: 0)
    plain = states()
    assert counted.flops > 0 == plain.flops
    assert_same(counted.server, plain.server)


def test_rounds_csv_has_traffic_and_operations_of_all_rounds_so_far(tmp_path):
    """A round sends the shared extractor, Linear(5, 2) and Linear(2, 2), in 8 bytes a value to two clients and back."""
    phases = [Phase("pFedMoE", PFedMoE(), rounds=3, clients_per_round=2)]
    fed = run(phases, model(), blobs((7, 7, 7, 7, 7, 7)), tmp_path)
    size = (5 * 2 + 2) + (2 * 2 + 2)
    for row in fed.run.rows:
        values = {name: row[name] for name in fed.run.states["pFedMoE"].traffic}
        sent = 2 * row["round"] * size
        assert values == {
            **{"parameters_down": sent, "parameters_up": sent, "parameters_between_clients": 0},
            **{"bytes_down": 8 * sent, "bytes_up": 8 * sent, "bytes_between_clients": 0},
        }
    flops = [row["flops"] for row in fed.run.rows]
    assert [row["round"] for row in fed.run.rows] == [1, 2, 3] and flops == sorted(flops) and flops[0] > 0
    assert [int(row["flops"]) for row in csv_rows(fed.run_dir / "rounds.csv")] == flops
