"""The gRPC server of every process: typed methods, the session stream, health, reflection.

A handler takes the decoded request and returns an awaitable of the reply. A handler that has a future returns it and is no
coroutine: a coroutine's task costs as much as the rest of a small call. The same handlers serve unary calls and `Session`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from inspect import isawaitable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runtime import errors, timeouts
from runtime.process import network, spans
from runtime.process.keys import Keys
from runtime.status import CallStats
from runtime.types import SCHEMA_VERSION, Body
from services.rpc import contract, security
from services.rpc.generated import common_pb2

log = logging.getLogger("sluice")

Handler = Callable[[Any], Any]
"""Returns an awaitable of the reply, or of a unary call the reply itself; of a streamed method an asynchronous generator."""
Handlers = Mapping[str, Handler]

OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    # No compression: gRPC would expand a message before its size is checked.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Of one connection; a peer has one or two. Near the limit gRPC refuses calls that could wait, so the limit is far off.
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.server_handshake_timeout_ms", int(1000 * timeouts.HANDSHAKE)),
)
RPCS = 1 << 14  # calls and streams of a server at the same time: 1,000 nodes have two each, and up to 8 processes that register
KEPT = 256 << 20  # bytes of answers that a service keeps until its callers acknowledge them
PING = 0.3  # a share, not seconds: a connection that has been silent for this part of the allowed silence is pinged
TERMS = 1 << 31  # terms of coordinators that a process may have missed
ERROR_KEY = "sluice-error-bin"
SHOWN = 400  # characters of an error in a unary reply: gRPC refuses trailing metadata of more than 8 KiB

_CODES: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.UserError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.ServiceFault: grpc.StatusCode.UNAVAILABLE,
}


def options(silence: float = 0.0) -> tuple[tuple[str, int], ...]:
    """Return the options of a channel or a server. A connection without data for `silence` seconds is given up; 0 = never."""
    if not silence:
        return OPTIONS
    ping = int(silence * 1000 * PING)
    return (
        *OPTIONS,
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", int(silence * 1000) - ping),
        ("grpc.http2.ping_timeout_ms", int(silence * 1000) - ping),  # the default is a minute, whatever keepalive says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Limits the peers' pings, which come as rarely as ours. After two earlier pings the connection is closed.
        ("grpc.http2.min_ping_interval_without_data_ms", min(int(1000 * timeouts.PING_LEAST), ping // 2)),
        ("grpc.http2.max_ping_strikes", 2),
    )


class Server:
    """One process's gRPC server. Bind first, then `start`; `services` maps a service to its handlers by method.

    `silence`: see `options`. `fence`: accepts coordinators. `keys`: of the server's party; None: any process may call it."""

    def __init__(
        self, services: Mapping[str, Handlers], *, silence: float = 0.0, fence: Fence | None = None, keys: Keys | None = None
    ):
        guards = () if keys is None else (security.Guard(keys),)
        self._server = grpc.aio.server(options=options(silence), interceptors=guards, maximum_concurrent_rpcs=RPCS)
        self._listen = self._server.add_insecure_port
        if keys is not None and keys.tls:
            self._listen = partial(self._server.add_secure_port, server_credentials=security.server_credentials(keys))
        self._health = health.aio.HealthServicer()
        self._names = [f"{contract.PACKAGE}.{service}" for service in services]
        for service, handlers in services.items():
            self._server.add_generic_rpc_handlers((_service_handlers(service, handlers, fence or Fence()),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    def bind(self, host: str, port: int, port_range: network.PortRange | None = None) -> str:
        """Listen on `port`, or on one of `port_range` or any if 0. Returns HOST:PORT. Raises UserError if all are taken."""
        for candidate in (port,) if port else network.candidates(host, port_range):
            with suppress(RuntimeError):  # taken since it was checked
                return network.host_port(host, self._listen(network.host_port(host, candidate)))
        address = network.host_port(host, port)
        raise errors.UserError(f"cannot listen on {address}: the port is in use or the address is not this machine's")

    async def rebind(self, address: str) -> str:
        """Listen on the address of the process before, once it is free. Raises UserError after `PORT_AGAIN`."""
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeouts.PORT_AGAIN
        while True:
            try:
                return self.bind(host.strip("[]"), int(port))
            except errors.UserError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(timeouts.PORT_POLL)

    async def start(self) -> None:
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of health checks, for the process as a whole ("") and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)


def _service_handlers(service: str, handlers: Handlers, fence: Fence) -> grpc.GenericRpcHandler:
    out: dict[str, grpc.RpcMethodHandler] = {}
    for name, handler in handlers.items():
        method = contract.METHODS[service, name]
        if method.streamed:
            out[name] = grpc.unary_stream_rpc_method_handler(_streaming(method, handler))
        else:
            out[name] = grpc.unary_unary_rpc_method_handler(_unary(method, handler))
    if service not in ("Process", "Coordinator"):
        session = _SessionHandler(service, handlers, fence)
        out["Session"] = grpc.stream_stream_rpc_method_handler(session.serve)
    return grpc.method_handlers_generic_handler(f"{contract.PACKAGE}.{service}", out)


def _unary(method: contract.Method, handler: Handler) -> Any:
    async def call(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            security.check_certificate(context)
            command = method.request.parse(data)
            security.check_speaker(method, command)
            answer = handler(command)
            return method.reply.serialize(await answer if isawaitable(answer) else answer)
        except errors.SluiceError as error:
            await _refuse(error, context)
            raise AssertionError from error  # `_refuse` has raised

    return call


def _streaming(method: contract.Method, source: Handler) -> Any:
    async def call(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            security.check_certificate(context)
            command = method.request.parse(data)
            security.check_speaker(method, command)
            async with aclosing(source(command)) as items:
                async for item in items:
                    yield method.reply.serialize(item)
        except errors.SluiceError as error:
            await _refuse(error, context)

    return call


async def _refuse(error: errors.SluiceError, context: grpc.aio.ServicerContext) -> None:
    """End a call with `error`: a code and a text for any gRPC client, and the error itself for Sluice's client."""
    if isinstance(error, errors.InvalidMessage):
        security.log_refusal(context.peer(), str(error))
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)
    details = contract.error_to_wire(error)
    details.message = details.message[:SHOWN]
    await context.abort(code, contract.text(str(error))[:SHOWN], ((ERROR_KEY, details.SerializeToString()),))


class Fence:
    """Accepts commands of the newest coordinator that a process has heard of. Commands of an earlier one come too late."""

    def __init__(self) -> None:
        self._term = 0

    def check(self, term: int) -> None:
        """Accept `term`. Raises Fenced if it is below the highest so far, InvalidMessage if it is impossibly high."""
        if term > self._term + TERMS:
            raise errors.InvalidMessage(f"term {term}, after {self._term}")
        if term < self._term:
            raise errors.Fenced(f"term {term} is over: the coordinator has term {self._term}")
        self._term = term


class _SessionHandler:
    """Serves `Session` streams: each call of a frame goes to its handler; replies leave in frames, in order of completion.

    A call with a key outlives its stream: the next coordinator sends it with the same key, and gets its answer. A call without
    a key is cancelled when its stream ends. Only the coordinator has terms, keys and kept answers."""

    def __init__(self, service: str, handlers: Handlers, fence: Fence):
        self._service = service
        self._handlers = handlers
        self._fence = fence
        self._running: dict[str, asyncio.Future[Any]] = {}  # calls that have a key, by the key
        self._kept = ReplyCache(KEPT)
        self._held = [contract.BufferedBytes() for _ in range(2)]  # at 1: of the coordinator's streams; at 0: of all others

    async def serve(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            security.check_certificate(context)
        except errors.Forbidden as error:  # before the stream is read
            await _refuse(error, context)
        stream = _CallStream()
        reader = asyncio.create_task(self._read(frames, stream))
        try:
            while replies := await stream.outbox.frame():  # until the reader has closed the outbox
                await context.write(contract.wire_frame(common_pb2.ReplyFrame(schema=SCHEMA_VERSION), "replies", replies))
            await reader  # raises the reader's error
        except (errors.InvalidMessage, errors.Fenced, errors.Forbidden) as error:
            security.log_refusal(context.peer(), str(error))
            await context.abort(_CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT), str(error))
        finally:
            reader.cancel()
            for key, answer in list(stream.answering.values()):
                if not key:
                    answer.cancel()

    async def _read(self, frames: AsyncIterator[bytes], stream: _CallStream) -> None:
        joiner = contract.Reassembler(self._held[security.is_coordinator()])
        try:
            async for data in frames:
                frame = contract.frame_of(common_pb2.CallFrame, data)
                if frame.term or frame.acknowledged or any(call.key for call in frame.calls):
                    security.check_coordinator("use a term, or keys of calls")
                if frame.term:
                    self._fence.check(frame.term)
                for key in frame.acknowledged:
                    self._kept.forget(key)
                for call in frame.calls:
                    if call.cancel:
                        joiner.forget(call.id)
                        self._withdraw(call, stream)
                    elif (body := joiner.add(call.id, call.body, call.more)) is not None:
                        self._begin(call, body, stream)
        finally:
            joiner.close()
            stream.outbox.close()

    def _withdraw(self, call: common_pb2.Call, stream: _CallStream) -> None:
        self._kept.forget(call.key)
        if call.id in stream.answering:
            key, answer = stream.answering[call.id]
            self._running.pop(key, None)
            answer.cancel()

    def _begin(self, call: common_pb2.Call, body: bytes, stream: _CallStream) -> None:
        """Hand a call over; its answer leaves when it is there. No task per call: a task costs as much as the call."""
        method = contract.METHODS.get((self._service, call.method))
        try:
            if method is None or method.streamed or call.method not in self._handlers:
                raise errors.InvalidMessage(f"{self._service} has no method {call.method!r}")
            security.check_caller(method)
            command = method.request.parse(body)
            security.check_speaker(method, command)
            if call.key != (key := method.key_of(command)):
                raise errors.InvalidMessage(f"{method.name}: the key of {key or 'a call without a key'} is not {call.key!r}")
            if (kept := self._kept.get(key)) is not None:
                stream.put(call.id, kept, urgent=True)
                return
            answer = self._running.get(key) or asyncio.ensure_future(self._handlers[method.name](command))
        except Exception as error:  # noqa: BLE001 - the error goes to the caller
            stream.put_error(call.id, error)
            return
        stream.answering[call.id] = key, answer
        if key:
            self._running[key] = answer
        answer.add_done_callback(partial(self._reply, call.id, key, method, stream))

    def _reply(self, id_: int, key: str, method: contract.Method, stream: _CallStream, answer: asyncio.Future[Any]) -> None:
        """Put `answer`, or its error, into the stream as the reply to call `id_`. A good reply is kept under `key`, if any."""
        stream.answering.pop(id_, None)
        if self._running.get(key) is answer:  # else it was withdrawn and sent again
            del self._running[key]
        try:
            body = method.reply.pack(answer.result())
        except asyncio.CancelledError:
            stream.put_error(id_, errors.Cancelled(f"{method.name} was withdrawn"))
        except Exception as error:  # noqa: BLE001 - the error goes to the caller
            stream.put_error(id_, error)
        else:
            if key:
                self._kept.put(key, body)
            stream.put(id_, body, urgent=method.priority is contract.Priority.CONTROL)


class _CallStream:
    """The replies to the calls of one stream."""

    def __init__(self) -> None:
        self.outbox = contract.SendQueue()
        self.answering: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # by call: its key, and the answer to come

    def put(self, id_: int, body: Body, urgent: bool) -> None:
        for chunk, more in contract.split(body):
            self.outbox.put(common_pb2.Reply(id=id_, more=more), chunk, urgent)

    def put_error(self, id_: int, error: BaseException) -> None:
        self.outbox.put(common_pb2.Reply(id=id_, error=contract.error_to_wire(error)), urgent=True)


class ReplyCache:
    """Answers by the keys of their calls, until they are acknowledged. Above `most` bytes the oldest are dropped."""

    def __init__(self, most: int):
        self._most = most
        self._bytes = 0
        self._answers: dict[str, Body] = {}  # the oldest first

    def get(self, key: str) -> Body | None:
        return self._answers.get(key)

    def put(self, key: str, body: Body) -> None:
        self.forget(key)
        self._answers[key] = body
        self._bytes += contract.size_of(body)
        while self._bytes > self._most:
            self.forget(next(iter(self._answers)))

    def forget(self, key: str) -> None:
        self._bytes -= contract.size_of(self._answers.pop(key, []))


# ---- A process's calls


SMOOTHING = 0.1  # weight of the newest call in the moving mean


class Calls:
    """The calls of a process: counts them, takes no new ones once the process drains, and cancels the rest at its end."""

    def __init__(self, name: str):
        self.stats = CallStats()
        self.busy_seconds = 0.0  # while any call was open, up to the newest answer
        self._busy_since = 0.0
        self._name = name
        self._draining = False
        self._open: set[asyncio.Future[Any]] = set()
        self._logged: BaseException | None = None  # the newest; several calls may get one error

    def counted(self, method: contract.Method, handler: Handler) -> Handler:
        """Wrap `handler` to count its calls. Data calls while the process drains get no answer, as from a killed one."""
        if method.streamed:
            return handler

        def begin(command: Any) -> Awaitable[Any]:
            if self._draining and method.priority is contract.Priority.DATA:
                return asyncio.get_running_loop().create_future()
            answer, now = asyncio.ensure_future(handler(command)), time.monotonic()
            if not self._open:
                self._busy_since = now
            self._open.add(answer)
            self.stats.open = len(self._open)
            answer.add_done_callback(partial(self._ended, method, now, *_of(command)))
            return answer

        return begin

    async def drain(self, seconds: float) -> None:
        """Take no new calls, and wait at most `seconds` until the earlier ones are answered."""
        self._draining = True
        if not self._open:
            return
        _, late = await asyncio.wait(self._open, timeout=seconds)
        if late:
            log.warning("%s: %d calls were dropped at the end", self._name, len(late))
            for answer in late:
                answer.cancel()
            await asyncio.wait(late)

    def _ended(self, method: contract.Method, began: float, group: int, step: int, answer: asyncio.Future[Any]) -> None:
        stats, now = self.stats, time.monotonic()
        spans.log.add(method.name, began, now, spans.CALLS, group, step)
        self._open.discard(answer)
        self.busy_seconds, self._busy_since = self.busy_seconds + now - self._busy_since, now
        stats.open = len(self._open)
        stats.seconds += SMOOTHING * (now - began - stats.seconds)
        if answer.cancelled():
            stats.withdrawn += 1
        elif (error := answer.exception()) is None:
            stats.answered += 1
        else:
            stats.failed += 1
            if not isinstance(error, errors.SluiceError) and error is not self._logged:  # the caller gets only the last line
                self._logged = error
                log.error("%s: %s failed", self._name, method.name, exc_info=error)


def _of(command: Any) -> tuple[int, int]:
    """Return the group and the step of a command, or the step of the version that it moves; -1 if it has none."""
    step: int = getattr(command if hasattr(command, "step") else getattr(command, "version", None), "step", -1)
    return getattr(command, "group_id", -1), step
