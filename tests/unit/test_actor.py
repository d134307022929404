"""The actor's mailbox and its task: order, limits, deadlines, withdrawal, its own work, statistics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from runtime.actor import Actor, Priority, Request
from runtime.errors import DeadlineExceeded, Overloaded
from tests.unit.actor_desk import Desk, keeper, run, running, settle
from tests.unit.clock import run_by_clock

# ----------------------------------------------------------------------------------------------------- order and limits


def test_control_goes_before_data_and_each_keeps_its_order() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, capacity=8)
        futures = [
            actor.send(message, priority=Priority.CONTROL if message.isupper() else Priority.DATA) for message in "abAcBd"
        ]
        async with running(actor):
            assert await asyncio.gather(*futures) == list("abAcBd")
        assert desk.seen == [["A"], ["B"], ["a"], ["b"], ["c"], ["d"]]

    run(test())


def test_control_that_arrives_between_two_data_letters_goes_first() -> None:
    async def test() -> None:
        futures = []

        async def serve(requests: Sequence[Request]) -> None:
            if requests[0].message == "first":
                futures.append(actor.send("control", priority=Priority.CONTROL))
            requests[0].reply()

        desk = Desk(serve)
        actor = Actor("desk", desk, capacity=8)
        futures += [actor.send("first"), actor.send("second")]
        async with running(actor):
            await asyncio.gather(*futures[:2])
        assert desk.seen == [["first"], ["control"], ["second"]]

    run(test())


def test_data_is_handed_over_in_batches_and_control_one_by_one() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, capacity=8, batch=3)
        futures = [actor.send(number) for number in range(7)]
        futures += [actor.send(name, priority=Priority.CONTROL) for name in "AB"]
        async with running(actor):
            await asyncio.gather(*futures)
        assert desk.seen == [["A"], ["B"], [0, 1, 2], [3, 4, 5], [6]]

    run(test())


def test_a_full_mailbox_refuses_data_with_a_delay_and_lets_control_in() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, capacity=2)
        futures = [actor.send("a"), actor.send("b")]
        futures += [actor.send(name, priority=Priority.CONTROL) for name in "CDE"]
        with pytest.raises(Overloaded, match=r"desk: mailbox is full \(2 requests\)") as refused:
            actor.send("c")
        assert refused.value.retry_after > 0
        assert (actor.stats.depth, actor.stats.capacity, actor.stats.refused) == (5, 2, 1)
        async with running(actor):
            await asyncio.gather(*futures)
            assert await actor.send("d") == "d"  # there is room again
        assert ["c"] not in desk.seen

    run(test())


def test_the_delay_of_a_refusal_grows_with_the_time_that_letters_take() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def serve(requests: Sequence[Request]) -> None:
            await gate.wait()
            requests[0].reply()

        actor = Actor("desk", Desk(serve), capacity=10)
        async with running(actor):
            first = actor.send("first")
            await asyncio.sleep(0.05)
            gate.set()
            await first
            gate.clear()
            mean = actor.stats.service_seconds
            assert mean == pytest.approx(0.1 * 0.05)  # of which the first request is a tenth
            for _ in range(10):
                actor.send("fill")
            with pytest.raises(Overloaded) as refused:
                actor.send("one too many")
            assert refused.value.retry_after == pytest.approx(mean * 5)  # until half of the mailbox is served

    run_by_clock(test())


# -------------------------------------------------------------------------------------- deadlines and withdrawn requests


def test_a_letter_whose_deadline_passed_in_the_mailbox_is_never_handed_over() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def serve(requests: Sequence[Request]) -> None:
            await gate.wait()
            requests[0].reply(requests[0].message)

        desk = Desk(serve)
        actor = Actor("desk-3", desk, capacity=8)
        async with running(actor):
            first, late, patient = actor.send("first"), actor.send("late", timeout=0.01), actor.send("patient", timeout=60.0)
            await asyncio.sleep(0.02)
            gate.set()
            assert await first == "first"
            with pytest.raises(DeadlineExceeded, match="desk-3: mailbox: ") as exceeded:
                await late
            assert await patient == "patient"
        assert (exceeded.value.service, exceeded.value.deadline) == ("desk-3", pytest.approx(0.01))
        assert desk.seen == [["first"], ["patient"]]
        assert (actor.stats.expired, actor.stats.handled, actor.stats.failed) == (1, 2, 0)

    run_by_clock(test())


def test_a_withdrawn_letter_is_never_handed_over_and_is_counted() -> None:
    async def test() -> None:
        desk = Desk()
        actor = Actor("desk", desk, capacity=8, batch=8)
        futures = [actor.send(name) for name in "abc"]
        futures[1].cancel()
        async with running(actor):
            assert await asyncio.gather(futures[0], futures[2]) == ["a", "c"]
        assert desk.seen == [["a", "c"]]
        assert (actor.stats.cancelled, actor.stats.handled, actor.stats.late) == (1, 2, 0)

    run(test())


def test_the_answer_to_a_letter_that_was_withdrawn_meanwhile_is_dropped_and_counted() -> None:
    async def test() -> None:
        desk = keeper()
        actor = Actor("desk", desk, capacity=8)
        async with running(actor):
            future = actor.send("a")
            await settle()
            assert not desk.kept["a"].abandoned
            future.cancel()
            assert desk.kept["a"].abandoned
            desk.kept["a"].reply("late")
            desk.kept["a"].fail(ValueError("later still"))
            await settle()
            assert future.cancelled()
            assert (actor.stats.late, actor.stats.cancelled, actor.stats.handled, actor.stats.failed) == (2, 1, 0, 0)

    run(test())


# ------------------------------------------------------------------------------------------------- the actor's own work


def test_advance_runs_while_there_is_work_and_mail_comes_first() -> None:
    async def test() -> None:
        order: list[str] = []

        class Worker(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                assert not interrupted()
                order.append("advance")
                await super().advance(interrupted)

        async def serve(requests: Sequence[Request]) -> None:
            order.append(requests[0].message)
            worker.work = 2
            requests[0].reply()

        worker = Worker(serve)
        actor = Actor("worker", worker, capacity=8)
        futures = [actor.send("a"), actor.send("b")]
        async with running(actor):
            await asyncio.gather(*futures)
            await settle()
            assert order == ["a", "b", "advance", "advance"]

    run(test())


def test_an_engine_thread_learns_of_mail_and_returns_early() -> None:
    async def test() -> None:
        started = asyncio.Event()
        seen: list[bool] = []

        class Engine(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                loop = asyncio.get_running_loop()

                def decode() -> None:
                    seen.append(interrupted())
                    loop.call_soon_threadsafe(started.set)
                    step = threading.Event()
                    for _ in range(100_000):
                        if interrupted():
                            seen.append(True)
                            return
                        step.wait(0.001)

                await asyncio.to_thread(decode)
                self.work -= 1

        engine = Engine()
        engine.work = 1
        actor = Actor("engine", engine, capacity=8)
        async with running(actor):
            await started.wait()
            assert not actor.interrupted()
            assert await asyncio.wait_for(actor.send("mail"), 30.0) == "mail"
        assert seen == [False, True]
        assert not actor.interrupted()

    run(test())


# ----------------------------------------------------------------------------------------------------------- statistics


def test_statistics_tell_waiting_from_service() -> None:
    async def test() -> None:
        async def serve(requests: Sequence[Request]) -> None:
            if requests[0].message == "slow":
                await asyncio.sleep(0.05)
            requests[0].reply()

        actor = Actor("desk", Desk(serve), capacity=8)
        slow, waiting = actor.send("slow"), actor.send("waiting")
        assert (actor.stats.depth, actor.stats.handled) == (2, 0)
        async with running(actor):
            await asyncio.gather(slow, waiting)
        stats = actor.stats
        assert (stats.depth, stats.handled, stats.failed) == (0, 2, 0)
        # Both means weigh the newest request by a tenth: the slow request served for 50 ms, and then the other, which waited
        # for as long.
        assert stats.service_seconds == pytest.approx(0.9 * 0.1 * 0.05)
        assert stats.wait_seconds == pytest.approx(0.1 * 0.05)

    run_by_clock(test())
