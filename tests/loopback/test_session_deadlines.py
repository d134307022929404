"""A session's calls that are not answered in time: deadlines and withdrawal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from runtime import errors
from runtime.types import LogprobRequest
from services.model_service import Actor, Request
from tests.loopback.session_peers import (
    PATIENCE,
    Peer,
    connected,
    echo,
    request,
    run,
    serving,
)


def test_a_deadline_names_service_and_method_and_withdraws_the_call() -> None:
    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address, connected(address) as session:
            with pytest.raises(errors.Unanswered, match=r"^reference-0: Logprobs: did not answer \(deadline 1 s\)$"):
                await session.call("Logprobs", request(), 1.0)
            await peer.withdrawn.wait()
            peer.gate.set()
            assert await session.call("Logprobs", request(b"next"), PATIENCE) == b"next!"

    run(test())


def test_a_cancelled_call_is_withdrawn_from_an_actors_line() -> None:
    class Busy:
        busy = False

        def __init__(self) -> None:
            self.seen: list[bytes] = []
            self.gate = asyncio.Event()
            self.arrived = asyncio.Event()

        async def receive(self, requests: Sequence[Request]) -> None:
            for each in requests:
                self.seen.append(each.message.payload)
                self.arrived.set()
                await self.gate.wait()
                each.reply(b"")

        async def advance(self, interrupted: Callable[[], bool]) -> None: ...

    async def test() -> None:
        behaviour = Busy()
        actor = Actor("reference-0", behaviour)
        serve = asyncio.create_task(actor.run())
        mailed = asyncio.Event()

        def handler(message: LogprobRequest) -> Awaitable[Any]:
            future = actor.send(message)
            if message.payload == b"second":
                future.add_done_callback(lambda _: mailed.set())
            return future

        async with serving(handler) as address, connected(address) as session:
            first = asyncio.create_task(session.call("Logprobs", request(b"first"), PATIENCE))
            second = asyncio.create_task(session.call("Logprobs", request(b"second"), PATIENCE))
            await behaviour.arrived.wait()
            second.cancel()
            await mailed.wait()
            behaviour.gate.set()
            await first
            assert await session.call("Logprobs", request(b"third"), PATIENCE) == b""
            assert second.cancelled()
        assert behaviour.seen == [b"first", b"third"]
        serve.cancel()

    run(test())


def test_closing_the_session_withdraws_its_calls() -> None:
    """Those without a key, as of an evaluation's group: the others wait for the next coordinator."""

    async def test() -> None:
        peer = Peer()
        async with serving(peer.logprobs) as address:
            async with connected(address) as session:
                waiting = asyncio.gather(session.call("Logprobs", request(b"", -1), PATIENCE), return_exceptions=True)
                await peer.arrived.wait()
            await peer.withdrawn.wait()
            (fault,) = await waiting
            assert isinstance(fault, errors.ServiceFault)
            assert "reference-0: Logprobs: was closed" in str(fault)

    run(test())


def test_closing_the_session_fails_its_unary_calls_and_not_the_task_that_made_them() -> None:
    async def test() -> None:
        asked, never = asyncio.Event(), asyncio.Event()

        async def status(_: None) -> None:
            asked.set()
            await never.wait()

        async with serving(echo, Process={"Status": status}) as address, connected(address) as session:
            asking = asyncio.create_task(session.unary("Process", "Status"))
            await asked.wait()
            await session.close()
            with pytest.raises(errors.Unreachable, match="reference-0: Status: was closed"):
                await asking

    run(test())
