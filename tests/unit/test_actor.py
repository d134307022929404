"""The mailbox and its task: order, limits, deadlines, withdrawal, the end, and one answer for every letter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.actor import Actor, Letter, Priority
from runtime.errors import Cancelled, DeadlineExceeded, Overloaded, ServiceFault

DEADLINE = 10.0  # seconds that one test may take


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test, DEADLINE)

    asyncio.run(within())


class Desk:
    """A behaviour that notes what it is handed and echoes it, unless `serve` says otherwise. It advances `work` times."""

    def __init__(self, serve: Callable[[Sequence[Letter]], Awaitable[None]] | None = None):
        self.seen: list[list[Any]] = []
        self.kept: dict[Any, Letter] = {}
        self.work = 0
        self._serve = serve

    @property
    def busy(self) -> bool:
        return self.work > 0

    async def receive(self, letters: Sequence[Letter]) -> None:
        self.seen.append([letter.message for letter in letters])
        if self._serve is not None:
            await self._serve(letters)
            return
        for letter in letters:
            letter.reply(letter.message)

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self.work -= 1

    async def keep(self, letters: Sequence[Letter]) -> None:
        """A `serve` that answers nothing yet."""
        self.kept |= {letter.message: letter for letter in letters}


def keeper() -> Desk:
    desk = Desk()
    desk._serve = desk.keep
    return desk


@asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(actor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    """Let everything that is ready to run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------ order and limits


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

        async def serve(letters: Sequence[Letter]) -> None:
            if letters[0].message == "first":
                futures.append(actor.send("control", priority=Priority.CONTROL))
            letters[0].reply()

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
        with pytest.raises(Overloaded, match=r"desk: mailbox is full \(2 letters\)") as refused:
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

        async def serve(letters: Sequence[Letter]) -> None:
            await gate.wait()
            letters[0].reply()

        actor = Actor("desk", Desk(serve), capacity=10)
        async with running(actor):
            first = actor.send("first")
            await asyncio.sleep(0.05)
            gate.set()
            await first
            gate.clear()
            mean = actor.stats.service_seconds
            assert mean >= 0.1 * 0.045  # of which the first letter is a tenth
            for _ in range(10):
                actor.send("fill")
            with pytest.raises(Overloaded) as refused:
                actor.send("one too many")
            assert refused.value.retry_after == pytest.approx(mean * 5)  # until half of the mailbox is served

    run(test())


# ------------------------------------------------------------------------------------ deadlines and withdrawn letters


def test_a_letter_whose_deadline_passed_in_the_mailbox_is_never_handed_over() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def serve(letters: Sequence[Letter]) -> None:
            await gate.wait()
            letters[0].reply(letters[0].message)

        desk = Desk(serve)
        actor = Actor("desk-3", desk, capacity=8)
        async with running(actor):
            first, late, patient = actor.send("first"), actor.send("late", timeout=0.01), actor.send("patient", timeout=5.0)
            await asyncio.sleep(0.02)
            gate.set()
            assert await first == "first"
            with pytest.raises(DeadlineExceeded, match="desk-3: mailbox: ") as exceeded:
                await late
            assert await patient == "patient"
        assert (exceeded.value.service, exceeded.value.deadline) == ("desk-3", pytest.approx(0.01))
        assert desk.seen == [["first"], ["patient"]]
        assert (actor.stats.expired, actor.stats.handled, actor.stats.failed) == (1, 2, 0)

    run(test())


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


# ------------------------------------------------------------------------------------------------------------ drain


def test_drain_refuses_data_and_waits_for_letters_that_the_behaviour_keeps() -> None:
    async def test() -> None:
        desk = keeper()
        actor = Actor("desk", desk, capacity=8)
        async with running(actor):
            future = actor.send("kept")
            await settle()
            draining = asyncio.create_task(actor.drain(5.0))
            await settle()
            with pytest.raises(ServiceFault, match="desk: receive: is stopping"):
                actor.send("new")
            control = actor.send("status", priority=Priority.CONTROL)
            await settle()
            desk.kept["status"].reply("fine")
            assert await control == "fine"
            await settle()
            assert not draining.done()
            desk.kept["kept"].reply("done")
            assert await draining
            assert await future == "done"

    run(test())


