"""Bytes that an attacker sends in place of a message: any bytes, and real messages in which one thing is odd."""

import copy
import json
import math
import random
import struct

DEEP = "a nested list, which only stands in the text"
ODD_VALUES = (
    *(None, True, -1, 0, 1, 7.5, 1e30, math.nan, -math.inf, 2**31, 2**63, 10**300, DEEP),
    *("", "x" * 10**5, "\ud800", "\x1b[2J\n", "../../x", "0" * 32, "FedAvg"),
    *([], [[]], [0] * 10**5, {}, {"a": {"b": [1]}}, [["..", 1, None]], [["it", 10**12, None]]),
)
ODD_NUMBERS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 0.0)


def raw(header, tensors=b"") -> bytes:
    """Bytes in the format of a message: a header, as an object or as text of JSON, and what follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def parts(content: bytes) -> tuple[dict, bytes]:
    """The header of a message, and what follows it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def odd(content: bytes, rng: random.Random) -> bytes:
    """A message in which one thing is odd."""
    return rng.choice((_of_bytes, _of_header, _of_header, _of_shapes, _of_values))(content, rng)


def _of_bytes(content: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(content)), rng.choice((1, 8, 1000))
    noise = rng.randbytes(length)
    return rng.choice(
        (
            content[:start],
            content + noise,
            content[:start] + noise + content[start:],
            content[:start] + noise + content[start + length :],
            content[:start] + content[start + length :],
            rng.choice((0, 1, 2**21, 2**40, 2**64 - 1)).to_bytes(8, "little") + content[8:],
            noise,
            b"",
        )
    )


def _of_header(content: bytes, rng: random.Random) -> bytes:
    """One value anywhere in the header is replaced, left out or added."""
    header, tensors = parts(content)
    header = copy.deepcopy(header)
    places = [*_places(header)]
    node, key = rng.choice(places)
    value = rng.choice(ODD_VALUES)
    what = rng.choice(("replace", "replace", "leave out", "add"))
    if what == "leave out":
        del node[key]
    elif what == "add" and isinstance(node, dict):
        node[rng.choice(("odd", "../x", "x" * 10**4, "weight", "reason"))] = value
    elif what == "add":
        node.append(value)
    else:
        node[key] = value
    depth = rng.choice((9, 900, 20_000, 200_000))
    text = json.dumps(header).replace(json.dumps(DEEP), "[" * depth + "]" * depth)
    return raw(text.encode(), tensors)


def _places(node):
    for key in node if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _of_shapes(content: bytes, rng: random.Random) -> bytes:
    """A tensor claims another name, type or shape than what follows has."""
    header, tensors = parts(content)
    if not header["tensors"]:
        header["tensors"] = [["x", "float32", [1]]]
        tensors += bytes(4)
    listed = rng.choice(header["tensors"])
    size = math.prod(listed[2])
    name = rng.choice(("x", "own/x", "../x", "gate.weight", "optimizer/x", "experts.0.weight", "features/0", "1", ""))
    shape = rng.choice(
        ([10**12], [10**10], [0, 10**5], [size, 1], [1, size], [1] * 20, [-1], [], [size * 2], [2**62, 4])
    )
    change = rng.choice(((0, name), (0, name), (1, rng.choice(("bool", "int64", "complex64", "load"))), (2, shape)))
    listed[change[0]] = change[1]
    return raw(header, tensors)


def _of_values(content: bytes, rng: random.Random) -> bytes:
    """The tensors have odd numbers."""
    header, tensors = parts(content)
    changed, number, begin = b"", rng.choice(ODD_NUMBERS), 0
    for _, dtype, shape in header["tensors"]:
        form = {"float64": "d", "float32": "f"}.get(dtype)
        size = math.prod(shape) * {"float64": 8, "float32": 4, "int64": 8, "bool": 1, "uint8": 1}[dtype]
        replaced = form and rng.random() < 0.5
        changed += struct.pack(f"<{form}", number) * math.prod(shape) if replaced else tensors[begin : begin + size]
        begin += size
    return raw(header, changed)
