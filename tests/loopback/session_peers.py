"""What the tests of sessions and servers share: peers of the reference role, and the stream without either end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from runtime.types import SCHEMA_VERSION, LogprobRequest
from services.rpc import contract
from services.rpc.client import Channel, Session, call
from services.rpc.generated import common_pb2, reference_pb2
from services.rpc.server import OPTIONS, Handler, Server
from tests.coroutines import within

PATIENCE = 100.0  # seconds that one call may take where it is to succeed

run = within(100.0)


LOGPROBS = contract.METHODS["Reference", "Logprobs"]
_GROUPS = itertools.count()


def request(payload: bytes = b"", group_id: int | None = None) -> LogprobRequest:
    """Of another group each time."""
    return LogprobRequest(group_id=next(_GROUPS) if group_id is None else group_id, payload=payload)


async def echo(message: LogprobRequest) -> bytes:
    return message.payload


class Peer:
    """Handlers of the reference role that note what they get, and answer when `gate` is set: at once where `ready`."""

    def __init__(self, ready: bool = False) -> None:
        self.seen: list[bytes] = []
        self.gate = asyncio.Event()
        if ready:
            self.gate.set()
        self.arrived = asyncio.Event()
        self.withdrawn = asyncio.Event()

    async def logprobs(self, message: LogprobRequest) -> bytes:
        self.seen.append(message.payload)
        self.arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        return message.payload + b"!"


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[str]:
    """Its address while it serves."""
    address = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def serving(handler: Handler, **others: Mapping[str, Handler]) -> AsyncIterator[str]:
    """A server of the reference role with one handler; yields its address."""
    async with started(Server({"Reference": {"Logprobs": handler}, **others})) as address:
        yield address


@asynccontextmanager
async def connected(address: str, service: str = "Reference") -> AsyncIterator[Session]:
    session = Session(Channel(address), f"{service.lower()}-0", service)
    try:
        await session.open(PATIENCE)
        yield session
    finally:
        await session.close()


async def unary(address: str, message: LogprobRequest, timeout: float = PATIENCE) -> bytes:
    """One call without a session."""
    async with Channel(address) as channel:
        answer: bytes = await call(channel, "reference-0", contract.METHODS["Reference", "Logprobs"], message, timeout)
        return answer


@asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[Any]:
    """The session stream without `Session`."""
    async with Channel(address) as channel:
        rpc = channel.grpc.stream_stream(
            "/sluice.v1.Reference/Session", common_pb2.CallFrame.SerializeToString, common_pb2.ReplyFrame.FromString
        )()
        yield rpc
        rpc.cancel()


def frame(
    *calls: common_pb2.Call, acknowledged: Iterable[str] = (), schema: int = SCHEMA_VERSION, term: int = 0
) -> common_pb2.CallFrame:
    return common_pb2.CallFrame(schema=schema, calls=calls, acknowledged=acknowledged, term=term)


def key_of(group_id: int) -> str:
    return LOGPROBS.key_of(request(group_id=group_id))


def logprobs(id_: int, payload: bytes, group_id: int | None = None, **fields: Any) -> common_pb2.Call:
    """Of an evaluation's group, which has no key, where it does not say of which."""
    asked = request(payload, -1 if group_id is None else group_id)
    made = {"id": id_, "method": "Logprobs", "timeout_ms": int(PATIENCE * 1000), "key": LOGPROBS.key_of(asked)}
    made["body"] = LOGPROBS.request.serialize(asked)
    return common_pb2.Call(**made | fields)


def answer(reply: common_pb2.Reply) -> bytes:
    assert not reply.HasField("error"), reply.error
    return reference_pb2.LogprobReply.FromString(reply.body).logprobs


async def replies(rpc: Any, count: int) -> list[common_pb2.Reply]:
    out: list[common_pb2.Reply] = []
    while len(out) < count:
        out += (await rpc.read()).replies
    return out


@asynccontextmanager
async def raw_peer(serve: Callable[[Any, Any], AsyncIterator[common_pb2.ReplyFrame]]) -> AsyncIterator[str]:
    """A server of the session stream without `Server`; yields its address."""
    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(
        serve, common_pb2.CallFrame.FromString, common_pb2.ReplyFrame.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.Reference", {"Session": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
