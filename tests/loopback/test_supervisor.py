"""Processes that die and are replaced, and the logs of processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from rich.console import Console

from launcher.node.agent import CoordinatorKeeper
from launcher.node.logs import Log
from launcher.node.supervisor import Child, Supervisor
from launcher.node.topology import ProcessSpec
from launcher.view import View
from runtime import timeouts
from runtime.config import FromEnvironment, Logs
from runtime.errors import UserError
from runtime.process.os_process import INCARNATION
from sluice import start
from tests.coroutines import handed
from tests.loopback.line_views import Lines

# ---- Processes in the place of those that die, with real processes that do little

DEADLINE = 60.0
LIVES = "import time; time.sleep(600)"
DIES = "raise SystemExit(1)"
FAULTS = "from runtime.process import os_process; os_process.say_errors(['it cannot be']); raise SystemExit({code})"
DIES_FIRST = f"import os, time; os.environ['{INCARNATION}'] == '0' and os.abort(); time.sleep(600)"


def spec(name: str, code: str, *arguments: str) -> ProcessSpec:
    command = (sys.executable, "-c", code, *arguments)
    return ProcessSpec(name=name, role=name.partition("-")[0], command=command, env={})


def supervised(
    logs: Path,
    test: Callable[[Supervisor], Awaitable[None]],
    settings: Logs = Logs(),  # noqa: B008
    show: Callable[[str, str], None] | None = None,
    said: list[str] | None = None,
    says: list[str] | None = None,
    backoff: float = 0.0,
) -> list[str]:
    """What the supervisor said, in `said` as it does, which has to be `says`; every process is gone."""
    said = [] if said is None else said

    async def within() -> None:
        supervisor = Supervisor(logs, Lines(said, show), settings)
        try:
            await asyncio.wait_for(test(supervisor), DEADLINE)
        finally:
            await supervisor.end_all(0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "FIRST_BACKOFF", backoff)
        asyncio.run(within())
    assert says is None or said == says
    return said


def test_a_reference_becomes_a_variable_of_the_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "s3cr3t")
    path = tmp_path / "found"
    code = f"import os, pathlib; pathlib.Path({str(path)!r}).write_text(os.environ['HF_TOKEN'])"
    env = {"HF_TOKEN": FromEnvironment(variable="MINE")}

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(replace(spec("trainer-0", code), env=env))
        await child.process.wait()
        assert "s3cr3t" not in repr(child.spec)

    assert supervised(tmp_path, test) == []
    assert path.read_text() == "s3cr3t"
    assert "s3cr3t" not in (tmp_path / "trainer-0.log").read_text()


@handed(supervised, needs=("tmp_path",))
async def test_what_cannot_be_started_is_said_before(supervisor: Supervisor) -> None:
    env = {"HF_TOKEN": FromEnvironment(variable="NOT_SET_ANYWHERE")}
    said = r"services\.trainer\.env\.HF_TOKEN: \{from: NOT_SET_ANYWHERE\}: this machine's environment has no NOT_SET_ANYWHERE"
    with pytest.raises(UserError, match=said):
        await supervisor.start(replace(spec("trainer-0", LIVES), env=env))
    assert supervisor.children == []
    with pytest.raises(UserError, match=r"services\.bound\.cpus: this machine has none of 1023"):
        await supervisor.start(replace(spec("bound-0", LIVES), cpus=(1023,)))
    assert supervisor.children == []


async def started_again(supervisor: Supervisor, name: str, incarnation: int) -> Child:
    while True:  # the test's own deadline ends it
        for child in supervisor.children:
            if (child.spec.name, child.incarnation) == (name, incarnation):
                return child
        await asyncio.sleep(0.01)


async def fewer(supervisor: Supervisor, than: int) -> None:
    while len(supervisor.children) >= than:  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.01)


def allowed(restarts: int = 3) -> dict[str, int]:
    return dict.fromkeys(("rollout-0", "rollout-1"), restarts)


@handed(supervised, needs=("tmp_path",), says=["rollout-0: run: was killed by SIGABRT; started again in 0 s"])
async def test_one_that_dies_is_started_again_alone_with_a_log_of_its_own(supervisor: Supervisor) -> None:
    trainer = await supervisor.start(spec("trainer-0", LIVES))
    first = await supervisor.start(spec("rollout-0", DIES_FIRST))
    supervisor.enable_restarts(allowed())
    failing = asyncio.create_task(supervisor.first_failure())
    second = await started_again(supervisor, "rollout-0", 1)
    assert first not in supervisor.children
    assert trainer.running
    assert second.running
    assert second.log.name == "rollout-0.1.log"
    assert supervisor.cause_of_failure() is None
    assert not failing.done()
    trainer.process.kill()
    assert await failing is trainer


@handed(supervised, needs=("tmp_path",))
async def test_the_log_that_is_named_is_that_of_the_process_whose_fault_is_told(supervisor: Supervisor, tmp_path: Path) -> None:
    for name in ("trainer-0.log", "trainer-0.1.log"):
        (tmp_path / name).write_text("a traceback")
    os.utime(tmp_path / "trainer-0.log", (0, 0))
    told = ("trainer-0: Accumulate: it cannot be", "critic-0: Apply: it has no log here")
    codes = [f"from runtime.process import os_process; os_process.say_errors([{line!r}]); raise SystemExit(1)" for line in told]
    children = [await supervisor.start(spec(f"coordinator-{index}", code)) for index, code in enumerate(codes)]
    for child in children:
        await child.process.wait()
    logs = (tmp_path / "trainer-0.1.log", children[1].log)
    assert [str(child.fault()) for child in children] == [f"{line} (log: {log})" for line, log in zip(told, logs, strict=True)]


def test_out_of_attempts_it_is_told_of_and_the_others_are_watched_on(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor) -> None:
        told: list[Child] = []
        supervisor.on_exit = told.append
        supervisor.enable_restarts(allowed(restarts=0))
        first = await supervisor.start(spec("rollout-0", DIES))
        trainer = await supervisor.start(spec("trainer-0", LIVES))
        failing = asyncio.create_task(supervisor.first_failure())
        await fewer(supervisor, 2)
        assert told == [first]
        assert str(first.fault()) == "rollout-0: run: ended with exit code 1: (empty log) " + f"(log: {first.log})"
        assert supervisor.children == [trainer]
        trainer.process.kill()
        assert await failing is trainer

    (line,) = supervised(tmp_path, test)
    assert line.startswith("rollout-0: run: ended with exit code 1")


@handed(supervised, needs=("tmp_path",))
async def test_of_one_that_is_decided_elsewhere_every_death_is_told(supervisor: Supervisor) -> None:
    told: list[Child] = []
    supervisor.on_exit = told.append
    supervisor.enable_restarts({}, decided_elsewhere=["trainer-0"])
    part = await supervisor.start(spec("trainer-0", DIES))
    failing = asyncio.create_task(supervisor.first_failure())
    await fewer(supervisor, 1)
    assert told == [part]
    assert not failing.done()
    failing.cancel()


@handed(supervised, needs=("tmp_path",))
async def test_before_anything_may_be_replaced_a_death_is_a_failure_of_one_that_came_late_too(supervisor: Supervisor) -> None:
    failing = asyncio.create_task(supervisor.first_failure())
    await asyncio.sleep(0)
    late = await supervisor.start(spec("rollout-0", DIES))
    assert await failing is late


@handed(supervised, needs=("tmp_path",), says=[])
async def test_one_that_is_ended_is_no_failure_and_may_be_started_again(supervisor: Supervisor) -> None:
    supervisor.enable_restarts(allowed())
    failing = asyncio.create_task(supervisor.first_failure())
    child = await supervisor.start(spec("rollout-0", LIVES))
    await supervisor.end("rollout-0", DEADLINE)
    assert not child.running
    assert supervisor.incarnations == {}
    again = await supervisor.start(spec("rollout-0", LIVES), incarnation=4)
    assert supervisor.children == [again]
    assert supervisor.incarnations == {"rollout-0": 4}
    assert not failing.done()
    failing.cancel()


@handed(supervised, needs=("tmp_path",), backoff=30.0)
async def test_one_that_waits_to_be_started_again_can_be_ended(supervisor: Supervisor) -> None:
    supervisor.enable_restarts({"rollout-0": 3})
    await supervisor.start(spec("rollout-0", DIES))
    failing = asyncio.create_task(supervisor.first_failure())
    await fewer(supervisor, 1)
    await supervisor.end("rollout-0", DEADLINE)
    assert supervisor.incarnations == {}
    assert not failing.done()
    failing.cancel()


# A coordinator that writes where it is, and heeds SIGTERM only once it is told to go on.
HEEDS = """
import os, pathlib, signal, sys, time
from runtime.process import os_process
here = pathlib.Path(sys.argv[1], os.environ["SLUICE_INCARNATION"])
here.touch()
while not here.with_name(here.name + "-goes-on").exists():
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os_process.heed_signals()
here.with_name(here.name + "-heeds").touch()
time.sleep(600)
"""


async def there(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - the test's own deadline ends it
        await asyncio.sleep(0.01)


@handed(supervised, needs=("tmp_path",), backoff=0.2)
async def test_a_coordinator_that_is_lost_as_the_run_is_told_to_stop_is_followed_by_one_that_stops(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """Whenever the run is told: before the loss is known, while nobody is there, and before the next one heeds signals."""
    for moment in ("before anyone", "before the loss", "between", "as the next one begins"):
        folder = tmp_path / moment
        folder.mkdir()
        coordinator = replace(spec("coordinator", HEEDS, str(folder)), signals_held=True)
        keeper = CoordinatorKeeper(supervisor)
        if moment == "before anyone":
            keeper.terminate()
        first = await keeper.start(coordinator)
        running = asyncio.create_task(keeper.until_finished(coordinator, 1))
        await there(folder / "0")
        if moment != "before anyone":
            (folder / "0-goes-on").touch()
            await there(folder / "0-heeds")
            os.kill(first.pid, signal.SIGSTOP)  # so that it heeds no SIGTERM before it is killed
            if moment == "before the loss":
                keeper.terminate()
            os.kill(first.pid, signal.SIGKILL)
            if moment == "between":
                await fewer(supervisor, 1)
                keeper.terminate()
            await there(folder / "1")
            if moment == "as the next one begins":
                keeper.terminate()
        (folder / f"{keeper.child.incarnation if keeper.child else 0}-goes-on").touch()
        await running
        supervisor.children.clear()


@handed(supervised, needs=("tmp_path",))
async def test_one_that_may_not_be_started_another_time_says_so(supervisor: Supervisor) -> None:
    told: list[Child] = []
    supervisor.on_exit = told.append
    supervisor.enable_restarts({"trainer-0": 1})
    await supervisor.start(spec("trainer-0", DIES_FIRST))
    failing = asyncio.create_task(supervisor.first_failure())
    second = await started_again(supervisor, "trainer-0", 1)
    second.process.kill()
    await fewer(supervisor, 1)
    line = "trainer-0: run: was killed by SIGKILL; services.trainer.restarts allows no further start"
    assert [str(child.fault()) for child in told] == [line]
    failing.cancel()


@handed(supervised, needs=("tmp_path",))
async def test_what_its_user_has_to_mend_is_not_tried_again(supervisor: Supervisor) -> None:
    supervisor.enable_restarts(allowed())
    child = await supervisor.start(spec("rollout-0", FAULTS.format(code=2)))
    assert await supervisor.first_failure() is child
    assert str(child.fault()) == "it cannot be"


@handed(supervised, needs=("tmp_path",))
async def test_a_mistake_that_one_rank_of_a_group_tells_is_the_groups(supervisor: Supervisor, tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(FAULTS.format(code=2))
    command = start.command("launcher.node.ranks", "--group", "trainer-0", "--ranks", "0,1", "--world", "2", str(rank))
    supervisor.enable_restarts({"trainer-0": 3})
    group = ProcessSpec(name="trainer-0", role="trainer", command=command, env={})
    child = await supervisor.start(group)
    assert await supervisor.first_failure() is child
    fault = child.fault()
    assert isinstance(fault, UserError)
    assert str(fault) == "it cannot be"


@handed(supervised, needs=("tmp_path",), says=["rollout-0: run: verify: no answer within 3 s; started again in 0 s"])
async def test_one_that_is_given_up_is_ended_and_replaced_even_when_it_is_stopped(supervisor: Supervisor) -> None:
    supervisor.enable_restarts(allowed())
    child = await supervisor.start(spec("rollout-0", LIVES))
    failing = asyncio.create_task(supervisor.first_failure())
    child.signal_group(19)  # SIGSTOP
    supervisor.give_up("rollout-0", 1, "of another incarnation")
    supervisor.give_up("rollout-0", 0, "verify: no answer within 3 s")
    second = await started_again(supervisor, "rollout-0", 1)
    supervisor.give_up("rollout-0", 0, "told once more")
    await asyncio.sleep(2 * timeouts.PROCESS_END)
    assert second.running
    failing.cancel()


@handed(supervised, needs=("tmp_path",), says=["rollout-0: run: was killed by SIGKILL; started again in 0 s"])
async def test_one_that_was_dying_when_it_was_given_up_says_itself_why(supervisor: Supervisor) -> None:
    supervisor.enable_restarts(allowed())
    child = await supervisor.start(spec("rollout-0", LIVES))
    failing = asyncio.create_task(supervisor.first_failure())
    child.signal_group(9)
    supervisor.give_up("rollout-0", 0, "connection lost")
    await started_again(supervisor, "rollout-0", 1)
    failing.cancel()


@handed(supervised, needs=("tmp_path",))
async def test_of_two_that_died_at_once_both_are_told(supervisor: Supervisor) -> None:
    told: list[str] = []
    supervisor.on_exit = lambda child: told.append(child.spec.name)
    supervisor.enable_restarts(allowed(restarts=0))
    for name in ("rollout-0", "rollout-1"):
        await (await supervisor.start(spec(name, DIES))).process.wait()
    failing = asyncio.create_task(supervisor.first_failure())
    await fewer(supervisor, 1)
    assert told == ["rollout-0", "rollout-1"]
    failing.cancel()


@handed(supervised, needs=("tmp_path",))
async def test_one_that_came_late_holds_up_no_end(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others may take."""
    monkeypatch.setattr(timeouts, "AGENT_END_GRACE", 0.1)

    supervisor.enable_restarts(allowed())
    late = await supervisor.start(spec("rollout-1", LIVES))
    supervisor.stop_restarts()
    await asyncio.wait_for(supervisor.wait_all(1e6), DEADLINE)
    assert not late.running


TELLS = "import signal, socket; signal.sigwait([signal.SIGHUP]); socket.socket(fileno=0).send(b'x')"


@handed(supervised, needs=("tmp_path",))
async def test_one_that_lives_on_as_restarts_end_is_still_heard(supervisor: Supervisor) -> None:
    """As the coordinator does when a node's agent hears of a run for the first time."""
    supervisor.enable_restarts(allowed())
    child = await supervisor.start(replace(spec("coordinator", TELLS), signals_held=True))
    supervisor.stop_restarts()
    os.kill(child.pid, signal.SIGHUP)
    assert await asyncio.wait_for(child.process.wait(), DEADLINE) == 0  # its beat had somewhere to go


ENDS = ["rollout-0: run: was killed by SIGKILL", "reference-0: stop: did not end (deadline 0.5 s): killed"]


@handed(supervised, needs=("tmp_path",), says=ENDS)
async def test_once_all_is_saved_nobodys_end_is_a_failure(supervisor: Supervisor) -> None:
    """Neither of one that dies, nor of one that would not end."""
    hung = await supervisor.start(spec("reference-0", LIVES))
    dying = await supervisor.start(spec("rollout-0", LIVES))
    os.kill(hung.pid, signal.SIGSTOP)
    supervisor.enable_restarts(allowed())
    failing = asyncio.create_task(supervisor.first_failure())
    asyncio.get_running_loop().call_soon(os.kill, dying.pid, signal.SIGKILL)
    await supervisor.finish(0.5)
    assert not hung.running
    assert not failing.done()
    assert supervisor.cause_of_failure() is None
    assert supervisor.children == []
    failing.cancel()


