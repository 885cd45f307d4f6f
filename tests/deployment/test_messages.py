"""Messages carry tensors bit for bit; bytes that are none are refused before anything is built from them."""

import io
import math
import zipfile

import pytest
import torch
from helpers.odd_messages import raw

from fedmoe_pl.checkpoints import files
from fedmoe_pl.deployment import BadMessageError, Message
from fedmoe_pl.deployment.messages import one_line
from fedmoe_pl.deployment.schema import DTYPES

UPDATE = {"kind": "update", "values": {"weight": 3.0, "keeps": 1}, "tensors": []}
FAILED = {"kind": "failed", "values": {"failure": "refused"}, "tensors": []}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_tensors_arrive_bit_for_bit(dtype, shape):
    sent = torch.randn(shape).mul(50).to(dtype)
    came = Message.from_bytes(Message("requested", tensors={"x": sent}).to_bytes()).tensors["x"]
    assert (came.dtype, came.shape, bits(came)) == (sent.dtype, sent.shape, bits(sent))


def test_messages_carry_all_types_that_checkpoints_do():
    assert {*files._DTYPES} <= {*DTYPES.values()}


def test_odd_numbers_and_views_arrive_bit_for_bit():
    rows = torch.arange(12.0).reshape(3, 4)
    sent = {"odd": torch.tensor([math.nan, -0.0, math.inf, 5e-324]), "view": rows.T[1:], "same": rows[:1].expand(5, 4)}
    came = Message.from_bytes(Message("requested", tensors=sent).to_bytes()).tensors
    assert [bits(came[name]) for name in sent] == [bits(sent[name]) for name in sent]


def test_a_message_weighs_what_its_tensors_weigh():
    view = torch.zeros(1000, 1000)[:10]
    content = Message("requested", tensors={"x": view}).to_bytes()
    assert 10 * 1000 * 4 < len(content) < 10 * 1000 * 4 + 100


@pytest.mark.parametrize(
    "deep", [b'{"kind":"failed","values":{"failure":%s},"tensors":[]}', b'{"kind":"description","values":{"sizes":%s}}']
)
def test_nested_lists_do_not_exhaust_the_stack(deep):
    assert Message.from_bytes(raw(FAILED)).kind == "failed"
    for depth in (9, 500, 20_000, 200_000):
        with pytest.raises(BadMessageError) as error:
            Message.from_bytes(raw(deep % (b"[" * depth + b"]" * depth)))
        assert len(str(error.value)) < 200


@pytest.mark.parametrize("shape", [[10**10], [10**12], [10**30], [0, 10**9], [0, 10**5, 10**5], [1] * 17, [-1], [1.0]])
def test_a_tensor_cannot_claim_more_than_came(shape):
    listed = [["x", "float32", [1]]]
    assert Message.from_bytes(raw({**UPDATE, "tensors": listed}, bytes(4))).tensors["x"].tolist() == [0.0]
    with pytest.raises(BadMessageError):
        Message.from_bytes(raw({**UPDATE, "tensors": [["x", "float32", shape]]}, bytes(0 if 0 in shape else 4)))


def test_what_pytorch_saves_and_a_header_of_a_wrong_size_is_no_message():
    saved = io.BytesIO()
    content = {**UPDATE, "tensors": {"x": torch.zeros(1).expand(10**10), "y": torch.zeros(10**5)}}
    torch.save(content, saved)
    deflated = io.BytesIO()
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    of_wrong_sizes = [size.to_bytes(8, "little") + b" " * (2**21 + 1) for size in (0, 2**21 + 1, 2**40, 2**64 - 1)]
    for content in (saved.getvalue(), deflated.getvalue(), *of_wrong_sizes):
        with pytest.raises(BadMessageError, match="the bytes are no message"):
            Message.from_bytes(content)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff",
        b"9" * 5000,
        [],
        {"kind": "update"},
        {**UPDATE, "more": 1},
        {**UPDATE, "kind": 1},
        {**UPDATE, "kind": "odd"},
        {**UPDATE, "values": []},
        {**UPDATE, "values": {**UPDATE["values"], "x" * 10**6: 1}},
        {**UPDATE, "values": {"weight": "3", "keeps": 1}},
        {**UPDATE, "values": {"weight": 10**400, "keeps": 1}},
        {**UPDATE, "tensors": {}},
        {**UPDATE, "tensors": [["x", "float32"]]},
        {**UPDATE, "tensors": [["x", "load", [0]]]},
        {**UPDATE, "tensors": [[1, "float32", [0]]]},
        {**UPDATE, "tensors": [["\ud800", "float32", [0]]]},
        {**FAILED, "values": {"failure": "\ud800"}},
        {**FAILED, "values": {"failure": "no space left on /data/patients"}},
        {**FAILED, "values": {"failure": "refused", "reason": "no space left on /data/patients"}},
    ],
)
def test_a_header_that_no_message_has(header):
    with pytest.raises(BadMessageError) as error:
        Message.from_bytes(raw(header))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("missing", [1, 7])
def test_bytes_are_missing_or_too_many(missing):
    content = Message("requested", tensors={"x": torch.zeros(4)}).to_bytes()
    for changed in (content[:-missing], content + bytes(missing), content[:missing]):
        with pytest.raises(BadMessageError):
            Message.from_bytes(changed)


def test_a_reason_is_one_short_line():
    assert one_line("a\n b\r\x1b[31mc\x00\u202ed") == "a b [31mc d"
    assert len(one_line("word " * 10**6)) == 4000
