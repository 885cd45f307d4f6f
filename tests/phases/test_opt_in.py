"""What opts out influences nothing that leaves a client: preprocessing, validation and the selected round."""

import csv
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import TensorData, assert_same_bits, mixture, phase, run
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Federation, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, OptInFedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.data import AGNews, Arrays
from fedmoe_pl.data.datasets.ag_news import tokenize
from fedmoe_pl.models import BiLSTM, GlobalOnly, PersonalizedMoE

SIZES = (30, 24, 36, 20)
SEED = 3
ALGORITHMS = [
    pytest.param(OptInFedAvg("global_expert.*", opt_out_clients=0.5), id="clients"),
    pytest.param(OptInFedAvg("global_expert.*", opt_out_data=0.7), id="data"),
    pytest.param(OptInFedAvg("global_expert.*", 0.25, 0.7), id="both"),
]


def images() -> Arrays:
    """Dark, grey and light images, so that a few rounds learn to tell them apart."""
    n, generator = sum(SIZES) + 12, torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = (torch.randint(60, (n, 2, 3, 3), generator=generator) + 80 * y[:, None, None, None]).to(torch.uint8)
    return Arrays(x[:-12], y[:-12], x[-12:], y[-12:])


def image_data(arrays: Arrays, mean=None, std=None) -> TensorData:
    parts = torch.arange(sum(SIZES)).split(list(SIZES))
    data = TensorData(arrays.x_train, arrays.y_train, parts, batch_size=5, validation_fraction=0.3)
    data.arrays = replace(arrays, mean=mean, std=std)
    return data


def split_by_choice(data, algorithm) -> dict[str, torch.Tensor]:
    """Training and validation samples that are in and out, by the algorithm's hooks."""
    data.deal()
    participants, chosen = algorithm.opt_out.participants(range(len(SIZES)), SEED), {}
    for name, parts in (("training", data.train_samples), ("validation", data.validation_samples)):
        opted_in = [algorithm.opt_out.opted_in(i, parts[i], SEED, name == "validation") for i in participants]
        chosen[f"{name} in"] = torch.cat(opted_in)
        chosen[f"{name} out"] = parts.indices[~torch.isin(parts.indices, chosen[f"{name} in"])]
    return chosen


