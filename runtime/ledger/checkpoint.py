"""Checkpoint folders: `RUN/checkpoints/step-00000050`, whole or not there at all.

The trainer writes its state there, the critic its own into the folder `critic`; the coordinator, which has them do so, puts its
position beside both, so that a checkpoint is one thing. The position comes last, and names every other file with its size and
checksum: a folder that holds what it names is whole, whatever it is called.

A folder NAME changes by renames alone, so that a crash at any point leaves one that counts::

    .NAME.partial      being written
    .NAME.replaced     the former NAME, until the new one has taken its place; put back where it never did
    .NAME.discarded    being deleted

`sweep` ends what a crash has interrupted. Whatever lists a run's checkpoints asks `steps`: those of the branch that the run is
on. `set_aside` moves the others to `RUN/checkpoints/dead-INCARNATION` when the run goes back behind them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from runtime import run_files, types
from runtime.data.prompts import StreamState
from runtime.errors import InvalidMessage, StorageFull, UserError
from runtime.process import disk
from runtime.types import PolicyVersion

# ---- Position
#
# The coordinator's part of a checkpoint: where the run is, beside the weights that it has got to.


class Position(Struct, kw_only=True):
    """`version` is that of the saved weights: the next step is `version.step`. `trained` are inclusive ranges of group ids,
    `pending` the problems of the groups that were on their way. `files` are the other files in this folder: bytes by path.
    `sums` are their xxh3-128 as hexadecimal digits, and `own_sum` is that of the position itself. `run` names the run through
    all its starts. `parts`: where nodes share no folder, who has the checkpoint: `ROLE/NODE`."""

    version: PolicyVersion
    stream: StreamState
    trained: list[tuple[int, int]]
    pending: list[int] = []
    accuracy: float | None = None  # the newest evaluation's
    best_accuracy: float | None = None
    best_step: int | None = None  # the checkpoint that had it
    files: dict[str, int] = {}  # put in as the checkpoint is completed; version 0.1.0 named none
    sums: dict[str, str] = {}  # as these are; before version 0.3 there were none
    own_sum: str = ""
    run: str = ""
    parts: list[str] = []


POSITION = "position.msgpack"
TRAINER = "trainer.json"  # what the trainer says of its part
CRITIC = "critic"  # folder of the critic's state within a checkpoint
_PARTIAL, _REPLACED, _DISCARDED = ".partial", ".replaced", ".discarded"
_NAME = re.compile(r"step-(\d{8})")
_DEAD = "dead-"
_SUMS = ".sums-"  # what a rank says of its files, until `complete` has put it into the position
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")  # what each rank writes for itself; rank 0 writes the other files
_UNSUMMED = b"0" * 32  # in the place of the position's own sum, as that is taken
_READ = 1 << 20  # bytes
_READERS = 4  # files at once
_CHANGED = "is not what was written: its checksum is another"


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / run_files.CHECKPOINTS / f"step-{step:08d}"


# ---------------------------------------------------------------------------------------------- one folder, by renames


def begin(folder: Path) -> Path:
    """An empty temporary folder beside `folder`, for `complete` or `discard`."""
    partial = partial_of(folder)
    discard(partial)
    put_back(folder)
    partial.mkdir(parents=True)
    return partial


def partial_of(folder: Path) -> Path:
    """What `begin` makes."""
    return _beside(folder, _PARTIAL)


def complete(partial: Path, folder: Path, position: Position | None = None) -> None:
    """Give `partial` the name `folder`: it survives a power cut, and replaces what lay there. `position`: of a checkpoint; with
    it goes the list of its files, with their checksums.

    When that fails `partial` is discarded, and what lay there stays.
    """
    try:
        sums = _noted_sums(partial)
        files = sync_tree(partial)
        if position is not None:
            sums |= _sums(partial, files.keys() - sums)
            _write_position(partial, replace(position, files=files, sums=sums))
        _take_name(partial, folder)
    except BaseException:
        discard(partial)
        put_back(folder)
        raise
    discard(_beside(folder, _REPLACED))


def put_back(folder: Path) -> None:
    """End what `complete` was killed at: what it was to replace is there again where nothing has come in its place, and gone
    where something has."""
    former = _beside(folder, _REPLACED)
    if folder.exists():
        discard(former)
    elif former.exists():
        former.replace(folder)
        disk.sync(folder.parent)


def discard(folder: Path) -> None:
    """Remove it, if it is there. Under another name first: whoever still writes into it can add nothing any more, and what is
    half deleted has not the name of something whole."""
    doomed = folder.with_suffix(_DISCARDED) if folder.name.startswith(".") else _beside(folder, _DISCARDED)
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.replace(doomed)
        disk.sync(doomed.parent)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once the block ends well; what lay there before is replaced.

    Raises StorageFull when there is no room, whatever library it was that met it.
    """
    with as_storage_full(folder):
        partial = begin(folder)
        try:
            yield partial
        except BaseException:
            discard(partial)
            raise
        complete(partial, folder)


