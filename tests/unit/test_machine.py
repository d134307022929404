"""What a process reads of its machine: processors, memory, disk, stalls; and waits with a deadline."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node import local_node
from launcher.node.local_node import Machine, this_machine
from launcher.node.topology import coordinator_spec, environment, machine_faults, service_specs
from launcher.node.watchdog import HeartbeatMonitor, ReceivedHeartbeat, stalled
from runtime import run_files, timeouts, types
from runtime.cluster.nodes import Launch
from runtime.config import Config, Deadlines
from runtime.errors import ServiceFault
from runtime.process import os_process, platform, spans, waiting
from runtime.process.spans import Heartbeat, Work
from runtime.process.waiting import done_within
from runtime.telemetry import startup
from runtime.telemetry.startup import Memory, PeakMemory
from runtime.telemetry.summary import TrainedTokenLog, TrainedTokens
from tests.coroutines import driven_by

# ---- Lists of processors, and what is said of those that the machine has not

CONFIG = Path("c.yaml")
MACHINE = Machine(cpus=frozenset(range(8)))


def make(**services: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": services}, Config)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_shown_is_read_back(some: set[int]) -> None:
    assert set(local_node.parse_cpus(local_node.shown_cpus(some))) == some


def test_numbers_and_runs_in_any_order() -> None:
    assert local_node.parse_cpus("32, 0-3,2") == (0, 1, 2, 3, 32)
    assert local_node.shown_cpus([5, 0, 1, 2, 7]) == "0-2,5,7"


@pytest.mark.parametrize("wrong", ["3-1", "a", "1,,2", "-1", "0-1-2"])
def test_anything_else_is_no_list(wrong: str) -> None:
    with pytest.raises(ValueError, match="is neither a processor nor a range of processors"):
        local_node.parse_cpus(wrong)


def test_each_role_has_its_own() -> None:
    config = make(coordinator={"cpus": "7"}, rollout={"cpus": "0-3"})
    launches = [Launch(role="rollout", name="rollout-0"), Launch(role="trainer", name="trainer-0", ranks=[0])]
    specs = service_specs(config, launches, CONFIG, "python", "host:1", 8, MACHINE)
    assert specs["rollout-0"].cpus == (0, 1, 2, 3)
    assert specs["trainer-0"].cpus == ()
    assert coordinator_spec(config, CONFIG, "python", ("--ready-fd", "3"), 0.0, True, MACHINE).cpus == (7,)


def test_there_are_no_more_threads_than_processors_unless_asked_for() -> None:
    role = make(trainer={"cpus": "0-1"}).services.trainer
    assert environment(role, 6, MACHINE)["OMP_NUM_THREADS"] == "2"
    assert environment(role, 1, MACHINE)["OMP_NUM_THREADS"] == "1"
    role = make(trainer={"cpus": "0-1", "env": {"OMP_NUM_THREADS": "4"}}).services.trainer
    found = environment(role, 6, MACHINE)
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "4"


def test_what_the_machine_has_not_is_refused() -> None:
    assert this_machine().cpus
    config = make(trainer={"cpus": "6-9"}, rollout=[{"cpus": "x"}], reward={"cpus": "0-7"})
    found = dict(line.split(": ", 1) for line in machine_faults(config, MACHINE))
    assert found == {
        "services.trainer.cpus": "6-9, but this machine has no 8-9; must be of 0-7",
        "services.rollout.0.cpus": "'x' is neither a processor nor a range of processors; must be a list such as 0-15,32",
    }


# ---- What is said of the memory of processes: real ones

MEASURED = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")

CHILD = "import sys; held = b'x' * (48 << 20); print('ready', flush=True); sys.stdin.read()"


@MEASURED
def test_the_most_of_each_process_outlives_it() -> None:
    names: dict[int, str] = {}
    peak = PeakMemory("launcher")
    before = peak.sample(names)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    names[child.pid] = "role-0"
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        held = startup.of([child.pid])
        assert 48 << 20 <= held.pss_bytes <= held.rss_bytes < 96 << 20
        assert peak.sample(names).pss_bytes >= before.pss_bytes + (48 << 20)
    assert startup.of([child.pid]) == Memory()
    assert peak.sample(names).pss_bytes < peak.pss_bytes
    assert peak.pss_bytes >= before.pss_bytes + (48 << 20)
    assert peak.by_process.keys() == {"launcher", "role-0"}
    assert peak.by_process["role-0"].rss_bytes >= 48 << 20
    assert peak.by_process["launcher"].rss_bytes >= 8 << 20  # no Python process has less


@MEASURED
def test_what_a_child_started_is_accounted_to_it() -> None:
    within = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], stdin=sys.stdin)"
    names: dict[int, str] = {}
    peak = PeakMemory("launcher")
    child = subprocess.Popen([sys.executable, "-c", within, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    names[child.pid] = "role-0"
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        peak.sample(names)
        assert peak.by_process["role-0"].pss_bytes >= 48 << 20


SHARER = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
SHARER += "sum(m[i] for i in range(0, len(m), 4096)); print('ready', flush=True); sys.stdin.read()"


@MEASURED
def test_shared_pages_count_once(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "shared").write_bytes(bytes(size))
    command = [sys.executable, "-c", SHARER, str(tmp_path / "shared")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    with children[0], children[1]:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert size <= startup.of([child.pid for child in children]).pss_bytes < size * 3 // 2


@MEASURED
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_the_allocator_holds_and_nobody_uses_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    held = [libc.malloc(1 << 14) for _ in range(1 << 12)]  # 64 MiB, in pieces that lie one after the other
    for each in held:
        ctypes.memset(each, 1, 1 << 14)
    for each in held[:-1]:  # the last one keeps the heap from shrinking
        libc.free(each)
    before = startup.of([os.getpid()]).rss_bytes
    platform.trim()
    given_back = before - startup.of([os.getpid()]).rss_bytes
    libc.free(held[-1])
    assert given_back > 48 << 20


# ---- What counts as a stall: the limits that a process learns, which rank is named, and what the agent hears


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spans, "now", clock)
    return clock


def spend(work: Work, clock: Clock, phase: str, seconds: float) -> None:
    with work.at(phase):
        clock.seconds += seconds


def test_the_limit_of_a_phase_is_learnt_from_what_it_has_taken(clock: Clock) -> None:
    work = Work(Deadlines(start=77.0, watchdog={"update": 3.0}))
    assert work.limit("forward") == 77.0
    for seconds in (*[1.0] * 8, 4.0, 2.0):
        spend(work, clock, "forward", seconds)
    assert work.limit("forward") == 40.0
    for _ in range(10):
        spend(work, clock, "backward", 0.25)
    assert work.limit("backward") == timeouts.STALL_LEAST
    spend(work, clock, "update", 9.0)
    assert work.limit("update") == 3.0


def test_a_phase_within_another_is_its_progress(clock: Clock) -> None:
    work = Work(Deadlines())
    with work.at("command", "Accumulate"):
        clock.seconds += 5.0
        with work.at("forward", "micro-batch 0"):
            clock.seconds += 2.0
            assert work.shown() == "forward of micro-batch 0, 2.0 s"
        clock.seconds += 1.0
        assert work.shown() == "command of Accumulate, 1.0 s"
    assert work.shown() == ""


def test_what_is_most_overdue_is_told(clock: Clock) -> None:
    work = Work(Deadlines(watchdog={"decode": 5.0, "forward": 50.0}))
    work.begin("one", "forward")
    clock.seconds += 10.0
    work.begin("other", "decode")
    clock.seconds += 8.0
    assert work.most_overdue() == ("decode", "", 8.0, 5.0)
    work.end("other")
    assert work.most_overdue() == ("forward", "", 18.0, 50.0)


def test_a_file_system_that_does_not_answer_is_waited_for_and_is_no_stall(tmp_path: Path) -> None:
    path = tmp_path / run_files.TRAINED / "trainer-0.tokens"
    path.parent.mkdir()
    os.mkfifo(path)  # which is opened once somebody reads it
    one, figures = np.zeros(1, np.int64), np.zeros(1, np.float32)
    tokens = TrainedTokens(0, one, one, one, figures, figures)

    def apply() -> None:
        with spans.work.at("command", "Apply"):
            TrainedTokenLog(tmp_path, "trainer-0").append(tokens)

    writing = threading.Thread(target=apply)
    writing.start()
    try:
        while (told := spans.work.most_overdue())[0] != "disk":
            assert writing.is_alive()
        phase, detail, _, limit = told
        assert detail == str(path)
        assert stalled({0: ReceivedHeartbeat(Heartbeat(0, 10.0, phase, detail, 1e9, limit), 0, 100.0)}, 100.0) is None
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writing.join()
        os.close(reader)


def heard(
    rank: int, phase: str = "forward", seconds: float = 0.0, when: float = 100.0, **collectives: int
) -> ReceivedHeartbeat:
    return ReceivedHeartbeat(Heartbeat(rank, 10.0, phase, "", seconds, 10.0 if phase else 0.0, collectives), 0, when)


def test_who_goes_on_has_not_stalled_but_a_silent_event_loop_and_a_long_phase_have() -> None:
    assert stalled({}, 100.0) is None
    assert stalled({0: heard(0, seconds=9.9)}, 109.9) is None  # nothing is added to what it told: it may be past it
    assert stalled({0: heard(0, "", when=91.0)}, 100.0) is None
    silent = stalled({0: heard(0, "", when=89.0)}, 100.0)
    assert silent == (0, "its event loop has not run for 11.0 s (deadlines.watchdog.loop: 10 s)")
    assert stalled({0: heard(0, seconds=10.5)}, 100.0) == (
        0,
        "no progress in forward for 10.5 s (deadlines.watchdog.forward: 10 s)",
    )


def test_what_a_signal_has_stopped_has_no_longer_to_load() -> None:
    """A process that has not told anything yet among them."""
    loads = ReceivedHeartbeat(Heartbeat(0, 180.0, "load", "", 5.0, 180.0), 0, 100.0)
    assert stalled({0: loads}, 111.0) is None
    silent = "is stopped: its event loop has not run for 11.0 s (deadlines.watchdog.loop: 10 s)"
    assert stalled({0: loads}, 111.0, stopped={0}) == (0, silent)
    beats = HeartbeatMonitor()
    beats.began("rollout-0", os.getpid())
    begun = beats.of("rollout-0")
    ((key, first),) = begun.items()
    assert stalled(begun, first.when + 1e9) is None
    assert stalled(begun, first.when + 11.0, stopped={key}) == (key, silent)


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    """Not those that have entered a collective, however long they wait in it."""
    waits, behind = heard(0, "reduce", seconds=30.0, dp=58), heard(1, seconds=12.0, dp=57)
    rank, why = stalled({0: waits, 1: behind}, 100.0) or (0, "")
    assert (rank, why.partition("; ")[2]) == (1, "other ranks wait for it in collective 58 of group dp")
    assert stalled({0: waits, 1: heard(1, seconds=3.0, dp=57)}, 100.0) is None  # it has more to do
    rank, _ = stalled({0: waits, 1: heard(1, "", dp=57)}, 100.0) or (9, "")
    assert rank == 0  # the other was given nothing to do
    rank, _ = stalled({0: waits, 1: heard(1, when=80.0, dp=58)}, 100.0) or (9, "")
    assert rank == 1  # it is stopped
    ranks = {0: heard(0, seconds=11.0, all=5, first=900), 1: heard(1, seconds=2.0, all=5, second=3)}
    assert (stalled(ranks, 100.0) or (9, ""))[0] == 0


def named_sockets() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@sluice-{os.getpid()}" in line]


async def heard_of(name: str, beats: HeartbeatMonitor, rank: int = 0) -> None:
    for _ in range(100_000):  # turns of the event loop
        if rank in beats.of(name):
            return
        await asyncio.sleep(0)
    raise AssertionError(f"nothing came from {name}")


@driven_by(asyncio.run)
async def test_the_agent_hears_beats_and_forgets_those_of_a_former_process() -> None:
    beats = HeartbeatMonitor()
    work = Work(Deadlines(watchdog={"decode": 5.0}))
    work.begin("engine", "decode")
    try:
        agent = beats.connected("rollout-0")
        assert isinstance(agent, socket.socket)
        beats.began("rollout-0", 1)
        telling = asyncio.create_task(work.send_heartbeats(agent, 3))
        await heard_of("rollout-0", beats, 3)
        telling.cancel()
        ((rank, told),) = beats.of("rollout-0").items()  # and no more what was started, which may be another process
        assert rank == 3
        assert (told.beat.phase, told.beat.limit, told.pid) == ("decode", 5.0, os.getpid())
        before = told.when
        beats.forgive(7.0)
        assert told.when == before + 7.0
        beats.connected("rollout-0").close()
        assert not beats.of("rollout-0")
    finally:
        beats.close()


@driven_by(asyncio.run)
async def test_what_is_no_beat_is_not_heeded_and_one_who_tells_too_much_delays_nobody() -> None:
    """Nor can it be told in the place of another, as its socket has no name."""
    beats, loud, quiet = HeartbeatMonitor(), "rollout-0", "rollout-1"
    try:
        with beats.connected(loud) as shouting, beats.connected(quiet) as telling:
            assert isinstance(shouting, socket.socket)
            assert isinstance(telling, socket.socket)
            assert not named_sockets()
            assert os.read(telling.fileno(), 1) == b""
            shouting.setblocking(False)
            with pytest.raises(BlockingIOError):
                while shouting.send(b"\xff nonsense"):
                    pass
            telling.send(types.encode(Heartbeat(0, 10.0)))
            beats.take()
            with suppress(BlockingIOError):  # there is room again, but not for as much as there was
                for left in range(1000):
                    shouting.send(types.encode(Heartbeat(left, 10.0)))
            assert not beats.of(loud)
            assert set(beats.of(quiet)) == {0}
            await heard_of(loud, beats)
    finally:
        beats.close()


# ---- Waits with a deadline: what they answer, and that a cancellation is never lost


@driven_by(asyncio.run)
async def test_it_says_whether_the_work_was_done_and_raises_what_it_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    event = asyncio.Event()
    assert not await done_within(event.wait(), 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await done_within(event.wait(), 100.0)
    with pytest.raises(ValueError, match="no"):
        await done_within(fails(), 100.0)


@pytest.mark.parametrize("turns", range(6))
@driven_by(asyncio.run)
async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost(turns: int) -> None:
    """asyncio.wait_for of Python 3.11 and before answers as if nobody had cancelled, after one or two of these turns."""
    event = asyncio.Event()
    waiting = asyncio.create_task(done_within(event.wait(), 100.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():  # else it had answered before
        with pytest.raises(asyncio.CancelledError):
            await waiting


# ---- Writing where there is no room for now


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.0)


def failing(*errors: int) -> Callable[[], str]:
    """Fails with each, one after the other; then writes."""
    left = list(errors)

    def work() -> str:
        if left:
            raise OSError(left.pop(0), "no")
        return "written"

    return work


def waited(work: Callable[[], str]) -> tuple[str, list[str]]:
    said: list[str] = []
    return asyncio.run(waiting.done(work, Path("/run/a"), said.append)), said


@pytest.mark.parametrize("passing", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_what_passes_is_waited_for_and_told_once(passing: int) -> None:
    assert waited(failing(passing, passing)) == ("written", ["waits until there is room for /run/a: no"])
    assert waiting.until_done(failing(passing, passing), Path("/run/a")) == "written"


def test_what_does_not_pass_is_a_fault() -> None:
    with pytest.raises(ServiceFault, match="/run/a"):
        waited(failing(errno.ENOSPC, errno.EACCES))
    with pytest.raises(ServiceFault, match="/run/a"):
        waiting.until_done(failing(errno.EACCES), Path("/run/a"))


# ---- What others may look at


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has it")
def test_what_knows_the_secret_is_not_dumpable() -> None:
    get, set_ = 3, 4  # PR_GET_DUMPABLE and PR_SET_DUMPABLE, prctl(2)
    libc = ctypes.CDLL(None)
    libc.prctl(set_, 1)  # a command that another test has run here may have closed this process
    assert libc.prctl(get) == 1
    try:
        os_process.close_to_others()
        assert libc.prctl(get) == 0
    finally:
        libc.prctl(set_, 1)
