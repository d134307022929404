"""What every service process does around its role: arguments, signals, serving, registration, an orderly end.

Exit codes: 0 stopped as asked, 2 a mistake that the user can correct (the last line of the log names it), 1 a fault."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import uvloop

import services
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.errors import DeadlineExceeded, SluiceError, Unanswered, Unreachable, UserError
from runtime.process import keys, network, os_process, spans
from runtime.process.keys import Keys
from runtime.process.waiting import unless_failed
from runtime.status import Profile, Registration, RunFigures, State, Status, Stop
from runtime.telemetry.startup import Phases, uncollected
from runtime.types import PolicyVersion
from services import profiles
from services.blobs import BlobClient
from services.rpc import client, contract
from services.rpc.server import Calls, Fence, Handler, Handlers, Server

log = logging.getLogger("sluice")

RATE_WINDOW = 0.5  # seconds
TORCH = ("torch",)
TRANSFORMERS = ("torch", "runtime.models.hf_policy", "transformers.modeling_utils")


class Service(ABC):
    """A role, as its process sees it. For each method of `service` in proto/ it has a method of that name in snake case. The
    method takes the command and returns an awaitable of the answer. `load` may block: it runs in a thread."""

    role: str
    libraries: Sequence[str] = ()  # slow imports that `load` needs; a start-up phase of their own
    background: asyncio.Future[None] | None = None  # the process ends when this work fails
    keys: Keys | None = None  # of this process
    profiled_for: profiles.Unit = "seconds"
    torch_thread: Executor | None = None  # of its torch computations, one at a time

    def __init__(self, config: Config, name: str, rank: int):
        self.config = config
        self.name = name
        self.rank = rank
        self.calls = Calls(name)

    @cached_property
    def blobs(self) -> BlobClient:
        """The client of the agents that hold blobs."""
        return BlobClient(self.name, self.keys)

    @abstractmethod
    def load(self) -> None:
        """Import heavy modules and build the engine."""

    async def start(self) -> None:  # noqa: B027 - most roles need nothing on the loop
        """Do what must happen on the event loop, after `load`."""

    async def close(self) -> None:  # noqa: B027
        """Free what `load` and `start` made."""

    @property
    def service(self) -> str:
        """The name in proto/ of the service that the role serves."""
        return contract.service_of(self.role, self.config)

    def handler(self, method: contract.Method) -> Handler:
        handler: Handler = getattr(self, method.handler)
        return handler

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion()

    @property
    def state(self) -> State:
        """The state in a status report once the process serves."""
        return "ready"

    async def profile(self, asked: Profile) -> list[Path]:
        """Record a profile, and return its files. Raises UserError if such a profile is impossible here, and OSError."""
        path, thread = profiles.stem(self.config, self.name, self.rank, asked.step), self.torch_thread
        if thread is None:
            return await profiles.by_spy(path, asked)
        return await profiles.of_thread(thread, path, asked.memory, asyncio.sleep(asked.seconds))

    def gauges(self) -> dict[str, float]:
        """Return figures for the status call. Keys that end in `_total` are counters; the status derives their rates."""
        return {"groups_total": self.calls.stats.answered, "busy_seconds_total": self.calls.busy_seconds}


def main(make: Callable[[Config, str, int], Service]) -> None:
    """Run `python -m services.ROLE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="the resolved configuration")
    parser.add_argument("--name", required=True)
    parser.add_argument("--coordinator", required=True, help="host:port")
    arguments = parser.parse_args()

    def work(config: Config, phases: Phases) -> Coroutine[Any, Any, None]:
        for name, value in network.transport_variables(config.network.interface).items():
            os.environ.setdefault(name, value)
        service = make(config, arguments.name, int(os.environ.get("RANK", "0")))
        os_process.name_process(service.name)
        service.keys = keys.given(config.network, service.name)
        return ServiceProcess(service, arguments.coordinator, phases).run()

    lead(arguments.config, arguments.name, work)


def lead(path: Path, name: str, work: Callable[[Config, Phases], Coroutine[Any, Any, None]]) -> None:
    """Run the process `name` to its end, and exit. `work` takes the configuration in `path` and the start-up phases so far."""
    os_process.die_with_parent()
    os_process.stacks_on_signal()
    os_process.raise_descriptor_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    phases = Phases()
    phases.mark("interpreter", services.BEGAN)
    phases.mark("imports")
    try:
        config = loading.load(path, ())
        uvloop.install()
        spans.log.open(config, name)
        asyncio.run(spans.with_heartbeats(config, work(config, phases)))
    except SluiceError as error:
        mistake = isinstance(error, UserError)
        os_process.say_errors(str(error).splitlines() if mistake else [str(error)])
        sys.exit(os_process.MISTAKE if mistake else 1)
    finally:
        spans.log.close()


@asynccontextmanager
async def exposed(
    config: Config, status: Callable[[], Status], figures: Callable[[], RunFigures] | None = None
) -> AsyncIterator[str]:
    """Serve metrics to Prometheus in the block, if configured. Yields HOST:PORT or "". Raises UserError without a port."""
    if config.metrics.prometheus is None:
        yield ""
        return
    from runtime.telemetry.scraping import ScrapeServer  # takes 0.3 s to import

    server = ScrapeServer(config, status, figures)
    try:
        yield await server.open()
    finally:
        await server.close()


class ServiceProcess:
    """One service process, from binding its port to its end."""

    def __init__(self, service: Service, coordinator: str, phases: Phases):
        self._service = service
        self._coordinator = coordinator
        self._phases = phases
        self._stop = asyncio.Event()
        self._drain_seconds = service.config.deadlines.stop
        self._state: State = "starting"
        self._loaded = False  # whether the service has figures
        self._address = self._metrics = ""
        self._previous: tuple[float, dict[str, float]] = (phases.born, {})  # a time, and the service's figures then
        self._fence = Fence()
        self._profiles = profiles.Profiles(service.name, self._profile, service.profiled_for)

    async def run(self) -> None:
        service, settings = self._service, self._service.config.network
        rows = [method for (owner, _), method in contract.METHODS.items() if owner == service.service]
        handlers: dict[str, Handlers] = {
            "Process": {"Status": self.status, "Stop": self._end, "Profile": self._profiles.profile},
            service.service: {row.name: service.calls.counted(row, service.handler(row)) for row in rows},
        }
        server = Server(handlers, silence=service.config.deadlines.keepalive, fence=self._fence, keys=service.keys)
        self._address = server.bind(settings.interface, 0, settings.port_range)
        await server.start()  # status calls are answered while `load` runs
        await server.set_serving(False)
        loop, grace = asyncio.get_running_loop(), max(timeouts.INTERRUPTED_GRACE, service.config.deadlines.stop)
        # A scheduler that ends a job signals every process. The coordinator sends Stop once all is saved; `grace` bounds that.
        for number in os_process.ending_signals():
            loop.add_signal_handler(number, loop.call_later, grace, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        os_process.heed_signals()
        try:
            async with exposed(service.config, self.status) as self._metrics:
                await self._load()
                await self._register()  # until the coordinator has answered: from here on it may call
                self._state = "ready"
                await server.set_serving(True)
                log.info("%s serves on %s", service.name, self._address)
                background = () if service.background is None else (service.background,)
                await unless_failed(background, self._stop.wait())  # until Stop or SIGINT, or the background work fails
                self._state = "draining"
                await service.calls.drain(self._drain_seconds)
        finally:
            self._state = "draining"
            await server.set_serving(False)
            await self._profiles.close()  # torch cannot bear an end in the middle of a profile
            if self._loaded:
                await service.close()
            await service.blobs.close()
            await server.stop(timeouts.SERVER_GRACE)  # last: status calls are answered up to here

    async def _load(self) -> None:
        spans.work.begin("load", "load")
        with uncollected():
            for library in self._service.libraries:
                await asyncio.to_thread(importlib.import_module, library)
            if self._service.libraries:
                self._phases.mark("libraries")
            await asyncio.to_thread(self._service.load)
        self._service.blobs.serve_threads()
        await self._service.start()
        spans.work.end("load")
        self._loaded = True
        self._phases.mark("load")

    async def _register(self) -> None:
        registration = Registration(
            role=self._service.role,
            name=self._service.name,
            rank=self._service.rank,
            address=self._address,
            pid=os.getpid(),
            host=socket.gethostname(),
            seconds=self._phases.seconds,
            incarnation=int(os.environ.get(os_process.INCARNATION, "0")),
            machine=os_process.machine(),
            metrics=self._metrics,
        )
        deadlines = self._service.config.deadlines
        until = time.monotonic() + max(deadlines.start, deadlines.coordinator)
        while True:
            left = until - time.monotonic()
            try:
                return await self._call_coordinator(registration, left)
            except Unanswered:
                raise
            except (Unreachable, DeadlineExceeded):  # the coordinator was lost, or is not there yet: wait for the next one
                if left < timeouts.CONTROL_CALL:
                    raise
            if self._service.config.services.coordinator.standby:  # another node leads meanwhile
                folder = Path(self._service.config.run.dir)
                self._coordinator = await asyncio.to_thread(run_files.coordinator_address, folder, self._coordinator)

    async def _call_coordinator(self, registration: Registration, seconds: float) -> None:
        """Register within `seconds`. Raises DeadlineExceeded if no process accepts the connection for a part of that time."""
        async with client.Channel(self._coordinator, self._service.keys) as channel:
            if seconds >= timeouts.CONTROL_CALL:
                await channel.ready("coordinator", timeouts.CONTROL_CALL)
            await client.call(channel, "coordinator", contract.METHODS["Coordinator", "Register"], registration, seconds)

    def status(self, _: None = None) -> Status:
        """Return the status. Rates are means over the time since the previous call, at least `RATE_WINDOW`."""
        service, now = self._service, time.monotonic()
        gauges, (then, earlier) = service.gauges() if self._loaded else {}, self._previous
        if now - then >= RATE_WINDOW:
            self._previous = (now, gauges)
        rates = {
            name.removesuffix("_total"): (value - earlier.get(name, 0.0)) / max(now - then, 1e-3)
            for name, value in gauges.items()
            if name.endswith("_total")
        }
        return Status(
            role=service.role,
            name=service.name,
            state=service.state if self._state == "ready" else self._state,
            detail=spans.work.shown(),
            version=service.version if self._loaded else PolicyVersion(),
            calls=service.calls.stats,
            rates=rates,
            gauges=gauges,
            pid=os.getpid(),
            address=self._address,
            uptime_seconds=now - self._phases.born,
            metrics=self._metrics,
        )

    def _end(self, request: Stop) -> None:
        if request.term:
            self._fence.check(request.term)
        self._drain_seconds = request.drain_seconds
        self._stop.set()

    async def _profile(self, asked: Profile) -> list[Path]:
        if not self._loaded:
            raise UserError("is still starting")
        return await self._service.profile(asked)
