"""What counts as a stall: the limits that a process learns, which rank is named, and what the agent hears."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from launcher.node.stalls import Beats, Heard, stalled
from runtime import codec, timeouts
from runtime.config import Deadlines
from runtime.process import progress
from runtime.process.progress import Beat, Work


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "now", clock)
    return clock


def spend(work: Work, clock: Clock, phase: str, seconds: float) -> None:
    with work.at(phase):
        clock.seconds += seconds


def test_the_limit_of_a_phase_is_learnt_from_what_it_has_taken(clock: Clock) -> None:
    work = Work(Deadlines(start=77.0, stall={"update": 3.0}))
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
    work = Work(Deadlines(stall={"decode": 5.0, "forward": 50.0}))
    work.begin("one", "forward")
    clock.seconds += 10.0
    work.begin("other", "decode")
    clock.seconds += 8.0
    assert work.most_overdue() == ("decode", "", 8.0, 5.0)
    work.end("other")
    assert work.most_overdue() == ("forward", "", 18.0, 50.0)


def heard(rank: int, phase: str = "forward", seconds: float = 0.0, when: float = 100.0, **collectives: int) -> Heard:
    return Heard(Beat("trainer-0", rank, 10.0, phase, "", seconds, 10.0 if phase else 0.0, collectives), 0, when)


def test_a_process_that_goes_on_has_not_stalled() -> None:
    assert stalled({}, 100.0) is None
    assert stalled({0: heard(0, seconds=9.9)}, 109.9) is None  # nothing is added to what it told: it may be past it
    assert stalled({0: heard(0, "", when=91.0)}, 100.0) is None


def test_a_silent_event_loop_and_a_long_phase_have_stalled() -> None:
    silent = stalled({0: heard(0, "", when=89.0)}, 100.0)
    assert silent == (0, "its event loop has not run for 11.0 s (deadlines.stall.loop: 10 s)")
    assert stalled({0: heard(0, seconds=10.5)}, 100.0) == (
        0,
        "no progress in forward for 10.5 s (deadlines.stall.forward: 10 s)",
    )


def test_what_a_signal_has_stopped_has_no_longer_to_load() -> None:
    """A process that has not told anything yet among them."""
    loads = Heard(Beat("trainer-0", 0, 180.0, "load", "", 5.0, 180.0), 0, 100.0)
    assert stalled({0: loads}, 111.0) is None
    silent = "is stopped: its event loop has not run for 11.0 s (deadlines.stall.loop: 10 s)"
    assert stalled({0: loads}, 111.0, stopped={0}) == (0, silent)
    beats = Beats()
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


def test_counts_of_groups_that_a_rank_is_not_in_are_not_compared() -> None:
    ranks = {0: heard(0, seconds=11.0, all=5, first=900), 1: heard(1, seconds=2.0, all=5, second=3)}
    assert (stalled(ranks, 100.0) or (9, ""))[0] == 0


async def heard_of(name: str, beats: Beats, rank: int = 0) -> None:
    for _ in range(100_000):  # turns of the event loop
        if rank in beats.of(name):
            return
        await asyncio.sleep(0)
    raise AssertionError(f"nothing came from {name}")


def test_the_agent_hears_beats_and_forgets_those_of_a_former_process() -> None:
    beats = Beats()
    work = Work(Deadlines(stall={"decode": 5.0}))
    work.begin("engine", "decode")

    async def tell() -> None:
        beats.open()
        try:
            agent, name = beats.variable("rollout-0").split()
            beats.began(name, 1)
            telling = asyncio.create_task(work.tell(agent, name, 3))
            await heard_of(name, beats, 3)
            telling.cancel()
            ((rank, told),) = beats.of("rollout-0").items()  # and no more what was started, which may be another process
            assert rank == 3
            assert (told.beat.phase, told.beat.limit, told.pid) == ("decode", 5.0, os.getpid())
            before = told.when
            beats.forgive(7.0)
            assert told.when == before + 7.0
            beats.variable("rollout-0")
            assert not beats.of("rollout-0")
        finally:
            beats.close()

    asyncio.run(tell())


def test_what_is_no_beat_is_not_heeded_and_every_process_is_heard_of_many() -> None:
    """More than a socket holds for who does not read it."""
    beats = Beats()
    address = "\0" + beats.variable("rollout-0").partition(" ")[0]
    names = [f"rollout-{number}" for number in range(40)]

    async def tell() -> None:
        beats.open()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"\xff nonsense", address)
                for name in names:
                    stranger.sendto(codec.encode(Beat(name, 0, 10.0)), address)
                    await asyncio.sleep(0)
            await heard_of(names[-1], beats)
            assert all(set(beats.of(name)) == {0} for name in names)
        finally:
            beats.close()

    asyncio.run(tell())
