"""The folder of a run: that it can be written to, and that no other run lies in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from runtime import checkpoint
from runtime.config import Run
from runtime.errors import UserError

PROBE_BYTES = 1 << 16
LEFTOVERS = ("ledger", "checkpoints", "model", "tensorboard", "metrics.jsonl", "metrics.png", "summary.json")


def prepare(folder: Path, run: Run) -> Path:
    """Make the run's folder, and try it by writing to it; returns the folder for logs, emptied. Changes nothing of a run that
    lies there already. Raises UserError.
    """
    if run.resume == "never" and not run.overwrite and (folder / "ledger").exists():
        raise UserError(
            f"run.dir: {folder} holds a run already; choose another run.name or run.dir, or set run.resume=auto to go on "
            "with it, or run.overwrite=true to replace it"
        )
    logs = folder / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("*.log"):
            old.unlink()
        probe = folder / ".probe"
        probe.write_bytes(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    return logs


def begin(folder: Path, run: Run) -> str:
    """The checkpoint to resume from, or "" for a new run: then what an earlier run left in the folder is removed."""
    resume = checkpoint.resolve(run.resume, folder)
    if not resume:
        for name in LEFTOVERS:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return resume
