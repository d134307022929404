"""The coordinator's process: it takes registrations, reports the run's progress, and runs the pipeline over the roles.

`python -m services.coordinator --config FILE --ready-fd N`. It writes its address to the descriptor N once it serves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from runtime import run_files, timeouts
from runtime.cluster.nodes import Death, Scale, Scaled
from runtime.cluster.topology import UPDATED, is_group, shares_devices, slots
from runtime.config import Config
from runtime.coordinator import failover
from runtime.coordinator.evaluation import EvaluationRun, ServingRun
from runtime.coordinator.failover import Failover, MembershipStore
from runtime.coordinator.metrics_recorder import EvaluationContext, RunContext, RunHistory, RunSupervisor
from runtime.coordinator.pools import wait_for
from runtime.coordinator.register import Register, Unit, UnitChange, UnitState
from runtime.coordinator.run import INTERRUPTED, TrainingRun, run_figures
from runtime.data.prepared import check_environments, training_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.errors import DeadlineExceeded, SluiceError, UserError
from runtime.evaluation.results import load_held_out
from runtime.ledger.journal import LedgerWriter
from runtime.process import keys, os_process, waiting
from runtime.process.keys import Keys
from runtime.process.spans import STATE, LineStates
from runtime.status import Profile, Progress, Registration, RunFigures, Status, Stop, Topology
from runtime.telemetry.startup import Phases, Startup, collect_rarely, in_order
from runtime.telemetry.trackers import Trackers
from services import process, profiles
from services.nodes import Nodes
from services.rpc.client import Channel, Session, client
from services.rpc.contract import service_of
from services.rpc.server import Handlers, Server

log = logging.getLogger("sluice")


class Peers:
    """Sessions to all units, whatever starts their processes. A unit gets them once its processes share one incarnation."""

    def __init__(self, config: Config, register: Register, keys: Keys | None = None):
        self._keys = keys
        self.term = 0  # the term of this coordinator, which its calls carry
        self._config = config
        self._register = register
        self._began = False  # no session opens before all units are there
        self._opening: set[asyncio.Task[None]] = set()
        self._sessions: dict[str, list[Session]] = {}  # the newest of each unit
        register.subscribe(self._look)

    @property
    def processes(self) -> list[Registration]:
        return [process for unit in self._register.units() for process in unit.processes if process is not None]

    def admit(self, registration: Registration) -> None:
        """Register a process that has loaded and serves. Raises UserError if the run has no place for it."""
        if self._register.admit(registration):
            one, seconds = registration, in_order(registration.seconds).items()
            took = ", ".join(f"{phase} {value:.1f} s" for phase, value in seconds)
            log.info("%s registered: pid %d at %s, %s", one.name, one.pid, one.address, took)

    async def connect(self, began: float) -> None:
        """Open the sessions of all units placed so far. Raises DeadlineExceeded `deadlines.start` after `began`."""
        timeout = self._config.deadlines.start
        first = [unit.name for unit in self._register.units()]  # later units are not waited for

        def missing() -> list[str]:
            late = self._register.units("", UnitState.PLACED, UnitState.STARTED, UnitState.LOST)
            return [name for unit in late if unit.name in first for name in _absent(unit)]

        if late := await wait_for(self._register, missing, began + timeout):
            raise DeadlineExceeded(", ".join(late), "start", "did not register", timeout)
        self._began = True
        await asyncio.gather(*(self._open(unit, timeout) for unit in self._register.units("", UnitState.REGISTERED)))

    async def take_up(self) -> None:
        """Open sessions to the units that had registered with an earlier coordinator. A unit that cannot be reached is lost."""
        self._began = True
        for unit in self._register.units("", UnitState.REGISTERED):
            self._connect(unit, self._config.deadlines.keepalive)
        await asyncio.gather(*self._opening, return_exceptions=True)

    async def stop_all(self) -> None:
        """Send Stop to every process. The launcher ends a process that does not answer."""
        for task in self._opening:
            task.cancel()
        connected = [unit for unit in self._register.units() if unit.state.connected]
        sessions = [session for unit in connected for session in self._sessions[unit.name]]
        command = Stop(drain_seconds=0.0, term=self.term)
        stops = (asyncio.wait_for(session.unary("Process", "Stop", command), timeouts.STOP_CALL) for session in sessions)
        for session in sessions:
            session.ends()
        for session, outcome in zip(sessions, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s did not confirm the stop: %s", session.name, outcome or type(outcome).__name__)
        for of_unit in self._sessions.values():
            await _close(of_unit)

    def _look(self, change: UnitChange) -> None:
        unit = change.unit
        if unit.state is UnitState.LOST:
            log.warning("%s (incarnation %d) is lost: %s", unit.name, unit.incarnation, unit.reason)
        elif unit.state is UnitState.REGISTERED and self._began:
            self._connect(unit, self._config.deadlines.start)

    def _connect(self, unit: Unit, timeout: float) -> None:
        task = asyncio.create_task(self._open(unit, timeout))
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, unit))

    def _opened(self, unit: Unit, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, SluiceError):
                self._register.lose(unit, str(error))
            else:
                log.error("%s (incarnation %d) could not be connected", unit.name, unit.incarnation, exc_info=error)
                self._register.lose(unit, f"{type(error).__name__}: {error}")

    async def _open(self, unit: Unit, timeout: float) -> None:
        """Open the unit's sessions and use them from now on. Raises DeadlineExceeded."""
        service, former = service_of(unit.role, self._config), self._sessions.get(unit.name, [])
        silence, sessions = self._config.deadlines.keepalive, []
        for one in unit.processes:
            channel = Channel(one.address, self._keys, keys.process(one.name, one.incarnation), silence)
            sessions.append(Session(channel, one.name, service, one.machine, self.term))
        try:
            await asyncio.gather(*(session.open(timeout) for session in sessions))
            if self._register.connect(client(unit.role, sessions, self._config, unit.incarnation)):
                self._sessions[unit.name], sessions = sessions, former
        finally:
            await _close(sessions)  # the new ones if the unit was lost or dismissed meanwhile, else the former ones


