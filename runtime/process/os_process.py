"""What Sluice asks of the operating system about processes. Linux has a parent-death signal; elsewhere it is left out."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

NODE = "SLUICE_NODE"  # the variable that tells a process its node's name
INCARNATION = "SLUICE_INCARNATION"  # the variable that tells a process how many were started under its name before
AGENTS = "SLUICE_AGENTS"  # the variable with the pids of the agents that a process, and whatever it starts, descends from
STORE = "SLUICE_STORE"  # the variable that tells rank 0 the descriptor of its group's socket, which listens
STORE_KEY = "SLUICE_STORE_KEY"  # the variable that tells the ranks of a group its key, in hexadecimal digits

MISTAKE = 2  # exit code of what the user can mend

_PARENT = "SLUICE_PARENT"
_HELD = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_PTRACER = 0x59616D61
_PR_SET_CHILD_SUBREAPER = 36
_START_TIME = 19  # in /proc/PID/stat, counted from what follows the name: clock ticks after the machine's start
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec there should be nothing but the call


def machine() -> str:
    """Equal for one user's processes that can share memory and connect by each other's /proc; "" where Linux does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = (os.readlink(f"/proc/self/ns/{space}") for space in ("net", "user", "pid"))  # noqa: PTH115
        return " ".join((boot, *spaces, str(os.geteuid())))
    except OSError:
        return ""


def age() -> float:
    """Seconds since this process was started, its interpreter's start included: to a hundredth on Linux, else to a second."""
    if not sys.platform.startswith("linux"):
        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    born = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born


def raise_descriptor_limit() -> None:
    """As many open files and connections as this process may have; often fewer are set at first. Its children have it too."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS gives less than it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def say_errors(lines: Sequence[str]) -> None:
    """On stderr, in one write: the ranks of a group have one log, and may all have something to say at once."""
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    sys.stderr.flush()


def end_at_once(error: str, code: int = 1) -> NoReturn:
    """With no orderly end, for which threads and libraries that hang would be waited for."""
    say_errors([error])
    os._exit(code)


def stacks_on_signal(then: Callable[[], object] | None = None) -> None:
    """On SIGUSR1, write every thread's stack to stderr: what a process that seems stuck is doing. Then the running event loop
    calls `then`."""
    faulthandler.unregister(signal.SIGUSR1)
    if then is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, then)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=then is not None)


def follow_parent() -> None:
    """`die_with_parent` in a process of multiprocessing's, whose parent called `lead_children`; so may those below it."""
    die_with_parent(int(os.environ[_PARENT]))
    lead_children()


def lead_children() -> None:
    """Tell the processes that this one will start who their parent is."""
    os.environ[_PARENT] = str(os.getpid())


def before_exec(cpus: Sequence[int] = (), signals_held: bool = False) -> None:
    """Between fork and exec of a process that is not to outlive this one. It may run on `cpus` alone; empty = all of ours.
    `signals_held`: the kernel keeps SIGTERM and SIGHUP until the process calls `heed_signals`. Before its handlers are set,
    they would end the process."""
    die_with_parent()
    if cpus:
        os.sched_setaffinity(0, cpus)
    if signals_held:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def heed_signals() -> None:
    """The main thread has its handlers: one that was kept is handled now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends. `parent`: the pid it must still have."""
    if not sys.platform.startswith("linux"):
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the call took hold
        os.kill(os.getpid(), signal.SIGKILL)


def adopt(on: bool) -> None:
    """Whether from now on a process whose parent ends becomes this one's child, if it descends from this one and no nearer
    process adopts. On Linux."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(on))


@contextmanager
def children_may_look() -> Iterator[None]:
    """Children of this process may read its memory inside the block, as py-spy does. Without Yama they always may."""
    linux = sys.platform.startswith("linux")
    if linux:
        _LIBC.prctl(_PR_SET_PTRACER, os.getpid())
    try:
        yield
    finally:
        if linux:
            _LIBC.prctl(_PR_SET_PTRACER, 0)


def close_to_others() -> None:
    """Let none of the user's other processes read this one's memory, nor the environment that it began with, which may have the
    run's secret: what was taken over runs as the same user. No core is written, and py-spy needs root."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_DUMPABLE, 0)


def find_program(name: str) -> str | None:
    """Its path, beside this interpreter or else in PATH: a virtual environment need not be activated."""
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def ended(child: int) -> bool:
    """Whether this process's child has ended, be it that nobody has taken note of its end yet."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
