"""What has changed in a run's folder: the sizes and times of its files, looked at again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from runtime import run_files
from runtime.ledger.reader import DATABASE

Mark = tuple[int, int]  # bytes, nanoseconds since the epoch

_FILES = {
    "metrics": (run_files.METRICS,),
    "ledger": (f"{run_files.LEDGER}/{DATABASE}", f"{run_files.LEDGER}/{DATABASE}-wal"),
    "state": (run_files.ADDRESS, run_files.SUMMARY, run_files.STARTUP, run_files.CONFIG),
}
_FOLDERS = {"spans": run_files.SPANS, "evaluations": run_files.EVALUATIONS, "logs": run_files.LOGS}


def marks(folder: Path) -> dict[str, tuple[Mark, ...]]:
    """By kind of file. A file that is not there, or goes away meanwhile, has none."""
    found = {kind: tuple(of_files(folder / name for name in names)) for kind, names in _FILES.items()}
    return found | {kind: tuple(of_files(sorted((folder / name).glob("*")))) for kind, name in _FOLDERS.items()}


def of_files(paths: Iterable[Path]) -> Iterator[Mark]:
    """Of those that are there."""
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue
        yield found.st_size, found.st_mtime_ns


def changed(before: dict[str, tuple[Mark, ...]], after: dict[str, tuple[Mark, ...]]) -> list[str]:
    """The kinds that differ."""
    return [kind for kind in after if before.get(kind) != after[kind]]
