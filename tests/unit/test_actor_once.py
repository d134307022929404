"""Whatever happens to an actor, every request is answered exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.commands import Priority
from runtime.errors import ServiceFault
from services.model_service import Actor, Request
from tests.unit.actor_desk import Desk, run, running, settle

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


@settings(max_examples=150)
@given(st.lists(operations, max_size=40), st.integers(1, 3))
def test_every_request_is_answered_exactly_once(script: list[tuple[str, Any]], batch: int) -> None:
    async def test() -> None:
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

    run(test())
