"""The caller's end: one channel and one session stream per peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import grpc

from runtime import errors, timeouts
from runtime.process.keys import COORDINATOR, Keys, process
from runtime.status import Progress
from runtime.types import SCHEMA_VERSION
from services.rpc import contract, security, stream, wire_errors
from services.rpc.generated import common_pb2
from services.rpc.server import ERROR_KEY, options

HEALTH = "/grpc.health.v1.Health/Check"
WATCH = contract.METHODS["Coordinator", "Watch"]
LONGEST = (1 << 32) - 1  # milliseconds, as uint32 holds them


class Channel:
    """To `called`, a party of the run, by somebody who has `keys`; None where the run needs none."""

    def __init__(
        self, address: str, keys: Keys | None = None, called: str = COORDINATOR, silence: float = 0.0, token: str = ""
    ):
        """`silence`: as of `server.options`. `token`: what the coordinator gave a process to show to another."""
        self.address = address
        self.grpc: grpc.aio.Channel = security.connection(grpc.aio, address, keys, called, options(silence))
        self.metadata = security.shown_to(called, keys, token)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.close()

    async def ready(self, name: str, timeout: float) -> None:
        """Connect to the process called `name`. Raises DeadlineExceeded, which says what came of the last attempt."""
        try:
            await asyncio.wait_for(self.grpc.channel_ready(), timeout)
        except asyncio.TimeoutError:
            raise errors.DeadlineExceeded(name, "connect", await self.why(), timeout) from None

    async def why(self) -> str:
        """Why there is no answer, as far as gRPC says what came of its last attempt to connect."""
        if self.grpc.get_state() is grpc.ChannelConnectivity.READY:
            return "did not answer"
        told = f"no connection to {self.address}"
        try:
            await self.grpc.unary_unary(HEALTH)(b"", timeout=timeouts.CONTROL_CALL)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                told += f": {security.in_words(error.details() or '')}"
        return told


async def call(
    channel: Channel, name: str, method: contract.Method, request: Any = None, timeout: float = timeouts.CONTROL_CALL
) -> Any:
    """One unary call to the process called `name`. Raises what the other end raised, or DeadlineExceeded; Unreachable
    where the connection broke meanwhile."""
    stub = channel.grpc.unary_unary(method.path, method.request.serialize, method.reply.parse)
    try:
        return await stub(request, timeout=timeout, wait_for_ready=True, metadata=channel.metadata)
    except grpc.aio.AioRpcError as error:
        if (told := _told(error, name, method.name)) is not None:
            raise told from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise errors.Unanswered(name, method.name, await channel.why(), timeout) from None
        lost = errors.Unreachable if error.code() is grpc.StatusCode.UNAVAILABLE else errors.ServiceFault
        raise lost(name, method.name, f"{error.code().name}: {error.details()}") from None


async def items(channel: Channel, name: str, method: contract.Method, request: Any = None) -> AsyncGenerator[Any, None]:
    """What the process called `name` streams in answer to one request, until it ends. Raises what the other end raised, or
    Unreachable."""
    stub = channel.grpc.unary_stream(method.path, method.request.serialize, method.reply.parse)
    try:
        async for item in stub(request, metadata=channel.metadata):
            yield item
    except grpc.aio.AioRpcError as error:
        raise _told(error, name, method.name) or errors.Unreachable(
            name, method.name, f"{error.code().name}: {error.details()}"
        ) from None


async def watch(address: str, silence: float = 0.0, keys: Keys | None = None) -> AsyncGenerator[Progress, None]:
    """The coordinator's word on the run, until it ends. Raises ServiceFault when it cannot be reached.

    `silence`: as of `server.options`.
    """
    channel = Channel(address, keys, silence=silence)
    async with channel, aclosing(items(channel, COORDINATOR, WATCH)) as progress:
        async for one in progress:
            yield one


def _told(error: grpc.aio.AioRpcError, name: str, phase: str) -> Exception | None:
    """What the other end raised, if it came to say so."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return wire_errors.error_from_wire(common_pb2.Error.FromString(value), name, phase)
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.Forbidden(f"{name}: {phase}: {error.details()}")
    return None


