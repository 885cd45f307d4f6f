"""DP-SGD against a loop over samples, closed forms and statistics; and the backends against each other."""

import hmac
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import TensorData, blobs, mixture, phase, run, sparse_mixture
from helpers.adapters import adapters
from helpers.backends import FEW, assert_agree, local_training, train
from helpers.runs import assert_same
from helpers.workers import TwoInThisProcess, trained
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Generator, nn

from fedmoe_pl.algorithms import FedAvg, FedRep, FineTuning, Local, PFLMoE
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend, dp_sgd
from fedmoe_pl.backends.dp_sgd import DPSGD, add_clipped, clipped_sum, noisy_mean
from fedmoe_pl.backends.private_client import clipped_gradients
from fedmoe_pl.data import Batches, PoissonBatches, poisson_sampling
from fedmoe_pl.models import AdapterMoE, ConstantGate, GlobalOnly, LeNet5, LinearGate, LoRA
from fedmoe_pl.seeds import generator_of

SGD = partial(torch.optim.SGD, lr=0.5)


def private(training, noise_multiplier=1.0, max_grad_norm=0.5, **changes):
    privacy = DPSGD(max_grad_norm, 1e-3, noise_multiplier)
    return replace(training, sample_privacy=privacy, phase_name="it", **changes)


class Classifier(LightningModule):
    """A user's own module, with nothing of this package but a pure loss."""

    def __init__(self, network, optimizer=SGD):
        super().__init__()
        self.network, self.optimizer = network.double(), optimizer

    def forward(self, x):
        return self.network(x)

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1]), {}

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def normalized_by_groups():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def of_words():
    return nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.LayerNorm(30), nn.Linear(30, 3))


NETWORKS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)),
    "LeNet-5": (lambda: LeNet5(num_classes=3, in_channels=1), (1, 32, 32)),
    "group normalization": (normalized_by_groups, (1, 8, 8)),
    "embedding": (of_words, None),
    "adapters": (lambda: adapters(LinearGate(5)), (5,)),
}


def loop_over_samples(module, names, x, y, max_norm):
    """The sum of clipped gradients, one sample after another."""
    parameters = [dict(module.named_parameters())[name] for name in names]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(len(y)):
        gradients = torch.autograd.grad(module.loss((x[i : i + 1], y[i : i + 1]))[0], parameters)
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1, max_norm / norm)
    return dict(zip(names, total, strict=True))


@pytest.mark.parametrize("at_once", [2**28, 1])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_gradients_are_those_of_a_loop_over_samples(network, at_once, monkeypatch):
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    x = torch.randint(10, (6, 5)) if shape is None else torch.randn(6, *shape, dtype=torch.float64)
    y = torch.randint(3, (6,))
    if network == "adapters":
        pytest.importorskip("peft")
    module = make() if network == "adapters" else Classifier(make())
    module(x)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    training = local_training(module, FedAvg(), blobs())
    monkeypatch.setattr(dp_sgd, "_BYTES_AT_ONCE", at_once)
    whole = loop_over_samples(module, names, x, y, math.inf)
    norm = math.sqrt(sum(float((total**2).sum()) for total in whole.values())) / 6
    for max_norm in (0.3 * norm, norm, math.inf):
        expected = loop_over_samples(module, names, x, y, max_norm)
        actual = clipped_gradients(training, module, {}, names, (x, y), {}, max_norm)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_each_gradient_over_all_parameters_is_clipped_and_one_that_is_not_finite_counts_as_none():
    """The gradient of w x + v z by (w, v) is (x, z)."""
    parameters = {"w": torch.zeros(1), "v": torch.zeros(())}
    samples = torch.tensor([[3.0, 4.0], [0.0, 0.5], [math.nan, 1.0], [0.0, 0.0], [math.inf, 0.0], [0.0, -8.0]])

    def loss(parameters, sample):
        return (parameters["w"] * sample[:, 0] + parameters["v"] * sample[:, 1]).sum()

    sums = clipped_sum(loss, parameters, samples, 2.0)
    assert sums["w"].tolist() == pytest.approx([1.2]) and sums["v"].item() == pytest.approx(1.6 + 0.5 - 2)
    counts, sums = torch.tensor([[True, False, False], [True, False, True]]), {"v": torch.ones(2)}
    add_clipped(sums, {"v": samples[:, 1].view(2, 3)}, counts, 2.0)
    assert sums["v"].tolist() == [1 + 2, 1 + 0 - 2]


