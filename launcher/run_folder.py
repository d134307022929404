"""The folder of a run: that it can be written to, that it is this run's alone, and that no earlier run is lost unasked."""

from __future__ import annotations

import fcntl
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

from runtime import checkpoint, layout
from runtime.config import Config, Run
from runtime.errors import UserError

LOCK = ".lock"
PROBE_BYTES = 1 << 16
LOOKS, LOOK = 5, 0.05  # times, and seconds between them


def prepare(folder: Path, run: Run) -> tuple[Path, IO[bytes]]:
    """Make the run's folder, and try it by writing to it; changes nothing of a run that lies there already.

    Returns the folder for logs, and the lock that keeps the folder ours while it is open. Raises UserError.
    """
    # A run's own config.yaml says "" where it began anew.
    if run.resume in ("never", "") and not run.overwrite and (folder / layout.LEDGER).exists():
        raise UserError(
            f"run.dir: {folder} holds a run already; choose another run.name or run.dir, or set run.resume=auto to go on "
            "with it, or run.overwrite=true to replace it"
        )
    try:
        logs = folder / layout.LOGS
        logs.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("ab")  # what a run under way wrote stays
        try:
            _take(lock)
        except BlockingIOError:
            raise UserError(f"run.dir: a run is under way in {folder}") from None
        lock.truncate(0)
        lock.write(uuid.uuid4().bytes)  # by which other nodes see that they share the folder
        lock.flush()
        probe = folder / ".probe"
        probe.write_bytes(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    return logs, lock


def _take(lock: IO[bytes]) -> None:
    """Raises BlockingIOError when another run has it. Whoever only looks whether one has, has it for a moment."""
    for _ in range(LOOKS):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(LOOK)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def begin(folder: Path, config: Config) -> str:
    """The checkpoint to resume from, or "" for a new run: then what an earlier run left in the folder is removed.

    Raises UserError when it is no checkpoint, or lacks what this run needs of it.
    """
    resume = checkpoint.resolve(config.run.resume, folder)
    if resume and config.critic is not None:
        checkpoint.critic_state(Path(resume))
    if not resume:
        for name in layout.OF_ONE_RUN:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return resume
