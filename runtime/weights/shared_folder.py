"""The epochs' folders in a folder that machines share: made, listed, removed."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from runtime.errors import UserError

MARKER = "sluice-weights"  # in each epoch's folder: what has it is ours to remove
_EPOCH = re.compile(r"epoch-\d{4,}")
_REMOVED = re.compile(r"epoch-\d{4,}\.removed-\d+-\d+")


def epoch_folder(root: Path, epoch: int) -> Path:
    return root / f"epoch-{epoch:04d}"


def open_epoch(root: Path, epoch: int) -> None:
    """Make the folder of `epoch` with its marker, after removing all epochs that `root` has.

    Raises UserError when that is not allowed, or what has the epoch's name is not ours.
    """
    folder = epoch_folder(root, epoch)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in sorted(root.iterdir()):
            if _is_ours(left):
                remove(left)
        folder.mkdir()
        (folder / MARKER).write_text(f"made by process {os.getpid()}; removed with its run\n", encoding="utf-8")
    except FileExistsError as error:
        raise UserError(f"publication.folder: {error.filename} exists already, and is no folder of Sluice's") from error
    except OSError as error:
        raise UserError(f"publication.folder: {root} cannot be written: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    if _REMOVED.fullmatch(path.name):
        return True
    if not _EPOCH.fullmatch(path.name) or not path.is_dir():
        return False
    inside = names(path)
    return MARKER in inside or not inside  # a host that was killed may not have come to write the marker


def names(folder: Path) -> list[str]:
    """What `folder` holds. Raises OSError.

    A look for one name may be answered from what an NFS client remembers, a listing asks the server.
    """
    return os.listdir(folder)  # noqa: PTH208 - only the names are wanted


def remove(folder: Path) -> None:
    """It is gone at once for whoever looks; then its files go, unless somebody holds them. Raises OSError."""
    removed = folder
    if not _REMOVED.fullmatch(folder.name):
        removed = folder.with_name(f"{folder.name}.removed-{os.getpid()}-{time.monotonic_ns()}")
        try:
            folder.rename(removed)
        except FileNotFoundError:
            return
    shutil.rmtree(removed, ignore_errors=True)
