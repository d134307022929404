"""The actor: the order of requests, withdrawal, its own task, its end, and one answer for each request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.commands import Priority
from runtime.errors import Cancelled, ServiceFault
from services.model_service import Actor, Request
from tests.coroutines import driven_by
from tests.unit.actor_desk import Desk, keeper, run, running, settle

# ---- The actor's requests and its task: order, withdrawal, its own work


@driven_by(run)
async def test_control_goes_before_data_and_each_keeps_its_order() -> None:
    desk = Desk()
    actor = Actor("desk", desk)
    futures = [actor.send(message, priority=Priority.CONTROL if message.isupper() else Priority.DATA) for message in "abAcBd"]
    async with running(actor):
        assert await asyncio.gather(*futures) == list("abAcBd")
    assert desk.seen == [["A"], ["B"], ["a"], ["b"], ["c"], ["d"]]


@driven_by(run)
async def test_control_that_arrives_between_two_data_requests_goes_first() -> None:
    futures = []

    async def serve(requests: Sequence[Request]) -> None:
        if requests[0].message == "first":
            futures.append(actor.send("control", priority=Priority.CONTROL))
        requests[0].reply()

    desk = Desk(serve)
    actor = Actor("desk", desk)
    futures += [actor.send("first"), actor.send("second")]
    async with running(actor):
        await asyncio.gather(*futures[:2])
    assert desk.seen == [["first"], ["control"], ["second"]]


@driven_by(run)
async def test_data_is_handed_over_in_batches_and_control_one_by_one() -> None:
    desk = Desk()
    actor = Actor("desk", desk, batch=3)
    futures = [actor.send(number) for number in range(7)]
    futures += [actor.send(name, priority=Priority.CONTROL) for name in "AB"]
    async with running(actor):
        await asyncio.gather(*futures)
    assert desk.seen == [["A"], ["B"], [0, 1, 2], [3, 4, 5], [6]]


@driven_by(run)
async def test_a_withdrawn_request_is_never_handed_over() -> None:
    desk = Desk()
    actor = Actor("desk", desk, batch=8)
    futures = [actor.send(name) for name in "abc"]
    futures[1].cancel()
    async with running(actor):
        assert await asyncio.gather(futures[0], futures[2]) == ["a", "c"]
    assert desk.seen == [["a", "c"]]


@driven_by(run)
async def test_the_answer_to_a_request_that_was_withdrawn_meanwhile_is_dropped() -> None:
    desk = keeper()
    actor = Actor("desk", desk)
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


@driven_by(run)
async def test_advance_runs_while_there_is_work_and_mail_comes_first() -> None:
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
    actor = Actor("worker", worker)
    futures = [actor.send("a"), actor.send("b")]
    async with running(actor):
        await asyncio.gather(*futures)
        await settle()
        assert order == ["a", "b", "advance", "advance"]


@driven_by(run)
async def test_an_engine_thread_learns_of_mail_and_returns_early() -> None:
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
    actor = Actor("engine", engine)
    async with running(actor):
        await started.wait()
        assert not actor.interrupted()
        assert await asyncio.wait_for(actor.send("mail"), 30.0) == "mail"
    assert seen == [False, True]
    assert not actor.interrupted()


# ---- How an actor ends: stopped, or by an exception of its behaviour


@driven_by(run)
async def test_an_exception_in_receive_fails_only_the_requests_that_it_had_and_left_open() -> None:
    async def serve(requests: Sequence[Request]) -> None:
        requests[0].reply("answered before")
        if requests[0].message == "bad":
            raise ValueError("no good")
        for request in requests[1:]:
            request.reply()

    actor = Actor("desk", Desk(serve), batch=2)
    futures = [actor.send(name) for name in ("bad", "with it", "good", "as well")]
    async with running(actor):
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert outcomes[0] == "answered before"
    assert isinstance(outcomes[1], ValueError)
    assert outcomes[2:] == ["answered before", None]


@driven_by(run)
async def test_an_exception_in_advance_ends_the_actor_and_fails_every_request() -> None:
    class Broken(Desk):
        async def advance(self, interrupted: Callable[[], bool]) -> None:
            self.kept["answered"].reply("in time")
            raise RuntimeError("the device is lost")

    desk = Broken()
    desk._serve = desk.keep
    actor = Actor("engine", desk, batch=8)
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


@driven_by(run)
async def test_stop_fails_what_is_unanswered_and_nothing_is_taken_in_afterwards() -> None:
    desk = keeper()
    actor = Actor("desk", desk)
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


# ---- Whatever happens to an actor, every request is answered exactly once

operations = st.one_of(
    st.tuples(st.just("data"), st.sampled_from(["keep", "reply", "raise"])),
    st.tuples(st.just("control"), st.sampled_from(["keep", "reply", "raise"])),
    st.tuples(st.sampled_from(["cancel", "answer", "fail", "twice"]), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(1, 3)),
    st.tuples(st.just("work"), st.booleans()),
)


class Clerk(Desk):
    """Does with each request what its message says. Its own work may fail, once."""

    def __init__(self) -> None:
        super().__init__(self._handle)
        self.handed: list[int] = []
        self.breaks = False

    async def _handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            number, how = request.message
            assert not request.abandoned
            self.handed.append(number)
            self.kept[number] = request
            if how == "reply":
                request.reply(number)
        if any(request.message[1] == "raise" for request in requests):
            raise ValueError

    async def advance(self, interrupted: Callable[[], bool]) -> None:
        self.work -= 1
        await asyncio.sleep(0)
        if self.breaks:
            raise RuntimeError


@given(st.lists(operations, max_size=40), st.integers(1, 3))
@driven_by(run)
async def test_every_request_is_answered_exactly_once(script: list[tuple[str, Any]], batch: int) -> None:
    clerk = Clerk()
    actor = Actor("clerk", clerk, batch=batch)
    futures: list[asyncio.Future[Any]] = []
    done: list[int] = []
    async with running(actor):
        await settle()
        for what, how in script:
            if what in ("data", "control"):
                message, number = (len(futures), how), len(futures)
                priority = Priority.DATA if what == "data" else Priority.CONTROL
                try:
                    future = actor.send(message, priority=priority)
                except ServiceFault:  # it has ended
                    continue
                future.add_done_callback(lambda _, number=number: done.append(number))
                futures.append(future)
            elif what == "cancel" and how < len(futures):
                futures[how].cancel()
            elif what in ("answer", "fail", "twice") and how in clerk.kept:
                for _ in range(2 if what == "twice" else 1):
                    clerk.kept[how].fail(KeyError()) if what == "fail" else clerk.kept[how].reply(how)
            elif what == "tick":
                for _ in range(how):
                    await asyncio.sleep(0)
            elif what == "work":
                clerk.work, clerk.breaks = 1, how
    await settle()
    assert sorted(done) == list(range(len(futures)))
    assert len(clerk.handed) == len(set(clerk.handed))
    for number, future in enumerate(futures):
        if not future.cancelled() and future.exception() is None:
            assert future.result() == number
