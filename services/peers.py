"""The processes of a run as the coordinator knows them: who has registered, the sessions to them, and the roles they play."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from runtime.cluster.topology import Instance, group_of
from runtime.config import Config
from runtime.coordinator.roles import EvaluationRoles, Replicas, Roles, TrainedModels
from runtime.errors import DeadlineExceeded, UserError
from runtime.ports import Replaceable
from runtime.process.aio import still_missing
from runtime.status import Loss, Registration, Stop, replaced
from runtime.telemetry.startup import in_order
from services.rpc.client import client, service_of
from services.rpc.session import Session

log = logging.getLogger("sluice")


UPDATED = ("trainer", "critic")  # the roles whose groups hold what no other process can get, but from a checkpoint


class Peers:
    """A process that stands alone is one unit; so are the ranks of a group, which live and die together and have the name of
    their first. Whoever starts the processes, a unit is there once all of it has registered with one incarnation.

    `lost` holds the newest loss of each unit, until another has come in its place.
    """

    def __init__(self, config: Config, changed: Callable[[], None]):
        """`changed` is called when `lost` has changed."""
        self._config = config
        self._instances: list[Instance] = []
        self._changed = changed
        self.lost: dict[str, Loss] = {}
        self._registered: dict[Instance, Registration] = {}
        self._arrived = asyncio.Event()
        self._arrive: Callable[[str, Replaceable], None]
        self._joining: set[asyncio.Task[None]] = set()
        self._sessions: dict[Instance, Session] = {}  # none before all are there
        self._groups: dict[str, Any] = {}  # of the roles UPDATED, the client of the newest that is connected
        self._handed: dict[str, int] = {}  # their incarnations, as `wait_restarted` or `roles` gave them away last
        self._back = asyncio.Event()

    # ------------------------------------------------------------------------------------------ who is there

    @property
    def processes(self) -> list[Registration]:
        """The newest of each that has registered."""
        return list(self._registered.values())

    def register(self, registration: Registration) -> None:
        """A process has loaded, and serves. Raises UserError for one that the run has no place for."""
        instance = Instance(registration.role, registration.name, registration.rank)
        if instance not in self._instances:
            raise UserError(f"{registration.name} (rank {registration.rank}) is not in this run's topology")
        former = self._registered.get(instance)
        if former is not None and registration.incarnation <= former.incarnation:
            if registration != former:
                raise UserError(f"{registration.name}: its incarnation {former.incarnation} has registered already")
            return
        self._registered[instance] = registration
        log.info("%s registered: pid %d at %s, %s", *_told(registration))
        unit = group_of(self._config, instance)
        if self._sessions and self._complete(unit):
            task = asyncio.create_task(self._take_in(unit, registration.incarnation))
            self._joining.add(task)
            task.add_done_callback(partial(self._taken_in, unit[0].name, registration.incarnation))
        self._arrived.set()

    def _taken_in(self, name: str, incarnation: int, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s (incarnation %d) could not be taken in", name, incarnation, exc_info=error)
            self.lose(Loss(name=name, incarnation=incarnation, reason=f"{type(error).__name__}: {error}"))

    def _complete(self, unit: Sequence[Instance]) -> bool:
        return len({self._registered[instance].incarnation for instance in unit}) == 1

    def newest(self, instance: Instance) -> int | None:
        """The incarnation of the newest process that registered as `instance`."""
        registration = self._registered.get(instance)
        return None if registration is None else registration.incarnation

    def expect(self, instances: Sequence[Instance]) -> None:
        """These have been given a place: they will register."""
        self._instances += [instance for instance in instances if instance not in self._instances]

    def give_up(self, instances: Sequence[Instance], reason: str) -> None:
        """These are gone, which may take long to be seen on their connections."""
        for instance in instances:
            if instance in self._sessions:
                self._sessions[instance].lose(reason)

    def dismiss(self, instances: Sequence[Instance], reason: str) -> None:
        """These are not wanted any more, nor missed."""
        self._instances = [instance for instance in self._instances if instance not in instances]
        self.give_up(instances, reason)
        for instance in instances:
            self.lost.pop(instance.name, None)
        self._changed()
        self._arrived.set()

    def others(self, role: str, name: str) -> bool:
        """Whether another unit of `role` is there, or comes."""
        return any(one.role == role and one.name != name and one.name not in self.lost for one in self._instances)

    def lose(self, loss: Loss) -> None:
        """The run does without this process from now on."""
        self.lost[loss.name] = loss
        self._changed()

    async def connect(self, began: float, arrive: Callable[[str, Replaceable], None]) -> None:
        """Wait until everybody who is expected has registered, and open a session to each. Raises DeadlineExceeded when
        that is not done `deadlines.start` after `began`.

        `arrive(role, client)`: a process has come later in the place of one that was lost.
        """
        self._arrive = arrive
        timeout = self._config.deadlines.start
        first = list(self._instances)  # who comes besides is not waited for

        def missing() -> list[str]:
            return [one.name for one in first if one in self._instances and one not in self._registered]

        if late := await still_missing(missing, self._arrived, began + timeout):
            raise DeadlineExceeded(", ".join(late), "start", "did not register", timeout)
        self._sessions = {instance: self._session(instance) for instance in self._instances if instance in self._registered}
        await asyncio.gather(*(session.open(timeout) for session in self._sessions.values()))

    async def wait_restarted(self) -> TrainedModels:
        """Trainer and critic, once all their ranks are there again: of later incarnations than those that were given away
        before. Raises DeadlineExceeded, naming who is not there after `deadlines.start`, and the longest that a role's
        `restarts` may put off a start.
        """
        policies = [getattr(self._config.services, role).restarts for role in self._groups]
        timeout = self._config.deadlines.start + max(one.backoff * 2 ** max(0, one.attempts - 1) for one in policies)

        def missing() -> list[str]:
            return [group.name for role, group in self._groups.items() if group.incarnation <= self._handed[role]]

        if late := await still_missing(missing, self._back, time.monotonic() + timeout):
            raise DeadlineExceeded(", ".join(late), "restart", "did not register again", timeout)
        return self._updated()

    async def stop_all(self) -> None:
        """Tell every process to stop; one that does not answer is the launcher's to end."""
        for task in self._joining:
            task.cancel()
        config, lost = self._config, self.lost
        sessions = [session for instance, session in self._sessions.items() if group_of(config, instance)[0].name not in lost]
        order = Stop(drain_seconds=0.0)
        stops = (asyncio.wait_for(session.unary("Process", "Stop", order), 1.0) for session in sessions)
        for session in sessions:
            session.ends()
        for session, outcome in zip(sessions, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s did not take the order to stop: %s", session.name, outcome or type(outcome).__name__)
        for session in self._sessions.values():
            await session.close()

    def _session(self, instance: Instance) -> Session:
        registration = self._registered[instance]
        service = service_of(registration.role, self._config)
        return Session(registration.address, registration.name, service, registration.machine)

    async def _take_in(self, unit: Sequence[Instance], incarnation: int) -> None:
        """Talk to the unit that has come in the place of another from now on."""
        first, sessions = unit[0], [self._session(instance) for instance in unit]
        try:
            await asyncio.gather(*(session.open(self._config.deadlines.start) for session in sessions))
        except DeadlineExceeded as error:
            await asyncio.gather(*(session.close() for session in sessions))
            self.lose(Loss(name=first.name, incarnation=incarnation, reason=str(error)))
            return
        if any(instance not in self._instances for instance in unit):  # dismissed meanwhile
            await asyncio.gather(*(session.close() for session in sessions))
            return
        former = [self._sessions[instance] for instance in unit if instance in self._sessions]
        self._sessions.update(zip(unit, sessions, strict=True))
        self._settle(first.role, client(first.role, sessions, self._config, incarnation))
        self.lost.pop(first.name, None)
        self._changed()
        await asyncio.gather(*(session.close() for session in former))

    def _settle(self, role: str, arrived: Replaceable) -> None:
        if role in UPDATED:
            self._groups[role].lose(replaced(arrived.incarnation))
            self._groups[role] = arrived
            self._back.set()
        else:
            self._arrive(role, arrived)

    # ------------------------------------------------------------------------------------------ the roles they play

    def roles(self) -> Roles:
        """Of a run that trains, once everybody is connected."""
        answering = self.evaluation_roles()
        self._groups = {role: clients[0] for role in UPDATED if (clients := self._clients(role))}
        updated = self._updated()
        return Roles(
            rollouts=answering.rollouts,
            rewards=answering.rewards,
            reward_models=answering.reward_models,
            references=self._replicas("reference"),
            trainer=updated.trainer,
            critic=updated.critic,
        )

    def evaluation_roles(self) -> EvaluationRoles:
        """Of an evaluation alone, once everybody is connected."""
        return EvaluationRoles(
            rollouts=self._clients("rollout"),
            rewards=self._replicas("reward"),
            reward_models=self._replicas("reward_model"),
        )

    def _updated(self) -> TrainedModels:
        self._handed = {role: one.incarnation for role, one in self._groups.items()}
        return TrainedModels(self._groups["trainer"], self._groups.get("critic"))

    def _replicas(self, role: str) -> Replicas[Any]:
        return Replicas(self._clients(role), self._config.deadlines.start, self)

    def _clients(self, role: str) -> list[Any]:
        """Of every unit of a role, in the order of their names."""
        units = {tuple(group_of(self._config, instance)): None for instance in self._sessions if instance.role == role}
        return [
            client(role, [self._sessions[instance] for instance in unit], self._config, self._registered[unit[0]].incarnation)
            for unit in units
        ]


def _told(registration: Registration) -> tuple[str, int, str, str]:
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in in_order(registration.seconds).items())
    return registration.name, registration.pid, registration.address, seconds
