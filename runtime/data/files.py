"""Which files a path names: one file, or a folder of data files, such as a data set of Hugging Face's on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from runtime.errors import UserError

T = TypeVar("T")

SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
_PACKED = (".gz", ".zst")  # what may follow .json and .jsonl
_SAVED = "state.json"  # what `Dataset.save_to_disk` writes beside its Arrow files
_SPLITS = "dataset_dict.json"  # and `DatasetDict.save_to_disk` above the splits' folders
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", _SAVED, _SPLITS)
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_.]|$)")
TRAIN = ("train", "training")


class _Shard(msgspec.Struct):
    filename: str


class _Saved(msgspec.Struct):
    shards: list[_Shard] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


class DataFiles(NamedTuple):
    """The files to read, in the order in which their rows count, and what their problems' source is called."""

    source: str  # folder and stem of a file, "gsm8k/train"; the last two parts of a folder's path
    files: list[Path]


def data_files(path: str, key: str) -> DataFiles:
    """What `path` names; of several splits the training split.

    A folder is what `save_to_disk` wrote, or holds data files of one kind, directly or in its folder `data`.
    Raises UserError, naming the configuration key `key`.
    """
    root = Path(path)
    if not root.is_dir():
        if not root.is_file():
            raise UserError(f"{key}: {path} is not a file")
        return DataFiles(f"{root.absolute().parent.name}/{unpacked(root).stem}", [root])
    if (root / _SPLITS).is_file():
        return data_files(str(root / _train(_decoded(root / _SPLITS, _Splits, key).splits, root, key)), key)
    source = "/".join(root.absolute().parts[-2:])
    if (root / _SAVED).is_file():
        shards = _decoded(root / _SAVED, _Saved, key).shards
        return DataFiles(source, [root / shard.filename for shard in shards])
    found = _in_folder(root) or _in_folder(root / "data")
    if not found:
        raise UserError(f"{key}: {path} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    kinds = sorted({unpacked(file).suffix for file in found})
    if len(kinds) > 1:
        raise UserError(f"{key}: {path} holds files of several kinds ({', '.join(kinds)}); name one of them")
    splits = [_split(file) for file in found]
    if not any(splits) or {*splits} <= {*TRAIN}:
        return DataFiles(source, found)
    if not all(splits):
        other = found[splits.index("")].name
        raise UserError(f"{key}: {root} holds files of splits, and {other}, which names none; name the files")
    _train(splits, root, key)
    return DataFiles(source, [file for file, split in zip(found, splits, strict=True) if split in TRAIN])


def unpacked(file: Path) -> Path:
    """The name without that of a compression."""
    return file.with_suffix("") if file.suffix in _PACKED else file


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if unpacked(file).suffix in SUFFIXES and file.name not in _NOT_DATA)


def _split(file: Path) -> str:
    """The split that a file's name says: "train-00000-of-00002.parquet"; "" when it says none."""
    found = _SPLIT.search(file.stem)
    return found.group(1) if found else ""


def _train(splits: list[str], root: Path, key: str) -> str:
    for name in TRAIN:
        if name in splits:
            return name
    raise UserError(f"{key}: {root} has no split named train (it has {', '.join(sorted(set(splits)))}); name a file of it")


def _decoded(file: Path, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{key}: {file} is not what save_to_disk writes: {error}") from error
