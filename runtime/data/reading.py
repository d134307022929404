"""Rows of a json, jsonl, Parquet or Arrow file, one object at a time, each with the place it stands at.

The first bytes decide: Parquet and Arrow name themselves, `[` is a JSON array (read whole), anything else is JSON lines
(streamed). JSON may be compressed by gzip or zstd. pyarrow is imported where it is needed: most runs read JSON.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.data.fields import Row
from runtime.errors import UserError

T = TypeVar("T")

PARQUET = b"PAR1"
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # a file, and a stream written to one
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_HEAD_BYTES = 64
_BLOCK_BYTES = 1 << 20
_ROW_BYTES = 1 << 26  # at most: a few bytes that are compressed can stand for gigabytes
_ARRAY_BYTES = 1 << 30
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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


def count_rows(path: Path, key: str) -> int:
    """How many rows a file has, about: blank lines count. Raises UserError as `read_rows` does for a file that is torn."""
    with _opened(path, key) as file:
        head = _head(file)
        if _is_table(head):
            from runtime.data import tables

            return tables.count(path, key, head.startswith(PARQUET))
        if _is_array(head):
            return len(_decoded(file, path, key, list[msgspec.Raw]))
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    with _opened(path, key) as file:
        head = _head(file)
        if _is_table(head):
            from runtime.data import tables

            yield from tables.rows(path, key, head.startswith(PARQUET), _ROW_BYTES)
        elif _is_array(head):
            yield from enumerate(_decoded(file, path, key, list[Any]), 1)
        else:
            yield from _lines(file, path, key)


@contextmanager
def _opened(path: Path, key: str) -> Iterator[io.BufferedReader]:
    """The file, which is decompressed as it is read. Raises UserError for one that cannot be."""
    try:
        with path.open("rb") as file:
            head = file.peek(_HEAD_BYTES)
            kind = next((kind for mark, kind in _COMPRESSED.items() if head.startswith(mark)), "")
            if not kind:
                yield file
                return
            import pyarrow as pa

            with io.BufferedReader(pa.CompressedInputStream(file, kind)) as unpacked:
                if _is_table(_head(unpacked)):
                    raise UserError(f"{key}: {path}: a compressed table, which is not mapped into memory; unpack it")
                yield unpacked
    except (OSError, NotImplementedError) as error:  # pyarrow without that library
        raise UserError(f"{key}: {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _head(file: io.BufferedReader) -> bytes:
    return file.peek(_HEAD_BYTES)


def _is_table(head: bytes) -> bool:
    return head.startswith((PARQUET, *_ARROW))


def _is_array(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _lines(file: io.BufferedReader, path: Path, key: str) -> Iterator[tuple[int, Any]]:
    decode = msgspec.json.Decoder().decode
    for number, line in enumerate(iter(lambda: file.readline(_ROW_BYTES + 1), b""), 1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if len(line) > _ROW_BYTES:
            raise UserError(f"{key}: {path}:{number}: a row of more than {_ROW_BYTES} bytes")
        if text.isspace() or not text:
            continue
        try:
            yield number, decode(text)
        except _NO_JSON as error:
            raise UserError(f"{key}: {path}:{number}: not a line of JSON: {error}") from error


def _decoded(file: io.BufferedReader, path: Path, key: str, kind: type[list[T]]) -> list[T]:
    data = file.read(_ARRAY_BYTES + 1)
    if len(data) > _ARRAY_BYTES:
        raise UserError(f"{key}: {path}: a JSON array of more than {_ARRAY_BYTES} bytes; write a row a line (jsonl)")
    try:
        return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except _NO_JSON as error:
        raise UserError(f"{key}: {path}: not a JSON array: {error}") from error