@handed(supervised, needs=("tmp_path",), says=["trainer-0: run: was killed by SIGABRT"])
async def test_a_trainer_that_is_lost_while_the_run_stops_is_not_started_again(supervisor: Supervisor) -> None:
    reported: list[str] = []
    supervisor.on_exit = lambda child: reported.append(child.spec.name)
    trainer = await supervisor.start(spec("trainer-0", DIES_FIRST))
    supervisor.enable_restarts({"trainer-0": 3})
    supervisor.stopping = True
    failing = asyncio.create_task(supervisor.first_failure())
    await fewer(supervisor, 1)
    assert reported == ["trainer-0"]
    assert str(trainer.fault()) == "trainer-0: run: was killed by SIGABRT"
    assert not failing.done()
    failing.cancel()


@handed(supervised, needs=("tmp_path",), backoff=30.0)
async def test_at_the_end_nobody_is_started_again(supervisor: Supervisor) -> None:
    supervisor.enable_restarts({"rollout-0": 3})
    await supervisor.start(spec("rollout-0", DIES))
    failing = asyncio.create_task(supervisor.first_failure())
    await fewer(supervisor, 1)
    failing.cancel()
    supervisor.stop_restarts()
    await supervisor.wait_all(1.0)
    assert supervisor.children == []


