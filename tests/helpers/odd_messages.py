"""Bytes that an attacker sends in place of a message."""

import json


def raw(header, tensors=b"") -> bytes:
    """Bytes in the format of a message: a header, as an object or as text of JSON, and what follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors
