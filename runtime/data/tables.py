"""Rows of Parquet and Arrow files, which are mapped into memory. Whoever imports this loads pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from runtime.errors import UserError

_BATCH_ROWS = 1024


def rows(path: Path, key: str, parquet: bool) -> Iterator[tuple[int, Any]]:
    """Yield (place, row), places from 1. Raises UserError, naming the configuration key `key`, for a file that is torn."""
    place = 0
    with _opened(path, key, parquet) as source:
        for batch in pq.ParquetFile(source).iter_batches(_BATCH_ROWS) if parquet else _arrow(source):
            for row in batch.to_pylist():
                place += 1
                yield place, row


def count(path: Path, key: str, parquet: bool) -> int:
    """How many rows there are. Raises UserError as `rows` does."""
    with _opened(path, key, parquet) as source:
        return pq.ParquetFile(source).metadata.num_rows if parquet else sum(batch.num_rows for batch in _arrow(source))


@contextmanager
def _opened(path: Path, key: str, parquet: bool) -> Iterator[pa.NativeFile]:
    try:
        with pa.memory_map(str(path)) as source:
            yield source
    except (pa.ArrowException, OSError) as error:
        kind = "a Parquet" if parquet else "an Arrow"
        raise UserError(f"{key}: {path}: not {kind} file: {str(error).splitlines()[0]}") from error


def _arrow(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, or of a stream written to one, as the library datasets does."""
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return iter(pa.ipc.open_stream(source))
    return map(file.get_batch, range(file.num_record_batches))
