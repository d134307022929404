"""The HTTP server of a process at which Prometheus asks for its metrics.

::

    GET /metrics ──► on the event loop: what the process tells of itself, as plain values ──► in a thread: their text
    GET /sd      ──► at the coordinator: every process that has registered, and where it serves metrics

Nothing is computed unless somebody asks, and there is one thread, whoever asks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from aiohttp import web

from runtime import timeouts
from runtime.config import Config
from runtime.config.secret_values import resolved
from runtime.errors import UserError
from runtime.process import network, spans
from runtime.process.http_server import Handler, HttpServer, bounded, let_in
from runtime.status import RunFigures, Status
from runtime.telemetry import prometheus

log = logging.getLogger("sluice")

BACKLOG = 16  # connections that wait for the event loop
CONNECTIONS = 64  # that there may be at once


class Scraped(Protocol):
    """A process, as far as it is asked: on its event loop."""

    def status(self) -> Status: ...

    def figures(self) -> RunFigures | None:
        """Of the run, at the coordinator; None elsewhere."""


class ScrapeServer:
    """From `open` to `close`. `leads`: `process` is the coordinator."""

    def __init__(self, config: Config, process: Scraped, leads: bool = False):
        """Raises UserError where the variable of the token is missing."""
        settings = config.metrics.prometheus
        assert settings is not None
        self._config, self._settings = config, settings
        self._process, self._leads = process, leads
        token = None if settings.token is None else resolved(settings.token, os.environ, "metrics.prometheus.token")
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._server: HttpServer | None = None

    async def open(self) -> str:
        """Returns HOST:PORT. Raises UserError where the port is taken, or all of the range are."""
        made = web.Application(middlewares=[bounded, self._guard])
        made.router.add_get("/metrics", self._metrics)
        if self._leads:
            made.router.add_get("/sd", self._discovery)
        listener = self._listener()
        self._server = HttpServer(made, CONNECTIONS, timeouts.SERVER_GRACE)
        url = await self._server.open(listener, backlog=BACKLOG)
        log.info("metrics for Prometheus at %s/metrics", url)
        return url.partition("//")[2]

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _listener(self) -> socket.socket:
        host, ports = self._config.network.interface, self._config.network.port_range
        port = self._settings.port if self._leads else 0
        if not port:
            return network.listen(host, ports, BACKLOG)
        try:
            return network.listener(host, port, BACKLOG)
        except OSError as error:
            where = network.host_port(host, port)
            raise UserError(f"metrics.prometheus.port: cannot listen on {where}: {os.strerror(error.errno or 0)}") from None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise web.HTTPUnauthorized(text="metrics.prometheus.token is missing, or another\n")
        let_in(request)
        return await handler(request)

    async def _metrics(self, _: web.Request) -> web.Response:
        told = (self._config.run.name, self._process.status(), spans.log.dropped, self._process.figures())
        writing = asyncio.get_running_loop().run_in_executor(self._thread, partial(prometheus.text, *told))
        done, _late = await asyncio.wait({writing}, timeout=timeouts.SCRAPE)
        if not done:
            writing.cancel()
            raise web.HTTPServiceUnavailable(text="a file system does not answer\n")
        return web.Response(body=writing.result(), headers={"Content-Type": f"{prometheus.CONTENT_TYPE}; charset=utf-8"})

    async def _discovery(self, _: web.Request) -> web.Response:
        figures = self._process.figures()
        assert figures is not None
        return web.json_response(prometheus.targets(self._config.run.name, [self._process.status(), *figures.processes]))
