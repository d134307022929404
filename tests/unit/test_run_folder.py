"""A run's folder: no earlier run is lost unasked."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from launcher import run_folder
from runtime import layout
from runtime.config import Run
from runtime.errors import UserError


@pytest.mark.parametrize("resume", ["never", ""])  # "" is what a run that began anew keeps in its own config.yaml
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, resume: str) -> None:
    (tmp_path / layout.LEDGER).mkdir()
    with pytest.raises(UserError, match="holds a run already"):
        run_folder.prepare(tmp_path, Run(name="a", resume=resume))
    _, lock = run_folder.prepare(tmp_path, Run(name="a", resume=resume, overwrite=True))
    lock.close()
    _, lock = run_folder.prepare(tmp_path, Run(name="a", resume="auto"))
    lock.close()


def test_whoever_only_looks_whether_a_run_is_under_way_keeps_none_from_starting(tmp_path: Path) -> None:
    (tmp_path / run_folder.LOCK).touch()
    looking = (tmp_path / run_folder.LOCK).open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(2 * run_folder.LOOK, looking.close).start()
    _, lock = run_folder.prepare(tmp_path, Run(name="a"))
    lock.close()


def test_a_folder_under_way_is_refused(tmp_path: Path) -> None:
    _, lock = run_folder.prepare(tmp_path, Run(name="a"))
    with lock, pytest.raises(UserError, match="a run is under way in"):
        run_folder.prepare(tmp_path, Run(name="a"))
