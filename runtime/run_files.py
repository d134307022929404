"""The names of the files in a run's folder, its permissions and locks, and atomic writes of private files and of JSON."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from runtime.errors import UserError

T = TypeVar("T")

# ---- JSON files from other programs: models, tokenizers and checkpoints have them


def read_object(path: Path, where: str) -> dict[str, Any]:
    """Read the object in a file; `where` begins the errors. Raises UserError if the file cannot be read or has no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: is not a JSON object")
    return value


CONFIG = "config.yaml"
ADDRESS = "coordinator.address"
SECRET = ".secret"
CERTIFICATES = ".certificates"
LOCK = ".lock"  # held while a run is under way; its content names the run
LEDGER = "ledger"
LOGS = "logs"
NODES = "nodes"
GATEWAYS = "gateways"  # a file for each gateway, with its URL
GATEWAYS_CA = "gateways-ca.pem"  # the authority of the gateways' certificates, if they have any
CHECKPOINTS = "checkpoints"
PARTS = "parts"  # of checkpoints, if nodes share no folder
MODEL = "model"
EVALUATIONS = "evaluations"
NONFINITE = "nonfinite"
METRICS = "metrics.jsonl"
SPANS = "spans"
TRAINED = "trained"
PROFILES = "profiles"
TENSORBOARD = "tensorboard"
MLFLOW = "mlflow.run"  # the id of the MLflow run
SUMMARY = "summary.json"
STARTUP = "startup.json"

OF_ONE_RUN = (
    *(LEDGER, CHECKPOINTS, PARTS, MODEL, EVALUATIONS, NONFINITE, METRICS, SPANS, TRAINED, PROFILES, TENSORBOARD, MLFLOW),
    *(SUMMARY, STARTUP, GATEWAYS, GATEWAYS_CA),
)
"""The names that must not exist before a new run."""

NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # msgspec's errors for invalid JSON
LARGEST = 1 << 30  # bytes of a file that is read as a whole


def regular(path: Path, largest: int | None = LARGEST) -> Path:
    """Return `path` if it is a regular file: a folder from another user may have devices and pipes instead. Raises UserError
    for these, and for a file of more than `largest` bytes (None: no limit). Raises OSError if there is no file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is a directory" if stat.S_ISDIR(found.st_mode) else f"{path}: is no regular file")
    if largest is not None and found.st_size > largest:
        raise UserError(f"{path}: has {found.st_size} bytes; must have at most {largest}")
    return path


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raise UserError, which begins with `path`, for an error of the system in the block."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error


def read_json(path: Path, kind: type[T], what: str) -> T:
    """Decode the JSON of a regular file. Raises UserError, which says that it is not `what`, or cannot be read."""
    with reading(path):
        data = regular(path).read_bytes()
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_DECODED as error:
        raise UserError(f"{path}: not {what}: {error}") from error


def sync(path: Path) -> int:
    """Make a file, or a folder's entries, survive a power cut. Returns the current size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def make(folder: Path) -> None:
    """Make a run's folder, private to its user; an existing one keeps its mode. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file as private to its user, since any process that can read a file can lock it. Raises OSError."""
    lock = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
    os.fchmod(lock.fileno(), 0o600)
    return lock


def holder(lock: IO[bytes]) -> str:
    """Describe the process that holds the lock of an open file."""
    inode = os.fstat(lock.fileno()).st_ino
    with suppress(OSError):
        for fields in map(str.split, Path("/proc/locks").read_text().splitlines()):
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                process = Path("/proc", fields[4])
                return f"process {fields[4]}, {(process / 'comm').read_text().strip()} of user {process.stat().st_uid}"
    return "a process that the system does not name"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, and replace an existing one. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # a link would be followed, and its creator may hold it open
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    partial.replace(path)


def run_id(folder: Path) -> str:
    """Return the id of this start of the run by its user; "" if it was not started."""
    with suppress(FileNotFoundError):
        return (folder / LOCK).read_bytes().hex()
    return ""


def coordinator_address(folder: Path, known: str) -> str:
    """Return the address of the coordinator that leads the run in `folder`; `known` if the shared folder cannot be read."""
    try:
        return (folder / ADDRESS).read_text() or known
    except OSError:
        return known
