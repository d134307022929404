"""The rules for code, and the command lines of sandboxes, without any program being run."""

from __future__ import annotations

import base64
import json
import pickle
import struct
import zlib
from typing import Any

import msgspec
import pytest

from runtime.config.sandbox import Sandbox, sandbox_faults
from runtime.rewards.code import CodeTests, _screen, last_program, passed, read_tests, same_text
from runtime.rewards.rules import RuleContext
from runtime.sandbox.command_lines import SandboxHost, command_line, system_calls


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nb\n```\n```text\nc\n```", "a\n"),
        ("```\na\n```\n```cpp\nb\n```", "b\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python\nnever closed\n\n```python\na\n```", "a\n"),
        ("  ```Python3 title\na ``` b\n  ```", "a ``` b\n"),
        ("print(1)", None),
        ("```python", None),
    ],
)
def test_the_program_of_a_reply(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_a_reply_without_a_program_needs_no_worker() -> None:
    assert _screen("no", "", RuleContext()) is False
    assert _screen("```\na\n```", "", RuleContext()) is None


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}]
CALLED = [{"input": '[1, 2]\n"x"', "output": "3", "testtype": "functional"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_labels_of_livecodebench() -> None:
    assert read_tests(json.dumps(STDIN), {}) == CodeTests(["1\n", "3"], ["2\n", "4"])
    wanted = CodeTests(['[[1, 2], "x"]'], [3], "add")
    assert read_tests(json.dumps(CALLED), {"fn_name": "add"}) == wanted
    assert read_tests(json.dumps(CALLED), {"metadata": '{"func_name": "add"}'}) == wanted
    assert read_tests(packed(json.dumps(STDIN)), {}) == read_tests(json.dumps(STDIN), {})


def test_labels_of_prime() -> None:
    stdin = {"inputs": ["1\n", ["2", "3"]], "outputs": ["4", ["5", "6"]]}
    assert read_tests(json.dumps(stdin), {}) == CodeTests(["1\n", "2\n3"], ["4", "5\n6"])
    called = {"fn_name": "add", "inputs": [[[1, 2]], "[3]\n4"], "outputs": [3, [7]]}
    assert read_tests(json.dumps(called), {}) == CodeTests(["[[1, 2]]", "[[3], 4]"], [3, [7]], "add", wrapped=True)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("5", "neither a list of tests"),
        ("no tests", "neither JSON nor packed tests"),
        ("[]", "0 inputs"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        (packed(Evil()), "exec"),
        (packed(7), "no text"),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "neither JSON nor packed tests"),
    ],
)
def test_labels_without_tests(label: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_tests(label, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2\n3\n", "1 2\n3"),
        (" 1  2 \n", "1 2"),
        ("\n1\r\n2", "1\n2\n\n"),
        ("1.0", "1"),
        ("0.333333", "0.3333333333"),
        ("1e3", "1000.0"),
        ("YES", "YES"),
        ("", "\n"),
    ],
)
def test_outputs_that_are_the_same(text: str, expected: str) -> None:
    assert same_text(text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2", "1\n2"),
        ("1", "1\n2"),
        ("yes", "YES"),
        ("100000000001", "100000000000"),
        ("0.33", "0.3333333333"),
        ("nan", "1.0"),
        ("sNaN", "1.0"),
        ("1", "one"),
        ("", "0"),
    ],
)
def test_outputs_that_differ(text: str, expected: str) -> None:
    assert not same_text(text, expected)


def test_values_of_functions() -> None:
    plain, wrapped = (CodeTests(["[]"], [[1, 2]], "f", wrapped) for wrapped in (False, True))
    assert passed(plain, 0, b"[1, 2]")
    assert not passed(plain, 0, b"1")
    assert passed(wrapped, 0, b"1")
    assert not passed(wrapped, 0, b"2")
    assert not passed(plain, 0, b"")
    assert not passed(plain, 0, b"[" * 100_000)


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
