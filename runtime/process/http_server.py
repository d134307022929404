"""A bounded HTTP server on aiohttp, for gateways, the page and metrics: limits what a stranger may hold, and for how long.

::

    connection ──► Connection: limits the number, the seconds until the first request, and the seconds of an unread response
                        └──► aiohttp ──► `bounded`: no body is expanded
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from runtime import timeouts
from runtime.process import network
from runtime.process.os_process import counted

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("sluice.http")  # for faults that any client can repeat: logged at counts of 1, 10, 100 and so on


class FewLines(logging.Filter):
    """Passes each kind of fault at counts of 1, 10, 100 and so on, for malformed HTTP without the client's data."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, error, at = record.exc_info or (None, None, None)
        if kind is None or error is None:
            return True
        if record.module == "web_protocol" and issubclass(kind, ConnectionError):  # aiohttp reports a client that hung up
            return False
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        count = counted(f"{kind.__name__} {at and (at.tb_frame.f_code.co_filename, at.tb_lineno)}")
        if kind.__module__.startswith("aiohttp"):
            record.msg, record.args, record.exc_info = "%s (%s)", (record.getMessage(), kind.__name__), None
        if count > 1:
            record.msg, record.args = "%s; %d so far", (record.getMessage(), count)
        return bool(count)


log.addFilter(FewLines())


@web.middleware
async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Wrap the check of keys: stop the first request's timer, and refuse a compressed body, which may be gigabytes."""
    if (connection := _connection(request)) is not None:
        connection.has_asked()
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise web.HTTPUnsupportedMediaType(reason="Content-Encoding is not supported, but identity")
    return await handler(request)


def let_in(request: web.Request) -> None:
    """Mark the request's connection as trusted, after it has shown a key or needs none. It is never ended to make room."""
    if (connection := _connection(request)) is not None:
        connection.server.know(connection)


def _connection(request: web.Request) -> Connection | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


class HttpServer:
    """A server. Allows `most` connections, and half as many strangers of one host; one beyond ends the oldest stranger."""

    def __init__(self, application: web.Application, most: int, grace: float):
        """Make the server. `application` must have the middleware `bounded`. `grace`: seconds for open requests at the end."""
        assert bounded in application.middlewares
        self.most, self._open = most, set[Connection]()
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._of_host: Counter[str] = Counter()  # strangers
        self._listening: asyncio.Server
        self.runner = web.AppRunner(
            application,
            handler_cancellation=True,  # a client that hangs up cancels its request
            access_log=None,
            logger=log,
            shutdown_timeout=grace,
            auto_decompress=False,
            lingering_time=timeouts.HTTP_HEAD,  # many clients read the response only after sending the whole body
            keepalive_timeout=timeouts.HTTP_IDLE,
        )

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None, backlog: int = 128) -> str:
        """Listen, and return the server's URL without a path."""
        await self.runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: Connection(self),
            sock=listener,
            backlog=backlog,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else timeouts.HTTP_HEAD,
        )
        return f"{'http' if tls is None else 'https'}://{network.host_port(*listener.getsockname()[:2])}"

    async def close(self) -> None:
        """Stop the server, also if it was never opened."""
        if hasattr(self, "_listening"):
            self._listening.close()
        await self.runner.cleanup()

    def take(self, connection: Connection) -> bool:
        """Add a connection, and end an older stranger for it if necessary. Returns whether there was room."""
        if self._of_host[connection.host] >= self.most // 2:
            self._end(next(each for each in self._strangers if each.host == connection.host))
        elif len(self._open) >= self.most and self._strangers:
            self._end(next(iter(self._strangers)))
        if len(self._open) >= self.most:
            return False
        self._open.add(connection)
        self._strangers[connection] = None
        self._of_host[connection.host] += 1
        return True

    def _end(self, connection: Connection) -> None:
        self.lose(connection)
        connection.end()

    def know(self, connection: Connection) -> None:
        """Count the connection as trusted from now on. Idempotent."""
        if self._strangers.pop(connection, connection) is None:
            self._of_host[connection.host] -= 1
            if not self._of_host[connection.host]:
                del self._of_host[connection.host]

    def lose(self, connection: Connection) -> None:
        """Remove a connection that has ended. Idempotent."""
        self.know(connection)
        self._open.discard(connection)


class Connection(asyncio.Protocol):
    """The protocol between a client's connection and aiohttp, with limits."""

    def __init__(self, server: HttpServer):
        self.server, self._inner, self._taken = server, server.runner.server(), False  # type: ignore[misc]
        self._waiting: asyncio.TimerHandle | None = None  # ends the connection without a first request
        self._writing: asyncio.TimerHandle | None = None  # checks that the client reads
        self._left = 0  # bytes that the client had not read at the last check
        self.host = ""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        self.host = str((transport.get_extra_info("peername") or [""])[0])
        self._taken = self.server.take(self)
        if not self._taken:
            self.end()
            return
        self.transport.set_write_buffer_limits(0)  # so any unread byte calls `pause_writing`
        self._waiting = asyncio.get_running_loop().call_later(timeouts.HTTP_HEAD, self.end)
        self._inner.connection_made(transport)

    def has_asked(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def end(self) -> None:
        self.transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        for timer in (self._waiting, self._writing):
            if timer is not None:
                timer.cancel()
        if self._taken:
            self.server.lose(self)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._left = self.transport.get_write_buffer_size()
        self._writing = asyncio.get_running_loop().call_later(timeouts.HTTP_WRITE, self._look)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._inner.resume_writing()

    def _look(self) -> None:
        """End the connection if the client has read no byte since the last check."""
        before, self._left = self._left, self.transport.get_write_buffer_size()
        if self._left >= before:
            self.end()
        else:
            self._writing = asyncio.get_running_loop().call_later(timeouts.HTTP_WRITE, self._look)
