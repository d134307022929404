"""The keeper: first process of a sandbox and parent of every command there, `python -I -S -c SOURCE`, controlled by its stdin.

The keeper is passed as source because the sandbox contains no code of Sluice. It imports only modules that load at once: json,
signal and socket would double its start time. When its input ends, the keeper ends, and with it all processes it has started.

A message to it is a list of byte strings: their number, then the length of each string before it, as little-endian uint32. The
first message holds the settings, names and values in turn. Each other message is a command: timeout, cpu_seconds, stdin, source
and output, then the arguments. The answer is an `ANSWER`, and the kept bytes of stdout and stderr.

As process 1 of a pid namespace, the keeper cannot be killed or stopped from within. It is not dumpable: the processes that it
watches cannot read its memory and descriptors. With runtime `subprocess` neither protection exists.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import time

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<iI2Q")  # exit code, index in REASONS, bytes kept of stdout and stderr
REASONS = ("", "timeout", "cpu", "memory", "processes", "disk")
FILES = 10_000  # files that the folder may hold: an empty file takes memory too
DESCRIPTORS = 256  # open descriptors of a process, at most

_SIGKILL, _SIGPIPE, _SIGXCPU, _SIGXFSZ = 9, 13, 24, 25
_NOT_RUN = 127  # a shell's exit code for a missing command
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36  # options of prctl
_TICKS = os.sysconf("SC_CLK_TCK")
_ALONE = os.getpid() == 1  # in a pid namespace: every other process in it descends from this process

now = time.monotonic


def exactly(size: int) -> bytes:
    """Read `size` bytes of standard input. Raises EOFError at the end of the input, which ends this process."""
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        raise EOFError
    return data


def receive() -> list[bytes]:
    (count,) = LENGTH.unpack(exactly(LENGTH.size))
    return [exactly(LENGTH.unpack(exactly(LENGTH.size))[0]) for _ in range(count)]


def send(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


# ------------------------------------------------------------------------------------------------ all processes but this one


def others() -> list[int]:
    """Return the pids of all processes but this one; with runtime `subprocess`, of its descendants."""
    if _ALONE:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208 - loads at once
    found = [os.getpid()]
    for pid in found:  # the list grows during the loop
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                with open(f"/proc/{pid}/task/{thread}/children") as children:  # noqa: PTH123
                    found += map(int, children.read().split())
        except OSError:  # the process has ended
            continue
    return found[1:]


def kill_others() -> None:
    """Kill all other processes, and return when they are gone."""
    while True:
        for pid in [-1] if _ALONE else others():  # -1: all at once, so that no process can start another meanwhile
            try:
                os.kill(pid, _SIGKILL)
            except OSError:  # the process has ended
                continue
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def usage() -> tuple[float, int, int]:
    """Return their seconds of processor time, bytes without mapped files, and threads. Shared pages count for each."""
    ticks = kilobytes = threads = 0
    for pid in others():
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat, open(f"/proc/{pid}/status", "rb") as status:  # noqa: PTH123
                fields, lines = stat.read().rpartition(b")")[2].split(), status.readlines()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # of the process and of its ended children
        threads += int(fields[17])
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))
    return ticks / _TICKS + sum(os.times()[2:4]), kilobytes << 10, threads


def stored(home: str) -> tuple[int, int]:
    """Return the bytes and the files in the folder."""
    if _ALONE:
        found = os.statvfs(home)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
    size = files = 0
    for folder, _, names in os.walk(home):
        files += len(names)
        for name in names:
            try:
                size += os.lstat(f"{folder}/{name}").st_size
            except OSError:
                continue
    return size, files


# ------------------------------------------------------------------------------------------------ a command


def run_command(settings: dict[str, bytes], command: list[bytes]) -> None:
    """Run one command and answer. `settings`: look (seconds), home, packages, and memory, processes, threads, disk (0: any)."""
    inward, outward, errors = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        _become(settings, (inward[0], outward[1], errors[1]), command)
    for end in (inward[0], outward[1], errors[1]):
        os.close(end)
    kept = {outward[0]: bytearray(), errors[0]: bytearray()}
    reason = _watch(settings, child, inward[1], command, kept)
    code = -_SIGKILL if reason else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_others()
    for end in kept:  # data left in the pipes; no process holds the other ends now
        while data := os.read(end, 1 << 16):
            keep(data, kept[end], int(command[4]))
        os.close(end)
    reason = reason or ("cpu" if code == -_SIGXCPU else "")
    send(ANSWER.pack(code, REASONS.index(reason), *map(len, kept.values())) + b"".join(kept.values()))


def _become(settings: dict[str, bytes], ends: tuple[int, int, int], command: list[bytes]) -> None:
    """Become the command in the child process, or run its source in this interpreter and exit."""
    os.setsid()
    for number, end in enumerate(ends):
        os.dup2(end, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(settings["home"])
    limit(resource.RLIMIT_CPU, int(float(command[1])) + 1, 1)
    limit(resource.RLIMIT_DATA, int(settings["memory"]))
    limit(resource.RLIMIT_FSIZE, int(settings["disk"]))
    limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    limit(resource.RLIMIT_CORE, 0)
    if processes := int(settings["processes"]):
        limit(resource.RLIMIT_NPROC, processes)
    source, arguments = command[3], command[5:]
    if source:
        sys.argv = [argument.decode() for argument in arguments]
        sys.path.append(settings["packages"].decode())
        exec(compile(source, "main", "exec"), {"__name__": "__main__"})
        sys.exit()
    import _signal  # type: ignore[import-not-found]  # the base of `signal`, without its enumerations

    for ignored in (_SIGPIPE, _SIGXFSZ):  # Python ignores these signals; the command would inherit that
        _signal.signal(ignored, _signal.SIG_DFL)
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        os.write(2, f"{arguments[0].decode()}: {error.strerror}\n".encode())
        os._exit(_NOT_RUN)


def _watch(settings: dict[str, bytes], child: int, inward: int, command: list[bytes], kept: dict[int, bytearray]) -> str:
    """Feed and read the command. Return "" once `child` has ended, or the name of an exceeded limit."""
    ended, left = os.pidfd_open(child), memoryview(command[2])
    deadline, cpu = now() + float(command[0]), float(command[1]) + sum(os.times()[2:4])
    look, heard, reason = float(settings["look"]), set(kept), ""
    due = now() + look
    os.set_blocking(inward, False)
    while not reason:
        if not left and inward:
            os.close(inward)
            inward = 0
        readable, writable, _ = select.select([0, ended, *heard], [inward] if inward else [], [], look)
        if 0 in readable:  # no message comes while a command runs: the input has ended
            raise EOFError
        for end in heard & set(readable):
            if data := os.read(end, 1 << 16):
                keep(data, kept[end], int(command[4]))
            else:
                heard.discard(end)
        if writable:
            try:
                left = left[os.write(inward, left[: 1 << 16]) :]
            except BrokenPipeError:  # the command has closed its input
                left = left[:0]
        if ended in readable:
            break
        if now() >= due:
            reason, due = _exceeded_limit(settings, deadline, cpu), now() + look
    os.close(ended)
    if inward:
        os.close(inward)
    return reason


def _exceeded_limit(settings: dict[str, bytes], deadline: float, cpu: float) -> str:
    """Return the name of an exceeded limit, or ""."""
    seconds, resident, threads = usage()
    size, files = stored(settings["home"].decode())
    passed = {
        "timeout": now() >= deadline,
        "cpu": seconds >= cpu,
        "memory": resident > int(settings["memory"]),
        "processes": threads > int(settings["threads"]),
        "disk": size > int(settings["disk"]) or files > FILES,
    }
    return next((reason for reason, is_so in passed.items() if is_so), "")


def limit(kind: int, amount: int, more: int = 0) -> None:
    """Set a limit of this process in the kernel; a lower existing limit stays. `more`: amount between signal and kill."""
    most = resource.getrlimit(kind)[1]
    amount, most = (value if most == resource.RLIM_INFINITY else min(value, most) for value in (amount, amount + more))
    resource.setrlimit(kind, (amount, most))


def keep(data: bytes, kept: bytearray, most: int) -> None:
    kept += data[: most - len(kept)]


def settle(settings: dict[str, bytes]) -> None:
    """Give up privileges that commands must not have, and create their folder."""
    if port := int(settings["port"]):
        import socket

        with socket.create_server(("127.0.0.1", port)) as listener, socket.socket(fileno=int(settings["control"])) as control:
            socket.send_fds(control, [b"."], [listener.fileno()])
    if uid := int(settings["uid"]):  # changing the uid also makes the process not dumpable
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if not _ALONE:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.mkdir(settings["home"], 0o700)  # noqa: PTH102


def main() -> None:
    keeper = os.getpid()
    named = receive()
    settings = {name.decode(): value for name, value in zip(named[::2], named[1::2], strict=False)}
    settle(settings)
    send(LENGTH.pack(0))
    try:
        while True:
            run_command(settings, receive())
    except EOFError:
        if os.getpid() != keeper:  # a command's source raised it
            raise
        kill_others()
        if not _ALONE:
            import shutil

            shutil.rmtree(settings["home"], ignore_errors=True)


if __name__ == "__main__":
    main()
