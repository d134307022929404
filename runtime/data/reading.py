"""Rows of a json or jsonl file, one object at a time, each with the place it stands at.

The first character decides: `[` is a JSON array (read whole), anything else is JSON lines (streamed).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import UserError

Row = dict[str, Any]


def read_rows(path: Path, key: str) -> Iterator[tuple[int, Row]]:
    """Yield (position, row), positions from 1: the line of a jsonl file, the place in an array.

    Raises UserError, naming the configuration key `key`, for a file that is missing, empty or malformed.
    """
    if not path.is_file():
        raise UserError(f"{key}: {path} is not a file")
    with path.open("rb") as file:
        head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    rows = _array(path, key) if head.startswith(b"[") else _lines(path, key)
    count = 0
    for position, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{key}: {path}:{position}: a row is a JSON object, not {type(row).__name__}")
        yield position, row
        count += 1
    if not count:
        raise UserError(f"{key}: {path} has no rows")


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
