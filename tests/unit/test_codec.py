"""msgpack with arrays: what goes in comes out, and what is not a message is refused with the place of the fault."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime import codec
from runtime.columns import Runs
from runtime.errors import InvalidMessage
from runtime.types import GroupPayload, Sample, Scores

DTYPES = ("<i4", "<f4", "|u1", "<i8", "<f8", "<u4")


class Box(msgspec.Struct):
    values: np.ndarray


def extension(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode({"values": msgspec.msgpack.Ext(code, data)})


@settings(max_examples=60)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, st.integers(0, 40))))
def test_an_array_arrives_bit_for_bit(values: np.ndarray) -> None:
    decoded = codec.decode(Box, codec.encode(Box(values))).values
    assert decoded.dtype == values.dtype
    assert decoded.shape == values.shape
    assert decoded.tobytes() == values.tobytes()  # NaN's bits and the sign of 0 included


@pytest.mark.parametrize(("index", "dtype"), list(enumerate(DTYPES)))
def test_an_array_on_the_wire_is_its_dtypes_number_and_its_bytes(index: int, dtype: str) -> None:
    values = np.array([1, 2], dtype)
    assert codec.encode(Box(values)) == extension(1, bytes([index]) + values.tobytes())


def test_a_view_with_gaps_is_packed() -> None:
    values = np.arange(10, dtype=np.int32)[::3]
    np.testing.assert_array_equal(codec.decode(Box, codec.encode(Box(values))).values, [0, 3, 6, 9])


def test_an_array_is_a_read_only_view_into_the_message() -> None:
    data = codec.encode(Box(np.arange(1000, dtype=np.int64)))
    decoded = codec.decode(Box, data).values
    assert not decoded.flags.writeable
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert start <= decoded.__array_interface__["data"][0] < start + len(data)


def test_a_group_with_samples_of_several_lengths_arrives_whole() -> None:
    samples = [
        Sample(
            tokens=np.arange(size, dtype=np.int32),
            loss_mask=np.ones(size, np.uint8),
            logprobs=np.linspace(-1, 0, size, dtype=np.float32),
            versions=np.full(size, 1 << 33, np.int64),
            finish_reason="length",
        )
        for size in (0, 1, 7)
    ]
    payload = GroupPayload.of(1 << 40, np.array([-1, 5], np.int32), samples)
    data = codec.encode(payload)
    decoded = codec.decode(GroupPayload, data)
    assert codec.encode(decoded) == data
    assert [len(sample.tokens) for sample in decoded.samples] == [0, 1, 7]
    np.testing.assert_array_equal(decoded.samples[2].logprobs, samples[2].logprobs)


def _reply(mask: np.ndarray, versions: np.ndarray) -> Sample:
    random = np.random.default_rng(len(mask))
    return Sample(
        tokens=random.integers(0, 1 << 31, len(mask), np.int32),
        loss_mask=mask,
        logprobs=(-random.random(len(mask), np.float32) * mask).astype(np.float32),
        versions=versions,
        finish_reason="stop",
    )


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 1 << 32])), max_size=20), max_size=5).map(
        lambda replies: [
            _reply(np.array([mask for mask, _ in reply], np.uint8), np.array([version for _, version in reply], np.int64))
            for reply in replies
        ]
    )
)
def test_the_replies_of_a_group_arrive_as_they_were(samples: list[Sample]) -> None:
    """Whatever masks and versions they have, which travel as runs."""
    payload = codec.decode(GroupPayload, codec.encode(GroupPayload.of(7, np.zeros(1, np.int32), samples)))
    assert len(payload.samples) == len(samples)
    for arrived, sent in zip(payload.samples, samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(arrived, name), getattr(sent, name), strict=True)


def test_a_sampled_token_takes_8_bytes_and_an_inserted_one_4() -> None:
    """Besides some hundred bytes a group: a version that changes now and then, and a tool's output, cost next to nothing."""
    size, n = 1024, 8
    mask = np.ones(size, np.uint8)
    mask[100:300] = 0
    versions = np.where(np.arange(size) < 600, 1, 2)
    data = codec.encode(GroupPayload.of(7, np.zeros(1, np.int32), [_reply(mask, versions) for _ in range(n)]))
    sampled = n * int(mask.sum())
    assert len(data) < 8 * sampled + 4 * (n * size - sampled) + 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.full(3, -1.0, np.float32), "loss_mask": np.array([1, 0, 1], np.uint8)}, "whose mask is 0"),
        ({"tokens": np.zeros(2, np.int32)}, r"sample 0: loss_mask is uint8 of shape \(3,\), not uint8 of shape \(2,\)"),
        ({"logprobs": np.zeros(3, np.float64)}, "sample 0: logprobs is float64 of shape .*, not float32"),
    ],
)
def test_a_reply_that_a_payload_cannot_hold_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    sample = msgspec.structs.replace(_reply(np.ones(3, np.uint8), np.zeros(3, np.int64)), **change)
    with pytest.raises(InvalidMessage, match=message):
        GroupPayload.of(7, np.zeros(1, np.int32), [sample])


