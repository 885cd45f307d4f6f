"""Models of transformers and data of Hugging Face's datasets, as their users have them."""

import math
from functools import partial

import pytest
import torch
from helpers.runs import assert_same, federation
from helpers.workers import TwoInThisProcess
from torch import nn
from torchmetrics.text import Perplexity

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import Ditto, FedAvg, FineTuning, LabelPrior, PFLMoE
from fedmoe_pl.data import Dirichlet, FromDatasets
from fedmoe_pl.models import EqualWeights, Gate, GlobalOnly, LocalOnly

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

VOCABULARY, CLASSES = 20, 3


def texts(seed: int, number: int):
    """Texts of several lengths, whose words tell the class."""
    generator = torch.Generator().manual_seed(seed)

    def text(label: int) -> dict[str, object]:
        length = int(torch.randint(3, 9, (), generator=generator))
        ids = torch.randint(1 + 4 * label, 9 + 4 * label, (length,), generator=generator).tolist()
        return {"input_ids": ids, "attention_mask": [1] * length, "label": label}

    return datasets.Dataset.from_list([text(index % CLASSES) for index in range(number)])


def padded(samples: list[dict]):
    """As ``DataCollatorWithPadding`` makes batches, without a tokenizer: with another key of the labels."""
    columns = {
        name: nn.utils.rnn.pad_sequence([torch.tensor(sample[name]) for sample in samples], batch_first=True)
        for name in ("input_ids", "attention_mask")
    }
    labels = torch.tensor([sample["label"] for sample in samples])
    return transformers.BatchEncoding({**columns, "labels": labels})


def of_tokens(samples: list[dict]):
    """As ``DataCollatorForLanguageModeling(mlm=False)`` makes batches."""
    batch = padded(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SMALL, intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES, pad_token_id=0
    )
    return transformers.BertForSequenceClassification(config)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


class MeanGate(Gate):
    """Reads the mean embedding of the tokens of a text, without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 2)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = x["attention_mask"][..., None]
        return ((self.embedding(x["input_ids"]) * mask).sum(1) / mask.sum(1)).softmax(1)


def data(collate_fn, **kwargs) -> FromDatasets:
    arguments = {"num_clients": 2, "batch_size": 8, "test_fraction": 0.3, "validation_fraction": 0.2}
    return FromDatasets(texts(0, 24), texts(1, 6), collate_fn=collate_fn, **arguments, **kwargs)


def model(expert: nn.Module, **kwargs) -> PersonalizedMoE:
    return PersonalizedMoE(expert, optimizer=partial(torch.optim.AdamW, lr=0.01), **kwargs)


def phases() -> list[Phase]:
    torch.manual_seed(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()),
        Phase("FT", FineTuning(gate_fraction=0.25), start="FedAvg", gate=LocalOnly()),
        Phase("MoE", PFLMoE(), start="FT", gate=MeanGate()),
    ]


@pytest.mark.slow
def test_a_classifier_is_personalized_and_two_workers_give_the_same_bits(tmp_path) -> None:
    runs = []
    for arguments in ({}, {"backend": TwoInThisProcess()}):
        with_prior = [*phases(), Phase("Prior", LabelPrior(), start="FedAvg", gate=GlobalOnly())]
        run = federation(tmp_path, with_prior, trainer={"accelerator": "cpu", "devices": 1}, **arguments)
        run.fit(model(bert()), data(padded, targets="label", partitioner=Dirichlet(1.0)))
        runs.append(run)
    for name, state in runs[0].run.states.items():
        assert_same(runs[1].run.states[name].server, state.server)
        trees = ({client: dict(tree) for client, tree in run.run.states[name].clients.items()} for run in runs)
        assert_same(*trees)
        assert 0 < state.evaluations[0].spread("global_test").mean <= 1
    weights = runs[0].run.states["MoE"].evaluations[0].clients[0].gate_weights
    assert weights.shape[1] == 2 and not torch.equal(weights[0], weights[-1])
    assert runs[0].run.states["FedAvg"].traffic  # counted, as FLOPs are
    batch = padded([texts(2, 1)[0]])
    with torch.no_grad():
        logits = runs[0].client_module("FedAvg", 0).eval().predict_step(batch, 0)["logits"]
    assert logits.shape == (1, CLASSES)


@pytest.mark.slow
def test_a_language_model_is_personalized_and_has_the_perplexity_of_its_own_loss(tmp_path) -> None:
    given, metrics = data(of_tokens), {"perplexity": Perplexity(ignore_index=-100)}
    of_both = [phases()[0], Phase("Ditto", Ditto(), gate=LocalOnly())]
    run = federation(tmp_path, of_both, trainer={"accelerator": "cpu", "devices": 1}, metrics=metrics)
    run.fit(model(gpt(), task="causal_lm"), given)
    for client in run.run.states["FedAvg"].evaluations[0].clients:
        expert = run.client_module("FedAvg", client.client).global_expert.eval()
        total = tokens = 0
        with torch.no_grad():
            for index in given.test_samples[client.client].tolist():
                batch = of_tokens([given.train_dataset[index]])
                number = batch["input_ids"].shape[1] - 1
                total, tokens = total + expert(**batch).loss.item() * number, tokens + number
        assert client.metrics["local_test_loss"] == pytest.approx(total / tokens, rel=1e-5)
        assert client.metrics["local_test_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert run.run.states["Ditto"].evaluations[0].clients[0].metrics["global_test_perplexity"] < VOCABULARY


def test_tensors_of_tokens_in_memory_are_the_fast_way(tmp_path) -> None:
    ids = torch.randint(1, VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(ids, ids)
    run = federation(tmp_path, [Phase("p", FedAvg(), gate=EqualWeights())])
    run.fit(model(gpt(), task="causal_lm"), FromDatasets(dataset, dataset, num_clients=2, batch_size=4))
    assert run.run.states["p"].evaluations[0].clients[0].metrics["global_test_loss"] < 1.1 * math.log(VOCABULARY)
