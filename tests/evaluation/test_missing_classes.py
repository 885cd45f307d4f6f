"""Every classification metric of torchmetrics against scikit-learn, for clients that lack classes."""

import math
from functools import partial

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torchmetrics.classification as tm
from lightning.pytorch import LightningModule

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.evaluation.metrics import Meter, check_values

pytestmark = pytest.mark.filterwarnings("ignore")
K, N, STEPS = 5, 30, 256
ALL, AVERAGES = [*range(K)], ("micro", "macro", "weighted")
TASKS = {"Binary": {}, "Multiclass": {"num_classes": K}, "Multilabel": {"num_labels": K}}
EXACT, BINNED = {"thresholds": None}, {"thresholds": STEPS + 1}
SEVERAL_NUMBERS = (
    *(
        "ConfusionMatrix",
        "StatScores",
        "ROC",
        "PrecisionRecallCurve",
        "PrecisionAtFixedRecall",
        "RecallAtFixedPrecision",
    ),
    *("SensitivityAtSpecificity", "SpecificityAtSensitivity"),
)
NEED_GROUPS = {"BinaryFairness", "BinaryGroupStatRates"}


def on_the_grid(values):
    """The values as thresholds of binned curves, so that these have all points; those of a sample are different."""
    return (np.floor(np.clip(values, 0, 0.99) * STEPS / K) * K + (np.arange(K) if values.ndim == 2 else 0)) / STEPS


def class_clients():
    """Targets and predictions of clients that lack classes in targets, in predictions, in both, or in neither."""
    rng = np.random.default_rng(0)
    for targets, predicted in (
        (ALL, ALL),
        ([0, 1], ALL),
        (ALL, [1, 3]),
        ([0, 1], [1, 2]),
        ([0, 3], [0, 3]),
        ([2], ALL),
    ):
        t = np.resize(targets, N)
        p = rng.random((N, K)) * 0.4
        p[:, predicted] += 0.5
        yield t, on_the_grid(p + rng.random((N, K)) / 10)
    for targets in (ALL, [0, 3], [2]):  # all right
        t = np.resize(targets, N)
        yield t, on_the_grid(rng.random((N, K)) * 0.4 + 0.5 * np.eye(K)[t])


def label_clients():
    rng = np.random.default_rng(1)
    for labels, predicted in ((ALL, ALL), ([0, 3], ALL), (ALL, [1, 2]), ([0, 3], [0, 1]), ([], ALL), ([], [])):
        t, p = np.zeros((N, K), int), rng.random((N, K)) * 0.4
        t[:, labels] = rng.integers(0, 2, (N, len(labels)))
        p[:, predicted] = rng.random((N, len(predicted)))
        yield t, on_the_grid(p)
    t = np.zeros((N, K), int)
    t[::2, 0] = t[:, 3] = 1  # all samples have label 3
    yield t, on_the_grid(0.05 + 0.9 * t)


def binary_clients():
    rng = np.random.default_rng(2)
    for t in (rng.integers(0, 2, N), np.zeros(N, int), np.ones(N, int)):
        for low, high in ((0, 1), (0, 0.45), (0.55, 1)):
            yield t, on_the_grid(rng.uniform(low, high, N))


def eer(t, p):
    false, true, _ = sk.roc_curve(t, p, drop_intermediate=False)
    nearest = np.abs(false - (1 - true)).argmin()
    return (false[nearest] + 1 - true[nearest]) / 2


def log_auc(t, p):
    """Of each class torchmetrics' own, because scikit-learn has none."""
    return tm.BinaryLogAUC()(torch.from_numpy(p), torch.from_numpy(t)).item()


def of_positives(curve, t, p, needs_negatives=True):
    """A curve's value; nan without samples of both kinds, or for average precision without positives."""
    return curve(t, p) if t.any() and not (needs_negatives and t.all()) else math.nan


def over_classes(curve, average, t, p):
    """The mean over the classes that have a value; nan without any."""
    of_each = t if t.ndim == 2 else (t[:, None] == ALL).astype(int)
    if average == "micro":
        return curve(of_each.ravel(), p.ravel())
    values = np.array([curve(of_each[:, c], p[:, c]) for c in ALL])
    weights = (of_each.sum(0) if average == "weighted" else np.ones(K)) * ~np.isnan(values)
    return np.average(np.nan_to_num(values), weights=weights) if weights.sum() else math.nan