def trained(data, algorithm, tmp_path, monitor="validation_loss", **kwargs):
    """Four rounds in which clients and server select by validation samples."""
    expert = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    train = Train(trainer={"limit_val_batches": 1.0}, callbacks=[BestEpoch()])
    arguments = {"train": train, "gate": GlobalOnly(), **kwargs}
    phases = [Phase("FedAvg", algorithm, rounds=4, select=Select(monitor), **arguments)]
    model = mixture(expert=expert, dtype=torch.float32, optimizer=partial(torch.optim.SGD, lr=0.05))
    federation = run(phases, model, data, tmp_path, max_epochs=3, backend=TrainerBackend(), seed=SEED)
    return federation.run.states["FedAvg"].server, federation.results["FedAvg"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_images_that_opt_out_change_no_bit_of_what_the_server_has_and_of_the_round_it_selects(algorithm, tmp_path):
    chosen = split_by_choice(image_data(images()), algorithm)
    assert all(len(samples) for samples in chosen.values())

    def result(name=None, inverts=False, relabels=False):
        """With other images, or labels, of some samples."""
        arrays, samples = images(), chosen.get(name, [])
        if inverts:
            arrays.x_train[samples] = 255 - arrays.x_train[samples]
        if relabels:
            arrays.y_train[samples] = (arrays.y_train[samples] + 1) % 3
        server, evaluation = trained(image_data(arrays), algorithm, tmp_path / f"{name}")
        return server, evaluation.round, [str(client.validation_loss) for client in evaluation.clients]

    server, *selected = result()
    for name in ("training out", "validation out"):
        changed_server, *changed = result(name, inverts=True, relabels=True)
        assert_same_bits(changed_server, server)
        assert changed == selected
    weight = "global_expert.1.weight"
    assert not torch.equal(result("training in", inverts=True)[0][weight], server[weight])
    other_server, round, _ = result("validation in", relabels=True)
    assert round != selected[0], "with wrong labels for validation, learning looks like forgetting"
    assert not torch.equal(other_server[weight], server[weight])


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_images_are_normalized_by_those_that_opt_in(algorithm, tmp_path):
    data, train = image_data(images()), images().x_train.numpy() / 255
    trained(data, algorithm, tmp_path)
    pixels = train[split_by_choice(image_data(images()), algorithm)["training in"]]
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))
    assert np.allclose(data.normalization, (mean, std), rtol=1e-12, atol=0)
    expected = torch.from_numpy((train - mean[:, None, None]) / std[:, None, None])
    torch.testing.assert_close(data.x[: sum(SIZES)].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.few("both")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_validation_is_that_of_samples_that_opt_in_and_nan_without_any(algorithm, tmp_path):
    data = image_data(images())
    server, evaluation = trained(data, algorithm, tmp_path)
    inside = set(split_by_choice(image_data(images()), algorithm)["validation in"].tolist())
    for client, evaluated in enumerate(evaluation.clients):
        samples = [i for i in data.validation_samples[client].tolist() if i in inside]
        if client not in algorithm.opt_out.participants(range(len(SIZES)), SEED):
            assert not samples and math.isnan(evaluated.validation) and math.isnan(evaluated.validation_loss)
            continue
        logits = data.x[samples].flatten(1) @ server["global_expert.1.weight"].T + server["global_expert.1.bias"]
        right = (logits.argmax(1) == data.y[samples]).double().mean()
        assert evaluated.validation == pytest.approx(right.item(), abs=1e-6)
        losses = torch.logsumexp(logits, 1) - logits[torch.arange(len(samples)), data.y[samples]]
        assert evaluated.validation_loss == pytest.approx(losses.mean().item(), rel=1e-5)


# Texts

WORDS = ("goal match team", "shares profit market", "court vote law", "chip software robot")


def write_texts(folder, changed=()):
    """Sixty texts, each of three words of its class; those in ``changed`` are about something else."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    rows = [(1 + i % 4, "", " ".join(rng.choice(WORDS[i % 4].split(), 3))) for i in range(60)]
    for i in changed:
        rows[i] = (1 + (i + 1) % 4, "", "sea sand sun")
    for part, written in (("train", rows), ("test", rows[:8])):
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(written)
    return rows


def text_data(folder):
    return AGNews(root=str(folder), vocabulary_size=8, length=4, num_clients=len(SIZES), validation_fraction=0.2)


def trained_texts(data, algorithm, tmp_path):
    torch.manual_seed(0)
    expert = BiLSTM(vocabulary_size=10, embedding_dim=3, hidden=2, num_classes=4)
    model = PersonalizedMoE(expert, optimizer=partial(torch.optim.SGD, lr=0.5))
    phases = [phase("FedAvg", algorithm, rounds=2, gate=GlobalOnly())]
    federation = run(phases, model, data, tmp_path / "run", backend=TrainerBackend(), seed=SEED)
    return federation.run.states["FedAvg"].server


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_texts_that_opt_out_change_neither_the_vocabulary_nor_a_bit_of_what_the_server_has(algorithm, tmp_path):
    def result(changed=()):
        rows = write_texts(tmp_path / "data", changed)
        data = text_data(tmp_path / "data")
        return trained_texts(data, algorithm, tmp_path), data.vocabulary, rows

    server, vocabulary, rows = result()
    chosen = split_by_choice(text_data(tmp_path / "data"), algorithm)
    counts = Counter(word for i in chosen["training in"].tolist() for word in tokenize(rows[i][2]))
    assert vocabulary == sorted(counts, key=lambda word: (-counts[word], word))[:8]
    changed_server, changed, _ = result(torch.cat((chosen["training out"], chosen["validation out"])).tolist())
    assert_same_bits(changed_server, server)
    assert changed == vocabulary
    other_server, other, _ = result(chosen["training in"][:8].tolist())
    assert other != vocabulary
    assert not torch.equal(other_server["global_expert.classifier.weight"], server["global_expert.classifier.weight"])


# Refusals


@pytest.mark.slow
def test_statistics_of_samples_that_opt_out_are_refused(tmp_path):
    algorithm = OptInFedAvg("global_expert.*", opt_out_data=0.4)
    data = image_data(images())
    data.setup()
    message = "TensorData: normalization: it was computed from samples that opt out, because setup was called before"
    with pytest.raises(MisconfigurationException, match=message):
        trained(data, algorithm, tmp_path)
    given = image_data(images(), mean=(0.5, 0.5), std=(0.2, 0.2))
    given.setup()
    trained(given, algorithm, tmp_path)
    write_texts(tmp_path / "data")
    texts = text_data(tmp_path / "data")
    texts.setup()
    with pytest.raises(MisconfigurationException, match=r"AGNews: vocabulary: it was computed from .*; leave setup to"):
        trained_texts(texts, algorithm, tmp_path)


def test_a_monitor_that_depends_on_the_classes_of_samples_that_opt_out_is_refused(tmp_path):
    message = "Phase 'FedAvg': select.monitor is 'reweighted_test', but must be another"
    with pytest.raises(MisconfigurationException, match=message):
        trained(image_data(images()), OptInFedAvg("global_expert.*", opt_out_data=0.4), tmp_path, "reweighted_test")
    trained(image_data(images()), OptInFedAvg("global_expert.*", opt_out_clients=0.5), tmp_path, "reweighted_test")


def test_a_run_does_not_go_on_with_other_statistics(tmp_path):
    """A phase that is added in between, in which clients opt out, would change how images are normalized."""
    torch.manual_seed(0)
    first = phase("FedAvg", FedAvg("global_expert.*"))
    model = mixture(expert=nn.Sequential(nn.Flatten(), nn.Linear(18, 3)), dtype=torch.float32)
    finished = run([first], model, image_data(images()), tmp_path, enable_checkpointing=True)
    added = phase("opt-out", OptInFedAvg("global_expert.*", opt_out_clients=0.5))
    longer = Federation([first, added], {"max_epochs": 1}, logger=False, enable_progress_bar=False)
    with pytest.raises(MisconfigurationException, match="a run with another normalization"):
        longer.fit(model, image_data(images()), str(finished.run_dir / "checkpoints/last.ckpt"))
