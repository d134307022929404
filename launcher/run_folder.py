"""The folder of a run: writable, and this run's alone. An earlier run in it is kept unless the user gives it up."""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from runtime import run_files, timeouts
from runtime.cluster.topology import named_paths
from runtime.config import Config, Run
from runtime.data.prepared import sources
from runtime.errors import UserError
from runtime.evaluation.results import evaluation_sets
from runtime.ledger import checkpoint
from runtime.ledger.reader import DATABASE, LedgerReader, examine

PROBE_BYTES = 1 << 16
LOOKS = 5  # attempts to take the lock


def prepare(folder: Path, run: Run) -> tuple[Path, IO[bytes]]:
    """Make the run's folder, and test it by writing to it. An existing run in it stays unchanged. Returns the folder for logs,
    and the lock that keeps the folder ours while it is open. Raises UserError."""
    if alien := _alien(folder):
        raise UserError(
            f"run.dir: {folder} is not the folder of a run, and a run would replace '{alien}' in it; choose another run.dir"
        )
    # A run's own config.yaml has "" if the run began anew.
    if run.resume in ("never", "") and not run.overwrite and _holds_a_run(folder):
        raise UserError(
            f"run.dir: {folder} holds a run already; choose another run.name or run.dir, or set run.resume=auto to go on "
            "with it, or run.overwrite=true to replace it"
        )
    try:
        logs = folder / run_files.LOGS
        run_files.make(folder)
        logs.mkdir(exist_ok=True)
        lock = run_files.open_lock(folder / run_files.LOCK)  # keeps what a run under way wrote
        try:
            _take(lock)
        except BlockingIOError:
            raise UserError(f"run.dir: a run is under way in {folder}: {run_files.holder(lock)}") from None
        lock.truncate(0)
        lock.write(uuid.uuid4().bytes)  # other nodes compare it to see that they share the folder
        lock.flush()
        probe = folder / ".probe"
        probe.write_bytes(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    return logs, lock


def _holds_a_run(folder: Path) -> bool:
    """Return whether the folder holds a run. One that ended before it asked for a sample does not count."""
    if not (folder / run_files.LEDGER).exists():
        return (folder / run_files.CHECKPOINTS).exists()
    if any((folder / name).exists() for name in (run_files.CHECKPOINTS, run_files.MODEL, run_files.EVALUATIONS)):
        return True
    try:
        with LedgerReader(folder / run_files.LEDGER) as reader:
            return any(reader.counts().values())
    except (UserError, sqlite3.Error):
        return True


def _take(lock: IO[bytes]) -> None:
    """Take the lock. Raises BlockingIOError if another run has it. A process that only checks the lock has it for a moment."""
    for _ in range(LOOKS):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(timeouts.RUN_LOCK_POLL)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def under_way(folder: Path) -> bool:
    """Return whether a process has the folder locked. An address without a lock is that of a coordinator that was killed."""
    if not (folder / run_files.ADDRESS).exists():
        return False
    try:
        with (folder / run_files.LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a folder that cannot be examined further
        return False
    return False


def inherited(folder: Path) -> IO[bytes] | None:
    """Return the lock of a run whose leader was lost with its coordinator; None if the run is led, or has ended."""
    with suppress(OSError):
        lock = (folder / run_files.LOCK).open("ab")
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / run_files.ADDRESS).exists():
                return lock
        lock.close()
    return None


def _alien(folder: Path) -> str:
    """Return what a run would replace in a folder that has had no run; "" for nothing."""
    if (folder / run_files.LOCK).exists() or (folder / run_files.LEDGER).is_dir():
        return ""
    return next((name for name in (*run_files.OF_ONE_RUN, run_files.CONFIG) if (folder / name).exists()), "")


def _require_unneeded(folder: Path, config: Config) -> None:
    """Check that the run removes neither its own input nor a trained run. Raises UserError."""
    run = config.run
    if run.resume == "auto" and not run.overwrite and (held := _trained(folder)):
        raise UserError(
            f"run.resume: auto finds no checkpoint in {folder}, which holds {held}; set run.overwrite=true to train anew in "
            "its place, or choose another run.dir"
        )
    removed = [(folder / name).resolve() for name in run_files.OF_ONE_RUN]
    for key, path in _inputs(config).items():
        place = Path(path).resolve()
        if any(place == gone or gone in place.parents for gone in removed):
            raise UserError(f"{key}: {path} would be removed by a new run in {folder}; copy it, or choose another run.dir")


def _trained(folder: Path) -> str:
    """Return what is there of a run that has trained; "" for nothing."""
    if (folder / run_files.MODEL).exists():
        return "a trained model"
    if not (folder / run_files.LEDGER / DATABASE).exists():
        return ""
    try:
        with LedgerReader(folder / run_files.LEDGER) as ledger:
            return "a ledger of steps that were trained" if ledger.trained() else ""
    except (UserError, sqlite3.Error) as error:
        return f"a ledger that cannot be read ({error})"


def _inputs(config: Config) -> dict[str, str]:
    """Return the paths that the run reads, by key."""
    named = {key: path for key, path in named_paths(config).items() if key != "run.dir"}
    named |= {key: source.path for key, source in sources(config.data)}
    named |= {f"the evaluation set {found.name}": found.path for found in evaluation_sets(config)}
    if config.run.resume not in ("never", "auto", ""):
        named["run.resume"] = config.run.resume
    return named


def begin(folder: Path, config: Config, say: Callable[[str], None] = lambda _: None) -> str:
    """Return the checkpoint to resume from, or "" for a new run. Unless the run in the folder goes on, its files are removed.
    `say` gets a line on the checkpoint to resume from, on each checkpoint that is left out as incomplete, and on the newest one
    that is removed. Raises UserError if the checkpoint is none, or lacks what this run needs. Also raises UserError, and
    removes nothing, if a run would remove its own input, or a run or trained model that the user has not given up."""
    checkpoint.sweep(folder)
    checkpoint.put_back(folder / run_files.MODEL)
    resume = checkpoint.resolve(config.run.resume, folder, say)
    if resume and config.critic is not None:
        checkpoint.critic_state(Path(resume))
    if resume and checkpoint.is_of(folder, Path(resume)):
        say(f"run.resume: going on from {resume}" + "; run.overwrite replaces nothing" * config.run.overwrite)
        examine(folder, Path(resume), say)
        return resume if config.cluster.shared_folder else config.run.resume  # other nodes may lack their parts of it
    if resume and not config.run.overwrite and (folder / run_files.LEDGER).exists():  # the ledger does not know that checkpoint
        raise UserError(
            f"run.resume: {resume} does not belong to the run in {folder}; choose another run.name or run.dir, or set "
            "run.resume=auto to go on with that run, or run.overwrite=true to replace it"
        )
    _require_unneeded(folder, config)
    if removed := sorted(path.name for path in (folder / run_files.CHECKPOINTS).glob("step-*")):
        say(f"run.overwrite: replaces the run in {folder}, whose newest checkpoint was {removed[-1]}")
    for name in run_files.OF_ONE_RUN:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return resume
