"""Rows of a json, jsonl, Parquet or Arrow file, one object at a time, each with the place it stands at.

The first bytes decide: Parquet and Arrow name themselves, `[` is a JSON array (read whole), anything else is JSON lines
(streamed). pyarrow is imported where it is needed: most runs read JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.data.fields import Row
from runtime.errors import UserError

T = TypeVar("T")

PARQUET = b"PAR1"
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # a file, and a stream written to one
_HEAD_BYTES = 64
_BLOCK_BYTES = 1 << 20


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
    head = _head(path)
    if _is_table(head):
        from runtime.data import tables

        return tables.count(path, key, head.startswith(PARQUET))
    if _is_array(head):
        return len(_decoded(path, key, list[msgspec.Raw]))
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    head = _head(path)
    if _is_table(head):
        from runtime.data import tables

        return tables.rows(path, key, head.startswith(PARQUET))
    if _is_array(head):
        return enumerate(_decoded(path, key, list[Any]), 1)
    return _lines(path, key)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _is_table(head: bytes) -> bool:
    return head.startswith((PARQUET, *_ARROW))


def _is_array(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


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


def _decoded(path: Path, key: str, kind: type[list[T]]) -> list[T]:
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path}: not a JSON array: {error}") from error
