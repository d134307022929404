"""The sessions of a run: opened to every unit that has registered, and closed once another has come in its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from runtime import timeouts
from runtime.config import Config
from runtime.coordinator.register import Register, Unit, UnitChange, UnitState
from runtime.coordinator.roles import wait_for
from runtime.errors import DeadlineExceeded, SluiceError
from runtime.process.keys import Keys
from runtime.status import Registration, Stop
from runtime.telemetry.startup import in_order
from services.rpc.client import client
from services.rpc.contract import service_of
from services.rpc.session import Session

log = logging.getLogger("sluice")


class Peers:
    """Whoever starts the processes, a unit is talked to once all of it has registered with one incarnation."""

    def __init__(self, config: Config, register: Register, keys: Keys | None = None):
        self._keys = keys
        self.term = 0
        """The coordinator's, under which it speaks."""
        self._config = config
        self._register = register
        self._began = False  # no session is opened before all are there
        self._opening: set[asyncio.Task[None]] = set()
        self._sessions: dict[str, list[Session]] = {}  # of each unit the newest
        register.subscribe(self._look)

    @property
    def processes(self) -> list[Registration]:
        """The newest of each that has registered."""
        return [process for unit in self._register.units() for process in unit.processes if process is not None]

    def admit(self, registration: Registration) -> None:
        """A process has loaded, and serves. Raises UserError for one that the run has no place for."""
        if self._register.admit(registration):
            log.info("%s registered: pid %d at %s, %s", *_told(registration))

    async def connect(self, began: float) -> None:
        """Wait until everybody who has a place now has registered, and open a session to each. Raises DeadlineExceeded when
        that is not done `deadlines.start` after `began`."""
        timeout = self._config.deadlines.start
        first = [unit.name for unit in self._register.units()]  # who comes besides is not waited for

        def missing() -> list[str]:
            late = self._register.units("", UnitState.PLACED, UnitState.STARTED, UnitState.LOST)
            return [name for unit in late if unit.name in first for name in _absent(unit)]

        if late := await wait_for(self._register, missing, began + timeout):
            raise DeadlineExceeded(", ".join(late), "start", "did not register", timeout)
        self._began = True
        timeout = self._config.deadlines.start
        await asyncio.gather(*(self._open(unit, timeout) for unit in self._register.units("", UnitState.REGISTERED)))

    async def take_up(self) -> None:
        """Open a session to each that had registered with an earlier coordinator. One that is not to be reached is lost."""
        self._began = True
        for unit in self._register.units("", UnitState.REGISTERED):
            self._connect(unit, self._config.deadlines.silence)
        await asyncio.gather(*self._opening, return_exceptions=True)

    async def stop_all(self) -> None:
        """Tell every process to stop; one that does not answer is the launcher's to end."""
        for task in self._opening:
            task.cancel()
        connected = [unit for unit in self._register.units() if unit.state.connected]
        sessions = [session for unit in connected for session in self._sessions[unit.name]]
        order = Stop(drain_seconds=0.0, term=self.term)
        stops = (asyncio.wait_for(session.unary("Process", "Stop", order), timeouts.STOP_CALL) for session in sessions)
        for session in sessions:
            session.ends()
        for session, outcome in zip(sessions, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s did not take the order to stop: %s", session.name, outcome or type(outcome).__name__)
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
        """Talk to the unit from now on. Raises DeadlineExceeded."""
        service, former = service_of(unit.role, self._config), self._sessions.get(unit.name, [])
        silence = self._config.deadlines.silence
        sessions = [
            Session(one.address, one.name, service, one.machine, silence, self.term, self._keys, one.incarnation)
            for one in unit.processes
        ]
        try:
            await asyncio.gather(*(session.open(timeout) for session in sessions))
            if self._register.connect(client(unit.role, sessions, self._config, unit.incarnation)):
                self._sessions[unit.name], sessions = sessions, former
        finally:
            await _close(sessions)  # of one that was lost or dismissed meanwhile; else of the one before


async def _close(sessions: Sequence[Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


def _absent(unit: Unit) -> list[str]:
    """The names of its processes that have not registered with its incarnation."""
    pairs = zip(unit.ranks, unit.processes, strict=True)
    return [name for name, process in pairs if process is None or process.incarnation != unit.incarnation] or [unit.name]


def _told(registration: Registration) -> tuple[str, int, str, str]:
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in in_order(registration.seconds).items())
    return registration.name, registration.pid, registration.address, seconds