def test_the_noise_has_the_multiplier_times_the_norm_on_the_sum():
    sums = {"a": torch.ones(300, 40), "b": torch.full((5000,), 2.0, dtype=torch.float64)}
    noisy = noisy_mean(sums, 4, 0.5, 3.0, Generator().manual_seed(0))
    for name, mean in {"a": 1 / 4, "b": 2 / 4}.items():
        assert noisy[name].mean().item() == pytest.approx(mean, abs=0.02)
        assert noisy[name].std().item() == pytest.approx(3.0 * 0.5 / 4, rel=0.03)
        assert noisy[name].dtype == sums[name].dtype
    assert torch.equal(noisy_mean(sums, 4, 0.5, 0.0, Generator())["a"], torch.full((300, 40), 0.25))


def test_each_sample_joins_a_batch_with_the_same_probability_independently_of_others():
    n, size = 40, 5
    batches = PoissonBatches(torch.arange(n), torch.arange(n), torch.arange(n), size, True, Generator().manual_seed(0))
    assert len(batches) == 8 and poisson_sampling(n, size) == (0.125, 8)
    assert poisson_sampling(23, 4) == (4 / 23, 6) and poisson_sampling(21, 4) == (4 / 21, 5)
    drawn = torch.zeros(500 * 8, n)
    for step, (x, y) in enumerate(batch for _ in range(500) for batch in batches):
        assert torch.equal(x, y)
        drawn[step, x] = 1
    std = math.sqrt(0.125 * 0.875)
    assert (drawn.mean(0) - 0.125).abs().max() < 4 * std / math.sqrt(4000)
    correlations = drawn.T.corrcoef() - torch.eye(n)
    assert correlations.abs().max() < 5 / math.sqrt(4000)
    assert drawn.sum(1).std().item() == pytest.approx(std * math.sqrt(n), rel=0.05)
    assert (drawn.sum(1) == 0).any()


def test_drawn_samples_are_augmented():
    def add(x, generator):
        return x + torch.randint(1, 9, (1,), generator=generator)

    plain = Batches(torch.arange(40), torch.arange(40), torch.arange(40), 5, True, Generator().manual_seed(0), add)
    differences = [(x - y).tolist() for x, y in PoissonBatches.of(plain) if len(y)]
    assert all(len({*each}) == 1 and 1 <= each[0] < 9 for each in differences) and len({*map(min, differences)}) > 1


def by_hand(module, datamodule, client, round_index, epochs, lr, momentum, z, max_norm):
    """A client's training, written out: Poisson batches, a loop over samples, noise, and SGD with momentum."""
    samples, batch_size = datamodule.train_samples[client], datamodule.batch_size
    held = datamodule.x[samples].numpy().tobytes(), datamodule.y[samples].numpy().tobytes()
    shapes = [f"{values.dtype} {(len(samples), *values.shape[1:])}".encode() for values in (datamodule.x, datamodule.y)]
    content = b"".join((shapes[0], held[0], shapes[1], held[1]))
    digest = hmac.digest(b"0", content, "sha256").hex()
    batches, noise = (generator_of(0, purpose, "it", client, round_index, digest) for purpose in (12, 13))
    names, velocity = [name for name, _ in module.named_parameters()], {}
    for _ in range(epochs * max(round(len(samples) / batch_size), 1)):
        draws = torch.rand(len(samples), generator=batches, dtype=torch.float64)
        chosen = samples[draws < min(1, batch_size / len(samples))]
        sums = loop_over_samples(module, names, datamodule.x[chosen], datamodule.y[chosen], max_norm)
        for name, parameter in module.named_parameters():
            total = sums[name] + z * max_norm * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
            gradient = total / min(batch_size, len(samples))
            velocity[name] = gradient if name not in velocity else momentum * velocity[name] + gradient
            parameter.data -= lr * velocity[name]
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("backend", [TrainerBackend, StackedBackend])
def test_a_client_is_trained_as_by_hand(backend):
    """With noise of its own in each round; phases and seeds that differ have other generators: test_seeds.py."""
    torch.manual_seed(0)
    network, datamodule = nn.Linear(5, 3), blobs((9, 2))
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    training = private(local_training(Classifier(network, optimizer), Local(), datamodule, rounds=2), 0.7, 0.4)
    privacy = replace(training.sample_privacy, noise_multiplier=None, target_epsilon=1.0)
    own = replace(training, sample_privacy=privacy, noise_multipliers={0: 0.7, 1: 1.9})
    for each, multipliers, round in ((training, (0.7, 0.7), 0), (own, (0.7, 1.9), 0), (training, (0.7, 0.7), 1)):
        _, kept = train(backend(), each, round)
        for client, multiplier in enumerate(multipliers):
            module = Classifier(nn.Linear(5, 3))
            module.load_state_dict(training.initial)
            expected = by_hand(module, datamodule, client, round, 2, 0.5, 0.9, multiplier, 0.4)
            torch.testing.assert_close(kept[client], expected, rtol=1e-9, atol=1e-11)


