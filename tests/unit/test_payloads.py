"""Segment files: what was appended is read back, or its loss is noticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import StorageFull
from runtime.ledger import payloads
from runtime.ledger.payloads import Handle, PayloadLost, PayloadStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PayloadStore]:
    store = PayloadStore(tmp_path, segment_bytes=256)
    yield store
    store.close()


def test_records_come_back_across_segments_and_restarts(tmp_path: Path, store: PayloadStore) -> None:
    written = {store.append(data): data for data in (b"", b"a" * 100, b"b" * 200, b"c" * 1000, b"d")}
    assert {handle.segment for handle in written} == {0, 1, 2, 3}, "a record is never split, and one too long has its own"
    again = PayloadStore(tmp_path, segment_bytes=256)
    assert again.append(b"later").segment == 4, "nothing is written behind a tail that may be torn"
    for handle, data in written.items():
        assert again.read(handle) == data
    again.close()


@given(data=st.binary(min_size=1, max_size=64), where=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: bytes, where: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("segments")
    store = PayloadStore(folder, 1 << 20)
    before, handle = store.append(b"before"), store.append(data)
    store.close()
    path = payloads.segment_path(folder, handle.segment)
    content = bytearray(path.read_bytes())
    content[handle.offset + where % (16 + len(data))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(PayloadLost, match=r"segment-00000\.bin"):
        payloads.read(folder, handle)
    assert payloads.read(folder, before) == b"before"


def test_a_torn_or_missing_record_is_lost(tmp_path: Path, store: PayloadStore) -> None:
    handle = store.append(b"x" * 50)
    os.truncate(payloads.segment_path(tmp_path, 0), 40)
    with pytest.raises(PayloadLost, match="torn"):
        store.read(handle)
    with pytest.raises(PayloadLost, match="torn"):
        store.read(Handle(0, 4096, 8))
    with pytest.raises(PayloadLost, match="gone"):
        store.read(Handle(9, 0, 8))


def test_a_full_device_leaves_the_store_as_it_was(store: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.append(b"first")
    write = os.pwrite
    room = [10]

    def scarce(fd: int, data: bytes, offset: int) -> int:
        allowed = min(len(data), room[0])
        if not allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= allowed
        return write(fd, data[:allowed], offset)

    monkeypatch.setattr("runtime.ledger.payloads.os.pwrite", scarce)
    with pytest.raises(StorageFull, match="no space left on device"):
        store.append(b"second" * 10)
    assert payloads.segments(store.folder) == {0: 16 + 5}, "nothing half written stays behind"
    room[0] = 1000
    second = store.append(b"second" * 10)
    assert (store.read(first), store.read(second)) == (b"first", b"second" * 10)


def test_retention_deletes_the_oldest_retired_segments_only(store: PayloadStore) -> None:
    handles = [store.append(bytes([i]) * 200) for i in range(5)]  # one to a segment, 216 bytes each
    assert store.retain([1, 2, 3, 4], retain_bytes=2 * 216) == [1], "4 is current and does not count"
    assert store.retain([1, 2, 3, 4], retain_bytes=2 * 216) == []
    assert store.retain([2, 3, 4], retain_bytes=0) == [2, 3]
    assert store.read(handles[0]) == b"\0" * 200
    with pytest.raises(PayloadLost):
        store.read(handles[1])


def test_a_segment_number_is_never_used_twice(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path, 10)
    store.append(b"0" * 20)
    store.append(b"1" * 20)
    store.retain([0, 1], 0)
    store.close()
    again = PayloadStore(tmp_path, 10)
    assert again.segment == 2
    again.close()
