"""What a message may say: the values of every kind of message, and what each of them may be.

A value is checked only as deep as its kind goes, so that nothing which somebody has nested can exhaust the stack.
"""

from __future__ import annotations

import builtins
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any, get_args

import torch

from fedmoe_pl.algorithms.algorithm import EvaluationPoint
from fedmoe_pl.checks import MOST_COUNTED, MOST_UNITS
from fedmoe_pl.evaluation.results import ACCURACIES

Check = Callable[[Any], bool]
# isprintable() refuses other spaces than ' ', and the joiners of Persian and Indian scripts
_PRINTABLE_TOO = re.compile("[\u00a0\u2000-\u200a\u200c\u200d\u202f\u205f\u3000]")
_MOST = 10**8  # samples of a client, values of a sample: more would take the server's memory
_MOST_CLIENTS = 10**6
_MOST_FILES = 1000  # of a client, in one message
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
"""Data types of tensors in messages, by name."""


def _number(value: Any) -> bool:
    """A number; of integers, one that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _share(value: Any) -> bool:
    """A number from 0 to 1, or nan."""
    return _number(value) and (math.isnan(value) or 0 <= value <= 1)


def _text(value: Any) -> bool:
    """A text that can be printed; JSON also knows halves of characters."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _name(value: Any) -> bool:
    """A text of one line, whose spaces may be of any kind, such as those of a table that Excel has written."""
    return isinstance(value, str) and len(value) <= 1000 and _PRINTABLE_TOO.sub(" ", value).isprintable()


def _nothing(value: Any) -> bool:
    return value is None or value == ""


