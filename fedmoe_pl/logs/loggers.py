"""What callbacks show of a run, sent to every logger that can take it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.util.tensor_util import make_tensor_proto
from typing_extensions import TypeIs

from fedmoe_pl.checks import tried

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HISTOGRAM_BINS = 30
"""TensorBoard always shows 30 bins."""
_RESULT = "result"  # section of a method's final accuracies
_HPARAMS: Any = api_pb2  # its classes are made at run time, so that type checkers know none


class RunLoggers:
    """The run's loggers, each of which gets what it can show.

    In TensorBoard, every method is a run of its own, in a folder of the logger's ``log_dir``; in MLflow, one below the
    logger's run; in Weights & Biases, one in a group with the name of the logger's. A measure has the same tag in all
    of them, so that the methods are curves of one chart. In other loggers, the method's name comes before the tag.
    Scalars go to every logger; pictures to TensorBoard, MLflow and every logger with a ``log_image`` like that of
    ``WandbLogger``; histograms to TensorBoard and Weights & Biases; text to these three.

    Args:
        loggers: the loggers.
        completed: the last completed step of each method of a resumed run, 0 for none, and that of the run under None.
            TensorBoard leaves out what was logged of later steps; what it has of these is not logged again, as when a
            phase was killed after its last round, which is then evaluated a second time.
        below: what precedes the names of methods, and of what belongs to the whole run, such as ``new_clients/``, in
            loggers that have those of another run.
    """

    def __init__(
        self, loggers: Sequence[Logger] = (), completed: Mapping[str | None, int] | None = None, below: str = ""
    ) -> None:
        self.all = [*loggers]
        self._below = below
        for logger in self.all:
            with tried(f"federation.logger: {type(logger).__name__} cannot be opened"):
                getattr(logger, "experiment", None)  # opens it, before any training
        self._completed = dict(completed or {})
        self._tensorboards = [each for each in self.all if isinstance(each, TensorBoardLogger)]
        self._others = [each for each in self.all if not isinstance(each, TensorBoardLogger)]
        self._writers: dict[tuple[str, str], SummaryWriter] = {}  # by the logger's folder and the method
        self._closed = set[str]()  # methods that have ended, to which a callback may still log
        self._runs: dict[tuple[int, str], MLFlowLogger | WandbLogger] = {}  # by the logger's place and the method
        if (step := self._completed.get(None)) is not None:
            for logger in self._tensorboards:
                _leave_out(logger.experiment, _logged(logger.log_dir, step))

    @property
    def take_images(self) -> bool:
        """Whether a logger takes pictures; if not, they need not be drawn."""
        return bool(self._tensorboards) or any(_takes_images(logger) for logger in self._others)

    @property
    def take_histograms(self) -> bool:
        """Whether a logger takes histograms."""
        return bool(self._tensorboards) or any(isinstance(logger, WandbLogger) for logger in self._others)

    def log_scalars(self, method: str, values: Mapping[str, float], step: int) -> None:
        """Sends numbers of a method, by tag, to every logger; the step is the round of its phase."""
        for writer in self.writers(method):
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)
        for logger, before in self._loggers_of(method):
            logger.log_metrics({f"{before}{tag}": float(value) for tag, value in values.items()}, step=step)

    def log_image(self, tag: str, pixels: np.ndarray, step: int, method: str | None = None) -> None:
        """Sends a picture, uint8 of shape (height, width, 3), of a method or the whole run to loggers that take it."""
        for writer in self.writers(method):
            writer.add_image(tag, pixels, step, dataformats="HWC")
        for logger, before in self._loggers_of(method):
            if isinstance(logger, MLFlowLogger):
                logger.experiment.log_image(logger.run_id, pixels, key=f"{before}{tag}", step=step)
            elif _takes_images(logger):
                logger.log_image(f"{before}{tag}", [pixels], step=step)  # pyright: ignore[reportAttributeAccessIssue]

    def log_histogram(self, tag: str, weights: np.ndarray, description: str, step: int, method: str) -> None:
        """Sends a histogram of numbers from 0 to 1 to loggers that take it; its axis is the same for all clients.

        ``SummaryWriter.add_histogram`` drops empty bins at the ends, which would give every client a different axis.
        """
        # rounding lifts some sums of weights above 1, and `np.histogram` leaves out what is not in the range
        counts, edges = np.histogram(np.clip(weights, 0.0, 1.0), bins=HISTOGRAM_BINS, range=(0.0, 1.0))
        buckets = np.stack([edges[:-1], edges[1:], counts], axis=1)  # (bins, 3): left, right, count
        of_axis = create_summary_metadata(display_name=None, description=description)
        tensor = make_tensor_proto(buckets, np.float64)
        summary = Summary(value=[Summary.Value(tag=tag, metadata=of_axis, tensor=tensor)])
        _add_summaries(self.writers(method), [summary], step)
        for logger, before in self._loggers_of(method):
            if isinstance(logger, WandbLogger):
                from wandb import Histogram  # pyright: ignore[reportMissingImports]  optional

                histogram: Any = Histogram(np_histogram=(counts.tolist(), edges.tolist()))
                logger.log_metrics({f"{before}{tag}": histogram}, step=step)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Sends text of aligned columns to loggers that take it."""
        for writer in self.writers():
            writer.add_text(tag, f"```\n{text}\n```", step)  # Markdown that keeps spaces and line breaks
        for logger, before in self._loggers_of(None):
            if isinstance(logger, MLFlowLogger):
                logger.experiment.log_text(logger.run_id, text, f"{before}{tag}.txt")
            elif isinstance(logger, WandbLogger):
                logger.log_text(f"{before}{tag}", columns=["text"], data=[[text]], step=step)

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Sends hyperparameters to every logger, before the first round; of TensorBoard only to ``hparams.yaml``."""
        for logger in self._tensorboards:
            logger.hparams.update(hparams)
        for logger in self._others:
            _log_hparams(logger, hparams)

    def log_result(
        self,
        method: str,
        hparams: Mapping[str, Any],
        accuracies: Mapping[str, float],
        step: int,
        of_all: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Sends a method's final accuracies to every logger, with its hyperparameters where it has a run of its own.

        In TensorBoard, they are a row of the page of hyperparameters, whose columns are those of all methods.
        """
        values = {f"{_RESULT}/{name}": value for name, value in accuracies.items()}
        self.log_scalars(method, values, step)
        columns = {f"{_RESULT}/{name}": name for name in accuracies}
        _add_summaries(self.writers(method), _hparams_summaries(hparams, columns, of_all), None)
        for logger, _ in self._loggers_of(method):
            if _compares_runs(logger):
                _log_hparams(logger, hparams)

    def writers(self, method: str | None = None) -> list[SummaryWriter]:
        """The TensorBoard writers of a method, or of the whole run, one for each TensorBoard logger."""
        if method is None and not self._below:
            return [logger.experiment for logger in self._tensorboards]
        return [self._writer(logger.log_dir, method or "") for logger in self._tensorboards]

    def _writer(self, folder: str, method: str) -> SummaryWriter:
        if (folder, method) not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed for TensorBoard

            path, completed = os.path.join(folder, self._below + method), self._completed.get(method)
            known = set() if completed is None else _logged(path, completed)
            # a new run has nothing to purge, but TensorBoard takes no notice of the first purge
            purge_step = None if method in self._closed else 0 if completed is None else completed + 1
            self._writers[folder, method] = SummaryWriter(path, purge_step=purge_step)
            _leave_out(self._writers[folder, method], known)
        return self._writers[folder, method]

    def _loggers_of(self, method: str | None) -> Iterator[tuple[Logger, str]]:
        """Loggers other than TensorBoard's of a method or of the whole run, each with what precedes a tag in it."""
        for place, logger in enumerate(self._others):
            if method is None:
                yield logger, self._below
            elif _compares_runs(logger):
                if (place, method) not in self._runs:
                    begin: Any = _of_mlflow if isinstance(logger, MLFlowLogger) else _of_wandb
                    self._runs[place, method] = begin(logger, self._below + method)
                yield self._runs[place, method], ""
            else:
                yield logger, f"{self._below}{method_tag(method)}/"

    def flush(self) -> None:
        """Writes what the loggers still hold in memory, so that a kill leaves no gap in their curves."""
        for writer in (*([] if self._below else self.writers()), *self._writers.values()):
            writer.flush()
        for logger in self._others:
            logger.save()  # CSVLogger would wait for a hundred steps

    def close(self, method: str, status: str = "success") -> None:
        """Closes the writers of a finished method, and ends its runs."""
        for folder, name in [*self._writers]:
            if name == method:
                self._writers.pop((folder, name)).close()
        for place, name in [*self._runs]:
            if name == method:
                _end_run(self._runs.pop((place, name)), status)
        self._completed.pop(method, None)
        self._closed.add(method)

    def finalize(self, status: str = "success") -> None:
        """Ends all loggers; ``failed`` is the status of a run that an error or an interruption has ended."""
        for _, method in [*self._writers, *self._runs]:
            self.close(method, status)
        for logger in self.all:
            logger.finalize(status)


