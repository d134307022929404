"""The command line that starts each runtime's keeper, from what is asked for and what the machine has. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from runtime.config.sandbox import Sandbox

SHARED_MEMORY = 1 << 20  # bytes of /dev/shm: the semaphores of multiprocessing
SYSTEM = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")  # into /usr, or folders
HOME = "/tmp"  # the folder of a program, with all runtimes but `subprocess`
CONTAINER_PYTHON = ("python3", "-I", "-S", "-c")


class SandboxHost(Struct, frozen=True):
    """What of this machine a sandbox needs to know.

    `links`: where each of LINKS leads, "" for a folder. `prefixes`: folders of this Python. `root`: this process may mount and
    may take any uid.
    """

    python: str
    prefixes: tuple[str, ...]
    packages: str  # folder of installed packages
    links: dict[str, str]
    root: bool
    processor: str  # as os.uname() calls it


def command_line(sandbox: Sandbox, host: SandboxHost, source: str, name: str, filter_fd: int = -1) -> list[str]:
    """What starts the keeper `source`. `name`: of the container; `filter_fd`: a descriptor that has `system_calls`."""
    keeper = [host.python, "-I", "-S", "-c", source]
    match sandbox.runtime:
        case "bwrap":
            return [*_bwrap(sandbox, host, filter_fd), *keeper]
        case "docker":
            return [*_docker(sandbox, name), *CONTAINER_PYTHON[1:], source]
        case "apptainer":
            return [*_apptainer(sandbox), *CONTAINER_PYTHON, source]
        case _:
            return keeper


def variables(host: SandboxHost, home: str) -> dict[str, str]:
    """The environment of programs that see this machine's Python: `bwrap` and `subprocess`."""
    path = [str(Path(host.python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    return {"PATH": ":".join(path), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _bwrap(sandbox: Sandbox, host: SandboxHost, filter_fd: int) -> list[str]:
    line = ["bwrap", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    for name, value in variables(host, HOME).items():
        line += ["--setenv", name, value]
    if host.root:  # then the keeper takes a uid that no process has: the kernel does not limit how many are root's
        line += [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
        line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-all", "--uid", "65534", "--gid", "65534"]
    line += _memory(HOME, sandbox.disk)  # before what is to be seen below it
    line += ["--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM:
        line += ["--ro-bind-try", path, path]
    for path, target in host.links.items():
        line += ["--symlink", target, path] if target else ["--ro-bind", path, path]
    for path in (*host.prefixes, *sandbox.read):
        for folder in reversed(Path(path).parents[:-1]):  # which bubblewrap would make for itself alone
            line += ["--perms", "0755", "--dir", str(folder)]
        line += ["--ro-bind", path, path]
    line += ["--proc", "/proc", "--dev", "/dev", *_memory("/dev/shm", SHARED_MEMORY)]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]  # both are in memory, without a limit
    return [*line, "--seccomp", str(filter_fd)]


def _memory(path: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _docker(sandbox: Sandbox, name: str) -> list[str]:
    size = str(sandbox.memory + sandbox.disk)  # a container's files in memory count as memory
    line = ["docker", "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--network", "none", "--ipc", "none"]
    line += ["--memory", size, "--memory-swap", size, "--pids-limit", str(sandbox.processes + 1), "--read-only"]
    line += ["--tmpfs", f"{HOME}:rw,exec,nosuid,nodev,mode=1777,size={sandbox.disk}", "--workdir", HOME]
    line += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
    line += ["--env", f"HOME={HOME}", "--env", f"TMPDIR={HOME}"]
    for path in sandbox.read:
        line += ["--volume", f"{path}:{path}:ro"]
    return [*line, "--entrypoint", CONTAINER_PYTHON[0], sandbox.image]


def _apptainer(sandbox: Sandbox) -> list[str]:
    line = ["apptainer", "--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-init", "--no-privs"]
    line += ["--net", "--network", "none", "--pwd", HOME]
    for path in sandbox.read:
        line += ["--bind", f"{path}:{path}:ro"]
    return [*line, sandbox.image]


# ------------------------------------------------------------------------------------------------ system calls

# By `uname -m`: audit's number of the processor, clone, clone3, socket, and what is refused: memory that is neither a
# process's nor a file's (memfd_create, memfd_secret, shmget, msgget, semget, mq_open), other namespaces (unshare, setns),
# other processes' memory and descriptors (ptrace, process_vm_readv, process_vm_writev, pidfd_getfd), keys (add_key,
# request_key, keyctl), and where most faults of the kernel are (bpf, perf_event_open, io_uring_setup, userfaultfd,
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
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_FAMILIES = (
    1,
    2,
    10,
)  # AF_UNIX, AF_INET, AF_INET6: others leave a network namespace (vsock), or are little-tried code of the kernel
_NEW_USER = 0x10000000  # CLONE_NEWUSER
_OTHER_ABI = 0x40000000  # from this number on, x86-64's calls with 32-bit pointers


def filters_exist(processor: str) -> bool:
    return processor in _REFUSED


def system_calls(processor: str) -> bytes:
    """A program for seccomp that refuses what `_REFUSED` lists, user namespaces, in which a program could mount, and sockets of
    all but `_FAMILIES`."""
    audit, clone, clone3, socket, refused = _REFUSED[processor]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += _answer(_AT_LEAST, _OTHER_ABI, _ENOSYS)
    for number in refused:
        program += _answer(_EQUAL, number, _EPERM)
    program += _answer(_EQUAL, clone3, _ENOSYS)  # whose flags cannot be seen: then libraries use clone
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), *_answer(_HAS, _NEW_USER, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    families = [(_EQUAL, left, 0, family) for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True)]
    program += [(_EQUAL, 0, len(families) + 2, socket), (_LOAD, 0, 0, 16), *families]
    program += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _answer(test: int, value: int, error: int) -> Sequence[tuple[int, int, int, int]]:
    return ((test, 0, 1, value), (_RETURN, 0, 0, _ERRNO | error))
