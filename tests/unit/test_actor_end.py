"""How an actor ends: stopped, or by an exception of its behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from runtime.commands import Priority
from runtime.errors import Cancelled, ServiceFault
from services.model_service import Actor, Request
from tests.unit.actor_desk import Desk, keeper, run, running, settle

# --------------------------------------------------------------------------------------------------------------- faults


def test_an_exception_in_receive_fails_only_the_requests_that_it_had_and_left_open() -> None:
    async def test() -> None:
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

    run(test())


def test_an_exception_in_advance_ends_the_actor_and_fails_every_request() -> None:
    async def test() -> None:
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

    run(test())


def test_stop_fails_what_is_unanswered_and_nothing_is_taken_in_afterwards() -> None:
    async def test() -> None:
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

    run(test())
