"""What a test leaves behind: processes, ports and files in the temporary folder. `tests/conftest.py` fails the test that did.

What comes up while a test runs has to be gone after it; what its fixtures made, which may be those of its module, once the
module is through. Each worker of the suite has a temporary folder of its own, so nothing is another one's.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GRACE = 60.0  # seconds for what has been told to end: a process that is killed, a thread that gives up at its deadline
POLL = 0.02
COLLECT = 0.5  # seconds between two collections of garbage
CLOCK = 0.01  # seconds: the kernel's steps between the times at which processes begin
OWNER = "SLUICE_TEST_TMPDIR"
"""In the environment of every process that a test starts: the temporary folder of the worker that did."""
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # of the interpreter's, one for its whole life


def use_temporary_folder(folder: Path) -> None:
    """Everything temporary of this process, and of those that it starts, goes into `folder`."""
    folder.mkdir()
    os.environ["TMPDIR"] = os.environ[OWNER] = str(folder)
    tempfile.tempdir = None  # so that it is looked up again


def directly() -> frozenset[str]:
    """Files, ports of this process, and its children, each in words: cheap enough for every test."""
    return frozenset({*_files(), *_ports(), *_children()})


def thoroughly() -> frozenset[str]:
    """Those, and processes whose parents have ended."""
    return directly() | frozenset(_orphans())


@dataclass
class Module:
    """A module's tests while they run: what was there before, and when each began."""

    before: frozenset[str] = field(default_factory=thoroughly)
    began: list[tuple[float, str]] = field(default_factory=list)

    def culprit(self, thing: str) -> str:
        """The test during which a process was started; for anything else, the module's first one and those behind it."""
        behind = f"{self.began[0][1]} or a later one"
        if not thing.startswith("process "):
            return behind
        try:
            started = psutil.Process(_pid(thing)).create_time()
        except psutil.Error:
            return behind
        return next((name for begun, name in reversed(self.began) if begun <= started + CLOCK), behind)


def left(before: frozenset[str], look: Callable[[], frozenset[str]]) -> list[str]:
    """What `look` sees that was not there `before`, once it has had time to go."""
    deadline, collect = time.monotonic() + GRACE, 0.0
    while new := look() - before:
        if all(thing.startswith("file ") for thing in new) or time.monotonic() > deadline:
            return sorted(new)
        if all(thing.startswith("port ") for thing in new) and _are_leaving():
            return []
        if time.monotonic() > collect:
            gc.collect()  # servers and pools that nothing refers to, or no thread any more
            collect = time.monotonic() + COLLECT
        time.sleep(POLL)
    return []


def _are_leaving() -> bool:
    """Whether this process lets go of a group of gloo's, which then closes its ports: at once, but where gloo has forgotten a
    send only by the deadline of the transfer (runtime/weights/collective.py)."""
    return any(thread.name == "leave-gloo" for thread in threading.enumerate())


def end(things: list[str]) -> None:
    """End those of them that are processes: they are this worker's own."""
    for thing in things:
        if thing.startswith("process "):
            with suppress(psutil.Error):
                psutil.Process(_pid(thing)).kill()


def _pid(process: str) -> int:
    return int(process.split()[1].rstrip(":"))


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _files() -> list[str]:
    return [f"file {name}" for name in _names(os.environ[OWNER]) if not name.startswith("pymp-")]  # a fork server's socket


def _ports() -> list[str]:
    """On which this process listens. Twice a test, and so without pathlib."""
    found = []
    for number in _names("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode) and (port := _listening(int(number))):
                found.append(f"port {port}")
    return found


def _listening(number: int) -> int:
    """The port of a descriptor that is a TCP socket which listens; otherwise 0."""
    opened = socket.socket(fileno=number)
    try:
        inet = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
        return opened.getsockname()[1] if inet and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else 0
    finally:
        opened.detach()  # it is somebody else's


def _children() -> list[str]:
    pids = set[int]()
    for thread in _names("/proc/self/task"):
        with suppress(OSError), Path(f"/proc/self/task/{thread}/children").open() as file:
            pids.update(map(int, file.read().split()))
    return [told for pid in pids if (told := _process(pid))]


def _orphans() -> list[str]:
    """Living processes that this worker's tests started, whoever is their parent by now."""
    mine, found = f"{OWNER}={os.environ.get(OWNER)}".encode(), []
    for pid in psutil.pids():
        with suppress(OSError):
            if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(_process(pid))
    return [told for told in found if told]


def descendants(part: str) -> list[psutil.Process]:
    """Return the living processes below this one whose command has `part`. A zombie of another test has no command."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


def _process(pid: int) -> str:
    """In words; "" when it has ended, is a helper of the interpreter's, or is this one."""
    if pid == os.getpid():
        return ""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        ended = process.status() == psutil.STATUS_ZOMBIE
        parent = process.parent()
        helps = _helps(command) and not (
            parent and _helps(" ".join(parent.cmdline()))
        )  # what a fork server forked is a process
    except psutil.Error:
        return ""
    return "" if ended or helps else f"process {pid}: {command[:200]}"


def _helps(command: str) -> bool:
    return any(helper in command for helper in _HELPERS)