def _a(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _count(most: int) -> Check:
    """An integer from 0 to ``most``."""
    return lambda value: type(value) is int and 0 <= value <= most


def _one_of(*choices: str) -> Check:
    return lambda value: isinstance(value, str) and value in choices


def _or_nothing(check: Check) -> Check:
    """Such a value, or none; then the message may leave it out."""
    return lambda value: value is None or check(value)


def _list(check: Check, most: int = MOST_UNITS) -> Check:
    """A list of such values, at most so many."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _row(*checks: Check) -> Check:
    """A list of one value for each check."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def _by_name(check: Check) -> Check:
    """A dict of such values by name."""
    return lambda value: isinstance(value, dict) and all(_name(key) and check(each) for key, each in value.items())


def _record(fields: dict[str, Check]) -> Check:
    """A dict with these values and no others."""
    return lambda value: isinstance(value, dict) and not _wrong(value, fields)


def _wrong(values: dict[str, Any], fields: dict[str, Check]) -> str:
    """The first name of a dict that is unknown, or whose value is not as it must be; empty if there is none."""
    unknown = (name for name in values if name not in fields)
    return next(unknown, "") or next((name for name, check in fields.items() if not check(values.get(name))), "")


_ROUND, _CLIENT, _SIZE = _count(MOST_COUNTED), _count(_MOST_CLIENTS), _count(_MOST)
_FILE = _count(2**32)  # its number; 0 for none


def _sizes(value: Any) -> bool:
    """Numbers of training, validation and test samples."""
    return _row(_SIZE, _SIZE, _SIZE)(value) and sum(value) <= _MOST


def _shape(value: Any) -> bool:
    """The shape of a sample or a target."""
    return _list(_SIZE)(value) and math.prod(value) <= _MOST


def _shape_of_tensor(value: Any) -> bool:
    """A shape; where there are no values, which would bound it, its other sizes are bounded."""
    return _list(_count(2**40), 16)(value) and (
        0 not in value or math.prod(max(size, 1) for size in value) <= MOST_UNITS
    )


_DESCRIPTION = {
    "client": _CLIENT,
    "sizes": _sizes,
    "global_test": _SIZE,
    **dict.fromkeys(("classes", "columns"), _or_nothing(_list(_name))),
    "class_numbers": _by_name(_count(MOST_UNITS)),
    "shape": _shape,
    "dtype": _one_of(*DTYPES),
    "target_shape": _shape,
    "target_dtype": _one_of(*DTYPES),
    "num_classes": _count(MOST_UNITS),
    "normalization": _or_nothing(_row(_list(_number), _list(_number))),
    "configuration": _by_name(_text),
    "torch": _name,
}
_EVALUATION_OF_CLIENT = {
    "client": _CLIENT,
    "n_train": _SIZE,
    "n_test": _SIZE,
    **dict.fromkeys(ACCURACIES, _share),
    # a tensor, and what stays on the clients' machines
    **dict.fromkeys(("gate_weights", "gate_labels", "name"), _nothing),
    "validation_loss": _number,
    "has_global_expert": _a(bool),
    "metrics": _by_name(_number),
}
_EVALUATION = {
    **dict.fromkeys(("method", "model", "selection"), _name),
    "round": _ROUND,
    "evaluation_point": _name,
    "clients": _list(_record(_EVALUATION_OF_CLIENT), 1),
    "drawn_from": _or_nothing(_CLIENT),
    "lower_is_better": _list(_name),
    "epochs": _or_nothing(_ROUND),
}
_OF_RUN = {"run": _name}
_OF_PHASE = {**_OF_RUN, "phase": _name, "round": _ROUND}
_OF_STEP = {**_OF_PHASE, "clients": _list(_CLIENT)}
_OF_PHASE |= {"kept": _list(_row(_name, _FILE, _or_nothing(_by_name(_name))), _MOST_FILES)}
_MESSAGES: dict[str, tuple[dict[str, Check], str, dict[str, Check]]] = {
    # a message of the server, the client's answer, and the values of both
    "describe": ({"num_clients": _or_nothing(_CLIENT)}, "description", _DESCRIPTION),
    "prepare": (
        {
            **_OF_RUN,
            "num_clients": _CLIENT,
            "num_classes": _count(MOST_UNITS),
            "description": _record(_DESCRIPTION),
        },
        "prepared",
        {},
    ),
    "begin": ({**_OF_RUN, "phase": _name, "rounds_before": _ROUND}, "begun", {}),
    "request": (_OF_PHASE, "requested", {}),
    "train": (_OF_PHASE, "update", {"weight": _number, "keeps": _FILE}),
    # with secure aggregation: training, of which only public keys come back, and four steps about what was trained
    "train masked": (_OF_PHASE, "trained", {"weight": _number, "keeps": _FILE}),
    "share": (_OF_STEP, "shared", {}),
    "mask": (_OF_STEP, "masked", {}),
    "confirm": (_OF_STEP, "confirmed", {}),
    "unmask": (_OF_STEP, "unmasked", {}),
    "exchange": (_OF_PHASE, "kept", {"keeps": _FILE}),
    "read": ({**_OF_PHASE, "parts": _list(_name)}, "given", {}),
    "evaluate": (
        {**_OF_PHASE, "evaluation_point": _one_of(*get_args(EvaluationPoint))},
        "evaluation",
        _EVALUATION_OF_CLIENT,
    ),
    "finish": (
        {
            **_OF_PHASE,
            "state": _record({"round": _ROUND, "stopped": _a(bool), "best_round": _ROUND}),
            "evaluations": _list(_record(_EVALUATION), 2),
        },
        "finished",
        {"phases": _list(_name)},
    ),
    # stand for several messages, or the answers to them; the values of these are checked, too
    "several": (
        {"parts": _list(_row(_one_of("evaluate", "train", "train masked"), _a(dict), _or_nothing(_list(_name))), 3)},
        "answers",
        {"parts": _list(_row(_one_of("evaluation", "update", "trained", "failed"), _a(dict)), 3)},
    ),
    "note": ({"text": _text}, "noted", {}),
    "end": ({}, "ended", {}),
}
_BUILT_IN = [name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)]
FAILURES = {
    "configuration": "its configuration, data or files do not fit the run",
    "refused": "it refuses the message",
    "not finite": "its training gave values that are not finite",
    "out of range": "its values are too large for secure aggregation",
    "too slow": "it took longer than failures.timeout",
    "training": "its training failed",
    "file": "a file of its own is missing or damaged",
    **{name: f"it raised {'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in _BUILT_IN},
}
"""All that a client says of a failure, and what the server makes of it. The sentence of an exception may name a path, a
patient or a value, so it stays in the client's own log; of its class, only the nearest one of Python's own is said."""
_INSTEAD: dict[str, dict[str, Check]] = {
    # in place of the answer to any message
    "failed": {"failure": _one_of(*FAILURES)},
    "leaves": {},
    "unprepared": {},
    "not begun": {},
}
_KINDS = {kind: values for kind, (values, _, _) in _MESSAGES.items()}
_KINDS |= {answer: values for _, answer, values in _MESSAGES.values()} | _INSTEAD
ANSWER_TO = {kind: answer for kind, (_, answer, _) in _MESSAGES.items()}
"""The kind of a client's answer, by the kind of the message."""
_TENSORS = {
    "begin": "what the phase starts from",
    "requested": "what a client asks the server",
    **dict.fromkeys(("train", "train masked"), "what the server sends a client"),
    "update": "what a client sends the server",
    "trained": "two public keys",
    "share": "public keys of all",
    "shared": "encrypted shares of two secrets, commitment to one of them",
    "mask": "encrypted shares",
    "masked": "what a client sends the server, masked",
    **dict.fromkeys(("confirmed", "unmask"), "codes about the clients that have not dropped out"),
    "unmasked": "shares",
    "exchange": "what the server and others send a client",
    "given": "what others get from a client",
    **dict.fromkeys(("evaluate", "finish"), "what a client needs for its model"),
    "evaluation": "mean gate weights",
}


def carried() -> dict[str, list[str]]:
    """What messages of each kind carry, beside what they are about: names of values, and tensors in words."""
    about, carries = {"run", "phase", "round", "kept"}, {}
    for kind, values in _KINDS.items():
        carries[kind] = [name for name, check in values.items() if name not in about and check is not _nothing]
        carries[kind] += [_TENSORS[kind]] if kind in _TENSORS else []
    return carries


HEADER = _record(
    {
        "kind": _name,
        "values": _a(dict),
        "tensors": _list(_row(_name, _one_of(*DTYPES), _shape_of_tensor)),
    }
)
"""Whether something is what stands before the tensors of a message."""


def problem_of_values(kind: str, values: dict[str, Any]) -> str:
    """Why no message of this kind has these values, in a few words; empty if one may have them."""
    if kind not in _KINDS:
        return f"it is of the kind {_shown(kind)}, which is unknown"
    if wrong := _wrong(values, _KINDS[kind]):
        return f"its {_shown(wrong)[1:-1]} is {_shown(values.get(wrong))}, which no '{kind}' has"
    parts = values["parts"] if kind in ("several", "answers") else ()
    return next(filter(None, (problem_of_values(of_part, its_values) for of_part, its_values, *_ in parts)), "")


def _shown(value: Any) -> str:
    """The beginning of a value, however long and deep it is."""
    return reprlib.repr(value)[:100]
