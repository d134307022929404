"""Which files a path names: one file, or a folder of data files, such as a data set of Hugging Face's on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from runtime.errors import UserError

SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
_SAVED = "state.json"  # what `Dataset.save_to_disk` writes beside its Arrow files
_SPLITS = "dataset_dict.json"  # and `DatasetDict.save_to_disk` above the splits' folders
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", _SAVED, _SPLITS)
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_.]|$)")
TRAIN = ("train", "training")


def data_files(path: str, key: str) -> list[Path]:
    """The files to read, in the order in which their rows count; of several splits the training split.

    A folder is what `save_to_disk` wrote, or holds data files of one kind, directly or in its folder `data`.
    Raises UserError, naming the configuration key `key`.
    """
    root = Path(path)
    if not root.is_dir():
        if not root.is_file():
            raise UserError(f"{key}: {path} is not a file")
        return [root]
    if (root / _SPLITS).is_file():
        return data_files(str(root / _train(_listed(root / _SPLITS, "splits", key), root, key)), key)
    if (root / _SAVED).is_file():
        shards = _listed(root / _SAVED, "_data_files", key)
        return [root / shard["filename"] for shard in shards]
    found = _in_folder(root) or _in_folder(root / "data")
    if not found:
        raise UserError(f"{key}: {path} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    kinds = sorted({file.suffix for file in found})
    if len(kinds) > 1:
        raise UserError(f"{key}: {path} holds files of several kinds ({', '.join(kinds)}); name one of them")
    splits = [_split(file) for file in found]
    if not any(splits) or {*splits} <= {*TRAIN}:
        return found
    _train([split or "none" for split in splits], root, key)
    return [file for file, split in zip(found, splits, strict=True) if split in TRAIN]


def source_of(file: Path) -> str:
    """What a problem's source is called: its file's folder and stem, "gsm8k/train"."""
    return f"{file.absolute().parent.name}/{file.stem}"


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.name not in _NOT_DATA)


def _split(file: Path) -> str:
    """The split that a file's name says: "train-00000-of-00002.parquet"; "" when it says none."""
    found = _SPLIT.search(file.stem)
    return found.group(1) if found else ""


def _train(splits: list[str], root: Path, key: str) -> str:
    for name in TRAIN:
        if name in splits:
            return name
    raise UserError(f"{key}: {root} has no split named train (it has {', '.join(sorted(set(splits)))}); name a file of it")


def _listed(file: Path, name: str, key: str) -> list[Any]:
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: {file} is not what save_to_disk writes: {error}") from error
    assert isinstance(listed, list), file
    return listed