class Session:
    """Calls to one peer over one stream, many under way at once, several to a frame.

    When the stream breaks, every call under way and every later one raises ServiceFault. `machine` is where the peer runs.
    """

    def __init__(
        self,
        address: str,
        name: str,
        service: str,
        machine: str = "",
        silence: float = 0.0,
        term: int = 0,
        keys: Keys | None = None,
        incarnation: int = 0,
        token: str = "",
    ):
        """`silence`, `token`: as of `Channel`. `term`: the coordinator's. `incarnation`: of the peer."""
        self.name = name
        self.machine = machine
        self.address = address
        self._service = service
        self._term = term
        self._channel = Channel(address, keys, process(name, incarnation), silence, token)
        self._ids = itertools.count(1)
        self._outbox = stream.Outbox()
        self._waiting: dict[int, tuple[str, asyncio.Future[bytes]]] = {}  # the method's name, and the answer to come
        self._keys: dict[int, str] = {}  # of those that have one
        self._acknowledged: list[str] = []  # since the last frame
        self._broken = ""  # why, once the stream is broken
        self._tasks: list[asyncio.Task[None]] = []
        self._tell: list[Callable[[str], None]] = []

    async def open(self, timeout: float) -> None:
        """Connect. Raises DeadlineExceeded."""
        await self._channel.ready(self.name, timeout)
        method = self._channel.grpc.stream_stream(f"/{contract.PACKAGE}.{self._service}/Session")
        rpc = method(metadata=self._channel.metadata)
        self._tasks = [asyncio.create_task(self._write(rpc)), asyncio.create_task(self._read(rpc))]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def when_broken(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once the stream breaks, at once if it is broken. Not after `close`."""
        if self._broken:
            tell(self._broken)
        else:
            self._tell.append(tell)

    def ends(self) -> None:
        """It is about to end as it should: nobody is told."""
        self._tell.clear()

    def give_up(self, reason: str) -> None:
        """Break the stream: calls under way, and later ones, raise Unreachable. Unary calls still work. Idempotent."""
        self.ends()
        self._break(reason)
        for task in self._tasks:
            task.cancel()

    def post(self, method: contract.Method, request: Any, timeout: float) -> Coroutine[Any, Any, Any]:
        """Put a call on its way now, and return what waits for its answer: calls reach the peer in the order of posting.

        Awaiting raises what the peer raised, DeadlineExceeded, or ServiceFault when the stream is broken. Cancelling
        withdraws the call.
        """
        id_, urgent = next(self._ids), method.priority is contract.Priority.CONTROL
        body = method.request.pack(request)
        milliseconds = min(max(1, int(timeout * 1000)), LONGEST)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = method.name, future
        if self._broken:
            future.set_exception(errors.Unreachable(self.name, method.name, self._broken))
        else:
            if key := method.key_of(request):
                self._keys[id_] = key
            for chunk, more in stream.split(body):
                call = common_pb2.Call(id=id_, method=method.name, timeout_ms=milliseconds, more=more, key=key)
                self._outbox.put(call, chunk, urgent)
        return self._answer(id_, method, future, timeout)

    async def _answer(self, id_: int, method: contract.Method, future: asyncio.Future[bytes], timeout: float) -> Any:
        # Not wait_for, which makes a second future and costs as much as all else here.
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, id_, timeout)
        try:
            body = await future
        except asyncio.CancelledError:
            self._withdraw(id_)
            raise
        finally:
            timer.cancel()
            self._waiting.pop(id_, None)
            self._keys.pop(id_, None)
        return method.reply.parse(body)

    def acknowledge(self, key: str) -> None:
        """The answer to the call of this key is safe here: the peer need not keep it. Told with the next call."""
        self._acknowledged.append(key)

    def _withdraw(self, id_: int) -> None:
        self._outbox.put(common_pb2.Call(id=id_, cancel=True, key=self._keys.get(id_, "")), urgent=True)

    def _expire(self, id_: int, timeout: float) -> None:
        method_name, future = self._waiting[id_]
        if not future.done():
            self._withdraw(id_)
            future.set_exception(errors.Unanswered(self.name, method_name, "did not answer", timeout))

    async def call(self, method_name: str, request: Any, timeout: float) -> Any:
        """`post`, once this is awaited, by the method's name."""
        return await self.post(contract.METHODS[self._service, method_name], request, timeout)

    async def unary(self, service: str, method_name: str, request: Any = None) -> Any:
        """A unary call on the same channel, beside the stream. Raises Unreachable when the session is closed meanwhile."""
        asking = asyncio.ensure_future(call(self._channel, self.name, contract.METHODS[service, method_name], request))
        try:
            await asyncio.wait([asking])
        finally:
            asking.cancel()
        if asking.cancelled():  # by the channel's end, which must not look like the end of the caller's task
            raise errors.Unreachable(self.name, method_name, self._broken)
        return asking.result()

    async def close(self) -> None:
        self.give_up("was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.grpc.close()

    async def _write(self, rpc: Any) -> None:
        try:
            while calls := await self._outbox.frame():
                acknowledged, self._acknowledged = self._acknowledged, []
                head = common_pb2.CallFrame(schema=SCHEMA_VERSION, acknowledged=acknowledged, term=self._term)
                await rpc.write(stream.frame(head, "calls", calls))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, and says why

    async def _read(self, rpc: Any) -> None:
        joiner = stream.Joiner()
        try:
            async for data in rpc:
                for reply in contract.frame_of(common_pb2.ReplyFrame, data).replies:
                    self._settle(reply, joiner)
            self._break("closed the connection")
        except grpc.aio.AioRpcError as error:
            self._break(f"connection lost ({error.code().name}: {error.details()})")
        except errors.InvalidMessage as error:
            self._break(str(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """If a reader or writer task fails, all pending calls fail with it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(f"{type(error).__name__}: {error}")

    def _settle(self, reply: common_pb2.Reply, joiner: stream.Joiner) -> None:
        failed = reply.HasField("error")
        body = None if failed else joiner.add(reply.id, reply.body, reply.more)
        method_name, future = self._waiting.get(reply.id, ("", None))
        if future is None or future.done():
            return
        if failed:
            future.set_exception(wire_errors.error_from_wire(reply.error, self.name, method_name))
        elif body is not None:
            future.set_result(body)

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        for method_name, future in self._waiting.values():
            if not future.done():
                future.set_exception(errors.Unreachable(self.name, method_name, self._broken))
        told, self._tell = self._tell, []
        for tell in told:
            tell(self._broken)
