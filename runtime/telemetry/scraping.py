"""The HTTP server that serves a process's metrics to Prometheus. At the coordinator, /sd lists every process with its address.

Metrics are computed only on request: plain values on the event loop, their text by one thread for all requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, get_args

from aiohttp import web
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime import timeouts
from runtime.config import Config
from runtime.config.secret_values import resolved
from runtime.errors import UserError
from runtime.process import network, spans
from runtime.process.http_server import Handler, HttpServer, bounded, let_in
from runtime.status import Registration, RunFigures, RunPhase, State, Status

_SECONDS = re.compile(r"timing/|(gateway/)?loop_lag")  # figures in seconds without the unit in the name


def labels(run: str, process: Status | Registration) -> dict[str, str]:
    """Return the labels of a process's own metrics, and of the process as a target."""
    return {"run": run, "role": process.role, "process": process.name}


def text(run: str, status: Status, dropped: int, figures: RunFigures | None) -> bytes:
    """Format the metrics of a process. `dropped`: count of dropped spans. `figures`: at the coordinator."""
    return generate_latest(_Collected(run, status, dropped, figures))


def metric_name(prefix: str, figure: str) -> str:
    """Convert `timing/all` to `PREFIX_timing_all_seconds`. A non-ASCII letter becomes its number, other characters `_`."""
    name = re.sub(r"[^a-zA-Z0-9_]", lambda found: "_" if found[0].isascii() else f"u{ord(found[0]):x}", figure)
    return f"{prefix}_{name}{'_seconds' if _SECONDS.match(figure) else ''}"


class _Collected:
    """A collector for the library. Of two metrics of the same name the first counts: two figures may map to one name."""

    def __init__(self, run: str, status: Status, dropped: int, figures: RunFigures | None):
        self._labels = labels(run, status)
        self._found: dict[str, Metric] = {}
        states = {each: float(each == status.state) for each in get_args(State)}
        self._add("sluice_process_state", "1 for the state that the process is in.", states, "state")
        self._add("sluice_spans_dropped_total", "Spans that the process's file has no room for.", dropped)
        if figures is None:
            self._of_service(status)
        else:
            self._of_run(figures)

    def collect(self) -> Iterator[Metric]:
        yield from self._found.values()
        yield from ProcessCollector(registry=None).collect()

    def _add(self, name: str, meaning: str, value: float | Mapping[Any, float], by: str = "") -> None:
        """Add a counter if the name ends with `_total`, else a gauge. `value`: one value, or several by the label `by`."""
        if name in self._found:
            return
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, meaning, labels=[*self._labels, *([by] if by else [])])
        for key, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric([*self._labels.values(), *([str(key)] if by else [])], one)
        self._found[name] = family

    def _of_service(self, status: Status) -> None:
        calls = status.calls
        ended = {"answered": calls.answered, "failed": calls.failed, "withdrawn": calls.withdrawn}
        self._add("sluice_process_version_step", "Optimizer steps that made the weights that it has.", status.version.step)
        self._add("sluice_calls_open", "Calls to the process that are not answered yet.", calls.open)
        self._add("sluice_calls_total", "Calls to the process that have ended, by how.", ended, "outcome")
        self._add("sluice_call_seconds", "From a call to its answer, the mean over the recent ones.", calls.seconds)
        for name, value in status.gauges.items():
            meaning = f"{name}, as {status.role} reports it with its status."
            self._add(metric_name(f"sluice_{status.role}", name), meaning, value)

    def _of_run(self, run: RunFigures) -> None:
        progress, add = run.progress, self._add
        phases = {each: float(each == progress.phase) for each in get_args(RunPhase)}
        add("sluice_run_phase", "1 for the phase that the run is in.", phases, "phase")
        add("sluice_run_step", "Optimizer steps so far.", progress.step)
        add("sluice_run_steps", "Optimizer steps of the whole run.", progress.steps)
        add("sluice_run_staleness_limit", "Versions that a sample may be old: training.staleness.", run.staleness)
        add("sluice_groups", "Groups, by state; of those that are over, since the coordinator's start.", run.groups, "state")
        add("sluice_rollouts", "Rollouts, by state.", run.rollouts, "state")
        add("sluice_units_lost", "Processes, or groups of ranks, that the run does without, by role.", run.lost, "of_role")
        add("sluice_restarts_total", "Processes, or groups of ranks, that came in another's place.", run.restarts, "of_role")
        add("sluice_mismatch_alarms_total", "Probes of rollouts over mismatch.limit.", run.alarms)
        with suppress(OSError):
            disk = shutil.disk_usage(run.folder)
            add("sluice_run_disk_free_bytes", "Free on the file system of the run's folder.", disk.free)
            add("sluice_run_disk_size_bytes", "Size of the file system of the run's folder.", disk.total)
        if run.stepped:
            add("sluice_run_step_timestamp_seconds", "When the newest step ended, since the epoch.", run.stepped)
        for name, value in run.newest.items():
            by = "value" if isinstance(value, dict) else ""
            add(metric_name("sluice_step", name), f"{name} of the newest step, as in metrics.jsonl.", value, by)


log = logging.getLogger("sluice")

BACKLOG = 16  # connections that wait for the event loop
CONNECTIONS = 64  # at once


class ScrapeServer:
    def __init__(self, config: Config, status: Callable[[], Status], figures: Callable[[], RunFigures] | None = None):
        """Prepare the server; `figures`: the coordinator's. Raises UserError if the token's variable is missing."""
        settings = config.metrics.prometheus
        assert settings is not None
        self._config, self._settings = config, settings
        self._status, self._figures = status, figures
        token = None if settings.token is None else resolved(settings.token, os.environ, "metrics.prometheus.token")
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._server: HttpServer | None = None

    async def open(self) -> str:
        """Listen, and return HOST:PORT. Raises UserError if the port, or every port of the range, is in use."""
        made = web.Application(middlewares=[bounded, self._guard])
        made.router.add_get("/metrics", self._metrics)
        if self._figures is not None:
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
        port = 0 if self._figures is None else self._settings.port
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
            raise web.HTTPUnauthorized(text="metrics.prometheus.token is missing or wrong\n")
        let_in(request)
        return await handler(request)

    async def _metrics(self, _: web.Request) -> web.Response:
        values = (self._config.run.name, self._status(), spans.log.dropped, self._figures and self._figures())
        writing = asyncio.get_running_loop().run_in_executor(self._thread, partial(text, *values))
        done, _late = await asyncio.wait({writing}, timeout=timeouts.SCRAPE)
        if not done:
            writing.cancel()
            raise web.HTTPServiceUnavailable(text="a file system does not answer\n")
        return web.Response(body=writing.result(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _discovery(self, _: web.Request) -> web.Response:
        assert self._figures is not None
        every: list[Status | Registration] = [self._status(), *self._figures().processes]
        found = [{"targets": [each.metrics], "labels": labels(self._config.run.name, each)} for each in every if each.metrics]
        return web.json_response(found)  # in the format of Prometheus' HTTP service discovery
