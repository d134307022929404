"""What vLLM's processes leave behind, even where they end in order: files in shared memory, and those by which they meet.

Each engine has a folder of its own among the temporary files, which its processes have for theirs, and where it notes which
files in shared memory they have. So all of it can be removed when the engine is closed. A lock on the folder, which the kernel
frees however a process ends, tells others that it is in use: what an engine left that was killed goes with the next one's
start, or with the end of the run.
"""

from __future__ import annotations

import fcntl
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
_MEETING = "vllm_dist_"  # begins the names of files by which workers meet, and with them those of what these share
_OF_VLLM = re.compile(rf"^(psm_[0-9a-f]+|.*cpushm_\d+|{_MEETING}.*)$")
_MAPPED = re.compile(rf"{SHARED}/(\S+)$", re.MULTILINE)
_SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of its sockets, named by UUIDs; vLLM removes none
_PATH_BYTES = 107  # the longest path of a socket
_UUID_BYTES = 36


class Leftovers:
    """Of the one engine of this process."""

    def __init__(self) -> None:
        clear()
        made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = made.rename(made.with_name(made.name.removeprefix("new-")))  # with its lock: nobody takes it for left
        self._names: set[str] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While vLLM starts: the temporary files of its processes go into the folder, and what they share is noted."""
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
        """Keep the names of the files in shared memory that this process's descendants have."""
        for process in psutil.Process().children(recursive=True):
            with suppress(OSError):  # it has just ended, or there is no /proc
                mapped = _MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"))
                self._names.update(filter(_OF_VLLM.match, mapped))
        (self._folder / _NOTED).write_text("\n".join(sorted(self._names)), encoding="utf-8")

    def remove(self) -> None:
        """Once the engine's processes have ended. Idempotent."""
        if self._folder.exists():
            _remove(self._folder)
            os.close(self._lock)


def clear() -> None:
    """Remove what engines of this user have left whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or just removed
            if folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _remove(folder: Path) -> None:
    noted = folder / _NOTED
    names = set(noted.read_text(encoding="utf-8").splitlines()) if noted.exists() else set()
    meetings = tuple(f"{path.name}-" for path in folder.glob(f"{_MEETING}*"))
    for file in SHARED.iterdir() if SHARED.is_dir() else ():
        if file.name in names or (meetings and file.name.startswith(meetings)):
            with suppress(OSError):  # removed meanwhile by Python's resource tracker, or another user's by the same name
                if file.stat().st_uid == os.geteuid():
                    file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
