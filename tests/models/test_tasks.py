"""Mixtures for regression, labels that do not exclude each other, and dense prediction."""

import pytest
import torch
import torch.nn.functional as F
from helpers.models import plain_trainer, samples, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl.models import ClusteredMoE, FeatureGate, LinearGate, LocalOnly, PersonalizedMoE, SmallFCN, SparseMoE
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.models.mixtures.tasks import fits, loss_weight, preds_and_target, range_problem

X, _ = samples(6)
IMAGES = torch.randn(4, 1, 6, 5, generator=torch.Generator().manual_seed(0))


def half_squared_error(outputs, targets):
    return (outputs - targets).square().mean() / 2


def mixture(outputs=1, **kwargs):
    torch.manual_seed(0)
    module = PersonalizedMoE(nn.Linear(5, outputs), nn.Linear(5, outputs), LinearGate(5), **kwargs)
    return module.double()


def experts(module, x):
    return module.global_expert(x), module.local_expert(x), module.gate(x)


OF_PIXELS = torch.tensor([-100] * 11 + [0, 1, 2, -100, 1] + [2] * 8).view(6, 2, 2)


@plain_trainer
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (None, OF_PIXELS),
        (nn.CrossEntropyLoss(ignore_index=255), OF_PIXELS.masked_fill(OF_PIXELS == -100, 255).byte()),
        (nn.CrossEntropyLoss(ignore_index=0), torch.tensor([0, 0, 1, 0, 1, 2])),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0])), torch.tensor([0, 0, 0, 2, 1, 2])),
    ],
    ids=["pixels", "pixels as bytes", "an ignored class", "weights of classes"],
)
def test_a_plain_trainer_logs_means_over_what_counts_in_batches_of_which_some_have_nothing(tmp_path, loss, targets):
    outputs = torch.randn(6, 3, *targets.shape[1:], generator=torch.Generator().manual_seed(1))
    module = PersonalizedMoE(nn.Identity(), nn.Identity(), LinearGate(outputs[0].numel()), loss=loss)
    module.gate.reset_parameters()
    loader = DataLoader(TensorDataset(outputs, targets), 2)
    (logged,) = trainer(tmp_path).validate(module, loader, verbose=False)
    criterion = loss or nn.CrossEntropyLoss()
    right = (outputs.argmax(1) == targets)[targets != criterion.ignore_index]
    assert logged["validation_loss"] == pytest.approx(criterion(outputs, targets.long()).item())
    assert logged["validation_accuracy"] == pytest.approx(right.double().mean().item())
    assert logged["validation_gate/global_expert"] == pytest.approx(module.gate(outputs)[:, 0].mean().item())


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2, 4)])
@pytest.mark.parametrize("mixing", ["probabilities", "log_probabilities", "probabilities_without_log"])
def test_targets_may_be_probabilities_of_classes_in_any_mixing(mixing, shape):
    module, classes = PersonalizedMoE(nn.Identity(), mixing=mixing), torch.randint(3, (6, *shape[2:]))
    scores, one_hot = module(torch.randn(shape)), F.one_hot(classes).movedim(-1, 1).double()
    for reduction in ("mean", "none"):
        expected = module.loss_of(scores, classes, reduction)
        torch.testing.assert_close(module.loss_of(scores, one_hot, reduction), expected)


def test_a_class_may_have_the_number_that_minus_100_has_in_bytes():
    assert loss_weight("multiclass", None, torch.tensor([156, 1], dtype=torch.uint8)) == 2


def test_a_loss_of_tokens_may_have_a_padding_of_its_own():
    ids = torch.tensor([[1, 2, 3, 0], [2, 1, 0, 0]])
    module = PersonalizedMoE(nn.Embedding(4, 4), task="causal_lm", loss=nn.CrossEntropyLoss(ignore_index=0))
    expected = F.cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    for labels in (ids, ids.masked_fill(ids == 0, -100)):
        torch.testing.assert_close(module.loss((ids, labels))[0], expected)
        assert module.counted(labels) == 3