LEAVES = """
import pathlib, subprocess, sys, time
program = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); print(flush=True); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
started.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(started.pid))
time.sleep(float(sys.argv[2]))
"""


@handed(supervised, needs=("tmp_path",))
async def test_what_a_process_has_started_outlives_neither_it_nor_the_run(supervisor: Supervisor, tmp_path: Path) -> None:
    """Be it in a session of its own, and the process killed; but what this process has started otherwise lives on."""
    mine = await asyncio.create_subprocess_exec(sys.executable, "-c", LIVES)
    try:
        killed = await supervisor.start(spec("environment-0", LEAVES, str(tmp_path / "first"), "600"))
        last = await supervisor.start(spec("environment-1", LEAVES, str(tmp_path / "second"), "600"))
        left = [await started_by(tmp_path / name) for name in ("first", "second")]
        supervisor.enable_restarts({})
        os.kill(killed.pid, signal.SIGKILL)
        await gone(left[0])
        assert last.running
        await supervisor.end_all(0.0)
        assert not psutil.pid_exists(left[1])
        assert mine.returncode is None
    finally:
        mine.kill()
        await mine.wait()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def started_by(path: Path) -> int:
    while not read(path):  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.01)
    return int(read(path))


async def gone(pid: int) -> None:
    while psutil.pid_exists(pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


AFFINITY = "import os; print('on', *sorted(os.sched_getaffinity(0)))"
THROUGH_ANOTHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {AFFINITY!r}])"


