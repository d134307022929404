"""Removes what vLLM's processes leave behind even after an orderly end: files in shared memory, and files by which they meet.

Each engine has a folder among the temporary files, which its processes use for their own. The folder notes the engine's files
in shared memory, so that closing the engine can remove all of them. A lock on the folder shows that it is in use; the kernel
frees the lock however a process ends. What a killed engine left is removed when the next engine starts, or the run ends.
"""

from __future__ import annotations

import fcntl
import multiprocessing.process
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PREFIX = "sluice-vllm-"
SHARED = Path("/dev/shm")

_LOCK, _NOTED = "lock", "shared"
_MEETING = "vllm_dist_"  # prefix of the files by which workers meet, and of the files that these share
_OF_VLLM = re.compile(rf"^(psm_[0-9a-f]+|.*cpushm_\d+|{_MEETING}.*)$")
_MAPPED = re.compile(rf"{SHARED}/(\S+)$", re.MULTILINE)
_SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of vLLM's sockets, which are named by UUIDs; vLLM never removes them
_PATH_BYTES = 107  # the longest path of a socket
_UUID_BYTES = 36


class Leftovers:
    """The leftovers of the one engine of this process."""

    def __init__(self) -> None:
        clear()
        made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = made.rename(made.with_name(made.name.removeprefix("new-")))  # locked before `clear` finds it
        self._names: set[str] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep the temporary files of vLLM's processes in the folder while vLLM starts, and note what they share."""
        # The prefix of the names of semaphores, which children inherit.
        multiprocessing.process.current_process()._config["semprefix"] = f"/{self._folder.name}"  # type: ignore[attr-defined]
        usual, variables = tempfile.gettempdir(), {name: os.environ.get(name) for name in ("TMPDIR", _SOCKETS)}
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        fits = len(os.fsencode(self._folder)) + 1 + _UUID_BYTES <= _PATH_BYTES
        os.environ.setdefault(_SOCKETS, str(self._folder) if fits else usual)
        try:
            yield
            self.note()
        finally:
            tempfile.tempdir = usual
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def note(self) -> None:
        """Save the names of the files in shared memory that this process's descendants have."""
        for process in psutil.Process().children(recursive=True):
            with suppress(OSError):  # the process has just ended, or there is no /proc
                mapped = _MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"))
                self._names.update(filter(_OF_VLLM.match, mapped))
        (self._folder / _NOTED).write_text("\n".join(sorted(self._names)), encoding="utf-8")

    def remove(self) -> None:
        """Remove the leftovers, once the engine's processes have ended. Idempotent."""
        if self._folder.exists():
            _remove(self._folder)
            os.close(self._lock)


def clear() -> None:
    """Remove the leftovers of this user's engines whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or already removed
            if folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _remove(folder: Path) -> None:
    noted = folder / _NOTED
    names = set(noted.read_text(encoding="utf-8").splitlines()) if noted.exists() else set()
    prefixes = (f"sem.{folder.name}-", *(f"{path.name}-" for path in folder.glob(f"{_MEETING}*")))
    for file in SHARED.iterdir() if SHARED.is_dir() else ():
        if file.name in names or file.name.startswith(prefixes):
            with suppress(OSError):  # Python's resource tracker has removed it, or another user's file has the same name
                if file.stat().st_uid == os.geteuid():
                    file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