class Focal(nn.Module):
    """Ignores no class."""

    ignore_index = None

    def forward(self, outputs, targets):
        return (1 - outputs.softmax(1).gather(1, targets[:, None])).square().mean()


def test_a_loss_may_ignore_no_class():
    module, x, y = mixture(3, task="multiclass", loss=Focal()), X.double(), torch.arange(6) % 3
    assert torch.equal(module.loss((x, y))[0], Focal()(module(x), y)) and module.counted(y) == 6


@pytest.mark.parametrize("loss", [None, nn.MSELoss()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_in_half_precision_are_compared_with_exact_values(dtype, loss):
    module, y = mixture(task="regression", loss=loss), torch.tensor([1e6, 1 + 2**-15])
    outputs = torch.tensor([[2.0], [1.0]], dtype=dtype)
    assert torch.equal(module.loss_of(outputs, y), F.mse_loss(outputs.float()[:, 0], y))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 5.0])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_and_metrics_of_classes_in_half_precision_are_computed_in_float32(dtype, weight):
    loss = None if weight is None else nn.CrossEntropyLoss(weight)
    module, generator = mixture(3, loss=loss).to(dtype), torch.Generator().manual_seed(0)
    outputs, y = (5 * torch.randn(999, 3, generator=generator)).to(dtype), torch.arange(999) % 3
    assert torch.equal(module.loss_of(outputs, y), F.cross_entropy(outputs.float(), y, weight))
    probabilities = torch.rand(999, 3, generator=generator).softmax(1).to(dtype)
    expected = F.cross_entropy(outputs.float(), probabilities.float(), weight)
    torch.testing.assert_close(module.loss_of(outputs, probabilities), expected)
    assert torch.equal(preds_and_target("multiclass", outputs, y)[0], outputs.float().softmax(1))


@pytest.mark.parametrize("mixing", ["probabilities", "log_probabilities", "probabilities_without_log"])
def test_probabilities_in_half_precision_are_mixed_in_float32(mixing):
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(99, 3, generator=generator).bfloat16() for _ in range(2)]
    weights, y = torch.rand(99, 1, generator=generator).bfloat16(), torch.arange(99) % 3
    module, weights = PersonalizedMoE(nn.Identity(), mixing=mixing), torch.cat((weights, 1 - weights), 1)
    exact = module.loss_of(module.mix_outputs([each.double() for each in outputs], weights.double()), y)
    assert module.loss_of(module.mix_outputs(outputs, weights), y).item() == pytest.approx(exact.item(), rel=1e-5)
    one = module.loss_of(module.scores_of(outputs[0]), y)
    assert one.item() == pytest.approx(module.loss_of(module.scores_of(outputs[0].double()), y).item(), rel=1e-5)


def test_regression_mixes_values_and_takes_the_squared_error():
    module, x, y = mixture(task="regression"), X.double(), torch.randn(6)
    one, other, weights = experts(module, x)
    values = weights[:, 0] * one[:, 0] + weights[:, 1] * other[:, 0]
    loss, metrics = module.loss((x, y))  # targets of shape (B,) and another type than the outputs (B, 1)
    torch.testing.assert_close(metrics["logits"][:, 0], values)
    torch.testing.assert_close(loss, (values - y).square().mean())
    torch.testing.assert_close(module.loss_of(metrics["logits"], y, "none"), (values - y).square())
    local = PersonalizedMoE(nn.Linear(5, 1), gate=LocalOnly(), task="regression").double()
    torch.testing.assert_close(local(x), local.local_expert(x))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.HuberLoss(delta=0.5), lambda values, y: F.huber_loss(values, y, delta=0.5)),
        (half_squared_error, half_squared_error),
    ],
)
def test_a_loss_is_any_module_or_function(loss, expected):
    module, x, y = mixture(task="regression", loss=loss), X.double(), torch.randn(6).double()
    values = module(x)
    torch.testing.assert_close(module.loss((x, y))[0], expected(values[:, 0], y))
    each = torch.stack([expected(values[i, 0], y[i]) for i in range(6)])
    torch.testing.assert_close(module.loss_of(values, y, "none"), each)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 2)])
