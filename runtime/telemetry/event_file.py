"""TensorBoard event files, written without TensorBoard: its writers load torch or TensorFlow, which the coordinator never does.

A file is a sequence of records: length (u64), checksum of the length (u32), an `Event` message, checksum of the message (u32),
all little-endian. The message's fields are those of TensorFlow's event.proto and summary.proto (`simple_value`, `histo`).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.telemetry.metrics import Histogram, Metrics


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4), rotated and offset as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile:
    """One new event file under `folder`; TensorBoard reads a folder's files as one run."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = self.path.open("xb")
        self._record(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        """Append one step's metrics, at `seconds` since the epoch, and flush."""
        values = b"".join(_bytes(1, _value(name, value)) for name, value in metrics.items())
        self._record(_double(1, seconds) + _integer(2, step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, event))
        self._file.write(length + next(checks) + event + next(checks))
        self._file.flush()


def _value(name: str, value: float | Mapping[int, int]) -> bytes:
    """Summary.Value: tag = 1, and simple_value = 2 or histo = 5."""
    if isinstance(value, Mapping):
        return _bytes(1, name.encode()) + _bytes(5, _histogram(dict(value)))
    return _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", value)


def _histogram(counts: Histogram) -> bytes:
    """HistogramProto with a bucket of width 1 about every integer from the least value to the greatest."""
    if not counts:
        return b""
    values = range(min(counts), max(counts) + 1)
    moments = (sum(value**power * count for value, count in counts.items()) for power in range(3))
    scalars = (min(counts), max(counts), *moments)
    return (
        b"".join(_double(field, scalar) for field, scalar in enumerate(scalars, start=1))
        + _doubles(6, [value + 0.5 for value in values])
        + _doubles(7, [counts.get(value, 0) for value in values])
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _doubles(field: int, values: Sequence[float]) -> bytes:
    return _bytes(field, struct.pack(f"<{len(values)}d", *values))