async def _close(sessions: Sequence[Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


def _absent(unit: Unit) -> list[str]:
    """Return the names of the unit's processes that have not registered with its incarnation."""
    pairs = zip(unit.ranks, unit.processes, strict=True)
    return [name for name, process in pairs if process is None or process.incarnation != unit.incarnation] or [unit.name]


class CoordinatorProcess(RunSupervisor):
    def __init__(self, config: Config, phases: Phases, trains: bool = True, address: str = ""):
        """Create it. `trains`: False for an evaluation alone. `address`: of the earlier coordinator that this one replaces."""
        super().__init__(Register(), Progress(steps=config.training.steps))
        self._config = config
        self._phases = phases
        self._trains = trains
        self._folder = Path(config.run.dir)
        self._started = time.monotonic()
        self._launched = float(os.environ.get("SLUICE_LAUNCHED", phases.born))
        self._states = LineStates()
        self._register.subscribe(self._look)
        self._keys = keys.holder(config.network, keys.COORDINATOR, keys.known(self._folder))
        self._peers = Peers(config, self._register, self._keys)
        self._nodes = Nodes(config, trains, self._register)
        self._failed: asyncio.Future[None]  # fails when a node reports a death that the run cannot survive
        self._run: TrainingRun | None = None
        self._evaluation: EvaluationRun | ServingRun | None = None
        self._address, self._metrics = address, ""
        self._follows = bool(address)
        self._ledger: LedgerWriter | None = None
        self._term = 1
        self._left: Failover | None = None  # the state that an earlier coordinator left
        self._finished = False  # whether an earlier coordinator has finished this run
        self._keeper: MembershipStore | None = None
        self._absent: list[Death] = []  # trainer and critic, to be started again once their devices are free

    async def serve(self, ready_fd: int | None) -> None:
        """Run the coordinator to its end. `ready_fd`: the descriptor that gets the address. Raises UserError, ServiceFault."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for number in os_process.ending_signals():
            loop.add_signal_handler(number, self._interrupt)
        os_process.heed_signals()
        server = Server(self._handlers(), silence=self._config.deadlines.keepalive, keys=self._keys)
        settings, network = self._config.services.coordinator, self._config.network
        try:
            here = settings.host or network.interface, settings.port, network.port_range
            self._address = await server.rebind(self._address) if self._address else server.bind(*here)
        except UserError as error:
            if network.port_range is not None and not settings.port:
                raise  # the error names the range
            host = "services.coordinator.host" if settings.host else "network.interface"
            raise UserError(f"{'services.coordinator.port' if settings.port else host}: {error}") from None
        async with process.exposed(self._config, self.status, self.figures) as self._metrics:
            await self._lead(server, ready_fd)

    async def _lead(self, server: Server, ready_fd: int | None) -> None:
        """Serve, and run the training or the evaluation to its end."""
        if self._trains:
            await self._open_ledger()  # before any call: it gives the term and what an earlier coordinator left
        await server.start()
        await server.set_serving(True)
        where = self._folder / run_files.ADDRESS
        await waiting.done(lambda: where.write_text(self._address), where)  # where nodes and commands find this coordinator
        if ready_fd is not None:
            os.write(ready_fd, f"{self._address}\n".encode())
            os.close(ready_fd)
        end = "failed"
        try:
            # A node's report of a fatal death fails `_failed`: the work is cancelled, all is closed, then the error is raised.
            await waiting.unless_failed({self._failed}, self._train() if self._trains else self._evaluate())
            end = "finished"
        finally:
            (self._folder / run_files.ADDRESS).unlink(missing_ok=True)
            await self._peers.stop_all()  # each process gets STOP_CALL seconds to confirm
            self.report(msgspec.structs.replace(self._progress, phase=end))
            self._nodes.close()
            self._states.close()
            await server.stop(timeouts.SERVER_GRACE)  # last: watchers still read the final phase

    async def _open_ledger(self) -> None:
        """Open the ledger, begin a term, and look for processes that an earlier coordinator of this run has left."""
        folder, patience = self._folder / run_files.LEDGER, self._config.deadlines.start
        self._ledger = await (failover.reopened(folder, patience) if self._follows else LedgerWriter.open(folder))
        self._term = self._peers.term = await self._ledger.begin_term()
        self._left = await failover.left_by(self._ledger, run_files.run_id(self._folder))
        summary = self._folder / run_files.SUMMARY
        if self._left is None:
            summary.unlink(missing_ok=True)  # of an earlier run: from here on, the summary says that this run is finished
        else:
            self._finished = summary.exists()
            done, steps = self._left.course.history.version.step, self._config.training.steps
            self._progress = Progress(phase="recovering", step=done, steps=steps, detail="the coordinator was lost")
            self._nodes.take_up(self._left.members)
        began = self._term if self._left is None else self._left.members.began
        self._nodes.run = f"{run_files.run_id(self._folder)}.{began}"
        self._keeper = MembershipStore(self._register, self._ledger, partial(self._nodes.members, began))

    async def _train(self) -> None:
        assert self._ledger is not None
        if self._finished:
            log.info("the run was finished as the earlier coordinator was lost: ends its processes")
            async with _closed(self._ledger):
                await self._nodes.rejoined(self._config.deadlines.keepalive)  # they read the end here
            return
        if self._left is not None:
            log.info("takes over from the earlier coordinator: version %s is done", self._left.course.history.version)
        if self._left is None:
            await self._nodes.placed(self._started, self._wait_for_nodes)
        placed = time.monotonic()
        context = await self._context(self._ledger)  # reads the data while the services start
        async with _closed(context.trackers, context.ledger):
            if self._left is not None:
                await self._peers.take_up()  # a unit that does not connect within `deadlines.keepalive` is lost
                self._run = await TrainingRun.taken_up(context, self._register, self._left.course)
            else:
                before = time.monotonic()
                await self._peers.connect(placed)  # returns once every placed unit has its sessions
                context.history.folder = self._nodes.resume()
                self._run = TrainingRun(context, self._register)
                context.startup.phases["services"] = time.monotonic() - before
                context.startup.processes |= {one.name: in_order(one.seconds) for one in self._peers.processes}
            self._run.pool.slots |= slots(self._nodes.config)  # the number of rollouts may have changed since
            if self.interrupted:
                self._run.stop(INTERRUPTED)
            summary = await self._run.execute()  # until the last step, a stop, or a fault
        await waiting.done(lambda: summary.write(self._folder), self._folder)  # after the trackers and the ledger are closed

    async def _evaluate(self) -> None:
        """Run the evaluation. With `gateway.serve`, only serve the gateway until the run is stopped."""
        config, serves = self._config, self._config.gateway is not None and self._config.gateway.serve
        await self._nodes.placed(self._started, self._wait_for_nodes)
        placed = time.monotonic()  # the rollouts load their weights while this process reads the data
        tokenizer = Tokenizer.of(config)
        held_out = [] if serves else load_held_out(config, tokenizer)
        trackers = Trackers(self._config, self._folder)
        context = EvaluationContext(
            config=config,
            trackers=trackers,
            held_out=held_out,
            text=tokenizer.texts,
            stop_token_ids=tokenizer.stop_ids,
            supervisor=self,
            keys=self._keys,
        )
        async with _closed(trackers):
            await self._peers.connect(placed)  # returns once every placed unit has its sessions
            self._evaluation = (ServingRun if serves else EvaluationRun)(context, self._register)
            if self.interrupted:
                self._evaluation.stop()
            await self._evaluation.execute()

    async def _context(self, ledger: LedgerWriter) -> RunContext:
        """Read the data while the services start."""
        config, before = self._config, time.monotonic()
        phases = {"launcher": self._phases.born - self._launched, "coordinator": before - self._phases.born}
        tokenizer = Tokenizer.of(config)
        train = training_prompts(config.data, tokenizer)
        log.info("prompts: %s", train.report())
        held_out = load_held_out(config, tokenizer, train.problems)
        tasks = chain(train.problems, *(each.prompts.problems for each in held_out))
        check_environments(list(tasks), config.services.environment)
        began = Startup.read(self._folder) if self._left is not None else None  # the times of the run's own start
        phases["data"] = time.monotonic() - before
        return RunContext(
            config=config,
            ledger=ledger,
            run=run_files.run_id(self._folder),
            term=self._term,
            trackers=Trackers(self._config, self._folder),
            train=train,
            held_out=held_out,
            text=tokenizer.texts,
            stop_token_ids=tokenizer.stop_ids,
            supervisor=self,
            keys=self._keys,
            epoch=time.time() - time.monotonic(),
            launched=self._launched,
            history=RunHistory() if self._left is None else self._left.course.history,
            holders=self._nodes.holders,
            startup=began or Startup(phases=phases, processes={"coordinator": self._phases.seconds}),
        )

    def _interrupt(self, _: Stop | None = None) -> None:
        self.interrupted = True
        self.report(self._progress)
        if self._run is not None:
            self._run.stop(INTERRUPTED)
        if self._evaluation is not None:
            self._evaluation.stop()

    # ------------------------------------------------------------------------------------------ handlers of calls

    def _handlers(self) -> dict[str, Handlers]:
        profile = profiles.Profiles("coordinator", self._profile).profile
        of_process: Handlers = {"Status": self.status, "Stop": self._interrupt, "Profile": profile}
        of_coordinator: Handlers = {
            "Register": self._register_process,
            "Processes": self._processes,
            "Watch": self.watch,
            "Join": self._nodes.join,
            "ReportPaths": self._nodes.report_paths,
            "ReportDeath": self._died,
            "Scale": self._scale,
        }
        return {"Process": of_process, "Coordinator": of_coordinator}

    async def _profile(self, asked: Profile) -> list[Path]:
        return await profiles.by_spy(profiles.stem(self._config, "coordinator", 0, asked.step), asked)

    async def _register_process(self, registration: Registration) -> None:
        self._peers.admit(registration)
        if self._keeper is not None:  # a process registers once: the next coordinator reads the ledger
            await self._keeper.written()

    def _processes(self, _: None) -> Topology:
        return Topology(processes=self._peers.processes)

    def _scale(self, wanted: Scale) -> Scaled:
        scaled = self._nodes.scale(wanted)
        if self._run is not None:
            self._run.pool.slots |= slots(self._nodes.config)
        return scaled

    def _died(self, death: Death) -> None:
        """Handle a death that the node leaves to the coordinator: start the group again, go on without it, or fail the run."""
        log.warning("%s (incarnation %d, node %s) ended: %s", death.name, death.incarnation, death.node, death.reason)
        self._register.lose(death, death.reason)
        if self._failed.done() or self._finished:
            return
        role = death.name.rpartition("-")[0]
        if death.mistake:
            self._failed.set_exception(UserError(death.reason))
        elif self._progress.phase == "starting":
            self._failed.set_exception(SluiceError(death.reason))
        elif is_group(self._config, role):
            if shares_devices(self._config, role) and self._run is not None and not self._run.attempt.vacated:
                self._absent.append(death)  # rollouts may still have its devices
            else:
                self._start_again(death)
        elif not (self._spans(death) and self._restarted(death)) and not self._register.has_others(death):
            self._failed.set_exception(SluiceError(death.reason))

    def _spans(self, death: Death) -> bool:
        unit = self._register.find(death.name)
        return unit is not None and len(unit.ranks) > 1

    def _restarted(self, death: Death) -> bool:
        step = self._run.context.history.version.step if self._run is not None else 0
        return self._nodes.start_again(death.name.rpartition("-")[0], death, step)

    def _start_again(self, death: Death) -> None:
        role = death.name.rpartition("-")[0]
        if not self._restarted(death) and not self._failed.done():
            allowed = getattr(self._config.services, role).restarts
            why = f"; services.{role}.restarts allows no further start" if allowed else ""
            self._failed.set_exception(SluiceError(death.reason + why))

    def step_over(self) -> None:
        elastic = any(getattr(self._config.services, role).elastic for role in UPDATED)
        for role in self._nodes.grown() if elastic and not self.interrupted else []:
            (unit,) = self._register.units(role)
            if unit.state is UnitState.SERVING:
                self._register.lose(unit, "starts again with more ranks")

    def vacated(self) -> None:
        absent, self._absent = self._absent, []
        for death in absent:
            self._start_again(death)

    def status(self, _: None = None) -> Status:
        progress = self._progress
        gauges: dict[str, float] = {"step": progress.step, "late": self._register.late}
        done, total = (progress.step, progress.steps) if self._trains else (progress.done, progress.total)
        detail = f"{self._config.run.name}: {progress.phase} {done}/{total}"
        if progress.phase in ("starting", "recovering") and progress.detail:
            detail += f": {progress.detail}"
        if self._ledger is not None and self._ledger.waits:
            detail += f"; {self._ledger.waits}"
        if self._run is not None:
            gauges |= self._run.gauges()
            detail += "".join(f"; {each}" for each in self._run.status_lines())
        where: dict[str, Any] = {"pid": os.getpid(), "address": self._address, "metrics": self._metrics}
        where["uptime_seconds"] = time.monotonic() - self._started
        return Status(role="coordinator", name="coordinator", state="ready", detail=detail, gauges=gauges, **where)

    def figures(self) -> RunFigures:
        return run_figures(self._config, self._register, self._progress, self._run)

    def _wait_for_nodes(self, missing: str) -> None:
        self.report(msgspec.structs.replace(self._progress, detail=f"waits for {missing}"))

    def _look(self, change: UnitChange) -> None:
        self._states.enter(f"{STATE}{change.unit.name}", change.unit.state.value, change.unit.reason)
        if UnitState.LOST in (change.was, change.unit.state):
            self.report(self._progress)


@asynccontextmanager
async def _closed(*opened: Trackers | LedgerWriter) -> AsyncIterator[None]:
    """Close each object at the end. After a failure of the block, log a second failure and raise the first."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised again once everything is closed
        for each in opened:
            try:
                await each.close()
            except SluiceError as second:
                log.warning("%s", second)
        raise waiting.first_error(error) from None
    for each in opened:
        await each.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="the resolved configuration")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--address", default="", help="HOST:PORT of the earlier coordinator that this one replaces")
    parser.add_argument("--evaluate", action="store_true", help="no training: evaluate the weights that the rollouts load")
    arguments = parser.parse_args()
    collect_rarely()

    def work(config: Config, phases: Phases) -> Coroutine[Any, Any, None]:
        process = CoordinatorProcess(config, phases, not arguments.evaluate, arguments.address)
        return process.serve(arguments.ready_fd)

    process.lead(arguments.config, "coordinator", work)


if __name__ == "__main__":
    main()