def test_probabilities_of_labels_are_mixed_each_by_itself(shape):
    one, other = torch.randn(2, *shape, dtype=torch.float64)
    weights = torch.rand(6, 1, dtype=torch.float64)
    weights = torch.cat((weights, 1 - weights), 1)
    scores = mix_outputs((one, other), weights, "probabilities", "multilabel")
    w = weights.view(6, 2, *[1] * (len(shape) - 1))
    mixed = w[:, 0] * one.sigmoid() + w[:, 1] * other.sigmoid()
    torch.testing.assert_close(scores.sigmoid(), mixed)
    y = (torch.rand(shape) < 0.5).long()
    module = mixture(3, task="multilabel", mixing="probabilities")
    torch.testing.assert_close(module.loss_of(scores, y), F.binary_cross_entropy(mixed, y.double()))


@pytest.mark.parametrize("mixing", ["logits", "probabilities", "log_probabilities", "probabilities_without_log"])
def test_a_mixture_of_images_is_the_mixture_of_each_pixel(mixing):
    torch.manual_seed(0)
    one, other = torch.randn(2, 4, 3, 2, 2, dtype=torch.float64)
    weights = torch.rand(4, 2, dtype=torch.float64).softmax(1)
    dense = mix_outputs((one, other), weights, mixing)
    for row in range(2):
        for column in range(2):
            pixel = mix_outputs((one[..., row, column], other[..., row, column]), weights, mixing)
            torch.testing.assert_close(dense[..., row, column], pixel)
    module, y = mixture(3, mixing=mixing), torch.randint(3, (4, 2, 2))
    pixels = dense.movedim(1, 3).reshape(-1, 3)
    torch.testing.assert_close(module.loss_of(dense, y), module.loss_of(pixels, y.flatten()))
    torch.testing.assert_close(module.loss_of(dense, y, "none").mean(), module.loss_of(dense, y))


@pytest.mark.parametrize("gate", [LinearGate(), FeatureGate()], ids=["input", "features"])
def test_a_gate_weighs_whole_images(gate):
    torch.manual_seed(0)
    module = PersonalizedMoE(SmallFCN(num_classes=3, channels=2), gate=gate)
    scores, weights = module.mix(IMAGES)
    assert scores.shape == (4, 3, 6, 5) and weights.shape == (4, 2)
    both = module.global_expert(IMAGES), module.local_expert(IMAGES)
    torch.testing.assert_close(scores[2], weights[2, 0] * both[0][2] + weights[2, 1] * both[1][2])


def test_a_sparse_mixture_of_images_weighs_each_image():
    torch.manual_seed(0)
    module = SparseMoE(nn.Identity(), SmallFCN(num_classes=1, channels=2), num_experts=3, task="binary")
    scores, weights = module.mix(IMAGES)
    chosen = weights.argmax(1)
    for i in range(4):
        expected = weights[i, chosen[i]] * module.experts[chosen[i]](IMAGES[i : i + 1])[0]
        torch.testing.assert_close(scores[i], expected)
    with dense_experts():
        torch.testing.assert_close(module.mix(IMAGES)[0], scores)
    assert module.loss((IMAGES, torch.ones(4, 6, 5)))[0].dim() == 0


def test_clusters_mix_values_in_regression():
    x = X
    module = ClusteredMoE(nn.Linear(5, 1), num_clusters=2, task="regression")
    mean = sum(expert(x) for expert in (*module.global_experts, module.local_expert)) / 3
    torch.testing.assert_close(module(x), mean)
    assert ClusteredMoE(nn.Linear(5, 3), num_clusters=2).mixing == "probabilities"


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        (None, "multiclass"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "multiclass"),
        (nn.BCEWithLogitsLoss(), "multilabel"),
        (nn.L1Loss(), "regression"),
    ],
)
def test_the_task_follows_from_the_loss(loss, task):
    assert mixture(loss=loss).task == task


