"""Checkpoint folders: `RUN/checkpoints/step-00000050`, whole or not there at all.

The trainer's rank 0 writes them; the coordinator's position lies beside the model, so that a checkpoint is one thing.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime import codec
from runtime.errors import InvalidMessage, UserError
from runtime.payloads import StorageFull
from runtime.position import Position

FOLDER = "checkpoints"
POSITION = "position.msgpack"
_NAME = re.compile(r"step-(\d{8})")


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08d}"


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once the block ends well; what lay there before is replaced.

    Raises StorageFull when there is no room, whatever library it was that met it.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
        _sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if os.strerror(errno.ENOSPC) in str(error):
            raise StorageFull(folder) from error
        raise


def sync_tree(folder: Path) -> None:
    """Everything under `folder` survives a power cut."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps(run_dir: Path) -> list[int]:
    """The steps of the run's whole checkpoints, ascending."""
    root = run_dir / FOLDER
    found = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match and (root / match[0] / POSITION).exists())


def prune(run_dir: Path, keep: int, best: int | None) -> list[int]:
    """Delete all but the newest `keep` checkpoints and that of step `best`; returns the steps deleted."""
    gone = [step for step in steps(run_dir)[:-keep] if step != best]
    for step in gone:
        shutil.rmtree(folder_for(run_dir, step))
    return gone


def resolve(resume: str, run_dir: Path) -> str:
    """The folder that `run.resume` means, "" for none. Raises UserError when it is not a checkpoint."""
    if resume == "never":
        return ""
    if resume == "auto":
        found = steps(run_dir)
        return str(folder_for(run_dir, found[-1])) if found else ""
    if resume and not (Path(resume) / POSITION).exists():
        raise UserError(f"run.resume: {resume!r} is not a checkpoint; must be never, auto or a checkpoint's folder")
    return resume


def read_position(folder: Path) -> Position:
    """Raises UserError when it is not whole."""
    path = folder / POSITION
    try:
        return codec.decode(Position, path.read_bytes())
    except (OSError, InvalidMessage) as error:
        raise UserError(f"run.resume: {path}: {error}") from error
