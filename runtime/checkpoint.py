"""Checkpoint folders: `RUN/checkpoints/step-00000050`, whole or not there at all.

The trainer writes its state there, the critic its own into the folder `critic`; the coordinator, which has them do so, puts its
position beside both, so that a checkpoint is one thing.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime import codec, layout
from runtime.errors import InvalidMessage, StorageFull, UserError
from runtime.position import Position

POSITION = "position.msgpack"
TRAINER = "trainer.json"  # what the trainer says of its part
CRITIC = "critic"  # folder of the critic's state within a checkpoint
_PARTIAL, _DISCARDED = ".partial", ".discarded"
_NAME = re.compile(r"step-(\d{8})")


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / layout.CHECKPOINTS / f"step-{step:08d}"


def begin(folder: Path) -> Path:
    """An empty temporary folder beside `folder`, for `complete` or `discard`."""
    partial = folder.with_name(f".{folder.name}{_PARTIAL}")
    discard(partial)
    partial.mkdir(parents=True)
    return partial


def complete(partial: Path, folder: Path, last: Mapping[str, bytes] | None = None) -> None:
    """Add the files `last` to `partial`, and give it the name `folder`: it survives a power cut, and replaces what lay there.

    When that fails it is discarded.
    """
    try:
        for name, data in (last or {}).items():
            (partial / name).write_bytes(data)
        sync_tree(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
        _sync(folder.parent)
    except BaseException:
        discard(partial)
        raise


def discard(partial: Path) -> None:
    """Remove it. Under another name first: whoever still writes into it can add nothing any more."""
    doomed = partial.with_suffix(_DISCARDED)
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        partial.replace(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once the block ends well; what lay there before is replaced.

    Raises StorageFull when there is no room, whatever library it was that met it.
    """
    with full_disk_told(folder):
        partial = begin(folder)
        try:
            yield partial
        except BaseException:
            discard(partial)
            raise
        complete(partial, folder)


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Raises StorageFull, naming `folder`, for whatever any library raises in the block when there is no room."""
    try:
        yield
    except Exception as error:
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
    root = run_dir / layout.CHECKPOINTS
    found = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match and (root / match[0] / POSITION).exists())


def prune(run_dir: Path, keep: int, best: int | None) -> list[int]:
    """Delete all but the newest `keep` checkpoints and that of step `best`; returns the steps deleted."""
    gone = [step for step in steps(run_dir)[:-keep] if step != best]
    for step in gone:
        shutil.rmtree(folder_for(run_dir, step))
    return gone


def sweep(run_dir: Path) -> None:
    """Remove what a coordinator that was killed while it saved has left; none may be under way."""
    for suffix in (_PARTIAL, _DISCARDED):
        for path in (run_dir / layout.CHECKPOINTS).glob(f".*{suffix}"):
            discard(path)


def resolve(resume: str, run_dir: Path, say: Callable[[str], None] = lambda _: None) -> str:
    """The folder that `run.resume` means, "" for none; `say` is told of each that is left out as it is not whole.

    Raises UserError when it is not a checkpoint, and when there are checkpoints and none is whole.
    """
    if resume == "never":
        return ""
    if resume == "auto":
        found = [folder_for(run_dir, step) for step in reversed(steps(run_dir))]
        faults = []
        for folder in found:
            if not (fault := _fault(folder)):
                return str(folder)
            faults.append(fault)
            say(f"run.resume: {folder} is left out: {fault}")
        if found:
            raise UserError(f"run.resume: no checkpoint of {run_dir} is whole; {found[0].name}: {faults[0]}")
        return ""
    if resume and not (Path(resume) / POSITION).exists():
        raise UserError(f"run.resume: {resume!r} is not a checkpoint; must be never, auto or a checkpoint's folder")
    return resume


def _fault(folder: Path) -> str:
    """What shows, without loading it, that a checkpoint is not whole; "" where nothing does."""
    try:
        codec.decode(Position, (folder / POSITION).read_bytes())
        msgspec.json.decode((folder / TRAINER).read_bytes())
        cut = next((path for path in sorted(folder.rglob("*.safetensors")) if _cut_short(path)), None)
    except (OSError, InvalidMessage, msgspec.DecodeError) as error:
        return str(error)
    return "" if cut is None else f"{cut.relative_to(folder)} is not as long as its header says"


class _Tensor(Struct):
    """An entry of a safetensors file's header; the one of metadata has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


def _cut_short(path: Path) -> bool:
    """Raises DecodeError for a header that is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if 8 + length > size:
            return True
        header = msgspec.json.decode(file.read(length), type=dict[str, _Tensor])
    return 8 + length + max((tensor.data_offsets[1] for tensor in header.values()), default=0) != size


def critic_state(folder: Path) -> Path:
    """The critic's part of the checkpoint `folder`. Raises UserError when it was saved by a run without one."""
    if not (folder / CRITIC).is_dir():
        raise UserError(f"run.resume: {folder} has no folder {CRITIC}: it was saved by a run without a critic")
    return folder / CRITIC


def read_position(folder: Path) -> Position:
    """Raises UserError when it is not whole."""
    path = folder / POSITION
    try:
        return codec.decode(Position, path.read_bytes())
    except (OSError, InvalidMessage) as error:
        raise UserError(f"run.resume: {path}: {error}") from error