def test_metrics_get_probabilities_or_values():
    scores, y = torch.tensor([[0.25], [-1.0]]), torch.tensor([1, 0])
    probabilities, labels = preds_and_target("binary", scores, y.float())
    assert torch.equal(probabilities, scores[:, 0].sigmoid()) and torch.equal(labels, y)
    assert preds_and_target("binary", scores, torch.tensor([0.75, 0.25]))[1].tolist() == [1, 0], "probabilities"
    assert torch.equal(preds_and_target("regression", scores, y)[0], scores[:, 0])
    logits = torch.tensor([[0.1, 0.7], [0.2, 0.3]])  # would pass for probabilities
    assert torch.equal(preds_and_target("multiclass", logits, y)[0], logits.softmax(1))
    of_pixels = preds_and_target("multiclass", torch.randn(2, 3, 4, 5), torch.zeros(2, 4, 5))[0]
    torch.testing.assert_close(of_pixels.sum(1), torch.ones(2, 4, 5))


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "expected"),
    [
        ("multiclass", (2, 3), torch.zeros(2, dtype=torch.int64), True),
        ("multiclass", (2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64), True),
        ("multiclass", (2, 3), torch.zeros(2), False),
        ("multilabel", (2, 3), torch.zeros(2, 3), True),
        ("binary", (2, 1, 4, 4), torch.zeros(2, 4, 4), True),
        ("regression", (2, 1), torch.zeros(2), True),
        ("regression", (2, 1), torch.zeros(2, 3), False),  # a loss would compare each value with all three
        ("regression", (2,), torch.zeros(2, 1), False),
    ],
)
def test_outputs_fit_targets_of_the_same_shape(task, outputs, targets, expected):
    assert fits(task, torch.zeros(outputs), targets) == expected


@pytest.mark.parametrize(
    ("task", "outputs", "allowed", "wrong"),
    [
        ("multiclass", (2, 3, 5, 4), (0, 2, -100), (3, -1)),  # more rows than classes
        ("causal_lm", (2, 9, 7), (0, 6, -100), (7, -1)),  # more tokens than classes
        ("multilabel", (2, 3), (0.0, 0.5, 1.0), (1.5, -1.0)),
        ("regression", (2, 3), (1e9, -1e9), ()),
    ],
)
def test_targets_are_within_the_range_of_a_task(task, outputs, allowed, wrong):
    shape = {"multiclass": (2, 5, 4), "causal_lm": (2, 9)}.get(task, outputs)
    for value in (*allowed, *wrong):
        targets = torch.full(shape, allowed[0])
        targets[-1, -1] = value
        problem = range_problem(task, None, torch.zeros(outputs), targets)
        assert problem is None if value in allowed else problem.startswith(f"the value {value:g}; ")


@plain_trainer
def test_a_plain_trainer_logs_no_accuracy_of_values(tmp_path):
    module, loader = mixture(task="regression").float(), DataLoader(TensorDataset(X, X[:, 0]), 3)
    fitted = trainer(tmp_path, max_epochs=1)
    fitted.fit(module, loader, loader)
    assert {*fitted.callback_metrics} == {
        *("train_loss", "train_gate/global_expert", "validation_loss", "validation_gate/global_expert")
    }


def test_pixels_may_be_bytes_and_be_left_out():
    module = PersonalizedMoE(SmallFCN(num_classes=3, channels=2), loss=nn.CrossEntropyLoss(ignore_index=255))
    y = torch.zeros(4, 6, 5, dtype=torch.uint8)
    expected = module.loss((IMAGES, y.long()))[0]
    assert torch.equal(module.loss((IMAGES, y))[0], expected)
    y[:, 2] = 255
    assert module.loss((IMAGES, y))[0] != expected
