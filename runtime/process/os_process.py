"""A process: calls to the operating system about it, its arguments and signals.

The parent-death signal exists on Linux only, and is left out elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

NODE = "SLUICE_NODE"  # variable: the name of the process's node
INCARNATION = "SLUICE_INCARNATION"  # variable: count of earlier processes under the process's name
AGENTS = "SLUICE_AGENTS"  # variable: pids of the agents from which a process and its children descend
MEMORY = "SLUICE_MEMORY"  # variable of a group's ranks: descriptor of the memory file with copies of their state
STORE = "SLUICE_STORE"  # variable of rank 0: descriptor of the group's listening socket
ORDERS = "SLUICE_ORDERS"  # variable of the parent of a group's ranks: descriptor of the socket with the agent's orders
MEETING = "SLUICE_MEETING"  # variable of a rollout's processes on several nodes: where they meet, as HOST PORT PORT
STORE_KEY = "SLUICE_STORE_KEY"  # variable of a group's ranks: the group's key, in hexadecimal digits

MISTAKE = 2  # exit code of an error that the user can mend

_PARENT = "SLUICE_PARENT"
_HELD = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61
_PR_SET_CHILD_SUBREAPER = 36
_START_TIME = 19  # index in /proc/PID/stat, counted after the name: clock ticks since the machine's start
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec there should be only the call


def machine() -> str:
    """Return what is equal for one user's processes that can share memory and reach each other's /proc; "" without Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = (os.readlink(f"/proc/self/ns/{space}") for space in ("net", "user", "pid"))  # noqa: PTH115
        return " ".join((boot, *spaces, str(os.geteuid())))
    except OSError:
        return ""


def age() -> float:
    """Return the seconds since this process was started, before its interpreter: to 0.01 s on Linux, else to 1 s."""
    if not sys.platform.startswith("linux"):
        import psutil

        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    born = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the hard limit. Children inherit it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS allows less than its reported limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def say_errors(lines: Sequence[str]) -> None:
    """Write error lines to stderr in one write: the ranks of a group share a log, and may all write at once."""
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    sys.stderr.flush()


KINDS = 256  # counted separately

counts: Counter[str] = Counter()  # by kind


def counted(what: str) -> int:
    """Count one more of `what`. Returns the count if it is a power of ten, and so to be logged; else 0."""
    what = what if what in counts or len(counts) < KINDS else "others"
    counts[what] += 1
    count = counts[what]
    return count if str(count).strip("0") == "1" else 0


def end_at_once(error: str, code: int = 1) -> NoReturn:
    """Exit without cleanup, because an orderly end would wait for threads and libraries that hang."""
    say_errors([error])
    os._exit(code)


def stacks_on_signal(then: Callable[[], object] | None = None) -> None:
    """Write every thread's stack to stderr on SIGUSR1, to show where it hangs; then the running event loop calls `then`."""
    faulthandler.unregister(signal.SIGUSR1)
    if then is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, then)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=then is not None)


def follow_parent() -> None:
    """Call `die_with_parent` in a multiprocessing child whose parent called `lead_children`, and lead this one's children."""
    die_with_parent(int(os.environ[_PARENT]))
    lead_children()


def lead_children() -> None:
    """Put this process's pid into the environment, as the parent for `follow_parent` in its children."""
    os.environ[_PARENT] = str(os.getpid())


def before_exec(cpus: Sequence[int] = (), signals_held: bool = False) -> None:
    """Prepare a process, between fork and exec, to die with this one. It runs on `cpus` only; empty = all of ours.
    `signals_held`: the kernel keeps SIGTERM and SIGHUP, which would end it, until it calls `heed_signals`."""
    die_with_parent()
    if cpus:
        os.sched_setaffinity(0, cpus)
    if signals_held:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def heed_signals() -> None:
    """Unblock SIGTERM and SIGHUP, which `before_exec` blocked, and handle those that came. Requires handlers for both."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        _LIBC.prctl(option, value)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends in any way. `parent`: the pid that the parent must still have."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # the parent ended before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name by which tools such as ps and top show this process; at most 15 bytes of it are kept."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_NAME, name.encode())


def adopt(on: bool) -> None:
    """Set whether orphaned descendants of this process become its children, unless a nearer process adopts them. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


@contextmanager
def children_may_look() -> Iterator[None]:
    """Let children of this process read its memory inside the block, as py-spy does. Without Yama, children always may."""
    _prctl(_PR_SET_PTRACER, os.getpid())
    try:
        yield
    finally:
        _prctl(_PR_SET_PTRACER, 0)


def close_to_others() -> None:
    """Let no other process of the user read this process's memory or initial environment, which may hold the run's secret: a
    hijacked process runs as the same user. As a consequence, no core is written, and py-spy needs root."""
    _prctl(_PR_SET_DUMPABLE, 0)


def find_program(name: str) -> str | None:
    """Return the program's path, beside this interpreter or else in PATH. So a virtual environment need not be activated."""
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def ended(child: int) -> bool:
    """Return whether this process's child has ended, also before it is reaped."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


# ---- Command line
# Arguments and signals of every command. Ctrl-C, SIGTERM, SIGHUP and a lost terminal end a command in the same way.


class CommandParser(argparse.ArgumentParser):
    """A parser, also for subcommands."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2. `message` names the argument and the wrong value."""
        from runtime.telemetry.shown import shown

        self.exit(2, shown(f"error: {message}; see {self.prog} --help\n"))


def ending_signals() -> list[signal.Signals]:
    """Return the signals by which a user ends a command in order. SIGHUP is left out where it is ignored, as below `nohup`."""
    hangs_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangs_up]


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let every ending signal raise KeyboardInterrupt: what is inside ends its processes and removes its folders."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
