"""A method's row on TensorBoard's page HParams, and the columns of all methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]

_API: Any = api_pb2  # its classes are made at run time, so that type checkers know none


def hparams_summaries(
    hparams: Mapping[str, Any], metrics: Mapping[str, str], of_all: Iterable[Mapping[str, Any]]
) -> Iterator[Summary]:
    """What TensorBoard reads for a row of the page.

    TensorBoard takes all columns from one of the rows, whichever it finds first, and shows the first five. Each row
    therefore names the columns of all methods, and says which of them differ: TensorBoard sorts these to the front.
    ``torch.utils.tensorboard`` would name only the row's own.
    """
    columns = [_column(name, values) for name, values in _by_name([hparams, *of_all]).items()]
    results = [_API.MetricInfo(name=_API.MetricName(tag=tag), display_name=name) for tag, name in metrics.items()]
    experiment = _API.Experiment(hparam_infos=columns, metric_infos=results)
    yield _summary(metadata.EXPERIMENT_TAG, experiment=experiment)
    start = HParamsPluginData().session_start_info
    for name, value in hparams.items():
        setattr(start.hparams[name], f"{_kind(value)}_value", value)
    yield _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)
    yield _summary(metadata.SESSION_END_INFO_TAG, session_end_info={"status": _API.STATUS_SUCCESS})


def _by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return values


def _column(name: str, values: list[Any]) -> Any:
    """A column; it differs if the methods that have the hyperparameter have different values."""
    kinds = {_kind(value) for value in values}
    types = {"bool": _API.DATA_TYPE_BOOL, "number": _API.DATA_TYPE_FLOAT64}
    kind = types.get(kinds.pop()) if len(kinds) == 1 else None
    differs = any(value != values[0] for value in values)
    return _API.HParamInfo(
        name=name,
        type=_API.DATA_TYPE_STRING if kind is None else kind,
        differs=differs,
    )


def _kind(value: Any) -> str:
    """How TensorBoard stores a value."""
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "string"


def _summary(tag: str, **message: Any) -> Summary:
    contents = metadata.create_summary_metadata(HParamsPluginData(**message))
    return Summary(value=[Summary.Value(tag=tag, metadata=contents)])