@contextmanager
def as_storage_full(folder: Path) -> Iterator[None]:
    """Raises StorageFull, naming `folder`, for whatever any library raises in the block when there is no room."""
    try:
        yield
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise StorageFull(folder) from error
        raise


def sync_tree(folder: Path) -> dict[str, int]:
    """Everything under `folder` survives a power cut. Returns the bytes of its files, by their path within it."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        size = disk.sync(path)
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = size
    disk.sync(folder)
    return sizes


def note_sums(folder: Path, rank: int) -> None:
    """Have `complete` find the checksums of what this rank has written into `folder`: this node has it in memory, and another
    would read it from the disk. To be called once all ranks have written."""
    own = []
    for path in folder.rglob("*"):
        name, by = path.relative_to(folder).as_posix(), _OF_RANK.fullmatch(path.name)
        elsewhere = path.name.startswith(_SUMS) or name.startswith(f"{CRITIC}/")  # which the critic may still be writing
        if path.is_file() and not elsewhere and (int(by[1]) if by else 0) == rank:
            own.append(name)
    if own:
        (folder / f"{_SUMS}{rank}").write_bytes(msgspec.json.encode(_sums(folder, own)))


def _noted_sums(folder: Path) -> dict[str, str]:
    """What `note_sums` has left there, which goes."""
    noted: dict[str, str] = {}
    for path in list(folder.rglob(f"{_SUMS}*")):
        sums = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        noted |= {(path.parent / name).relative_to(folder).as_posix(): each for name, each in sums.items()}
        path.unlink()
    return noted


def _sums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The checksum of each file, by its path in `folder`. From memory 1.4 to 2.4 GB/s on one core of a small machine under
    load: more than most disks give."""
    ordered = sorted(names)
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(ordered, pool.map(lambda name: _sum(folder / name), ordered), strict=True))


def _sum(path: Path) -> str:
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_READ))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _take_name(partial: Path, folder: Path) -> None:
    """The caller discards what lay there: until then `put_back` finds it."""
    if folder.exists():
        former = _beside(folder, _REPLACED)
        discard(former)
        folder.replace(former)
    partial.replace(folder)
    disk.sync(folder.parent)


# ---------------------------------------------------------------------------------------------- the checkpoints of a run


def steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints of the branch that the run is on, ascending."""
    root = run_dir / run_files.CHECKPOINTS
    found = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match and (root / match[0] / POSITION).exists())


def is_of(run_dir: Path, folder: Path) -> bool:
    """Whether the checkpoint `folder` lies where those of `run_dir` do. Raises UserError for one of a branch that the run has
    left: those between are none of its past."""
    place, root = folder.resolve().parent, (run_dir / run_files.CHECKPOINTS).resolve()
    if place.parent == root and place.name.startswith(_DEAD):
        raise UserError(
            f"run.resume: {folder} is of a branch that the run has left; move it to {root} to go on from it there, or "
            "choose another run.dir"
        )
    return place == root


def prune(run_dir: Path, keep: int, spared: Container[int | None]) -> None:
    """Delete all but the newest `keep` checkpoints and those of the steps `spared`."""
    for step in steps(run_dir)[:-keep]:
        if step not in spared:
            discard(folder_for(run_dir, step))


def sweep(run_dir: Path) -> None:
    """End what a coordinator that was killed has begun: a checkpoint that it had written whole counts, what it had not is
    removed. No save may be under way."""
    root = run_dir / run_files.CHECKPOINTS
    for partial in root.glob(f".*{_PARTIAL}"):
        folder = root / partial.name[1 : -len(_PARTIAL)]
        if _NAME.fullmatch(folder.name) and _names_its_files(partial) and not fault(partial, sums=False):
            _take_name(partial, folder)
        discard(partial)
    for former in root.glob(f".*{_REPLACED}"):
        put_back(root / former.name[1 : -len(_REPLACED)])
    for doomed in root.glob(f".*{_DISCARDED}"):
        discard(doomed)


def set_aside(run_dir: Path, step: int, incarnation: int) -> list[int]:
    """The run goes on from `step` as `incarnation`: move the checkpoints after it out of the way, as they are none of its past.
    Returns their steps. They stay in `checkpoints/dead-INCARNATION` until somebody deletes them."""
    later = [each for each in steps(run_dir) if each > step]
    if later:
        root = run_dir / run_files.CHECKPOINTS
        dead = root / f"{_DEAD}{incarnation}"
        dead.mkdir(exist_ok=True)
        for each in reversed(later):
            folder = folder_for(run_dir, each)
            folder.replace(dead / folder.name)
        disk.sync(dead)
        disk.sync(root)
    return later


def reposition(folder: Path, position: Position) -> None:
    """Give a checkpoint another position of the same version, at once or not at all."""
    former = read_position(folder)
    _write_position(folder, replace(position, files=former.files, sums=former.sums, parts=former.parts))


def _write_position(folder: Path, position: Position) -> None:
    partial = folder / f".{POSITION}{_PARTIAL}"
    data = types.encode(replace(position, own_sum=_UNSUMMED.decode()))
    partial.write_bytes(data.replace(_UNSUMMED, xxhash.xxh3_128_hexdigest(data).encode()))
    disk.sync(partial)
    partial.replace(folder / POSITION)
    disk.sync(folder)


def resolve(
    resume: str,
    run_dir: Path,
    say: Callable[[str], None] = lambda _: None,
    lacks: Callable[[Position], str] = lambda _: "",
    sums: bool = True,
) -> str:
    """The folder that `run.resume` means, "" for none; `say` is told of each that is left out as it is not whole. `lacks`: what
    is missing of one elsewhere. `sums`: as of `fault`.

    Raises UserError when it is not a whole checkpoint, and when there are checkpoints and none is whole.
    """
    if resume in ("never", ""):
        return ""
    if resume == "auto":
        found = [folder_for(run_dir, step) for step in reversed(steps(run_dir))]
        faults = []
        for folder in found:
            if not (why := fault(folder, sums) or lacks(read_position(folder))):
                return str(folder)
            faults.append(why)
            say(f"run.resume: {folder} is left out: {why}")
        if found:
            raise UserError(f"run.resume: no checkpoint of {run_dir} is whole; {found[0].name}: {faults[0]}")
        return ""
    if not (Path(resume) / POSITION).exists():
        raise UserError(f"run.resume: {resume!r} is not a checkpoint; must be never, auto or a checkpoint's folder")
    if why := fault(Path(resume), sums) or lacks(read_position(Path(resume))):
        raise UserError(f"run.resume: {resume} is not whole: {why}")
    return resume


def fault(folder: Path, sums: bool = True) -> str:
    """What shows, without loading it, that a checkpoint is not whole; "" where nothing does. `sums`: all of its files are read,
    and compared with their checksums."""
    try:
        position = _decoded(folder)
        if position.files or position.parts:
            cut = next((why for name, size in position.files.items() if (why := _fault_of(folder, name, size))), "")
            found = _sums(folder, position.sums.keys() & position.files.keys()) if sums and not cut else {}
            return cut or next((f"{name} {_CHANGED}" for name, each in found.items() if each != position.sums[name]), "")
        # Saved by version 0.1.0.
        msgspec.json.decode((folder / TRAINER).read_bytes())
        short = next((path for path in sorted(folder.rglob("*.safetensors")) if _cut_short(path)), None)
    except (OSError, InvalidMessage, msgspec.DecodeError) as error:
        return str(error)
    return "" if short is None else f"{short.relative_to(folder)} is not as long as its header says"


def _fault_of(folder: Path, name: str, size: int) -> str:
    found = (folder / name).stat()
    if not stat.S_ISREG(found.st_mode):  # such as a device, which has no end
        return f"{name} is no file"
    return "" if found.st_size == size else f"{name} has {found.st_size:,} bytes instead of {size:,}"


def _decoded(folder: Path) -> Position:
    """Raises OSError, InvalidMessage."""
    data = (folder / POSITION).read_bytes()
    position = types.decode(Position, data)
    own = position.own_sum.encode()
    if own and xxhash.xxh3_128_hexdigest(data.replace(own, _UNSUMMED)).encode() != own:
        raise InvalidMessage(f"{POSITION} {_CHANGED}")
    return position


def _names_its_files(folder: Path) -> bool:
    """Whether its position was written last, with all files safe: as no version did before there was a list of files."""
    try:
        position = _decoded(folder)
        return bool(position.files or position.parts)
    except (OSError, InvalidMessage):
        return False


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
    try:
        return _decoded(folder)
    except (OSError, InvalidMessage) as error:
        raise UserError(f"run.resume: {folder / POSITION}: {error}") from error
