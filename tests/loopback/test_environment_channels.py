"""How a gateway hears of an environment that does not answer: by one error, whichever way it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from runtime.config import Config, Deadlines, Environment, RemoteServer, Run, Services
from runtime.config.base import FromEnvironment
from runtime.environments.messages import EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.errors import Unreachable, UserError
from services.environment_channels import RUN, EnvironmentChannel, EnvironmentChannels
from services.rpc.generated import environment_pb2

PATIENCE = 60.0
REQUEST = EpisodeRequest(
    id="a",
    base_url="http://[::1]:1",
    api_key="k",
    task="{}",
    seed=1,
    purpose="train",
    call_seconds=1.0,
    tool_seconds=1.0,
    setup_seconds=1.0,
    score_seconds=1.0,
    cleanup_seconds=1.0,
)
BEGINS, ENDS = EpisodeEvent(phase="run"), EpisodeEvent(end=EpisodeEnd(reward=1.0))


class ScriptedServer:
    """Serves Environment as strangers do; each episode sends `sends` and then does `last`."""

    def __init__(self, sends: list[bytes], last: Callable[[Any], Awaitable[None]] | None = None):
        self._sends, self._last = sends, last
        self.cancelled: list[str] = []
        self.metadata: dict[str, str] = {}
        self.over = asyncio.Event()

    async def describe(self, request: Any, context: Any) -> Any:
        return environment_pb2.Description(name="scripted", concurrency=1)

    async def run(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.metadata = dict(context.invocation_metadata())
        try:
            for each in self._sends:
                yield each
            if self._last is not None:
                await self._last(context)
        finally:
            self.over.set()

    async def cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.id)
        return environment_pb2.CancelReply()

    async def start(self) -> tuple[Any, int]:
        server = grpc.aio.server()
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.describe,
                environment_pb2.DescribeRequest.FromString,
                environment_pb2.Description.SerializeToString,
            ),
            "Run": grpc.unary_stream_rpc_method_handler(self.run),
            "Cancel": grpc.unary_unary_rpc_method_handler(
                self.cancel, environment_pb2.CancelRequest.FromString, environment_pb2.CancelReply.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("sluice.v1.Environment", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port


def served(scripted: ScriptedServer, use: Callable[[EnvironmentChannel], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        server, port = await scripted.start()
        settings = RemoteServer(address=f"127.0.0.1:{port}", token=FromEnvironment(variable="GAME_TOKEN"))
        services = Services(environment={"game": Environment(server=settings)})
        channels = EnvironmentChannels(Config(run=Run(name="a"), services=services), None)
        try:
            (channel,) = channels.by_name()["game"]
            return await use(channel)
        finally:
            await channels.close()
            await server.stop(None)

    async def in_time() -> Any:
        (done, _) = await asyncio.wait({asyncio.ensure_future(whole())}, timeout=PATIENCE)
        assert done, f"not within {PATIENCE:g} s"
        return done.pop().result()

    return asyncio.run(in_time())


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_TOKEN", "sesame")


def told(event: EpisodeEvent) -> bytes:
    return RUN.reply.serialize(event)


async def all_of(events: AsyncGenerator[EpisodeEvent, None]) -> list[EpisodeEvent]:
    return [event async for event in events]


def test_events_arrive_and_calls_carry_the_token() -> None:
    scripted = ScriptedServer([told(BEGINS), told(ENDS)])

    async def use(channel: EnvironmentChannel) -> list[EpisodeEvent]:
        await channel.cancel("another")
        return await all_of(channel.run(REQUEST))

    assert served(scripted, use) == [BEGINS, ENDS]
    assert scripted.cancelled == ["another"] and scripted.metadata["authorization"] == "Bearer sesame"


async def fail(context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


@pytest.mark.parametrize(
    ("sends", "last", "reason"), [([told(BEGINS)], fail, "RESOURCE_EXHAUSTED: full"), ([b"\xff"], None, "EpisodeEvent")]
)
def test_what_goes_wrong_at_the_server_is_one_error(sends: list[bytes], last: Any, reason: str) -> None:
    with pytest.raises(Unreachable, match=reason):
        served(ScriptedServer(sends, last), lambda channel: all_of(channel.run(REQUEST)))


async def hang(context: Any) -> None:
    await asyncio.Event().wait()


def test_a_process_that_is_used_no_more_ends_what_it_has_under_way() -> None:
    async def use(channel: EnvironmentChannel) -> None:
        async with aclosing(channel.run(REQUEST)) as events:
            async for event in events:
                assert event == BEGINS
                await channel.close()

    with pytest.raises(Unreachable, match="it serves no more"):
        served(ScriptedServer([told(BEGINS)], hang), use)


def test_who_wants_no_more_of_an_episode_withdraws_it() -> None:
    scripted = ScriptedServer([told(BEGINS)], hang)

    async def use(channel: EnvironmentChannel) -> None:
        async with aclosing(channel.run(REQUEST)) as events:
            async for _ in events:
                break
        await scripted.over.wait()

    served(scripted, use)


def test_nobody_at_the_address_is_the_same_error() -> None:
    async def use(channel: EnvironmentChannel) -> None:
        gone = EnvironmentChannel("gone", grpc.aio.insecure_channel("127.0.0.1:1"), ())
        try:
            with pytest.raises(Unreachable, match="UNAVAILABLE"):
                await all_of(gone.run(REQUEST))
            with pytest.raises(Unreachable, match="UNAVAILABLE"):
                await gone.cancel("a")
        finally:
            await gone.close()

    served(ScriptedServer([]), use)


def test_a_server_is_asked_who_it_is_before_a_run_begins() -> None:
    async def check(address: str, silence: float) -> None:
        services = Services(environment={"game": Environment(server=RemoteServer(address=address))})
        config = Config(run=Run(name="a"), services=services, deadlines=Deadlines(silence=silence))
        channels = EnvironmentChannels(config, None)
        try:
            await channels.check()
        finally:
            await channels.close()

    async def whole() -> None:
        server, port = await ScriptedServer([]).start()
        try:
            await check(f"127.0.0.1:{port}", PATIENCE)
        finally:
            await server.stop(None)
        with pytest.raises(
            UserError, match=r"^services\.environment\.game\.server\.address: no Environment answers within 0\.2 s"
        ):
            await check("127.0.0.1:1", 0.2)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))