CURVES = {
    "AUROC": (partial(of_positives, sk.roc_auc_score), ("macro", "weighted")),
    "AveragePrecision": (
        partial(of_positives, sk.average_precision_score, needs_negatives=False),
        ("macro", "weighted"),
    ),
    "LogAUC": (partial(of_positives, log_auc), ("macro",)),
    "EER": (partial(of_positives, eer), ()),
}


def counts(t, y, average, which):
    """Specificity or the negative predictive value, of the classes that occur as others of scikit-learn."""
    labels = ALL if average == "micro" or t.ndim == 2 else None
    (tn, fp), (fn, tp) = np.moveaxis(sk.multilabel_confusion_matrix(t, y, labels=labels), 0, 2)
    others = fp if which == "Specificity" else fn
    weights = tp + fn if average == "weighted" else np.ones_like(tn)
    if average == "micro":
        tn, others, weights = tn.sum(), others.sum(), 1
    return float((weights * tn / np.maximum(tn + others, 1)).sum() / np.maximum(np.sum(weights), 1))


def of_classes(function, t, p, **kwargs):
    """A function of targets and predicted classes or labels."""
    return function(t, p.argmax(1) if p.ndim == 2 and t.ndim == 1 else (p > 0.5).astype(int), **kwargs)


def among_two(t, p, average):
    """The share of samples whose class is among the two most likely ones; of each class that occurs, if ``macro``."""
    right = (p.argsort(1)[:, -2:] == t[:, None]).any(1)
    return np.mean([right[t == c].mean() for c in {*t.tolist()}]) if average == "macro" else right.mean()


def weighted_accuracy(t, y):
    weights = t.sum(0)
    return float(((t == y).mean(0) * weights).sum() / max(weights.sum(), 1))


def weighted_jaccard(t, y):
    return sk.jaccard_score(t, y, average="weighted") if t.any() else math.nan


def calibration(t, p, bins=15):
    if t.ndim == p.ndim:
        right, sure = t, p  # of two classes, torchmetrics compares the share of positives
    else:
        right, sure = t == p.argmax(1), p.max(1)
    bin = np.searchsorted(np.linspace(0, 1, bins + 1), sure, side="right") - 1
    return sum(abs((right[bin == b] - sure[bin == b]).sum()) for b in {*bin}) / len(t)


def hinge(t, p):
    if p.ndim == 1:
        return np.maximum(1 - (2 * t - 1) * p, 0).mean()
    return sk.hinge_loss(t, p, labels=ALL)


def metrics_of(task):
    """Each metric, with each average and kind of thresholds, with its reference."""
    has_one = task == "Binary"
    averages = [{}] if has_one else [{"average": average} for average in AVERAGES]
    scores = {
        "Precision": sk.precision_score,
        "Recall": sk.recall_score,
        "F1Score": sk.f1_score,
        "FBetaScore": partial(sk.fbeta_score, beta=2.0),
        "JaccardIndex": sk.jaccard_score,
        "Specificity": partial(counts, which="Specificity"),
        "NegativePredictiveValue": partial(counts, which="NegativePredictiveValue"),
    }
    if has_one:
        scores["Specificity"] = partial(sk.recall_score, pos_label=0)
        scores["NegativePredictiveValue"] = partial(sk.precision_score, pos_label=0)
        of_right = [sk.accuracy_score]
    elif task == "Multiclass":  # the recall of each class
        of_right = [partial(sk.recall_score, average=average) for average in AVERAGES]
    else:
        of_right = [lambda t, y: (t == y).mean(), lambda t, y: (t == y).mean(), weighted_accuracy]
    for name, function in scores.items():
        beta = {"beta": 2.0} if name == "FBetaScore" else {}
        for average in averages:
            if (task, name, average) == ("Multilabel", "JaccardIndex", {"average": "weighted"}):
                yield name, average, partial(of_classes, weighted_jaccard)
            else:
                yield name, {**average, **beta}, partial(of_classes, partial(function, **average))
    for average, function in zip(averages, of_right, strict=True):
        yield "Accuracy", average, partial(of_classes, function)
        if not (task == "Multilabel" and average["average"] == "weighted"):  # the share of wrong ones, as the next
            yield "HammingDistance", average, lambda t, p, f=function: 1 - of_classes(f, t, p)
    for name, (curve, of_task) in CURVES.items():
        micro = ("micro",) if (task, name) in (("Multilabel", "AUROC"), ("Multilabel", "AveragePrecision")) else ()
        for average in [None] if has_one else (*of_task, *micro):
            for thresholds in (EXACT, BINNED) if name != "LogAUC" else (EXACT,):
                kwargs = thresholds if has_one else {**thresholds, "average": average}
                yield name, kwargs, curve if has_one else partial(over_classes, curve, average)
    for name in ("Accuracy", "Recall") if task == "Multiclass" else ():
        for average in averages:
            yield name, {**average, "top_k": 2}, partial(among_two, **average)
    flat = (lambda f: lambda t, y: f(t.ravel(), y.ravel())) if task == "Multilabel" else (lambda f: f)
    yield "MatthewsCorrCoef", {}, partial(of_classes, flat(sk.matthews_corrcoef))
    if task != "Multilabel":
        yield "CohenKappa", {}, partial(of_classes, sk.cohen_kappa_score)
        yield "CalibrationError", {}, calibration
        yield "HingeLoss", {}, hinge
    else:
        yield "ExactMatch", {}, partial(of_classes, sk.accuracy_score)
        yield "CoverageError", {}, sk.coverage_error
        yield "RankingAveragePrecision", {}, sk.label_ranking_average_precision_score
        yield "RankingLoss", {}, sk.label_ranking_loss


