"""Messages as bytes: msgpack with arrays, sets of tokens, and frames of a stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime import errors, timeouts, types
from runtime.errors import InvalidMessage
from runtime.types import GroupPayload, Runs, Sample, Scores, TokenSets, encode_set
from services.rpc import contract
from services.rpc.generated import common_pb2
from tests.coroutines import driven_by
from tests.unit.clock import run_by_clock

# ---- msgpack with arrays: what goes in comes out, and what is not a message is refused with the place of the fault

DTYPES = ("<i4", "<f4", "|u1", "<i8", "<f8", "<u4")


class Box(msgspec.Struct):
    values: np.ndarray


def extension(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode({"values": msgspec.msgpack.Ext(code, data)})


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, st.integers(0, 40))))
def test_an_array_arrives_bit_for_bit(values: np.ndarray) -> None:
    decoded = types.decode(Box, types.encode(Box(values))).values
    assert decoded.dtype == values.dtype
    assert decoded.shape == values.shape
    assert decoded.tobytes() == values.tobytes()  # NaN's bits and the sign of 0 included


@pytest.mark.parametrize(("index", "dtype"), list(enumerate(DTYPES)))
def test_an_array_on_the_wire_is_its_dtypes_number_and_its_bytes(index: int, dtype: str) -> None:
    values = np.array([1, 2], dtype)
    assert types.encode(Box(values)) == extension(1, bytes([index]) + values.tobytes())


def test_a_view_with_gaps_is_packed_and_what_arrives_is_a_read_only_view_into_the_message() -> None:
    values = np.arange(10, dtype=np.int32)[::3]
    np.testing.assert_array_equal(types.decode(Box, types.encode(Box(values))).values, [0, 3, 6, 9])
    data = types.encode(Box(np.arange(1000, dtype=np.int64)))
    decoded = types.decode(Box, data).values
    assert not decoded.flags.writeable
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert start <= decoded.__array_interface__["data"][0] < start + len(data)


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
    payload = types.decode(GroupPayload, types.encode(GroupPayload.of(7, np.zeros(1, np.int32), samples)))
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
    data = types.encode(GroupPayload.of(7, np.zeros(1, np.int32), [_reply(mask, versions) for _ in range(n)]))
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
        types.decode(GroupPayload, types.encode(payload))


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
        types.encode(Box(values))


def test_a_foreign_object_is_not_encoded_and_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        types.encode([object()])
    with pytest.raises(InvalidMessage, match="utf-8"):
        types.decode(dict[str, int], b"\x81\xa1\xff\x01")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "Input data was truncated"),
        (b"\xc1", "not a Box"),
        (types.encode(Box(np.zeros(3, np.int32)))[:-1], "truncated"),
        (msgspec.msgpack.encode({}), "required field `values`"),
        (msgspec.msgpack.encode({"values": 5}), r"\$\.values"),
        (msgspec.msgpack.encode({"values": [1, 2]}), r"\$\.values"),
        (extension(2, b"\0\0\0\0\0"), "extension 2"),
        (extension(types.ARRAY, b""), "extension 1"),
        (extension(types.ARRAY, b"\7\0\0\0\0"), "extension 1"),
        (extension(types.ARRAY, b"\0\0\0\0"), "3 bytes, not a multiple of 4"),
    ],
)
def test_what_is_not_the_message_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        types.decode(Box, data)


@given(st.binary(max_size=40))
def test_no_bytes_do_worse_than_InvalidMessage(data: bytes) -> None:
    for type_ in (Scores, GroupPayload, dict[str, np.ndarray]):
        with suppress(InvalidMessage):
            types.decode(type_, data)


@given(st.data())
def test_no_damaged_message_does_worse_than_InvalidMessage(data: st.DataObject) -> None:
    message = bytearray(types.encode(Scores(group_id=1, rewards=np.ones(3, np.float32), valid=np.ones(3, np.uint8))))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidMessage):
        types.decode(Scores, bytes(message))


# ---- Sets of tokens as they travel: what is packed comes out again, whatever its size, and what does not fit is told

VOCABULARY = 75  # not a multiple of 8


def made(sizes: list[int], vocabulary: int = VOCABULARY) -> tuple[TokenSets, np.ndarray, np.ndarray]:
    """Sets of random tokens, the masks that they are [n, vocabulary], and a token of each."""
    rng = np.random.default_rng(3)
    ids = [rng.permutation(vocabulary)[:size].astype(np.int32) for size in sizes]
    masks = np.zeros((len(ids), vocabulary), bool)
    for mask, each in zip(masks, ids, strict=True):
        mask[each] = True
    tokens = np.array([each[-1] for each in ids], np.int32)
    return TokenSets.of([encode_set(each, vocabulary) for each in ids], vocabulary), masks, tokens


def unpacked(sets: TokenSets, which: np.ndarray) -> np.ndarray:
    return np.unpackbits(sets.bitmaps(which), axis=1, bitorder="little")[:, : sets.vocabulary] != 0


SIZES = [1, 2, 3, VOCABULARY, 40, 74, 1, 2]


def test_sets_of_all_sizes_come_out_as_they_were() -> None:
    sets, masks, tokens = made(SIZES)
    read = types.decode(TokenSets, types.encode(sets))
    assert (unpacked(read, np.arange(len(SIZES))) == masks).all()
    some = np.array([7, 3, 5, 0])
    assert (unpacked(read, some) == masks[some]).all()
    assert read.fault(tokens, VOCABULARY) == ""


def test_a_set_takes_four_bytes_a_token_or_a_bit_a_token_of_the_vocabulary_and_nothing_where_it_is_all() -> None:
    vocabulary = 1 << 15
    for size, nbytes in ((1, 4), (1023, 4092), (1024, 4096), (20000, 4096), (vocabulary, 0)):
        assert len(made([size], vocabulary)[0].data) == nbytes


def test_parts_of_sets_join_to_what_they_were() -> None:
    sets, masks, _ = made(SIZES)
    parts = [sets.part(slice(0, 3)), None, sets.part(slice(3, None))]
    joined = TokenSets.joined(parts, [3, 2, 5])
    assert joined is not None
    found = unpacked(joined, np.arange(10))
    assert found[3:5].all()
    assert (np.delete(found, [3, 4], 0) == masks).all()
    assert TokenSets.joined([None, None], [3, 2]) is None


def test_sets_are_spread_among_tokens_that_were_not_drawn() -> None:
    sets, masks, _ = made([1, 40])
    spread = sets.spread(np.array([False, True, False, True]))
    assert (unpacked(spread, np.array([1, 3])) == masks).all()
    assert unpacked(spread, np.array([0, 2])).all()


@pytest.mark.parametrize("size", [2, 40])
def test_a_token_outside_of_its_set_is_a_fault(size: int) -> None:
    sets, masks, tokens = made([3, size, 3])
    tokens[1] = np.flatnonzero(~masks[1])[0]
    assert sets.fault(tokens, VOCABULARY) == "token 1 is not in its kept set"


def test_what_does_not_fit_is_a_fault() -> None:
    sets, _, tokens = made([3, 2])
    assert "the vocabulary has 80" in sets.fault(tokens, 80)
    assert "not 1 in" in sets.fault(tokens[:1], VOCABULARY)
    assert "in 19 bytes" in TokenSets(VOCABULARY, sets.sizes, sets.data[:-1]).fault(tokens, VOCABULARY)
    assert "outside of 0..74" in TokenSets.of([encode_set(np.array([3, 75], np.int32), VOCABULARY)], VOCABULARY).fault(
        np.array([3], np.int32), VOCABULARY
    )


# ---- How bodies become frames: cut up and joined, and when a frame leaves


@pytest.mark.parametrize(
    ("size", "chunks"), [(0, 1), (1, 1), (contract.CHUNK, 1), (contract.CHUNK + 1, 2), (3 * contract.CHUNK, 3)]
)
def test_a_body_is_cut_up_and_joined(size: int, chunks: int) -> None:
    body = np.random.default_rng(0).bytes(size)
    pieces = [(b"".join(chunk), more) for chunk, more in contract.split([body[: size // 3], body[size // 3 :]])]
    assert [more for _, more in pieces] == [True] * (chunks - 1) + [False]
    assert all(len(chunk) <= contract.CHUNK for chunk, _ in pieces)
    joiner = contract.Reassembler()
    joined = [joiner.add(1, chunk, more) for chunk, more in pieces]
    assert joined[:-1] == [None] * (chunks - 1)
    assert joined[-1] == body


def test_whole_bodies_pass_an_unfinished_one_and_a_forgotten_one_leaves_nothing() -> None:
    joiner = contract.Reassembler()
    assert joiner.add(1, b"a", True) is None
    assert joiner.add(3, b"whole", False) == b"whole"
    assert joiner.add(1, b"b", False) == b"ab"
    assert joiner.add(1, b"again", False) == b"again"
    joiner.add(1, b"a", True)
    joiner.forget(2)
    joiner.forget(1)
    assert joiner.add(1, b"b", False) == b"b"


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "LARGEST", 10)
    joiner = contract.Reassembler()
    joiner.add(2, bytes(6), True)
    assert joiner.add(2, bytes(4), False) == bytes(10)
    joiner.add(1, bytes(6), True)
    with pytest.raises(errors.InvalidMessage, match="more than 10 bytes"):
        joiner.add(1, bytes(6), True)


def test_a_stream_leaves_one_body_unfinished() -> None:
    joiner = contract.Reassembler()
    joiner.add(1, b"a", True)
    with pytest.raises(errors.InvalidMessage, match=r"^more than one unfinished message$"):
        joiner.add(2, b"a", True)


def call(id_: int, size: int = 0) -> tuple[common_pb2.Call, bytes]:
    return common_pb2.Call(id=id_), bytes(size)


def ids(calls: list[Any]) -> list[int]:
    return [getattr(call, "head", call).id for call in calls]


@pytest.mark.parametrize("size", [0, 127, 128, 1 << 14, 1 << 21])
@driven_by(run_by_clock)
async def test_a_frame_is_what_protobuf_would_write(size: int) -> None:
    bodies = [np.random.default_rng(number).bytes(size) for number in range(3)]
    outbox = contract.SendQueue()
    for number, body in enumerate(bodies):
        outbox.put(common_pb2.Reply(id=number), [memoryview(body)[:9], memoryview(body)[9:]] if number else body)
    messages = await outbox.frame()
    frame = common_pb2.ReplyFrame.FromString(contract.wire_frame(common_pb2.ReplyFrame(schema=7), "replies", messages))
    whole = [common_pb2.Reply(id=number, body=body) for number, body in enumerate(bodies)][: len(messages)]
    assert frame == common_pb2.ReplyFrame(schema=7, replies=whole)


@driven_by(run_by_clock)
async def test_data_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 0.05)
    loop, outbox = asyncio.get_running_loop(), contract.SendQueue()
    before = loop.time()
    outbox.put(*call(1))
    loop.call_later(0.01, outbox.put, *call(2))
    assert ids(await outbox.frame()) == [1, 2]
    assert loop.time() - before == pytest.approx(0.05)
    outbox.put(*call(3))
    before = loop.time()
    assert ids(await outbox.frame()) == [3]
    assert loop.time() - before == pytest.approx(0.05)


@driven_by(run_by_clock)
async def test_an_urgent_message_leaves_at_once_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)
    outbox = contract.SendQueue()
    outbox.put(*call(1))
    frame = asyncio.create_task(outbox.frame())
    await asyncio.sleep(0)
    outbox.put(*call(2), urgent=True)
    assert ids(await frame) == [1, 2]
    outbox.put(*call(3))  # the urgency is over
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(outbox.frame(), 0.02)


@driven_by(run_by_clock)
async def test_a_full_frame_leaves_and_the_rest_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = contract.SendQueue()
    for number in range(5):
        outbox.put(*call(number, contract.CHUNK))
    assert ids(await outbox.frame()) == [0, 1, 2, 3]
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)
    assert ids(await outbox.frame()) == [4]


@driven_by(run_by_clock)
async def test_as_many_messages_as_fill_a_frame_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)
    outbox = contract.SendQueue()
    for number in range(contract.MAX_BATCH + 1):
        outbox.put(*call(number))
    assert ids(await outbox.frame()) == list(range(contract.MAX_BATCH))
    assert ids(await outbox.frame()) == [contract.MAX_BATCH]


@driven_by(run_by_clock)
async def test_a_closed_outbox_gives_what_it_has_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FRAME_WINDOW", 60.0)
    outbox = contract.SendQueue()
    outbox.put(*call(1))
    outbox.close()
    assert ids(await outbox.frame()) == [1]
    assert await outbox.frame() == []
    assert await outbox.frame() == []
    waiting = contract.SendQueue()
    frame = asyncio.create_task(waiting.frame())
    await asyncio.sleep(0)
    waiting.close()
    assert await frame == []
