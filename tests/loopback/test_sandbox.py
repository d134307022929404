"""Sandboxes that are really opened, and the rules `code` and `code_share`, whose programs run in them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from runtime.config import Rewards
from runtime.errors import ServiceFault, UserError
from runtime.rewards.code import use, verdicts
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RuleContext, RuleOutcome
from runtime.rewards.scorer import RewardScorer
from runtime.rewards.worker import Task
from runtime.sandbox import Box, Finished, Sandbox, check, run
from runtime.sandbox.box import CONNECTIONS
from tests.sandboxes import members, namespaces_below, needs_bwrap
from tests.unit.test_rewards_scorer import Bytes

STAY = "import time\ntime.sleep(999)"
SHARED = f"import mmap\nheld = mmap.mmap(-1, 99 << 20)\nfor _ in range(99): held.write(b'x' * (1 << 20))\n{STAY}"
EMPTY = f"import os\nfor n in range(20_000): os.close(os.open(f'{{n}}', os.O_CREAT))\n{STAY}"
ENOUGH = 20.0  # seconds that no command needs here: the machine may be busy
RUNTIMES: dict[str, dict[str, Any]] = {"bwrap": {}, "subprocess": {"runtime": "subprocess", "network": "open"}}


@pytest.fixture(params=RUNTIMES)
def make(request: pytest.FixtureRequest) -> Callable[..., Sandbox]:
    if request.param == "bwrap":
        needs_bwrap()
    return lambda **settings: Sandbox(**({"timeout": ENOUGH, "cpu_seconds": ENOUGH} | RUNTIMES[request.param] | settings))


@pytest.fixture
def bwrap() -> Sandbox:
    needs_bwrap()
    return Sandbox(timeout=ENOUGH, cpu_seconds=ENOUGH)


def one(sandbox: Sandbox, command: list[str], **options: Any) -> Finished:
    return asyncio.run(run(sandbox, command, **options))


def boxes() -> list[str]:
    """Folders of sandboxes of this process."""
    return [path.name for path in Path(tempfile.gettempdir()).glob("sluice-box-*")]


# ------------------------------------------------------------------------------------------------ what a command gets and gives


def test_a_command(make: Callable[..., Sandbox]) -> None:
    finished = one(make(), ["sh", "-c", "cat; echo said >&2; exit 3"], stdin=b"given")
    assert finished == Finished(3, b"given", b"said\n")
    assert one(make(), ["true"], stdin=b"x" * (4 << 20)) == Finished(0)  # which it does not read
    assert one(make(), ["no-such-program"]) == Finished(127, b"", b"no-such-program: No such file or directory\n")
    kept = one(make(), ["a"], source="print('x' * 5000, end='')", output=1000)
    assert kept == Finished(0, b"x" * 1000)


def test_python_without_another_interpreter(make: Callable[..., Sandbox]) -> None:
    source = "import sys\nprint(sys.argv, input(), __name__)\nimport msgspec\nsys.exit(4)"
    assert one(make(), ["a", "b"], source=source, stdin=b"c\n") == Finished(4, b"['a', 'b'] c __main__\n")
    failed = one(make(), ["a"], source="1 / 0")
    assert failed.code == 1
    assert failed.stderr.endswith(b"ZeroDivisionError: division by zero\n")


def test_files_stay_from_one_command_to_the_next(make: Callable[..., Sandbox]) -> None:
    async def session() -> list[Finished]:
        async with Box(make()) as box:
            first = await box.run(["sh", "-c", "mkdir a; printf kept > a/b; cat a/b > c; (sleep 999 &)"])
            return [first, await box.run(["cat", "c"])]

    assert asyncio.run(session()) == [Finished(0), Finished(0, b"kept")]
    assert boxes() == []


def test_nothing_of_a_command_is_there_when_it_is_done(make: Callable[..., Sandbox]) -> None:
    command = ["sleep", f"9{os.getpid()}"]

    async def session() -> list[int]:
        async with Box(make()) as box:
            await box.run(["sh", "-c", f"setsid {' '.join(command)} >/dev/null 2>&1 &"])
            return [process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == command]

    assert asyncio.run(session()) == []


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("settings", "source", "reason"),
    [
        *(({"timeout": 0.3}, STAY, "timeout"), ({"cpu_seconds": 0.3}, "while True: pass", "cpu")),
        *(({"memory": 64 << 20}, SHARED, "memory"), ({"disk": 1 << 20}, EMPTY, "disk")),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
def test_a_command_at_its_limit(make: Callable[..., Sandbox], settings: dict[str, Any], source: str, reason: str) -> None:
    async def session() -> tuple[Finished, Finished]:
        async with Box(make(**settings)) as box:
            return await box.run(["a"], source=source), await box.run(["true"], timeout=ENOUGH)

    ended, following = asyncio.run(session())
    assert (ended.code, ended.reason) == (-9, reason)
    assert following.reason in ("", "disk")  # of what the first has left


def test_memory_that_the_kernel_refuses(make: Callable[..., Sandbox]) -> None:
    finished = one(make(memory=64 << 20), ["a"], source="held = bytearray(99 << 20)")
    assert finished.code == 1 and finished.stderr.endswith(b"MemoryError\n")


def test_more_processes_than_it_may_have(bwrap: Sandbox) -> None:
    source = "import os, time\nwhile True:\n    if not os.fork(): time.sleep(999)"
    finished = one(bwrap, ["a"], source=source)
    assert finished.code == 1
    assert b"BlockingIOError" in finished.stderr


def test_too_many_processes_of_a_subprocess() -> None:
    source = "import os, time\nfor _ in range(40):\n    if not os.fork(): time.sleep(999)\ntime.sleep(999)"
    sandbox = Sandbox(runtime="subprocess", network="open", timeout=ENOUGH, memory=4 << 30)
    assert one(sandbox, ["a"], source=source).reason == "processes"


def test_what_may_be_read(bwrap: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("shown")
    (tmp_path / "hidden").mkdir()
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)  # pytest's are for their owner alone
    sandbox = Sandbox(timeout=ENOUGH, read=[str(tmp_path / "given")])
    finished = one(sandbox, ["sh", "-c", f"cat {tmp_path}/given; echo x >> {tmp_path}/given; ls {tmp_path}"])
    assert finished.stdout == b"showngiven\n"
    assert (tmp_path / "given").read_text() == "shown"


CONNECT = """
import socket
end = socket.create_connection(("127.0.0.1", {}))
end.sendall(b"said\\n")
print(end.makefile().read())
"""


def test_the_gateway_alone(bwrap: Sandbox) -> None:
    async def session() -> tuple[Finished, Finished]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline() + b"heard\n")
            writer.close()

        gateway = await asyncio.start_server(answer, "127.0.0.1", 0)
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        there, elsewhere = (server.sockets[0].getsockname()[1] for server in (gateway, other))
        async with gateway, other, Box(Sandbox(timeout=ENOUGH, network="gateway"), ("127.0.0.1", there)) as box:
            found = [await box.run(["a"], source=CONNECT.format(port)) for port in (there, elsewhere)]
        return found[0], found[1]

    reached, refused = asyncio.run(session())
    assert reached.stdout == b"said\nheard\n\n"
    assert b"ConnectionRefusedError" in refused.stderr


def test_connections_to_the_gateway_are_counted() -> None:
    """By the relay itself, whatever runs in the sandbox."""

    async def session() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(1))
            await reader.read()
            writer.close()

        gateway = await asyncio.start_server(echo, "127.0.0.1", 0)
        box = Box(Sandbox(network="gateway"), gateway.sockets[0].getsockname())
        relay = await asyncio.start_server(box._connect, "127.0.0.1", 0)

        async def opened() -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*relay.sockets[0].getsockname())
            writer.write(b"x")
            with suppress(ConnectionResetError):
                return await reader.read(1), writer
            return b"", writer

        async with gateway, relay:
            ends = [await opened() for _ in range(CONNECTIONS + 1)]
            assert [answer for answer, _ in ends] == [b"x"] * CONNECTIONS + [b""]
            ends[0][1].close()
            while box._forwarded == CONNECTIONS:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            ends.append(await opened())
            assert ends[-1][0] == b"x"
            for _, writer in ends:
                writer.close()
            while box._forwarded:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(session(), 60))


# ------------------------------------------------------------------------------------------------ its end


def test_a_keeper_that_hangs_is_killed_from_outside(make: Callable[..., Sandbox]) -> None:
    before = set(psutil.Process().children())  # of other tests' making

    async def session() -> Finished:
        async with Box(make(timeout=0.2)) as box:
            (runtime,) = set(psutil.Process().children()) - before
            keeper = (runtime.children() or [runtime])[-1]
            running = asyncio.create_task(box.run(["sleep", "999"]))
            while not keeper.children():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            keeper.send_signal(signal.SIGSTOP)
            finished = await running
            with pytest.raises(ServiceFault, match="sandbox: run a command: the sandbox was lost"):
                await box.run(["true"])
            return finished

    assert asyncio.run(session()) == Finished(-9, reason="lost")
    assert set(psutil.Process().children()) <= before
    assert boxes() == []


def test_a_run_that_is_cancelled_leaves_nothing(make: Callable[..., Sandbox]) -> None:
    async def session() -> set[int]:
        async with Box(make()) as box:
            spaces = namespaces_below()
            running = asyncio.create_task(box.run(["sleep", "999"]))
            await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            with pytest.raises(ServiceFault):
                await box.run(["true"])
        return spaces

    assert members(asyncio.run(session())) == []


OWNER = """
import asyncio
from runtime.sandbox import Box, Sandbox
async def main():
    async with Box(Sandbox(timeout=900.0, **{settings})) as box:
        await box.run(["sh", "-c", "setsid sleep 901 & sleep 900"])