def method_tag(method: str) -> str:
    """The method's name as part of a tag, without characters that loggers would replace."""
    return re.sub(r"[^-/\w.]", "_", method)


def _log_hparams(logger: Logger, hparams: Mapping[str, Any]) -> None:
    """Sends hyperparameters; MLflow refuses other values of those that it has, such as a continued run's rounds."""
    known = logger.experiment.get_run(logger.run_id).data.params if isinstance(logger, MLFlowLogger) else {}
    logger.log_hyperparams({name: value for name, value in hparams.items() if name not in known})


def _add_summaries(writers: Iterable[SummaryWriter], summaries: Sequence[Summary], step: int | None) -> None:
    for writer in writers:
        assert writer.file_writer is not None, "closed writers are forgotten"
        for summary in summaries:
            writer.file_writer.add_summary(summary, step)


def _hparams_summaries(
    hparams: Mapping[str, Any], metrics: Mapping[str, str], of_all: Sequence[Mapping[str, Any]]
) -> list[Summary]:
    """What TensorBoard reads for a method's row on its page HParams.

    TensorBoard takes all columns from one of the rows, whichever it finds first, and shows the first five. Each row
    therefore names the columns of all methods, and says which of them differ: TensorBoard sorts these to the front.
    ``torch.utils.tensorboard`` would name only the row's own.
    """
    page, start = _HPARAMS.Experiment(), HParamsPluginData().session_start_info
    for name in dict.fromkeys(name for row in (hparams, *of_all) for name in row):
        values = [row[name] for row in (hparams, *of_all) if name in row]
        kinds = {*map(_kind, values)}
        kind = {"bool": "BOOL", "number": "FLOAT64"}.get(kinds.pop(), "STRING") if len(kinds) == 1 else "STRING"
        data_type = _HPARAMS.DataType.Value(f"DATA_TYPE_{kind}")
        page.hparam_infos.add(name=name, type=data_type, differs=any(value != values[0] for value in values))
    for tag, name in metrics.items():
        page.metric_infos.add(name=_HPARAMS.MetricName(tag=tag), display_name=name)
    for name, value in hparams.items():
        setattr(start.hparams[name], f"{_kind(value)}_value", value)
    messages = {
        metadata.EXPERIMENT_TAG: HParamsPluginData(experiment=page),
        metadata.SESSION_START_INFO_TAG: HParamsPluginData(session_start_info=start),
        metadata.SESSION_END_INFO_TAG: HParamsPluginData(session_end_info={"status": _HPARAMS.STATUS_SUCCESS}),
    }
    contents = {tag: metadata.create_summary_metadata(message) for tag, message in messages.items()}
    return [Summary(value=[Summary.Value(tag=tag, metadata=content)]) for tag, content in contents.items()]