class Plain(LightningModule):
    """Its outputs are taken as they are."""


def measured(metrics, clients):
    t, p = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*clients, strict=True))
    meter = Meter(Plain(), metrics, [len(t) for t, _ in clients], with_loss=False)
    for start in range(0, len(t), 77):  # batches of several clients
        meter.update(p[start : start + 77], t[start : start + 77])
    return meter.values


CLIENTS = {"Binary": binary_clients, "Multiclass": class_clients, "Multilabel": label_clients}


@pytest.mark.few("Multiclass")
@pytest.mark.parametrize("task", TASKS)
def test_each_metric_is_that_of_scikit_learn_over_the_classes_of_each_client(task):
    clients, cases = [*CLIENTS[task]()], [*metrics_of(task)]
    metrics = {f"{name} {kwargs}": getattr(tm, task + name)(**TASKS[task], **kwargs) for name, kwargs, _ in cases}
    values = measured(metrics, clients)
    wrong = []
    for (name, kwargs, reference), found in zip(cases, values.values(), strict=True):
        expected = [float(reference(t, p)) for t, p in clients]
        if not np.allclose(found, expected, atol=2e-6, equal_nan=True):
            wrong.append((name, kwargs, np.round(found, 4).tolist(), np.round(expected, 4).tolist()))
    assert not wrong, "\n" + "\n".join(map(str, wrong))
    known = {task + name for name, *_ in cases} | {task + name for name in SEVERAL_NUMBERS} | NEED_GROUPS
    known |= {"MulticlassEER", "MulticlassExactMatch", "MultilabelEER"}  # see below; of pixels; a number for each label
    assert {name for name in tm.__all__ if name.startswith(task)} <= known


def test_metrics_that_are_made_of_others_leave_the_same_classes_out():
    """Such as Gini coefficients; and the equal error rate, which scikit-learn does not have."""
    right, one_class, *_ = [client for client in class_clients()][-2:]
    metrics = {
        "gini": 2 * tm.MulticlassAUROC(K) - 1,
        "task": tm.AUROC("multiclass", num_classes=K),
        "eer": tm.MulticlassEER(K, average="macro"),
        "binned": tm.MulticlassEER(K, average="macro", thresholds=STEPS + 1),
    }
    values = measured(metrics, [right, one_class, right])
    expected = {"gini": 1.0, "task": 1.0, "eer": 0.0, "binned": 0.0}
    assert values == {name: pytest.approx([value, math.nan, value], nan_ok=True) for name, value in expected.items()}
    assert metrics["task"].num_classes == K, "the next client has all of its classes"


@pytest.mark.parametrize("name", SEVERAL_NUMBERS)
def test_a_metric_of_several_numbers_is_refused(name):
    condition = name.lower().replace("fixed", "").split("at")[-1]
    arguments = {f"min_{condition}": 0.5} if "At" in name else {}
    metric = getattr(tm, f"Multiclass{name}")(K, **arguments)
    t, p = next(class_clients())
    with pytest.raises(InvalidArgumentError, match="one number"):
        check_values({"it": metric}, Plain(), torch.from_numpy(p), torch.from_numpy(t))
