"""The command lines of the runtimes, the filter of system calls, and what a configuration of a sandbox may not ask for."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from runtime.config.sandbox import Sandbox, sandbox_faults
from runtime.sandbox.command_lines import SandboxHost, command_line, system_calls

HOST = SandboxHost(
    python="/opt/venv/bin/python",
    prefixes=("/opt/python", "/opt/venv"),
    packages="/opt/venv/lib/python3/site-packages",
    links={"/bin": "usr/bin", "/lib64": ""},
    root=False,
    processor="x86_64",
)


def line(host: SandboxHost = HOST, **settings: Any) -> list[str]:
    return command_line(Sandbox(**settings), host, "SOURCE", "box-1", 7)


def follows(words: list[str], *wanted: str) -> bool:
    return any(tuple(words[at : at + len(wanted)]) == wanted for at in range(len(words)))


# ------------------------------------------------------------------------------------------------ bwrap


def test_bwrap_shows_the_system_and_python_and_what_may_be_read() -> None:
    words = line(read=["/data/sets"])
    shown = {words[at + 1] for at, word in enumerate(words) if word in ("--ro-bind", "--ro-bind-try")}
    system = {"/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/lib64"}
    assert shown == system | {"/opt/python", "/opt/venv", "/data/sets"}
    assert "--bind" not in words
    assert follows(words, "--symlink", "usr/bin", "/bin")
    assert follows(words, "--perms", "0755", "--dir", "/data")  # or only bubblewrap itself may pass through it


def test_bwrap_writes_to_memory_of_a_limited_size_alone() -> None:
    words = line(disk=12345)
    assert follows(words, "--size", "12345", "--tmpfs", "/tmp")
    assert words.index("--tmpfs") < words.index("--ro-bind-try")  # what is to be seen below it comes behind it
    assert follows(words, "--remount-ro", "/")
    assert follows(words, "--remount-ro", "/dev")


def test_bwrap_takes_everything_away() -> None:
    words = line()
    assert {"--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"} <= set(words)
    assert follows(words, "--seccomp", "7", "/opt/venv/bin/python", "-I", "-S", "-c", "SOURCE")


def test_bwrap_of_root_keeps_what_it_takes_to_become_nobody() -> None:
    words = line(msgspec.structs.replace(HOST, root=True))
    assert "--unshare-all" not in words  # in a user namespace of root's, its processes would be root's for the kernel
    assert {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"} <= set(words)
    kept = [words[at + 1] for at, word in enumerate(words) if word == "--cap-add"]
    assert kept == ["CAP_SETUID", "CAP_SETGID"]
    assert follows(words, "--cap-drop", "ALL", "--cap-add")


# ------------------------------------------------------------------------------------------------ the others


def test_docker() -> None:
    words = line(runtime="docker", image="python:3.12", memory=1000, disk=24, processes=4, read=["/data"])
    assert words[:2] == ["docker", "run"]
    assert words[-7:] == ["--entrypoint", "python3", "python:3.12", "-I", "-S", "-c", "SOURCE"]
    for wanted in (
        ("--network", "none"),
        ("--memory", "1024", "--memory-swap", "1024"),
        ("--pids-limit", "5"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--pull", "never"),
        ("--name", "box-1"),
        ("--volume", "/data:/data:ro"),
    ):
        assert follows(words, *wanted), wanted
    assert {"--rm", "--interactive", "--read-only"} <= set(words)
    assert any(word.startswith("/tmp:") and word.endswith("size=24") for word in words)


def test_apptainer() -> None:
    words = line(runtime="apptainer", image="python.sif", read=["/data"])
    assert words[-6:] == ["python.sif", "python3", "-I", "-S", "-c", "SOURCE"]
    assert {"--containall", "--cleanenv", "--no-home", "--no-init", "--no-privs"} <= set(words)
    assert follows(words, "--net", "--network", "none")
    assert follows(words, "--bind", "/data:/data:ro")


def test_subprocess_is_the_keeper_alone() -> None:
    assert line(runtime="subprocess", network="open") == ["/opt/venv/bin/python", "-I", "-S", "-c", "SOURCE"]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"runtime": "subprocess"}, "s.network: 'none' is not what runtime 'subprocess' can do; must be open"),
        ({"network": "open"}, "s.network: 'open' is not what runtime 'bwrap' can do; must be none or gateway"),
        (
            {"runtime": "docker", "image": "a", "network": "gateway"},
            "s.network: 'gateway' is not what runtime 'docker' can do; must be none",
        ),
        ({"runtime": "docker"}, "s.image: empty; runtime 'docker' needs an image that has python3"),
        ({"image": "a"}, "s.image: 'a' is for docker and apptainer; must be empty with runtime 'bwrap'"),
        ({"read": ["data"]}, "s.read: 'data' must be an absolute path without '..', ':' and ','"),
        ({"read": ["/data/../etc"]}, "s.read: '/data/../etc' must be an absolute path without '..', ':' and ','"),
    ],
)
def test_what_no_machine_can_do_is_refused(settings: dict[str, Any], fault: str) -> None:
    assert list(sandbox_faults("s", msgspec.convert(settings, Sandbox))) == [fault]


def test_subprocess_reads_everything() -> None:
    (fault,) = sandbox_faults("s", Sandbox(runtime="subprocess", network="open", read=["/data"]))
    assert fault.startswith("s.read: '/data'")


# ------------------------------------------------------------------------------------------------ system calls

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def judged(processor: str, number: int, argument: int = 0, audit: int = 0) -> int:
    """What the filter says of a call, by a small machine for its program."""
    data = struct.pack("=IIQ6Q", number, audit or AUDIT[processor], 0, argument, *[0] * 5)
    program = list(struct.iter_unpack("=HBBI", system_calls(processor)))
    at, held = 0, 0
    while True:
        code, yes, no, value = program[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
            at += 1
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += 1 + (yes if holds else no)


NAMES = ("read", "clone", "execve", "memfd_create", "shmget", "unshare", "ptrace", "clone3")
NUMBERS = {  # of Linux's tables
    "x86_64": (0, 56, 59, 319, 29, 272, 101, 435),
    "aarch64": (63, 220, 221, 279, 194, 97, 117, 435),
}


@pytest.mark.parametrize("processor", NUMBERS)
def test_the_filter(processor: str) -> None:
    calls = dict(zip(NAMES, NUMBERS[processor], strict=True))
    new_user, threads = 0x10000000, 0x003D0F00
    assert [judged(processor, calls[name]) for name in ("read", "execve")] == [ALLOW] * 2
    assert [judged(processor, calls[name]) for name in ("memfd_create", "shmget", "unshare", "ptrace")] == [EPERM] * 4
    assert judged(processor, calls["clone3"]) == ENOSYS
    assert judged(processor, calls["clone"], threads) == ALLOW
    assert judged(processor, calls["clone"], threads | new_user) == EPERM
    assert judged(processor, calls["read"], audit=0x40000003) == KILL  # by 32-bit code
    assert judged(processor, calls["read"] | 0x40000000) == ENOSYS