METHODS = {
    "FedAvg": (FedAvg(), lambda: mixture(LinearGate(5))),
    "global expert": (FedAvg("global_expert.*"), lambda: mixture(GlobalOnly())),
    "FedRep": (FedRep("*.extractor.*", head_epochs=1), lambda: mixture(LinearGate(5))),
    "PFL-FB on features": (FineTuning("local_expert.classifier.*", 0.25), lambda: mixture(ConstantGate(0))),
    "PFL-MF on features": (PFLMoE(), lambda: mixture(LinearGate(5))),
    "sparse experts whatever their samples": (FedAvg(), lambda: sparse_mixture(3)),
}


@pytest.mark.few("FedAvg", "sparse experts whatever their samples")
@pytest.mark.parametrize("method", METHODS)
def test_stacked_and_one_by_one_agree(method):
    algorithm, make = METHODS[method]
    assert_agree(private(local_training(make(), algorithm, blobs(FEW))), 1e-9, clients_per_stack=3)


class Again(torch.optim.SGD):
    """Computes the gradient of a batch twice in a step."""

    def step(self, closure=None):
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


@pytest.mark.parametrize("optimizer", [partial(Again, lr=0.1), partial(torch.optim.LBFGS, lr=0.1)])
@pytest.mark.parametrize("backend", [TrainerBackend(), AutoBackend()])
def test_a_step_takes_one_noisy_gradient_or_is_refused(optimizer, backend):
    """Only one is accounted for."""
    training = private(local_training(mixture(LinearGate(5), optimizer=optimizer), FedAvg(), blobs(FEW)))
    with pytest.raises(MisconfigurationException, match=r"sample_privacy is .* more than once in a step"):
        train(backend, training)


@pytest.mark.slow
def test_two_workers_give_the_same_bits():
    training = private(local_training(mixture(LinearGate(5)), FedAvg(), blobs(FEW)))
    alone = trained(TrainerBackend(), training)
    assert_same(alone, trained(TrainerBackend(), training))
    assert_same(alone, trained(TwoInThisProcess(), training))


def test_dropout_is_drawn_for_each_sample():
    datamodule = TensorData(torch.ones(64, 1), torch.zeros(64, dtype=torch.long), [torch.arange(64)], batch_size=64)
    datamodule.setup()
    module = Classifier(nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 2)).float())
    module.network.float()
    training = private(local_training(module, Local(), datamodule, max_epochs=1), 0.0, 1e6)
    before = training.initial
    _, kept = train(TrainerBackend(), training)
    moved = (before["network.1.weight"] - kept[0]["network.1.weight"])[1].item() / 0.5
    kept_scores = 2 * before["network.1.weight"][:, 0] + before["network.1.bias"]
    of_kept = 2 * kept_scores.softmax(0)[1].item()
    assert 0 < moved / of_kept < 1 and (moved / of_kept * 64) == pytest.approx(round(moved / of_kept * 64), abs=1e-3)


def test_parameters_without_a_loss_stay_as_they_are():
    module = mixture(GlobalOnly(), optimizer=SGD)
    for backend in (TrainerBackend(), StackedBackend()):
        _, kept = train(backend, private(local_training(module, Local(), blobs((6,)))))
        assert kept[0] and all(name.startswith("global_expert.") for name in kept[0])


class MaximumLoss(Classifier):
    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none").max(), {}


class Branching(Classifier):
    """Asks for a value, as masks of transformers do, which vmap refuses."""

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return (loss if loss > 0 else 2 * loss), metrics


class WithHooks(Classifier):
    """Its optimizer scales the gradients where they are computed."""

    def configure_optimizers(self):
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        return super().configure_optimizers()


class Squeezing(nn.Module):
    def forward(self, x):
        return x.squeeze()


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0).detach())
        return x


class MeanInParameter(RunningMean):
    def __init__(self):
        super().__init__()
        del self.mean
        self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)


class Counting(nn.Module):
    """Counts the signs of all inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))

    def forward(self, x):
        self.counts += torch.stack([(x.detach() > 0).sum(), (x.detach() <= 0).sum()])
        return x


class Words(nn.Module):
    """Reads numbers as words, whose rows of the table are shortened when they are read."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3, max_norm=1.0)

    def forward(self, x):
        return self.table(x.detach().long().clamp(0, 8)).mean(1)


