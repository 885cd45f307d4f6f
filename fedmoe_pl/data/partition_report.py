"""The samples of every client by class or by bin of the target, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from logging import INFO, WARNING, getLogger
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedmoe_pl.data.arrays import NO_LABEL
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.data.partitioners.partitioner import IID

_MOST_CLIENTS = 40  # clients in the table; if there are more, some are left out
_MOST_CLASSES = 20  # classes with a column in the table
_MOST_UNUSED = 5  # classes without samples in the log


def partition_table(datamodule: FederatedDataModule) -> str:
    """Returns a table of the samples of every client.

    A row has the sizes of a client's training, validation and local test sets, and its number of training and
    validation samples of each class, called by its name if the data name it, or of each bin of the target
    (``target_bins``). If there are more than 20 of these, it has the number of those that the client has, and the
    largest one, instead. If there are more than 40 clients, the first 30 and the last 10 are listed. The last rows have
    the mean, the smallest and the largest value of each column over all clients.

    Args:
        datamodule: a data module after ``setup``.
    """
    of_clients = [*partition_rows(datamodule)]
    columns = {name: [row[name] for row in of_clients] for name in ("train", "validation", "test")}
    columns = {name: sizes for name, sizes in columns.items() if any(sizes)}  # without sets that are all empty
    columns |= _label_columns(*_labels(datamodule), datamodule.classes)
    n = datamodule.num_clients
    listed = list(range(n)) if n <= _MOST_CLIENTS else [*range(_MOST_CLIENTS - 10), *range(n - 10, n)]
    rows = [["client", *columns]]
    names = datamodule.client_names
    rows += [[names[client], *(str(column[client]) for column in columns.values())] for client in listed]
    if n > len(listed):
        rows.insert(_MOST_CLIENTS - 9, ["..."] * len(rows[0]))
    rows.append(["mean", *(f"{sum(column) / n:.1f}" for column in columns.values())])
    rows.append(["least", *(str(min(column)) for column in columns.values())])
    rows.append(["greatest", *(str(max(column)) for column in columns.values())])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(lines[0])
    body = [lines[0], rule, *lines[1:-3], rule, *lines[-3:]]
    classes = f"{datamodule.num_classes} classes, " if datamodule.num_classes else ""
    title = f"{n} clients, {classes}{_shared(datamodule)}, {len(datamodule.global_test)} global test samples"
    return "\n".join([title, "", *body])


def partition_rows(datamodule: FederatedDataModule) -> Iterator[dict[str, Any]]:
    """The rows of ``partition.csv``, one per client.

    ``name`` is what the data call the client, if they name it, ``train``, ``validation`` and ``test`` are the sizes of
    its sets, and ``class_<c>`` its number of training and validation samples of class c; with ``target_bins``,
    ``bin_<b>`` those whose target is in bin b.

    Args:
        datamodule: a data module after ``setup``.
    """
    parts = (datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples)
    kind, counts = _labels(datamodule)
    names = ("client", "train", "validation", "test", *(f"{kind}_{label}" for label in range(counts.shape[1])))
    columns = [part.sizes.tolist() for part in parts]
    for client, (*sizes, of_labels) in enumerate(zip(*columns, counts.long().tolist(), strict=True)):
        row = dict(zip(names, (client, *sizes, *of_labels), strict=True))
        yield {"client": client, "name": name, **row} if (name := datamodule.client_names.given_name(client)) else row


@rank_zero_only
def log_partition(datamodule: FederatedDataModule) -> None:
    """Logs in one line how the samples are divided; as a warning, if something seems to be forgotten or wrong."""
    if isinstance(getattr(datamodule, "dealt_by", None), AllToOne | None):
        return  # data of several machines, which nobody has dealt
    counts, n = datamodule.class_counts(), datamodule.num_clients
    settings = ((name, value) for name, value in vars(datamodule.dealt_by).items() if type(value) in (int, float, str))
    scheme = f"{type(datamodule.dealt_by).__name__}({', '.join(f'{name}={value}' for name, value in settings)})"
    each = [f"{_range(datamodule.train_samples.sizes)} training samples"]
    if datamodule.num_classes:
        each.append(f"samples of {_range((counts > 0).sum(dim=1))} of {datamodule.num_classes} classes")
        lacking = datamodule.train_samples.sizes + datamodule.validation_samples.sizes - counts.sum(1).long()
        each += [f"{_range(lacking)} training samples without a label"] if lacking.any() else []
    odd = [f" {text}" for text in _oddities(datamodule)]
    text = f"{type(datamodule).__name__}: {scheme}, {n} client{'s' * (n > 1)} with {' and '.join(each)}. "
    text += f"What is random in it follows partition_seed {datamodule.partition_seed}, not the run's seed."
    getLogger("lightning.pytorch").log(WARNING if odd else INFO, text + "".join(odd))


def _oddities(datamodule: FederatedDataModule) -> Iterator[str]:
    if datamodule.partitioner is None and isinstance(datamodule.dealt_by, IID) and datamodule.num_clients > 1:
        yield "No partitioner is given, so all clients have samples of the same distribution."
    for name, part in (("test", datamodule.test_samples), ("validation", datamodule.validation_samples)):
        fraction, lacking = getattr(datamodule, f"{name}_fraction"), int((part.sizes == 0).sum())
        if fraction and lacking:
            yield f"{name}_fraction {fraction} rounds to no sample for {lacking} of {len(part)} clients."
    if not datamodule.num_classes:
        return
    of_classes = datamodule.y[datamodule.y != NO_LABEL].bincount(minlength=datamodule.num_classes)
    unused = [str(label) for label in (of_classes == 0).nonzero().flatten().tolist()]
    if (of_classes > 0).sum() == 1:
        yield f"All samples have class {int(of_classes.argmax())}, so accuracies say nothing."
    elif unused:
        shown = ", ".join(unused[:_MOST_UNUSED]) + ", ..." * (len(unused) > _MOST_UNUSED)
        begin = " Labels begin with 0." if unused[0] == "0" else ""
        yield f"No sample has class {shown}, for which models have an output.{begin}"


def _range(numbers: Tensor) -> str:
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least}" if least == most else f"{least} to {most}"


def _shared(datamodule: FederatedDataModule) -> str:
    """Returns in words how many samples the clients hold, and of how many if some are not used."""
    parts = (datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples)
    dealt = sum(int((part.indices < datamodule.num_shared).sum()) for part in parts)
    whole = "" if dealt == datamodule.num_shared else f" of {datamodule.num_shared}"
    return f"{dealt}{whole} {'pooled' if datamodule.pool else 'training'} samples"


def _labels(datamodule: FederatedDataModule) -> tuple[str, Tensor]:
    """What samples are counted by, and each client's counts."""
    return ("class", datamodule.class_counts()) if datamodule.bins is None else ("bin", datamodule.bin_counts())


def _label_columns(kind: str, counts: Tensor, classes: Sequence[str] | None) -> dict[str, list[int]]:
    number = counts.shape[1]
    if number <= _MOST_CLASSES:
        names = classes if kind == "class" and classes else [*range(number)]
        return {f"{kind} {names[label]}": counts[:, label].long().tolist() for label in range(number)}
    return {
        "classes" if kind == "class" else "bins": (counts > 0).sum(dim=1).tolist(),
        f"largest {kind}": counts.argmax(dim=1).tolist(),
        "its samples": counts.max(dim=1).values.long().tolist(),
    }
