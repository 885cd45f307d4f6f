"""The task ``causal_lm``: a position's logits are compared with the token after it, and tokens count, not samples."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.backends import assert_agree, local_training
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torchmetrics.text import Perplexity

from fedmoe_pl import ClusteredMoE, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.algorithms.shared.parts import expert_loss, summed_loss, training_gradient
from fedmoe_pl.backends.local_client import client_of
from fedmoe_pl.data import FromDatasets
from fedmoe_pl.evaluation import measure
from fedmoe_pl.models import EqualWeights
from fedmoe_pl.models.mixtures.tasks import preds_and_target

V = 5
IGNORED = -100


class Bigrams(nn.Module):
    """The logits of the next token depend on a token alone: a row of a table."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(V, V, generator=torch.Generator().manual_seed(seed)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.table[input_ids]


def mixture(**kwargs) -> PersonalizedMoE:
    return PersonalizedMoE(Bigrams(0), Bigrams(1), task="causal_lm", **kwargs)


def texts(seed: int, number: int) -> list[list[int]]:
    lengths = [2 + (7 * index + seed) % 6 for index in range(number)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]


def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a collator of transformers makes them, but that the padding has labels, which must not count."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def by_hand(tables: list[torch.Tensor], samples: list[list[int]]) -> list[float]:
    """The negative log-likelihood of each token but the first of each text, of the mean logits."""
    logits = torch.stack(tables).mean(0)
    pairs = [pair for sample in samples for pair in itertools.pairwise(sample)]
    return [-logits[token].log_softmax(0)[following].item() for token, following in pairs]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    module, samples = mixture(), texts(0, 6)
    expected = mean(by_hand([module.global_expert.table, module.local_expert.table], samples))
    for criterion in (None, nn.CrossEntropyLoss()):
        module.criterion = criterion
        assert module.loss(padded(samples))[0].item() == pytest.approx(expected, rel=1e-6)
    global_loss = mean(by_hand([module.global_expert.table], samples))
    assert expert_loss(module, "global_expert", padded(samples)).item() == pytest.approx(global_loss, rel=1e-6)


def test_each_sample_has_the_mean_over_its_own_tokens_and_a_sum_is_over_all_tokens() -> None:
    module, samples = mixture(), [*texts(0, 3), [2]]  # the last one has no token to predict
    batch = padded(samples)
    labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    tables = [module.global_expert.table, module.local_expert.table]
    each = [by_hand(tables, [sample]) for sample in samples]
    losses = module.loss_of(module(batch["input_ids"]), labels, "none")
    assert losses.tolist() == pytest.approx([*map(mean, each[:3]), 0], rel=1e-6)
    assert summed_loss(module, module(batch["input_ids"]), labels).item() == pytest.approx(
        sum(map(sum, each)), rel=1e-6
    )


