"""An open sandbox. It runs commands one after the other, and its folder keeps their files until it is closed."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from runtime import timeouts
from runtime.config.sandbox import IN_CONTAINERS, Sandbox, sandbox_faults
from runtime.errors import ServiceFault, UserError
from runtime.sandbox.keeper import ANSWER, LENGTH, REASONS

# ---- Command lines
# The command lines that start each runtime's keeper, derived from the settings and the machine.

SHARED_MEMORY = 1 << 20  # bytes of /dev/shm: the semaphores of multiprocessing
SYSTEM = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")  # links into /usr, or folders
HOME = "/tmp"  # the folder of a program, in all runtimes except `subprocess`
CONTAINER_PYTHON = "python3"
EVERY_UID = "0 0 4294967295"  # the map of a user namespace that contains every uid

_SOURCE = Path(__file__).with_name("keeper.py").read_text("utf-8")


def command_line(sandbox: Sandbox, name: str, filter_fd: int) -> list[str]:
    """Return the command line that starts the keeper. `name`: of the container. `filter_fd`: holds `system_calls`."""
    keeper = ["-I", "-S", "-c", _SOURCE]
    match sandbox.runtime:
        case "bwrap":
            return [*_bwrap(sandbox, filter_fd), sys.executable, *keeper]
        case "docker":
            return [*_docker(sandbox, name), *keeper]
        case "apptainer":
            return [*_apptainer(sandbox), CONTAINER_PYTHON, *keeper]
        case _:
            return [sys.executable, *keeper]


@cache
def is_root() -> bool:
    """Return True if this process may mount and may take any uid."""
    return os.geteuid() == 0 and " ".join(Path("/proc/self/uid_map").read_text().split()) == EVERY_UID


def variables(home: str) -> dict[str, str]:
    """Return the environment of programs that see this machine's Python: `bwrap` and `subprocess`."""
    path = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    return {"PATH": ":".join(path), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _bwrap(sandbox: Sandbox, filter_fd: int) -> list[str]:
    line = ["bwrap", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    for name, value in variables(HOME).items():
        line += ["--setenv", name, value]
    if is_root():  # the keeper takes an unused uid later: the kernel does not limit the number of root's processes
        line += [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
        line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-all", "--uid", "65534", "--gid", "65534"]
    line += _memory(HOME, sandbox.disk)  # before any folder below it is mounted
    line += ["--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM:
        line += ["--ro-bind-try", path, path]
    for link in map(Path, LINKS):
        if link.is_symlink():
            line += ["--symlink", str(link.readlink()), str(link)]
        elif link.exists():
            line += ["--ro-bind", str(link), str(link)]
    prefixes = sorted({path for path in (sys.prefix, sys.base_prefix) if not Path(path).is_relative_to("/usr")})
    for path in (*prefixes, *sandbox.read):
        for folder in reversed(Path(path).parents[:-1]):  # bubblewrap would make these readable only to itself
            line += ["--perms", "0755", "--dir", str(folder)]
        line += ["--ro-bind", path, path]
    line += ["--proc", "/proc", "--dev", "/dev", *_memory("/dev/shm", SHARED_MEMORY)]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]  # both are in memory without a limit
    return [*line, "--seccomp", str(filter_fd)]


def _memory(path: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _docker(sandbox: Sandbox, name: str) -> list[str]:
    size = str(sandbox.memory + sandbox.disk)  # files of a container in memory count as memory
    line = ["docker", "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--network", "none", "--ipc", "none"]
    line += ["--memory", size, "--memory-swap", size, "--pids-limit", str(sandbox.processes + 1), "--read-only"]
    line += ["--tmpfs", f"{HOME}:rw,exec,nosuid,nodev,mode=1777,size={sandbox.disk}", "--workdir", HOME]
    line += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
    line += ["--env", f"HOME={HOME}", "--env", f"TMPDIR={HOME}"]
    for path in sandbox.read:
        line += ["--volume", f"{path}:{path}:ro"]
    return [*line, "--entrypoint", CONTAINER_PYTHON, sandbox.image]


def _apptainer(sandbox: Sandbox) -> list[str]:
    line = ["apptainer", "--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-init", "--no-privs"]
    line += ["--net", "--network", "none", "--pwd", HOME]
    for path in sandbox.read:
        line += ["--bind", f"{path}:{path}:ro"]
    return [*line, sandbox.image]


# ------------------------------------------------------------------------------------------------ system calls

# By `uname -m`: audit's number of the processor, clone, clone3, socket, and the refused calls. These are: memory that is
# neither a process's nor a file's (memfd_create, memfd_secret, shmget, msgget, semget, mq_open), other namespaces (unshare,
# setns), memory and descriptors of other processes (ptrace, process_vm_readv, process_vm_writev, pidfd_getfd), keys (add_key,
# request_key, keyctl), and calls in which most kernel faults are (bpf, perf_event_open, io_uring_setup, userfaultfd,
# open_by_handle_at, fanotify_init, syslog).
_REFUSED: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        *(0xC000003E, 56, 435, 41),
        (319, 447, 29, 68, 64, 240, 272, 308, 101, 310, 311, 438, 248, 249, 250, 321, 298, 425, 323, 304, 300, 103),
    ),
    "aarch64": (
        *(0xC00000B7, 220, 435, 198),
        (279, 447, 194, 186, 190, 180, 97, 268, 117, 270, 271, 438, 217, 218, 219, 280, 241, 425, 282, 265, 262, 116),
    ),
}
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of classic BPF
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
# AF_UNIX, AF_INET, AF_INET6: other families leave a network namespace (vsock) or run little-tested kernel code.
_FAMILIES = (1, 2, 10)
_NEW_USER = 0x10000000  # CLONE_NEWUSER
_OTHER_ABI = 0x40000000  # the first of x86-64's calls with 32-bit pointers


def system_calls(processor: str) -> bytes:
    """Return a seccomp program, which refuses `_REFUSED`, user namespaces (they allow mounts) and sockets but `_FAMILIES`."""
    audit, clone, clone3, socket, refused = _REFUSED[processor]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += _answer(_AT_LEAST, _OTHER_ABI, _ENOSYS)
    for number in refused:
        program += _answer(_EQUAL, number, _EPERM)
    program += _answer(_EQUAL, clone3, _ENOSYS)  # a filter cannot see its flags; libraries use clone instead
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), *_answer(_HAS, _NEW_USER, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    families = [(_EQUAL, left, 0, family) for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True)]
    program += [(_EQUAL, 0, len(families) + 2, socket), (_LOAD, 0, 0, 16), *families]
    program += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _answer(test: int, value: int, error: int) -> Sequence[tuple[int, int, int, int]]:
    return ((test, 0, 1, value), (_RETURN, 0, 0, _ERRNO | error))


INSTALL = {"bwrap": "apt-get install bubblewrap", "docker": "see docs.docker.com", "apptainer": "see apptainer.org"}
KEPT = 1 << 20  # bytes of each of a command's output streams
NOWHERE = ("127.0.0.1", 1024)  # stands for a gateway in `check`
CONNECTIONS = 64  # from a sandbox to the gateway at once
SHOWN = 300  # characters of a runtime's error output in a message


class Finished(Struct, frozen=True):
    """A command that has ended, together with every process that it started. `code`: the exit code, or -N after signal N.
    `reason`: the exceeded limit (timeout, cpu, memory, processes or disk); "lost" if the sandbox was lost with the command and
    accepts no more commands; else ""."""

    code: int
    stdout: bytes = b""
    stderr: bytes = b""
    reason: str = ""


class Box:
    """`async with Box(sandbox) as box: await box.run(...)`. Belongs to one event loop. `gateway`: with `network: gateway`, the
    host and port that programs reach at the same port of 127.0.0.1. Entering raises ServiceFault if the sandbox cannot be
    started; `check` finds the reason beforehand."""

    def __init__(self, sandbox: Sandbox, gateway: tuple[str, int] | None = None):
        assert bool(gateway) == (sandbox.network == "gateway"), "a gateway is needed for network: gateway, and only then"
        self._sandbox, self._gateway = sandbox, gateway
        self._name = f"sluice-box-{secrets.token_hex(8)}"
        self._home = f"{tempfile.gettempdir()}/{self._name}" if sandbox.runtime == "subprocess" else HOME
        self._process: asyncio.subprocess.Process
        self._relay: asyncio.Server | None = None
        self._forwarded = 0  # open connections to the gateway
        self._usable = False

    async def __aenter__(self) -> Box:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", source: str = "", timeout: float | None = None, output: int = KEPT
    ) -> Finished:
        """Run `command`. `source`: Python code to run instead, with `command` as its sys.argv, in the keeper's interpreter with
        this process's packages (not with docker and apptainer). `timeout`: seconds, in place of the sandbox's. `output`: bytes
        kept of stdout and of stderr. Raises ServiceFault if the sandbox was lost before."""
        if not self._usable:
            raise ServiceFault("sandbox", "run a command", "the sandbox was lost")
        self._usable = False  # until the whole answer has arrived
        seconds = self._sandbox.timeout if timeout is None else timeout
        message = _message([repr(seconds), repr(self._sandbox.cpu_seconds), stdin, source, str(output), *command])
        assert self._process.stdin is not None
        try:
            with suppress(ConnectionError):  # reading the answer finds the loss
                self._process.stdin.write(message)
            finished = await asyncio.wait_for(self._answer(output), seconds + timeouts.SANDBOX_GRACE)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self.close()
            return Finished(-9, reason="lost")
        self._usable = finished.reason != "lost"
        return finished

    async def _answer(self, most: int) -> Finished:
        assert self._process.stdout is not None
        header = await self._process.stdout.readexactly(ANSWER.size)
        code, reason, out, err = ANSWER.unpack(header)
        if max(out, err) > most or reason >= len(REASONS):  # with `subprocess`, a program may take over the keeper
            return Finished(-9, reason="lost")
        stdout, stderr = await self._process.stdout.readexactly(out), await self._process.stdout.readexactly(err)
        return Finished(code, stdout, stderr, REASONS[reason])

    async def close(self) -> None:
        """End the sandbox and every process in it; return when they are gone. Raises asyncio.TimeoutError if they are not."""
        self._usable = False
        if self._relay is not None:
            self._relay.close()
        process = getattr(self, "_process", None)
        if process is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), timeouts.SANDBOX_GRACE)
        except TimeoutError:
            await asyncio.to_thread(self._kill)
            await asyncio.wait_for(process.wait(), timeouts.SANDBOX_REAP)

    def _kill(self) -> None:
        """Kill the sandbox from outside. Killing the keeper, process 1 of its namespace, kills all other processes."""
        if self._sandbox.runtime == "docker":
            subprocess.run(["docker", "kill", self._name], capture_output=True, timeout=timeouts.SANDBOX_REAP, check=False)
        with suppress(psutil.NoSuchProcess):
            of_runtime = psutil.Process(self._process.pid)
            for one in (*of_runtime.children(recursive=True), of_runtime):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        if self._sandbox.runtime == "subprocess":
            shutil.rmtree(self._home, ignore_errors=True)

    async def _start(self) -> None:
        ours, control = socket.socketpair()
        filter_fd = _in_memory(system_calls(platform.machine())) if self._sandbox.runtime == "bwrap" else -1
        passed = [filter_fd] if filter_fd >= 0 else []
        passed += [control.fileno()] if self._gateway else []
        program, *arguments = command_line(self._sandbox, self._name, filter_fd)
        try:
            self._process = await asyncio.create_subprocess_exec(
                shutil.which(program) or program,  # by this process's PATH, not by the PATH of the sandbox
                *arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env=dict(os.environ) if self._sandbox.runtime in IN_CONTAINERS else variables(self._home),
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
            )
            await self._configure(control.fileno())
            if self._gateway:
                _, received, _, _ = socket.recv_fds(ours, 1, 1)
                self._relay = await asyncio.start_server(self._connect, sock=socket.socket(fileno=received[0]))
        except OSError as error:
            raise ServiceFault("sandbox", "start", str(error)) from None
        finally:
            ours.close()
            control.close()
            if filter_fd >= 0:
                os.close(filter_fd)
        self._usable = True

    async def _configure(self, control: int) -> None:
        """Send the keeper its settings and limits, and wait until it is ready."""
        alone = self._sandbox.runtime == "bwrap"
        settings: dict[str, Any] = {
            "uid": (1 << 30) + secrets.randbelow(1 << 30) if alone and is_root() else 0,  # an unused uid
            "port": self._gateway[1] if self._gateway else 0,
            "control": control,
            "home": self._home,
            "packages": sysconfig.get_path("purelib"),
            "look": timeouts.SANDBOX_LOOK,
            "processes": self._sandbox.processes + 1 if alone else 0,  # one more for the keeper
            "threads": self._sandbox.processes,
            "memory": self._sandbox.memory,
            "disk": self._sandbox.disk,
        }
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        with suppress(ConnectionError):
            self._process.stdin.write(_message([str(item) for pair in settings.items() for item in pair]))
        try:
            await asyncio.wait_for(self._process.stdout.readexactly(LENGTH.size), timeouts.SANDBOX_START)
        except asyncio.IncompleteReadError:
            said = (await asyncio.wait_for(self._process.stderr.read(), timeouts.SANDBOX_START)).decode("utf-8", "replace")
            raise ServiceFault("sandbox", "start", " ".join(said.split())[-SHOWN:] or "it ended without a message") from None
        except TimeoutError:
            raise ServiceFault("sandbox", "start", "the keeper is not ready", timeouts.SANDBOX_START) from None

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection from the sandbox to the gateway until one end closes it. Close it if there are too many."""
        if self._forwarded >= CONNECTIONS:
            writer.close()
            return
        self._forwarded += 1
        assert self._gateway is not None
        try:
            there, onward = await asyncio.wait_for(asyncio.open_connection(*self._gateway), timeouts.SANDBOX_START)
            await asyncio.gather(_copy(reader, onward), _copy(there, writer))
        except (TimeoutError, OSError):
            writer.close()
        finally:
            self._forwarded -= 1


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()


async def run(sandbox: Sandbox, command: Sequence[str], *, gateway: tuple[str, int] | None = None, **options: Any) -> Finished:
    """Run one command in a sandbox of its own. `options`: as in `Box.run`. Raises ServiceFault, as `Box` does."""
    async with Box(sandbox, gateway) as box:
        return await box.run(command, **options)


async def check(sandbox: Sandbox, key: str) -> None:
    """Open a sandbox and run a command in it. Raises UserError with one line per fault; `key`: the section's key."""
    if faults := [*sandbox_faults(key, sandbox), *_missing(key, sandbox)]:
        raise UserError("\n".join(faults))
    try:
        finished = await run(sandbox, ["true"], gateway=NOWHERE if sandbox.network == "gateway" else None)
    except ServiceFault as fault:
        raise UserError(f"{key}.runtime: {sandbox.runtime!r} does not work here: {fault}") from None
    if finished.code or finished.reason:
        said = finished.reason or " ".join(finished.stderr.decode("utf-8", "replace").split())[-SHOWN:]
        raise UserError(f"{key}.runtime: a command does not run with {sandbox.runtime!r} here: {said or finished.code}")


def _missing(key: str, sandbox: Sandbox) -> Iterator[str]:
    """Yield what this machine lacks, one line each."""
    runtime, processor = sandbox.runtime, platform.machine()
    for path in sandbox.read:
        if not Path(path).exists():
            yield f"{key}.read: {path!r} is not there"
    if runtime != "subprocess" and shutil.which(runtime) is None:
        others = ", ".join(name for name in INSTALL if shutil.which(name)) or "none"
        yield f"{key}.runtime: {runtime!r} is not installed: {INSTALL[runtime]}; there is: {others}"
    elif runtime == "bwrap" and processor not in _REFUSED:
        yield f"{key}.runtime: 'bwrap' is for x86_64 and aarch64; this machine is {processor}"


def _in_memory(data: bytes) -> int:
    """Return a descriptor from which a child can read `data`."""
    descriptor = os.memfd_create("sluice-seccomp")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _message(items: Sequence[str | bytes]) -> bytes:
    """Encode a message as the keeper reads it."""
    parts = [item.encode() if isinstance(item, str) else item for item in items]
    return LENGTH.pack(len(parts)) + b"".join(LENGTH.pack(len(part)) + part for part in parts)