def test_drain_gives_up_when_its_time_is_over() -> None:
    async def test() -> None:
        actor = Actor("desk", keeper(), capacity=8)
        async with running(actor):
            actor.send("kept")
            assert not await actor.drain(0.02)
            assert not await actor.drain(0.0)

    run(test())


def test_drain_of_an_idle_actor_is_at_once() -> None:
    async def test() -> None:
        actor = Actor("desk", Desk(), capacity=8)
        async with running(actor):
            assert await actor.drain(0.0)

    run(test())


def test_a_withdrawn_letter_does_not_hold_up_a_drain() -> None:
    async def test() -> None:
        actor = Actor("desk", keeper(), capacity=8)
        async with running(actor):
            future = actor.send("kept")
            await settle()
            draining = asyncio.create_task(actor.drain(5.0))
            await settle()
            future.cancel()
            assert await draining

    run(test())


# --------------------------------------------------------------------------------------------- the actor's own work


def test_advance_runs_while_there_is_work_and_mail_comes_first() -> None:
    async def test() -> None:
        order: list[str] = []

        class Worker(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                assert not interrupted()
                order.append("advance")
                await super().advance(interrupted)

        async def serve(letters: Sequence[Letter]) -> None:
            order.append(letters[0].message)
            worker.work = 2
            letters[0].reply()

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
                    for _ in range(5000):
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
            assert await asyncio.wait_for(actor.send("mail"), 2.0) == "mail"
        assert seen == [False, True]
        assert not actor.interrupted()

    run(test())


# ------------------------------------------------------------------------------------------------------------ faults


def test_an_exception_in_receive_fails_only_the_letters_that_it_had_and_left_open() -> None:
    async def test() -> None:
        async def serve(letters: Sequence[Letter]) -> None:
            letters[0].reply("answered before")
            if letters[0].message == "bad":
                raise ValueError("no good")
            for letter in letters[1:]:
                letter.reply()

        actor = Actor("desk", Desk(serve), capacity=8, batch=2)
        futures = [actor.send(name) for name in ("bad", "with it", "good", "as well")]
        async with running(actor):
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert outcomes[0] == "answered before"
        assert isinstance(outcomes[1], ValueError)
        assert outcomes[2:] == ["answered before", None]
        assert (actor.stats.handled, actor.stats.failed, actor.stats.late) == (3, 1, 0)

    run(test())


def test_an_exception_in_advance_ends_the_actor_and_fails_every_letter() -> None:
    async def test() -> None:
        class Broken(Desk):
            async def advance(self, interrupted: Callable[[], bool]) -> None:
                self.kept["answered"].reply("in time")
                raise RuntimeError("the device is lost")

        desk = Broken()
        desk._serve = desk.keep
        actor = Actor("engine", desk, capacity=8, batch=8)
        answered, kept, withdrawn = (actor.send(name) for name in ("answered", "kept", "withdrawn"))
        async with running(actor) as task:
            await settle()
            withdrawn.cancel()
            desk.work = 1
            last = actor.send("last")
            with pytest.raises(RuntimeError, match="the device is lost"):
                await task
            assert await answered == "in time"
            for future in (kept, last):
                with pytest.raises(RuntimeError, match="the device is lost"):
                    await future
            for priority in Priority:
                with pytest.raises(ServiceFault, match="engine: receive: has ended: the device is lost"):
                    actor.send("after", priority=priority)
        assert (actor.stats.handled, actor.stats.failed, actor.stats.cancelled, actor.stats.late) == (1, 2, 1, 0)

    run(test())


def test_stop_fails_what_is_unanswered_and_nothing_is_taken_in_afterwards() -> None:
    async def test() -> None:
        desk = keeper()
        actor = Actor("desk", desk, capacity=8)
        async with running(actor):
            kept = actor.send("kept")
            await settle()
            queued = actor.send("queued")
        for future in (kept, queued):
            with pytest.raises(Cancelled, match="desk was stopped"):
                await future
        assert desk.seen == [["kept"]]
        for priority in Priority:  # nobody would ever answer it
            with pytest.raises(ServiceFault, match="desk: receive: has ended: desk was stopped"):
                actor.send("after", priority=priority)
        assert await actor.drain(0.0)

    run(test())


# ------------------------------------------------------------------------------------------------------- statistics


def test_statistics_tell_waiting_from_service() -> None:
    async def test() -> None:
        async def serve(letters: Sequence[Letter]) -> None:
            if letters[0].message == "slow":
                await asyncio.sleep(0.05)
            letters[0].reply()

        actor = Actor("desk", Desk(serve), capacity=8)
        slow, waiting = actor.send("slow"), actor.send("waiting")
        assert (actor.stats.depth, actor.stats.handled) == (2, 0)
        async with running(actor):
            await asyncio.gather(slow, waiting)
        stats = actor.stats
        assert (stats.depth, stats.handled, stats.failed) == (0, 2, 0)
        # Both means weigh the newest letter by a tenth: the slow letter served for 50 ms, the other waited as long.
        assert stats.service_seconds == pytest.approx(0.9 * 0.1 * 0.05, rel=0.5)
        assert stats.wait_seconds == pytest.approx(0.1 * 0.05, rel=0.5)

    run(test())


# ----------------------------------------------------------------------------------------- every letter exactly once

operations = st.one_of(
    st.tuples(st.just("data"), st.sampled_from(["keep", "reply", "raise", "expire"])),
    st.tuples(st.just("control"), st.sampled_from(["keep", "reply", "raise", "expire"])),
    st.tuples(st.sampled_from(["cancel", "answer", "fail", "twice"]), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(1, 3)),
    st.tuples(st.just("work"), st.booleans()),
)


class Clerk(Desk):
    """Does with each letter what its message says. Its own work may fail, once."""

    def __init__(self) -> None:
        super().__init__(self._handle)
        self.handed: list[int] = []
        self.breaks = False

    async def _handle(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            number, how = letter.message
            assert not letter.abandoned
            assert how != "expire"
            self.handed.append(number)
            self.kept[number] = letter
            if how == "reply":
                letter.reply(number)
        if any(letter.message[1] == "raise" for letter in letters):
            raise ValueError

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self.work -= 1
        await asyncio.sleep(0)
        if self.breaks:
            raise RuntimeError


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=40), st.integers(1, 3), st.booleans())
def test_every_letter_is_answered_exactly_once(script: list[tuple[str, Any]], batch: int, drain: bool) -> None:
    async def test() -> None:
        clerk = Clerk()
        actor = Actor("clerk", clerk, capacity=6, batch=batch)
        futures: list[asyncio.Future[Any]] = []
        done: list[int] = []
        refused = late = 0
        async with running(actor):
            await settle()
            for what, how in script:
                if what in ("data", "control"):
                    message, number = (len(futures), how), len(futures)
                    priority = Priority.DATA if what == "data" else Priority.CONTROL
                    try:
                        future = actor.send(message, priority=priority, timeout=0.0 if how == "expire" else None)
                    except (Overloaded, ServiceFault):
                        refused += 1
                        continue
                    future.add_done_callback(lambda _, number=number: done.append(number))
                    futures.append(future)
                elif what == "cancel" and how < len(futures):
                    futures[how].cancel()
                elif what in ("answer", "fail", "twice") and how in clerk.kept:
                    for _ in range(2 if what == "twice" else 1):
                        late += clerk.kept[how].abandoned
                        clerk.kept[how].fail(KeyError()) if what == "fail" else clerk.kept[how].reply(how)
                elif what == "tick":
                    for _ in range(how):
                        await asyncio.sleep(0)
                elif what == "work":
                    clerk.work, clerk.breaks = 1, how
            if drain:
                await actor.drain(0.0)
        await settle()
        assert sorted(done) == list(range(len(futures)))
        assert len(clerk.handed) == len(set(clerk.handed))
        for number, future in enumerate(futures):
            if not future.cancelled() and future.exception() is None:
                assert future.result() == number
        stats = actor.stats
        assert stats.handled + stats.failed + stats.expired + stats.cancelled == len(futures)
        assert stats.cancelled == sum(future.cancelled() for future in futures)
        assert stats.expired == sum(
            not future.cancelled() and isinstance(future.exception(), DeadlineExceeded) for future in futures
        )
        assert stats.late == late
        assert stats.refused <= refused

    run(test())
