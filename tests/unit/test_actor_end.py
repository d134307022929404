"""How an actor ends: drained, stopped, or by an exception of its behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from runtime.actor import Actor, Priority, Request
from runtime.errors import Cancelled, ServiceFault
from tests.unit.actor_desk import Desk, keeper, run, running, settle

# ---------------------------------------------------------------------------------------------------------------- drain


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


# --------------------------------------------------------------------------------------------------------------- faults


def test_an_exception_in_receive_fails_only_the_letters_that_it_had_and_left_open() -> None:
    async def test() -> None:
        async def serve(requests: Sequence[Request]) -> None:
            requests[0].reply("answered before")
            if requests[0].message == "bad":
                raise ValueError("no good")
            for request in requests[1:]:
                request.reply()

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


def test_what_is_no_error_of_ours_is_logged_once_with_the_place_where_it_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def serve(requests: Sequence[Request]) -> None:
            if requests[0].message == "ours":
                raise ServiceFault("desk", "serve", "closed")
            raise AttributeError("no attribute 'nosuch'")

        actor = Actor("desk", Desk(serve), capacity=8, batch=2)
        answers = [actor.send("ours"), actor.send("ours"), actor.send("theirs"), actor.send("theirs")]
        async with running(actor):
            await asyncio.wait(answers)
            for answer in answers:
                answer.exception()

    run(test())
    (record,) = caplog.records
    assert record.getMessage() == "desk: str failed"
    assert "no attribute 'nosuch'" in caplog.text and "in serve" in caplog.text