def test_logits_in_half_precision_are_compared_in_float32() -> None:
    """As by transformers; the sum over the tokens is larger than any value of float16."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = 60 * torch.randn(4, 900, V, generator=generator).half(), torch.arange(3600).view(4, 900) % V
    each = F.cross_entropy(logits.float()[:, :-1].mT, labels[:, 1:], reduction="none")
    assert each.sum() > torch.finfo(torch.float16).max
    for criterion in (None, nn.CrossEntropyLoss()):
        assert mixture(loss=criterion).loss_of(logits, labels).item() == pytest.approx(each.mean().item(), rel=1e-5)
    torch.testing.assert_close(mixture().loss_of(logits, labels, "none"), each.mean(1))
    assert torch.equal(preds_and_target("causal_lm", logits, labels)[0], logits.float())


def test_a_batch_without_tokens_that_count_trains_nothing() -> None:
    module = mixture()
    loss = module.loss((torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)))[0]
    loss.backward()
    assert loss == 0 and module.global_expert.table.grad.abs().sum() == 0


def data(collate_fn=None, **kwargs) -> FromDatasets:
    train, test = ([{"input_ids": ids} for ids in texts(*arguments)] for arguments in ((0, 14), (1, 9)))
    return FromDatasets(train, test, collate_fn=collate_fn or collated, **{"num_clients": 2, "batch_size": 3, **kwargs})


def collated(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return padded([sample["input_ids"] for sample in samples])


@pytest.mark.parametrize("at_once", [2**26, 5 * V])
def test_perplexity_and_losses_of_clients_are_over_their_tokens(tmp_path, monkeypatch, at_once) -> None:
    monkeypatch.setattr(measure, "_MOST_VALUES", at_once)  # the outputs of a few samples, or of one
    phases, trainer = [Phase("p", FedAvg(), gate=EqualWeights())], {"accelerator": "cpu", "devices": 1}
    data_of_clients = data(test_fraction=0.3, validation_fraction=0.3)
    run = federation(tmp_path, phases, trainer=trainer, metrics={"perplexity": Perplexity(ignore_index=IGNORED)})
    run.fit(mixture(), data_of_clients)
    (evaluation,) = run.run.states["p"].evaluations
    everything = [*texts(0, 14), *texts(1, 9)]
    for client in evaluation.clients:
        module = run.client_module("p", client.client)
        tables = [module.global_expert.table, module.local_expert.table]
        for split, indices in (
            ("local_test", data_of_clients.test_samples[client.client]),
            ("global_test", data_of_clients.global_test),
            ("validation", data_of_clients.validation_samples[client.client]),
        ):
            losses = by_hand(tables, [everything[index] for index in indices.tolist()])
            assert len(losses) > 1
            assert client.metrics[f"{split}_perplexity"] == pytest.approx(math.exp(mean(losses)), rel=1e-5)
            loss = client.validation_loss if split == "validation" else client.metrics[f"{split}_loss"]
            assert loss == pytest.approx(mean(losses), rel=1e-5)


def test_outputs_in_evaluation_are_few_at_once(monkeypatch) -> None:
    monkeypatch.setattr(measure, "_MOST_VALUES", 3 * 7 * V)
    module, given = mixture().eval(), data()
    given.setup()
    sizes = []
    module.global_expert.register_forward_hook(lambda part, inputs, output: sizes.append(output.numel()))
    logits = [scores for scores, _, _ in measure._outputs(module, given, given.global_test)]
    assert sum(map(len, logits)) == 9 and max(sizes) <= 3 * 7 * V and len(logits) == 3


def test_a_plain_trainer_logs_the_mean_over_the_tokens_of_all_batches() -> None:
    module, samples = mixture(), texts(3, 7)
    loader = torch.utils.data.DataLoader(samples, 2, collate_fn=padded)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    logged = trainer.validate(module, loader, verbose=False)[0]
    expected = mean(by_hand([module.global_expert.table, module.local_expert.table], samples))
    assert logged["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert logged["validation_gate/global_expert"] == 0.5


def test_the_gradient_of_all_samples_is_that_of_the_mean_over_their_tokens() -> None:
    given = data(num_clients=1)
    given.setup()
    training = local_training(module := mixture(), FedAvg(), given)
    gradient = training_gradient(client_of(training, module, 0, {}, 0), "local_expert", {})

    tokens, following = torch.tensor([pair for ids in texts(0, 14) for pair in itertools.pairwise(ids)]).T

    def loss(table: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(table[tokens], following)

    expected = torch.func.grad(loss)(module.local_expert.table.detach())
    torch.testing.assert_close(gradient["table"], expected)


def test_stacked_clients_agree() -> None:
    ids = torch.tensor([[token % V for token in range(start, start + 6)] for start in range(15)])
    labels = ids.clone()
    labels[::2, 4:] = IGNORED
    dataset = torch.utils.data.TensorDataset(ids, labels)
    given = FromDatasets(dataset, dataset, num_clients=3, batch_size=4)  # the last batch is short
    given.setup()
    assert given.reader is None
    assert_agree(local_training(mixture(optimizer=partial(torch.optim.SGD, lr=0.5)), FedAvg(), given), 1e-6)


def test_clusters_mix_logits() -> None:
    module = ClusteredMoE(nn.Embedding(5, 5), 2, task="causal_lm")
    ids = torch.arange(4)[None]
    expected = torch.stack([expert(ids) for expert in (*module.global_experts, module.local_expert)]).mean(0)
    torch.testing.assert_close(module(ids), expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mixing": "probabilities"}, "mixing is 'probabilities', but must be logits, because the task is 'causal_lm'"),
        ({"loss": nn.MSELoss()}, "task is 'causal_lm', but must be regression, because the loss is MSELoss"),
    ],
)
def test_a_mixture_refuses_what_does_not_fit_the_task(arguments, sentence) -> None:
    with pytest.raises(MisconfigurationException, match=sentence):
        mixture(**arguments)


REFUSED = {
    "must be one with ignore_index -100, because tokens": (mixture, {"metrics": {"perplexity": Perplexity()}}),
    "trainer.strategy is 'ddp', but": (mixture, {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}}),
    r"task is 'multiclass', .* outputs of shape \(\d, 5\) do not fit targets of shape \(\d,\)": (
        partial(PersonalizedMoE, Bigrams(), task="multiclass"),
        {},
    ),
    "it has no reset_parameters|its .* has no reset_parameters": (
        partial(ClusteredMoE, Bigrams(), 2, task="causal_lm"),
        {},
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_federation_refuses_what_would_measure_something_else(tmp_path, sentence) -> None:
    model, arguments = REFUSED[sentence]
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", FedAvg(), gate=EqualWeights())], **arguments).fit(model(), data())


def test_padding_on_the_left_is_refused(tmp_path) -> None:
    def on_the_left(samples):
        return {name: tensor.flip(1) for name, tensor in collated(samples).items()}

    run = federation(tmp_path, [Phase("p", FedAvg(), gate=EqualWeights())], metrics={})
    with pytest.raises(MisconfigurationException, match="collate_fn pads texts on the left, but must pad them on the"):
        run.fit(mixture(), data(on_the_left))


def test_predictions_of_tokens_are_no_table(tmp_path) -> None:
    run = federation(tmp_path, [Phase("p", FedAvg(), gate=EqualWeights())])
    run.fit(mixture(), data())
    with pytest.raises(MisconfigurationException, match="task is 'causal_lm', but must be another for fedmoe predict"):
        run.predict(mixture(), data())
