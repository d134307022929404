"""Keeps what a process writes to its standard output and error in files of limited size. A thread for each process carries the
output from a pipe to the file, whether Python, a C library or a child process wrote it. So nothing is lost when a file is full,
and nothing waits for the launcher's event loop."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.view import View
from runtime import timeouts
from runtime.config import Logs

CHUNK = 1 << 16
PIPE_BYTES = 1 << 20  # the most that Linux lets every user have: a process can write so much before it waits for the thread
TAIL_BYTES = 1 << 20  # of the newest part of a log, which says why the process ended


class Log:
    """The output of one process. `path` is the file being written; PATH.1 is the one before it, and so on. The log's own thread
    notifies `view` once when the file cannot be written. A verbose `view` gets every line with the process's `name`."""

    def __init__(self, path: Path, settings: Logs, name: str, view: View | None = None):
        self.path = path
        self._settings = settings
        self._name = name
        self._view = view
        self._shows = view is not None and view.verbose
        self._rest = b""  # the start of an incomplete line
        self._lost = 0  # bytes lost since the last successful write to the file
        self._lock = threading.Lock()  # its holder alone reads the pipe
        for old in path.parent.glob(f"{path.name}.*"):
            old.unlink()
        self._file = path.open("wb", buffering=0)
        self._reader = -1
        self._thread: threading.Thread | None = None

    @contextmanager
    def writer(self) -> Iterator[int]:
        """Yield the file descriptor to start the process with, then begin to follow its output."""
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        with suppress(OSError):  # this user's pipes already hold as much as allowed
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            yield writer
        finally:
            os.close(writer)
            self._thread = threading.Thread(target=self._follow, name=f"log-{self.path.stem}", daemon=True)
            self._thread.start()

    def tail(self) -> str:
        """Return the newest part of the log, with everything that was written until now."""
        with self._lock:
            self._carry()
            self._keep_rest()
        data = b""
        for path in (self._older(1), self.path):
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                data += file.read()
        return data[-TAIL_BYTES:].decode(errors="replace")

    def add(self, data: bytes) -> None:
        """Add whole lines as if the process had written them; a line that it is still writing comes after them."""
        with self._lock:
            self._carry()
            if self._reader >= 0:
                self._keep(data)

    def close(self) -> None:
        """Wait until the last output of a process that has ended is in the file."""
        if self._thread is not None:
            self._thread.join(timeouts.LOG_CLOSE)

    def _follow(self) -> None:
        """Carry output until no process has the other end of the pipe open."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        ended = False
        while not ended:
            poll.poll()
            with self._lock:
                ended = self._carry()
        with self._lock:
            self._keep_rest()
            os.close(self._reader)
            self._reader = -1
            self._file.close()

    def _carry(self) -> bool:
        """Read all that is in the pipe; return whether its end was reached."""
        while self._reader >= 0:
            try:
                data = os.read(self._reader, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return True
            data = self._rest + data
            whole = data.rfind(b"\n") + 1 if len(data) < 2 * CHUNK else len(data)  # an overlong line is cut
            self._rest = data[whole:]
            self._keep(data[:whole])
        return True

    def _keep_rest(self) -> None:
        """Keep the start of an incomplete line."""
        data, self._rest = self._rest, b""
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        """Write `data` to files of at most `max_bytes`, and show it. Each file ends with a whole line if it holds one."""
        if not data:
            return
        self._show(data)
        try:
            if self._lost:
                self._write(f"[{self._lost} bytes were lost here]\n".encode())
                self._lost = 0
            while len(data) > (room := self._settings.max_bytes - self._file.tell()):
                cut = data.rfind(b"\n", 0, room) + 1
                if not cut and room == self._settings.max_bytes:  # not even one line fits
                    cut = room
                self._write(data[:cut])
                data = data[cut:]
                self._rotate()
            self._write(data)
        except OSError as error:  # the process must go on
            if not self._lost and self._view is not None:
                self._view.say(f"{self.path}: {(error.strerror or str(error)).lower()}: output of this process is being lost")
            self._lost += len(data)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _rotate(self) -> None:
        keep = self._settings.keep
        self._older(keep).unlink(missing_ok=True)
        for age in range(keep - 1, -1, -1):
            with suppress(FileNotFoundError):
                self._older(age).rename(self._older(age + 1))
        full, self._file = self._file, self.path.open("wb", buffering=0)
        full.close()

    def _older(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}") if age else self.path

    def _show(self, data: bytes) -> None:
        if self._view is None or not self._shows:
            return
        try:
            for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
                self._view.output(self._name, line)
        except (OSError, SystemExit):  # the reader of the launcher's output has gone; rich ends the thread for it
            self._shows = False
