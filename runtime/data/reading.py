"""Rows of a json, jsonl, Parquet or Arrow file, one object at a time, each with the place it stands at.

The first bytes decide: Parquet and Arrow name themselves, `[` is a JSON array (read whole), anything else is JSON lines
(streamed). pyarrow is imported where it is needed: most runs read JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from runtime.data.fields import Row
from runtime.errors import UserError

PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_HEAD_BYTES = 64
_BATCH_ROWS = 1024


def read_rows(path: Path, key: str) -> Iterator[tuple[int, Row]]:
    """Yield (position, row), positions from 1: the line of a jsonl file, the place in the others.

    Raises UserError, naming the configuration key `key`, for a file that is missing, empty or malformed.
    """
    if not path.is_file():
        raise UserError(f"{key}: {path} is not a file")
    count = 0
    for position, row in _rows(path, key):
        if not isinstance(row, dict):
            raise UserError(f"{key}: {path}:{position}: a row is a JSON object, not {type(row).__name__}")
        yield position, row
        count += 1
    if not count:
        raise UserError(f"{key}: {path} has no rows")


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((PARQUET, _ARROW_FILE, _ARROW_STREAM)):
        return _tables(path, key, head)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return _array(path, key)
    return _lines(path, key)


def _lines(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    decode = msgspec.json.Decoder().decode
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.isspace() or not text:
                continue
            try:
                yield number, decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{key}: {path}:{number}: not a line of JSON: {error}") from error


def _array(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    try:
        rows = msgspec.json.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path}: not a JSON array: {error}") from error
    yield from enumerate(rows, 1)


def _tables(path: Path, key: str, head: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.ipc
    import pyarrow.parquet as pq

    kind = "a Parquet" if head.startswith(PARQUET) else "an Arrow"
    position = 0
    try:
        with pa.memory_map(str(path)) as source:
            if head.startswith(PARQUET):
                batches = pq.ParquetFile(source).iter_batches(_BATCH_ROWS)
            elif head.startswith(_ARROW_FILE):
                reader = pa.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(source))
            for batch in batches:
                for row in batch.to_pylist():
                    position += 1
                    yield position, row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path}: not {kind} file: {str(error).splitlines()[0]}") from error