def _kind(value: Any) -> str:
    """How TensorBoard stores a value."""
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "string"


def _logged(folder: str, last: int) -> set[tuple[str, int]]:
    """The tags and steps, up to the last one, of all that TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # slow to import

    paths = [path for path in Path(folder).glob("events.out.tfevents.*") if path.is_file()]
    events = (event for path in paths for event in EventFileLoader(str(path)).Load() if event.step <= last)
    return {(value.tag, event.step) for event in events for value in event.summary.value}


def _leave_out(writer: SummaryWriter, known: set[tuple[str, int]]) -> None:
    """Makes a writer leave out what is known, by tag and step; all its methods write with that of its file."""
    file_writer: Any = writer._get_file_writer()  # opens that of a user's logger anew if an earlier run has closed it
    add_summary = file_writer.add_summary

    def add_new(summary: Summary, global_step: int | None = None, walltime: float | None = None) -> None:
        values = [value for value in summary.value if (value.tag, global_step or 0) not in known]
        if values:
            add_summary(Summary(value=values), global_step, walltime)

    if known:
        file_writer.add_summary = add_new


def _takes_images(logger: Logger) -> bool:
    return isinstance(logger, MLFlowLogger) or callable(getattr(logger, "log_image", None))


def _compares_runs(logger: Logger) -> TypeIs[MLFlowLogger | WandbLogger]:
    """Whether a method gets a run of its own."""
    return isinstance(logger, MLFlowLogger | WandbLogger)


def _end_run(logger: MLFlowLogger | WandbLogger, status: str) -> None:
    """Ends a method's run; Lightning leaves those of Weights & Biases open until the process ends."""
    logger.finalize(status)
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=int(status != "success"))


def _of_mlflow(logger: MLFlowLogger, method: str) -> MLFlowLogger:
    """A logger of the method's run below the logger's, with its tags; the same again where there is one already."""
    from mlflow.utils.mlflow_tags import (  # pyright: ignore[reportMissingImports]  optional
        MLFLOW_PARENT_RUN_ID,
        MLFLOW_RUN_NAME,
    )

    client, experiment = logger.experiment, logger.experiment_id
    found = client.search_runs([experiment], f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{logger.run_id}'")
    run = next((run for run in found if run.info.run_name == method), None)
    if run is None:
        tags = {**client.get_run(logger.run_id).data.tags, MLFLOW_PARENT_RUN_ID: logger.run_id, MLFLOW_RUN_NAME: method}
        run = client.create_run(experiment, tags=tags)
    own = copy.copy(logger)
    own._run_id = run.info.run_id
    return own


def _of_wandb(logger: WandbLogger, method: str) -> WandbLogger:
    """The same, in a group with the name of the logger's run, unless that has a group."""
    import wandb  # pyright: ignore[reportMissingImports]  optional

    of_all = logger.experiment
    # an id may have plain characters only, and is another one for every name
    plain = re.sub(r"[^-.0-9A-Za-z]", lambda found: f"_{ord(found[0]):x}_", method)
    own = {"name": method, "id": f"{of_all.id}-{plain}", "reinit": "create_new"}
    group = {"group": of_all.name or of_all.id, "job_type": "method"}
    chosen = {name: value for name, value in logger._wandb_init.items() if value is not None}
    run = wandb.init(**{**group, **chosen, **own})
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, prefix=logger._prefix)