@pytest.mark.parametrize("name", ["lengths", "tokens", "logprobs", "loss_mask", "versions", "finish_reasons"])
def test_a_payload_whose_columns_do_not_fit_one_another_is_refused(name: str) -> None:
    payload = GroupPayload.of(7, np.zeros(1, np.int32), [_reply(np.ones(3, np.uint8), np.zeros(3, np.int64))])
    kept = getattr(payload, name)
    setattr(payload, name, Runs(kept.values, kept.lengths + np.uint32(1)) if isinstance(kept, Runs) else kept[1:])
    with pytest.raises(InvalidMessage, match="group 7: its columns have"):
        codec.decode(GroupPayload, codec.encode(payload))


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 2), np.int32),
        np.array(1.0, np.float32),
        np.zeros(3, np.float16),
        np.zeros(3, ">i4"),
        np.array(["a"]),
        np.array([None]),
    ],
)
def test_an_array_of_another_shape_or_dtype_is_not_encoded(values: np.ndarray) -> None:
    with pytest.raises(InvalidMessage, match="cannot encode an array of dtype"):
        codec.encode(Box(values))


def test_a_foreign_object_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        codec.encode([object()])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "Input data was truncated"),
        (b"\xc1", "not a Box"),
        (codec.encode(Box(np.zeros(3, np.int32)))[:-1], "truncated"),
        (msgspec.msgpack.encode({}), "required field `values`"),
        (msgspec.msgpack.encode({"values": 5}), r"\$\.values"),
        (msgspec.msgpack.encode({"values": [1, 2]}), r"\$\.values"),
        (extension(2, b"\0\0\0\0\0"), "extension 2"),
        (extension(codec.ARRAY, b""), "extension 1"),
        (extension(codec.ARRAY, b"\7\0\0\0\0"), "extension 1"),
        (extension(codec.ARRAY, b"\0\0\0\0"), "3 bytes, not a multiple of 4"),
    ],
)
def test_what_is_not_the_message_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        codec.decode(Box, data)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="utf-8"):
        codec.decode(dict[str, int], b"\x81\xa1\xff\x01")


@settings(max_examples=150)
@given(st.binary(max_size=40))
def test_no_bytes_do_worse_than_InvalidMessage(data: bytes) -> None:
    for type_ in (Scores, GroupPayload, dict[str, np.ndarray]):
        with suppress(InvalidMessage):
            codec.decode(type_, data)


@settings(max_examples=60)
@given(st.data())
def test_no_damaged_message_does_worse_than_InvalidMessage(data: st.DataObject) -> None:
    message = bytearray(codec.encode(Scores(group_id=1, rewards=np.ones(3, np.float32), valid=np.ones(3, np.uint8))))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidMessage):
        codec.decode(Scores, bytes(message))