class MeanOfBatch(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("module", "arguments", "because"),
    [
        (MaximumLoss(nn.Linear(5, 3)), {}, "is not the mean of those of its samples"),
        (Classifier(nn.Sequential(MeanOfBatch(), nn.Linear(5, 3))), {}, "is not the mean of those of its samples"),
        (Classifier(nn.Sequential(Squeezing(), nn.Linear(5, 3))), {}, "a trial step .*each sample failed with"),
        (Classifier(nn.Sequential(RunningMean(), nn.Linear(5, 3))), {}, "a step itself changes 'network.0.mean'"),
        (Classifier(nn.Sequential(MeanInParameter(), nn.Linear(5, 3))), {}, "a step itself changes 'network.0.mean'"),
        (Classifier(nn.Sequential(Counting(), nn.Linear(5, 3))), {}, "a step itself changes 'network.0.counts'"),
        (Classifier(Words()), {}, "'network.table' shortens the rows of a batch to its max_norm"),
        (Classifier(nn.Linear(5, 3)), {"accumulate_grad_batches": 2}, "accumulate_grad_batches is set"),
        (Classifier(nn.Linear(5, 3)), {"logger": True}, "logger is set"),
        (WithHooks(nn.Linear(5, 3)), {}, "configure_optimizers registers hooks of parameters"),
    ],
)
def test_what_has_no_gradient_of_a_sample_is_refused(module, arguments, because):
    training = private(local_training(module, FedAvg(), blobs(), **arguments))
    for backend in (TrainerBackend(), StackedBackend(), AutoBackend()):
        with pytest.raises(Exception, match=f"Phase 'it': sample_privacy is .*{because}"):
            backend.plan(training)


def small_of_transformers(name, **arguments):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    arguments = {"vocab_size": 10, "num_labels": 3, "pad_token_id": 0, **arguments}
    config = getattr(transformers, f"{name}Config")(**arguments, bos_token_id=None, eos_token_id=None)
    base = getattr(transformers, f"{name}ForSequenceClassification")(config)
    head = "score" if name == "GPT2" else "classifier"
    lora = LoRA(["c_attn"] if name == "GPT2" else ["query"], r=2, modules_to_save=[head])
    return AdapterMoE(base, lora, GlobalOnly(), pad_token_id=0, optimizer=SGD).double()


def of_texts():
    """Clients with texts of 5 tokens, some of which end with padding."""
    x = torch.randint(1, 10, (19, 5), generator=torch.Generator().manual_seed(0))
    x[::3, 3:] = 0
    y = torch.arange(19) % 3
    datamodule = TensorData(x, y, torch.arange(13).split([6, 7]), (x[13:], y[13:]), None, batch_size=4)
    datamodule.setup()
    return datamodule


BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
ASKING = {  # for values of tensors
    "loss": (lambda: Branching(nn.Linear(5, 3)), blobs),
    "BERT": (lambda: small_of_transformers("Bert", **BERT), of_texts),
    "GPT-2": (lambda: small_of_transformers("GPT2", n_embd=8, n_layer=1, n_head=2, n_positions=8), of_texts),
}


@pytest.mark.parametrize("large", [2**20, 0])
@pytest.mark.parametrize("name", ASKING)
def test_a_model_that_vmap_refuses_is_trained_whatever_its_size(name, large, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(dp_sgd, "_LARGE", large)
    module, datamodule = ASKING[name][0]().eval(), ASKING[name][1]()
    training = private(local_training(module, FedAvg(), datamodule), 0.0)
    TrainerBackend().plan(training)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and "local" not in name]
    (batch,) = datamodule.batches(datamodule.train_samples[0][:6], batch_size=6)
    actual = clipped_gradients(training, module, {}, names, batch, {}, 0.5)
    torch.testing.assert_close(actual, loop_over_samples(module, names, *batch, 0.5), rtol=1e-11, atol=1e-12)


def test_vmap_is_tried_once_for_each_client_whose_model_it_refuses(monkeypatch, tmp_path):
    tried, steps = [], []
    own, one = dp_sgd.sample_gradients, dp_sgd._gradient_of_one
    monkeypatch.setattr(dp_sgd, "sample_gradients", lambda *arguments: tried.append(1) or own(*arguments))
    monkeypatch.setattr(dp_sgd, "_gradient_of_one", lambda *arguments: steps.append(1) or one(*arguments))
    privacy = DPSGD(1.0, 1e-3, noise_multiplier=0.5)
    its_phase = phase("it", FedAvg(), rounds=2, sample_privacy=privacy)
    run([its_phase], Branching(nn.Linear(5, 3)), blobs(), tmp_path, 2, backend=TrainerBackend())
    assert len(tried) == 1 + 3 * 2, "in the trial before training, and by each of three clients in each of two rounds"
    assert len(steps) > 4 * len(tried)