@pytest.mark.parametrize("code", [AFFINITY, THROUGH_ANOTHER], ids=["itself", "what it starts"])
@handed(supervised, needs=("tmp_path",))
async def test_a_process_runs_on_its_own_processors_alone(supervisor: Supervisor, code: str) -> None:
    all_of_them = sorted(os.sched_getaffinity(0))
    own = all_of_them[-1]
    bound = await supervisor.start(replace(spec("bound-0", code), cpus=(own,)))
    free = await supervisor.start(spec("free-0", code))
    assert [await bound.process.wait(), await free.process.wait()] == [0, 0]
    assert bound.output.tail() == f"on {own}\n"
    assert free.output.tail() == f"on {' '.join(map(str, all_of_them))}\n"
    assert sorted(os.sched_getaffinity(0)) == all_of_them


# ----
# The logs of real processes: nothing is lost, whoever writes it and however busy the launcher is, and files stay small.

NUMBERED = """
import ctypes, sys
libc = ctypes.CDLL(None)
for number in range(int(sys.argv[1])):
    line = b"line %d\\n" % number
    if number % 2:
        libc.write(2, line, len(line))
    else:
        print(line.decode(), end="", flush=True)
"""
MUCH_THEN_MARK = """
import os, pathlib, sys
for _ in range(128):
    os.write(1, b"x" * 65535 + b"\\n")
pathlib.Path(sys.argv[1]).touch()
"""


def one(started: ProcessSpec) -> Callable[[Supervisor], Awaitable[None]]:
    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(started)
        assert await child.process.wait() == 0

    return test


def files(logs: Path) -> list[Path]:
    """From the oldest to the newest."""
    older = sorted(logs.glob("role-0.log.*"), key=lambda path: -int(path.suffix[1:]))
    return [*older, logs / "role-0.log"]


def test_what_python_and_c_write_is_in_order_over_files_of_whole_lines(tmp_path: Path) -> None:
    supervised(tmp_path, one(spec("role-0", NUMBERED, "3000")), Logs(max_bytes=4096, keep=100))
    found = files(tmp_path)
    assert len(found) > 5
    texts = [path.read_text() for path in found]
    assert all(len(text) <= 4096 and (not text or text.endswith("\n")) for text in texts)
    assert "".join(texts).splitlines() == [f"line {number}" for number in range(3000)]


@pytest.mark.parametrize(("keep", "names"), [(2, ["role-0.log.2", "role-0.log.1", "role-0.log"]), (0, ["role-0.log"])])
def test_only_so_many_older_files_are_kept_and_none_of_another_run(tmp_path: Path, keep: int, names: list[str]) -> None:
    (tmp_path / "role-0.log.7").write_text("of a run before\n")
    supervised(tmp_path, one(spec("role-0", NUMBERED, "3000")), Logs(max_bytes=4096, keep=keep))
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    lines = "".join((tmp_path / name).read_text() for name in names).splitlines()
    assert lines == [f"line {number}" for number in range(3000 - len(lines), 3000)]


