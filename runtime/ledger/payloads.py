"""Payloads on disk: append-only segment files, each record with its length and checksum.

A segment `segment-00000.bin` is a sequence of records: length (uint64) and xxh3-64 of the bytes (uint64), little-endian, then
the bytes. A record is never changed; whole segments are deleted once none of their records is needed. A new store starts a new
segment, so it never writes behind a tail that a crash may have torn.

Durability: a write is in the operating system's cache when `append` returns, so killing the process loses nothing. `sync`,
rotation and `close` call fsync. A power cut may tear later records; the checksum finds this, and `read` raises PayloadLost.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash
from msgspec import Struct

from runtime import run_files
from runtime.errors import SluiceError, StorageFull, is_full
from runtime.run_files import regular

SEGMENT_BYTES = 64 << 20  # of a payload file
_HEADER = struct.Struct("<QQ")
_NAME = re.compile(r"segment-(\d{5,})\.bin")


class PayloadLost(SluiceError):
    """A record is missing, torn or altered: its content has to be made again."""


class Handle(Struct, frozen=True, array_like=True):
    """The position of a record: `offset` of its header, `length` of its bytes."""

    segment: int
    offset: int
    length: int


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"segment-{segment:05d}.bin"


def segments(folder: Path) -> dict[int, int]:
    """Return the segments in `folder` and their sizes in bytes, oldest first."""
    found = ((match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
    return dict(sorted((int(match[1]), path.stat().st_size) for match, path in found))


def read(folder: Path, handle: Handle) -> bytes:
    """Read one record. Raises PayloadLost. Any thread or process may read while a store appends."""
    path = segment_path(folder, handle.segment)
    try:
        with regular(path, None).open("rb", buffering=0) as file:
            whole = 0 <= handle.length <= os.fstat(file.fileno()).st_size and handle.offset >= 0  # False for a damaged row
            record = os.pread(file.fileno(), _HEADER.size + handle.length, handle.offset) if whole else b""
    except FileNotFoundError:
        raise PayloadLost(f"{path.name} is gone") from None
    if len(record) == _HEADER.size + handle.length:
        length, checksum = _HEADER.unpack_from(record)
        data = record[_HEADER.size :]
        if length == handle.length and xxhash.xxh3_64_intdigest(data) == checksum:
            return data
    raise PayloadLost(f"{path.name}: the record at {handle.offset} of {handle.length} bytes is torn")


class PayloadStore:
    """The writing side; one per folder, used from one thread."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.segment_bytes = segment_bytes
        newest = max(segments(folder), default=-1)
        if newest >= 0:
            run_files.sync(segment_path(folder, newest))  # a killed store did not do this
        self._open(newest + 1)

    def append(self, data: bytes) -> Handle:
        """Write one record. Raises StorageFull, leaving the store unchanged."""
        record = _HEADER.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data
        if self._size and self._size + len(record) > self.segment_bytes:
            self._rotate()
        handle = Handle(self.segment, self._size, len(data))
        try:
            self._write(record)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            if is_full(error):
                raise StorageFull(self.folder) from error
            raise
        self._size += len(record)
        return handle

    def read(self, handle: Handle) -> bytes:
        return read(self.folder, handle)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        os.fsync(self._fd)

    def retain(self, retired: Iterable[int], retain_bytes: int) -> list[int]:
        """Delete the oldest of the `retired` segments until the rest of them fit into `retain_bytes`. Return the deleted ones.

        The current segment stays, so that no number is used twice.
        """
        sizes = segments(self.folder)
        candidates = sorted(set(retired) & (sizes.keys() - {self.segment}))
        excess = sum(sizes[segment] for segment in candidates) - retain_bytes
        deleted = []
        for segment in candidates:
            if excess <= 0:
                break
            segment_path(self.folder, segment).unlink()
            excess -= sizes[segment]
            deleted.append(segment)
        return deleted

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _write(self, record: bytes) -> None:
        view, offset = memoryview(record), self._size
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def _rotate(self) -> None:
        full = self._fd
        os.fsync(full)
        self._open(self.segment + 1)
        os.close(full)

    def _open(self, segment: int) -> None:
        try:
            self._fd = os.open(segment_path(self.folder, segment), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if is_full(error):
                raise StorageFull(self.folder) from error
            raise
        self.segment, self._size = segment, 0
