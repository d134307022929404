"""The processes of a run as the coordinator knows them: who has registered, the sessions to them, and the roles they play."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from runtime.config import Config
from runtime.errors import DeadlineExceeded, UserError
from runtime.pipeline.roles import EvaluationRoles, Replicas, Roles
from runtime.ports import ReferencePort, Replaceable, RewardPort
from runtime.startup import in_order
from runtime.status import Loss, Registration
from runtime.topology import Member, data_leaders, replaceable
from services.client import (
    CLIENTS,
    CriticClient,
    Peer,
    ReferenceClient,
    ReferenceGroupClient,
    RewardClient,
    RolloutClient,
    TrainerClient,
    service_of,
)
from services.session import Session

log = logging.getLogger("sluice")


class Fleet:
    """`lost` holds the newest loss of each name, until another process has come in its place."""

    def __init__(self, config: Config, changed: Callable[[], None]):
        """`changed` is called when `lost` has changed."""
        self._config = config
        self._members: list[Member] = []
        self._changed = changed
        self.lost: dict[str, Loss] = {}
        self._registered: dict[Member, Registration] = {}
        self._arrived = asyncio.Event()
        self._arrive: Callable[[str, Replaceable], None]
        self._joining: set[asyncio.Task[None]] = set()
        self._settings = config.deadlines, config.publication  # of every client
        self._of_replicas = config.deadlines.start, self.lose
        self._sessions: dict[Member, Session] = {}  # none before all are there

    # ------------------------------------------------------------------------------------------ who is there

    @property
    def processes(self) -> list[Registration]:
        """The newest of each that has registered."""
        return list(self._registered.values())

    def register(self, registration: Registration) -> None:
        """A process has loaded, and serves. Raises UserError for one that the run has no place for."""
        member = Member(registration.role, registration.name, registration.rank)
        if member not in self._members:
            raise UserError(f"{registration.name} (rank {registration.rank}) is not in this run's topology")
        former = self._registered.get(member)
        if former is not None and registration.incarnation <= former.incarnation:
            if registration != former:
                raise UserError(f"{registration.name}: its incarnation {former.incarnation} has registered already")
            return
        if self._sessions and member.role not in replaceable(self._config):
            raise UserError(f"{registration.name}: a {member.role} cannot be replaced while the run goes on")
        self._registered[member] = registration
        log.info("%s registered: pid %d at %s, %s", *_told(registration))
        if self._sessions:
            task = asyncio.create_task(self._take_in(member, registration))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)
        self._arrived.set()

    def newest(self, member: Member) -> int | None:
        """The incarnation of the newest process that registered as `member`."""
        registration = self._registered.get(member)
        return None if registration is None else registration.incarnation

    def expect(self, members: Sequence[Member]) -> None:
        """These have been given a place: they will register."""
        self._members += [member for member in members if member not in self._members]

    def give_up(self, members: Sequence[Member], reason: str) -> None:
        """These are gone, which may take long to be seen on their connections."""
        for member in members:
            if member in self._sessions:
                self._sessions[member].lose(reason)

    def dismiss(self, members: Sequence[Member], reason: str) -> None:
        """These are not wanted any more, nor missed."""
        self._members = [member for member in self._members if member not in members]
        self.give_up(members, reason)
        for member in members:
            self.lost.pop(member.name, None)
        self._changed()

    def others(self, name: str) -> bool:
        """Whether another of its role is there, or comes."""
        role = next((member.role for member in self._members if member.name == name), "")
        return any(one.role == role and one.name != name and one.name not in self.lost for one in self._members)

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
        deadline = began + timeout
        while missing := [member for member in self._members if member not in self._registered]:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                names = ", ".join(member.name for member in missing)
                raise DeadlineExceeded(names, "start", "did not register", timeout) from None
        self._sessions = {member: self._session(self._registered[member]) for member in self._members}
        await asyncio.gather(*(session.open(timeout) for session in self._sessions.values()))

    async def stop_all(self) -> None:
        """Tell every process to stop; one that does not answer is the launcher's to end."""
        for task in self._joining:
            task.cancel()
        sessions = [session for member, session in self._sessions.items() if member.name not in self.lost]
        stops = (asyncio.wait_for(Peer(session, *self._settings).stop(0.0), 1.0) for session in sessions)
        for session in sessions:
            session.ends()
        for session, outcome in zip(sessions, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s did not take the order to stop: %s", session.name, outcome or type(outcome).__name__)
        for session in self._sessions.values():
            await session.close()

    def _session(self, registration: Registration) -> Session:
        service = service_of(registration.role, self._config)
        return Session(registration.address, registration.name, service, registration.machine)

    async def _take_in(self, member: Member, registration: Registration) -> None:
        """Talk to the process that has come in the place of another from now on."""
        session = self._session(registration)
        try:
            await session.open(self._config.deadlines.start)
        except DeadlineExceeded as error:
            await session.close()
            self.lose(Loss(name=member.name, incarnation=registration.incarnation, reason=str(error)))
            return
        former = self._sessions.get(member)
        self._sessions[member] = session
        self._arrive(member.role, CLIENTS[member.role](session, *self._settings, registration.incarnation))
        self.lost.pop(member.name, None)
        self._changed()
        if former is not None:
            await former.close()

    # ------------------------------------------------------------------------------------------ the roles they play

    def roles(self) -> Roles:
        """Of a run that trains, once everybody is connected."""
        answering, services = self.evaluation_roles(), self._config.services
        critic = None
        if self._config.critic is not None:
            critic = CriticClient(self._of("critic"), *self._settings, data_leaders(services.critic))
        return Roles(
            rollouts=answering.rollouts,
            rewards=answering.rewards,
            reward_models=answering.reward_models,
            references=self._references(),
            trainer=TrainerClient(self._of("trainer"), *self._settings, data_leaders(services.trainer)),
            critic=critic,
        )

    def evaluation_roles(self) -> EvaluationRoles:
        """Of an evaluation alone, once everybody is connected."""
        return EvaluationRoles(
            rollouts=[RolloutClient(session, *self._settings) for session in self._of("rollout")],
            rewards=self._rewards("reward"),
            reward_models=self._rewards("reward_model"),
        )

    def _rewards(self, role: str) -> Replicas[RewardPort]:
        return Replicas([RewardClient(session, *self._settings) for session in self._of(role)], *self._of_replicas)

    def _references(self) -> Replicas[ReferencePort]:
        settings, sessions = self._config.services.reference, self._of("reference")
        references: list[ReferencePort] = [ReferenceClient(session, *self._settings) for session in sessions]
        if sessions and settings.engine == "megatron":
            references = [ReferenceGroupClient(sessions, *self._settings, data_leaders(settings))]
        return Replicas(references, *self._of_replicas)

    def _of(self, role: str) -> list[Session]:
        """The sessions of a role, in the order of its names or ranks."""
        return [session for member, session in self._sessions.items() if member.role == role]


def _told(registration: Registration) -> tuple[str, int, str, str]:
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in in_order(registration.seconds).items())
    return registration.name, registration.pid, registration.address, seconds