def test_a_line_longer_than_a_file_is_cut(tmp_path: Path) -> None:
    supervised(tmp_path, one(spec("role-0", "print('x' * 10000)")), Logs(max_bytes=4096, keep=9))
    assert [path.stat().st_size for path in files(tmp_path)] == [4096, 4096, 10001 - 2 * 4096]


def test_a_process_that_writes_much_does_not_wait_for_a_busy_launcher(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec("role-0", MUCH_THEN_MARK, str(mark)))
        until = time.monotonic() + DEADLINE / 2
        while not mark.exists():  # the event loop stands still meanwhile
            assert time.monotonic() < until
            time.sleep(0.01)  # noqa: ASYNC251
        await child.process.wait()

    logs = tmp_path / "logs"
    logs.mkdir()
    supervised(logs, test)
    assert (logs / "role-0.log").stat().st_size == 128 << 16


@handed(supervised, needs=("tmp_path",))
async def test_the_reason_of_an_end_is_the_last_that_was_written(supervisor: Supervisor) -> None:
    code = "import os; os.write(2, b'noise\\n' * 400000); os.write(2, b'error: it cannot be\\n'); os._exit(1)"
    child = await supervisor.start(spec("role-0", code))
    assert await supervisor.first_failure() is child
    assert str(child.fault()) == f"it cannot be (log: {child.log})"


@handed(supervised, needs=("tmp_path",))
async def test_what_a_dead_process_started_goes_on_writing_there(supervisor: Supervisor) -> None:
    code = "import os, time\nif os.fork():\n os._exit(0)\ntime.sleep(0.2)\nos.write(1, b'of the child\\n')\ntime.sleep(600)"
    child = await supervisor.start(spec("role-0", code))
    assert await child.process.wait() == 0
    while child.output.tail() != "of the child\n":  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.01)


def test_a_process_outlives_a_disk_that_is_full_and_its_user_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "role-0.log").symlink_to("/dev/full")
    (line,) = supervised(tmp_path, one(spec("role-0", NUMBERED, "3000")))
    assert line == f"{tmp_path}/role-0.log: no space left on device: output of this process is being lost"


def test_how_much_was_lost_stands_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Log._write

    def full_at_first(log: Log, data: bytes) -> None:
        if data == b"lost\n":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(log, data)

    monkeypatch.setattr(Log, "_write", full_at_first)
    mark = tmp_path / "mark"
    code = f"import os, time\nos.write(1, b'lost\\n')\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)\nprint('kept')"

    async def test(supervisor: Supervisor) -> None:
        child = await supervisor.start(spec("role-0", code))
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        mark.touch()
        assert await child.process.wait() == 0
        assert child.output.tail() == "[5 bytes were lost here]\nkept\n"

    said: list[str] = []
    supervised(tmp_path, test, said=said)


def test_every_line_is_shown_with_the_name_of_its_process(tmp_path: Path) -> None:
    console, lines = Console(width=60), list[tuple[str, str]]()
    view = View(console, verbose=True)
    code = "import os; os.write(1, b'half of '); os.write(2, b'a line\\n'); os.write(1, 'é'.encode() + b' \\xff\\nno end')"
    with console.capture() as capture:
        view.output("coordinator", "a longer name")
        supervised(tmp_path, one(spec("role-0", code)), show=lambda name, line: lines.append((name, line)))
        for shown in lines:
            view.output(*shown)
    assert capture.get().splitlines() == [
        "coordinator | a longer name",
        "role-0      | half of a line",
        "role-0      | é \ufffd",
        "role-0      | no end",
    ]


@pytest.mark.parametrize("gone", [BrokenPipeError(), SystemExit(1)])
def test_a_reader_who_has_gone_stops_no_log(tmp_path: Path, gone: BaseException) -> None:
    def show(name: str, line: str) -> None:
        raise gone

    supervised(tmp_path, one(spec("role-0", NUMBERED, "100")), show=show)
    assert (tmp_path / "role-0.log").read_text().endswith("line 99\n")


def test_what_is_added_does_not_tear_a_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "role-0.log", Logs(), "role-0")
    with log.writer() as out:
        writer = os.dup(out)
    os.write(writer, b"first\nsec")
    log.add(b"added\n")
    os.write(writer, b"ond\n")
    os.close(writer)
    log.close()
    assert (tmp_path / "role-0.log").read_bytes() == b"first\nadded\nsecond\n"
