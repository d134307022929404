"""Rows of a json, jsonl, Parquet or Arrow file, one object at a time, each with its position.

The first bytes decide: Parquet and Arrow files begin with a mark of their own, `[` is a JSON array (read whole), anything
else is JSON lines (streamed). JSON may be compressed by gzip or zstd."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from runtime.errors import UserError
from runtime.run_files import NOT_DECODED

Row = dict[str, Any]

# ---- Files
# The files of a path: one file, or a folder of data files, such as a data set of Hugging Face on this machine.

T = TypeVar("T")

SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
_PACKED = (".gz", ".zst")  # suffixes behind .json and .jsonl
_SAVED = "state.json"  # written by `Dataset.save_to_disk` beside its Arrow files
_SPLITS = "dataset_dict.json"  # and `DatasetDict.save_to_disk` above the splits' folders
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", _SAVED, _SPLITS)
# The split in a file's name, as in "train-00000-of-00002.parquet".
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_.]|$)")
TRAIN = ("train", "training")


class _Shard(msgspec.Struct):
    filename: str


class _Saved(msgspec.Struct):
    shards: list[_Shard] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


class DataFiles(NamedTuple):
    """The files to read, in the order of their rows, and the name of their source."""

    source: str  # folder and stem of a file, "gsm8k/train"; the last two parts of a folder's path
    files: list[Path]


def data_files(path: str, key: str) -> DataFiles:
    """Return the files of `path`; of several splits those of the training split. A folder was written by `save_to_disk`, or
    holds data files of one kind, directly or in its folder `data`. Raises UserError, with the configuration key `key`."""
    root = Path(path)
    if not root.is_dir():
        if not root.is_file():
            raise UserError(f"{key}: {path} is not a file")
        return DataFiles(f"{root.absolute().parent.name}/{unpacked(root).stem}", [root])
    if (root / _SPLITS).is_file():
        return data_files(str(root / _train(_decode_file(root / _SPLITS, _Splits, key).splits, root, key)), key)
    source = "/".join(root.absolute().parts[-2:])
    if (root / _SAVED).is_file():
        shards = _decode_file(root / _SAVED, _Saved, key).shards
        return DataFiles(source, [root / shard.filename for shard in shards])
    found = _in_folder(root) or _in_folder(root / "data")
    if not found:
        raise UserError(f"{key}: {path} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    kinds = sorted({unpacked(file).suffix for file in found})
    if len(kinds) > 1:
        raise UserError(f"{key}: {path} holds files of several kinds ({', '.join(kinds)}); name one of them")
    splits = [named.group(1) if (named := _SPLIT.search(file.stem)) else "" for file in found]
    if not any(splits) or {*splits} <= {*TRAIN}:
        return DataFiles(source, found)
    if not all(splits):
        other = found[splits.index("")].name
        raise UserError(f"{key}: {root} holds files of splits, and {other}, which names none; name the files")
    _train(splits, root, key)
    return DataFiles(source, [file for file, split in zip(found, splits, strict=True) if split in TRAIN])


def unpacked(file: Path) -> Path:
    """Return the path without the suffix of a compression."""
    return file.with_suffix("") if file.suffix in _PACKED else file


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if unpacked(file).suffix in SUFFIXES and file.name not in _NOT_DATA)


def _train(splits: list[str], root: Path, key: str) -> str:
    for name in TRAIN:
        if name in splits:
            return name
    raise UserError(f"{key}: {root} has no split named train (it has {', '.join(sorted(set(splits)))}); name a file of it")


def _decode_file(file: Path, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, *NOT_DECODED) as error:
        raise UserError(f"{key}: {file} is not what save_to_disk writes: {error}") from error


PARQUET = b"PAR1"
_TABLES = (PARQUET, b"ARROW1", b"\xff\xff\xff\xff")  # the last two: an Arrow file, and a stream in a file
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_HEAD_BYTES = 64
_ROW_BYTES = 1 << 26  # at most: a few compressed bytes can stand for gigabytes
_ARRAY_BYTES = 1 << 30


def read_rows(path: Path, key: str) -> Iterator[tuple[int, Row]]:
    """Yield (position, row), positions from 1: the line of a jsonl file, the index in other files.

    Raises UserError, with the configuration key `key`, for a file that is missing, empty or malformed."""
    if not path.is_file():
        raise UserError(f"{key}: {path} is not a file")
    position = 0
    for position, row in _rows(path, key):
        if not isinstance(row, dict):
            raise UserError(f"{key}: {path}:{position}: a row is a JSON object, not {type(row).__name__}")
        yield position, row
    if not position:
        raise UserError(f"{key}: {path} has no rows")


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    with _opened(path, key) as file:
        head = file.peek(_HEAD_BYTES)
        if head.startswith(_TABLES):
            from runtime.data.tables import table_rows

            yield from table_rows(path, key, head.startswith(PARQUET), _ROW_BYTES)
        elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from enumerate(_array(file, path, key), 1)
        else:
            yield from _lines(file, path, key)


@contextmanager
def _opened(path: Path, key: str) -> Iterator[io.BufferedReader]:
    """Open a file, which is decompressed as it is read. Raises UserError for an unreadable file."""
    try:
        with path.open("rb") as file:
            head = file.peek(_HEAD_BYTES)
            kind = next((kind for mark, kind in _COMPRESSED.items() if head.startswith(mark)), "")
            if not kind:
                yield file
                return
            import pyarrow as pa

            with io.BufferedReader(pa.CompressedInputStream(file, kind)) as unpacked:
                if unpacked.peek(_HEAD_BYTES).startswith(_TABLES):
                    raise UserError(f"{key}: {path}: a compressed table, which is not mapped into memory; unpack it")
                yield unpacked
    except (OSError, NotImplementedError) as error:  # pyarrow without that library
        raise UserError(f"{key}: {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


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
        except NOT_DECODED as error:
            raise UserError(f"{key}: {path}:{number}: not a line of JSON: {error}") from error


def _array(file: io.BufferedReader, path: Path, key: str) -> list[Any]:
    data = file.read(_ARRAY_BYTES + 1)
    if len(data) > _ARRAY_BYTES:
        raise UserError(f"{key}: {path}: a JSON array of more than {_ARRAY_BYTES} bytes; write a row a line (jsonl)")
    try:
        return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=list[Any])
    except NOT_DECODED as error:
        raise UserError(f"{key}: {path}: not a JSON array: {error}") from error
