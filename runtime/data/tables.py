"""Rows of Parquet and Arrow files, which are mapped into memory. Imports pyarrow, which takes 0.2 s and 40 MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from runtime.errors import UserError

_BATCH_ROWS = 1024


def table_rows(path: Path, key: str, parquet: bool, most: int) -> Iterator[tuple[int, Any]]:
    """Yield (position, row), positions from 1. At most `most` bytes of rows are converted to Python at once.

    Raises UserError for a torn file, a value that Python does not have, and a row of more than `most` bytes."""
    position = 0
    with _open_table(path, key, parquet) as source:
        for batch in _parquet(source) if parquet else _arrow(source):
            exact = {field.name: make for field in batch.schema if (make := _exactly(field.type))}
            for part in _parts(batch, most):
                if part is None:
                    raise UserError(f"{key}: {path}:{position + 1}: a row of more than {most} bytes")
                for row in part.to_pylist():
                    position += 1
                    yield position, (row | {name: make(row[name]) for name, make in exact.items()} if exact else row)


@contextmanager
def _open_table(path: Path, key: str, parquet: bool) -> Iterator[pa.NativeFile]:
    kind = "a Parquet" if parquet else "an Arrow"
    try:
        with pa.memory_map(str(path)) as source:
            yield source
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path}: not {kind} file: {str(error).splitlines()[0]}") from error
    except (ValueError, OverflowError) as error:  # such as a date of the year 9999999, or nanoseconds
        raise UserError(f"{key}: {path}: {kind} file with a value that cannot be read: {error}") from error


def _parquet(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Return batches with columns of text as stored: a dictionary holds a text once, however many rows have it."""
    columns = pq.ParquetFile(source).schema
    texts = [each.path for each in columns if each.physical_type == "BYTE_ARRAY" and "." not in each.path]
    source.seek(0)
    batches: Iterator[pa.RecordBatch] = pq.ParquetFile(source, read_dictionary=texts).iter_batches(_BATCH_ROWS)
    return batches


def _arrow(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Return the batches of an Arrow file, or of an Arrow stream in a file, which the library datasets writes."""
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return iter(pa.ipc.open_stream(source))
    return map(file.get_batch, range(file.num_record_batches))


def _parts(batch: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch | None]:
    """Yield the batch in parts of at most `most` bytes each; None for a larger row."""
    if sum(map(_bytes, batch.columns)) <= most:
        yield batch
    elif batch.num_rows == 1:
        yield None
    else:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half), most)
        yield from _parts(batch.slice(half), most)


def _bytes(column: pa.Array) -> int:
    """Return the bytes of the values; a shared value counts once for each row."""
    if isinstance(column, pa.DictionaryArray) and not pa.types.is_primitive(column.type.value_type):
        return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    if isinstance(column, pa.StructArray):
        return sum(map(_bytes, column.flatten()))
    return _bytes(column.flatten()) if type(column) in (pa.ListArray, pa.LargeListArray) else int(column.nbytes)


def _exactly(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that restores a value which pyarrow converts inexactly; None if no conversion is inexact.

    Python's floats have 64 bits: 0.3 of 32 bits would become 0.30000001192092896. A mapping would be a list of pairs."""
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        width = np.float16 if pa.types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(width(value)))
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _exactly(kind.value_type)
    if pa.types.is_map(kind):
        held = _exactly(kind.item_type) or (lambda value: value)
        return lambda value: None if value is None else {name: held(each) for name, each in value}
    if pa.types.is_struct(kind):
        parts = {field.name: make for field in kind if (make := _exactly(field.type))}
        if parts:
            return lambda value: value and value | {name: make(value[name]) for name, make in parts.items()}
    elif pa.types.is_nested(kind) and hasattr(kind, "value_type") and (item := _exactly(kind.value_type)):
        return lambda value: value and [item(each) for each in value]
    return None
