"""Functions of the callbacks that write to TensorBoard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.util.tensor_util import make_tensor_proto

from fedmoe_pl.rounds.run import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HISTOGRAM_BINS = 30
"""TensorBoard always shows 30 bins."""


def tensorboard_writers(run: Run) -> list[SummaryWriter]:
    """The writers of the run's TensorBoard loggers."""
    return [logger.experiment for logger in run.loggers if isinstance(logger, TensorBoardLogger)]


def method_tag(method: str) -> str:
    """The method's name as part of a tag, with the characters that TensorBoard would replace already replaced."""
    return re.sub(r"[^-/\w.]", "_", method)


def preformatted(text: str) -> str:
    """The text as Markdown that keeps spaces and line breaks."""
    return f"```\n{text}\n```"


def histogram(tag: str, weights: np.ndarray, description: str) -> Summary:
    """A histogram whose axis is 0 to 1 for all clients.

    ``SummaryWriter.add_histogram`` drops empty bins at the ends, which would give every client a different axis.
    """
    counts, edges = np.histogram(weights, bins=HISTOGRAM_BINS, range=(0.0, 1.0))
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1)  # (bins, 3): left, right, count
    metadata = create_summary_metadata(display_name=None, description=description)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(buckets, np.float64))])


def add_summary(writer: SummaryWriter, summary: Summary, step: int) -> None:
    """Writes a summary, unless the writer is closed."""
    if writer.file_writer is not None:
        writer.file_writer.add_summary(summary, step)