asyncio.run(main())
"""


def test_it_ends_with_whoever_opened_it(make: Callable[..., Sandbox]) -> None:
    settings = RUNTIMES[make().runtime]
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(settings=settings)], cwd=Path(__file__).parents[2])
    try:
        process = psutil.Process(owner.pid)
        while not any("901" in child.cmdline() for child in _alive(process)):
            assert owner.poll() is None
        descendants = _alive(process)
    finally:
        owner.kill()
        owner.communicate()
    assert len(descendants) >= 3
    assert psutil.wait_procs(descendants, timeout=ENOUGH)[1] == []


def _alive(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            child.cmdline()
        except psutil.Error:
            continue
        found.append(child)
    return found


# ------------------------------------------------------------------------------------------------ what is refused


def refusal(sandbox: Sandbox) -> str:
    with pytest.raises(UserError) as error:
        asyncio.run(check(sandbox, "rewards.sandbox"))
    return str(error.value)


def test_a_sandbox_that_works(make: Callable[..., Sandbox]) -> None:
    asyncio.run(check(make(), "rewards.sandbox"))
    assert "rewards.sandbox.read: '/no/such' is not there" in refusal(Sandbox(read=["/no/such"]))


def test_a_runtime_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(Sandbox()) == "rewards.sandbox.runtime: 'bwrap' is not installed: apt-get install bubblewrap; there is: none"
    told = refusal(Sandbox(runtime="apptainer", image="python.sif"))
    assert told == "rewards.sandbox.runtime: 'apptainer' is not installed: see apptainer.org; there is: none"


@pytest.mark.parametrize("runtime", ["bwrap", "docker", "apptainer"])
def test_a_runtime_that_does_not_work_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str) -> None:
    """As without user namespaces, or without a daemon."""
    program = tmp_path / runtime
    program.write_text("#!/bin/sh\necho 'not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = refusal(Sandbox(runtime=runtime, image="" if runtime == "bwrap" else "python:3.12"))  # type: ignore[arg-type]
    assert told == f"rewards.sandbox.runtime: {runtime!r} does not work here: sandbox: start: not permitted"


# ------------------------------------------------------------------------------------------------ rules for code

SUMS = json.dumps([{"input": f"{n} 1\n", "output": str(n + 1), "testtype": "stdin"} for n in range(3)])


@pytest.fixture
def sandbox(make: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    use(make())
    yield make()
    use(Sandbox())


def judged(program: str, label: str = SUMS, **extra: Any) -> list[bool]:
    return asyncio.run(verdicts(f"```python\n{program}\n```", label, RuleContext(extra=extra)))


SUM = "print(sum(map(int, {}.split())))"
UNLESS_ONE = "n = int(input().split()[0])\n{}\nprint(n + 1)"
PROGRAMS = {
    "wrong": ("a, b = map(int, input().split())\nprint(a * 2 + 1)", [True, False, False]),
    "main": (
        "import sys\ndef main():\n    " + SUM.format("sys.stdin.read()") + "\nif __name__ == '__main__': main()",
        [True] * 3,
    ),
    "thread": (f"import threading\nthreading.Thread(target=lambda: {SUM.format('input()')}).start()", [True] * 3),
    "atexit": ("import atexit\natexit.register(lambda: print(n))\nn = sum(map(int, input().split()))", [True] * 3),
    "descriptors": ("import os\nos.write(1, str(sum(map(int, os.read(0, 9).split()))).encode())\nraise SystemExit", [True] * 3),
    "subprocess": ("import subprocess as s\n" + SUM.format("s.run(['cat'], capture_output=True).stdout"), [True] * 3),
    "raises": (UNLESS_ONE.format("if n == 1: raise ValueError"), [True, False, True]),
    "crashes": (UNLESS_ONE.format("import os\nif n == 1: os.kill(os.getpid(), 11)"), [True, False, True]),
    "status": (UNLESS_ONE.format("if n == 1:\n    print(2)\n    raise SystemExit(1)"), [True, False, True]),
    # No test sees what an earlier one left in memory.
    "memory": ("import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nprint(int(input().split()[0]) + sys.seen)", [True] * 3),
    "no program": ("(", [False] * 3),
    "nothing": ("", [False] * 3),
}


@pytest.mark.usefixtures("sandbox")
def test_programs() -> None:
    assert {name: judged(program) for name, (program, _) in PROGRAMS.items()} == {
        n: found for n, (_, found) in PROGRAMS.items()
    }


@pytest.mark.usefixtures("sandbox")
def test_functions() -> None:
    label = json.dumps({"fn_name": "total", "inputs": [[[1, 2]], [[3]]], "outputs": [3, [3]]})
    method = "class Solution:\n    def total(self, x: List[int]) -> int:\n        print('aside')\n        return sum(x)"
    assert judged(method, label) == [True, True]
    assert judged("def total(x): return sum(x)", label) == [True, True]
    assert judged("def total(x): return x[0]", label) == [False, True]
    assert judged("def total(x): return {1, 2}", label) == [False, False]
    assert judged("def other(x): return sum(x)", label) == [False, False]
    tests = json.dumps([{"input": "[1, 2]\n3", "output": "[[1, 2], 3]", "testtype": "functional"}])
    assert judged("def both(x, y): return x, y", tests, fn_name="both") == [True]


@pytest.mark.usefixtures("sandbox")
def test_expected_outputs_are_nowhere_in_the_sandbox() -> None:
    label = json.dumps([{"input": "x", "output": "expected-0123456789", "testtype": "stdin"}])
    search = "import gc, re\nfor held in gc.get_objects(): print(*re.findall('expected-[0-9]{10}', repr(held)), end='')"
    assert judged(search, label) == [False]


def test_tests_that_a_limit_leaves_out_are_not_passed(sandbox: Sandbox) -> None:
    use(msgspec.structs.replace(sandbox, timeout=0.5))
    assert judged("n = int(input().split()[0])\nprint(n + 1, flush=True)\nwhile n == 1: pass") == [True, False, False]


def test_in_the_pool(sandbox: Sandbox) -> None:
    replies = [f"```python\n{code}\n```" for code in ("a, b = map(int, input().split())\nprint(a + b)", "print(1)", "def")]

    async def scored() -> list[RuleOutcome]:
        pool = KillablePool(["code", "code_share"], 1, Limits(2 * ENOUGH, ENOUGH, 384 << 20, sandbox))
        try:
            tasks = [Task(rule, reply, SUMS, RuleContext()) for rule in ("code", "code_share") for reply in replies]
            return await pool.run([*tasks, Task("code", replies[0], "5", RuleContext())])
        finally:
            await pool.close()

    outcomes = asyncio.run(scored())
    assert [outcome.value for outcome in outcomes] == [True, False, False, 1.0, 1 / 3, 0.0, None]
    assert outcomes[-1].error == "exception:ValueError"  # a label without tests is nobody's fault


def test_a_service_without_its_sandbox_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def check(rules: list[dict[str, str]]) -> None:
        await RewardScorer(msgspec.convert({"rules": rules}, Rewards), Bytes()).check()

    asyncio.run(check([{"name": "gsm8k"}]))
    with pytest.raises(UserError, match=r"rewards.sandbox.runtime: 'bwrap' is not installed: apt-get install bubblewrap"):
        asyncio.run(check([{"name": "gsm8k"}, {"name": "code_share"}]))
