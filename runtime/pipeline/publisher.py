"""Drives weight publications: the epoch's group, and `publication.Publication` against the clock and the ports.

A rollout whose connection breaks is lost for good: the others meet in a new epoch, and a version that was not committed is sent
to them once more, whose weights the trainer has until the next step is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from runtime.commands import WeightsSent
from runtime.config import Publication as Settings
from runtime.errors import InvariantViolated, ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.metrics import PublicationFigures
from runtime.pipeline.publication import (
    Abort,
    Aborted,
    Action,
    Commit,
    Committed,
    Event,
    Failed,
    Lost,
    PhaseSeconds,
    Prepared,
    Publication,
    Sent,
    Tick,
    Verified,
)
from runtime.ports import RolloutPort, TrainerPort
from runtime.types import PolicyVersion

ABORT_SECONDS = 5.0  # a member that does not leave an epoch's group in this time is lost


class Publisher:
    """One publication at a time. `committed` is the version that counts."""

    def __init__(self, trainer: TrainerPort, rollouts: Sequence[RolloutPort], settings: Settings, prepare_seconds: float):
        self._trainer = trainer
        self._rollouts = {rollout.name: rollout for rollout in rollouts}
        self._settings = settings
        self._seconds = PhaseSeconds(
            prepare=prepare_seconds,
            transfer=settings.transfer_timeout,
            verify=settings.transfer_timeout,
            commit=settings.commit_timeout,
            abort=ABORT_SECONDS,
        )
        self._epoch = 0
        self.committed: PolicyVersion | None = None

    async def open_epoch(self) -> None:
        """A new group of the trainer and every rollout that lives. Raises ServiceFault naming who did not come."""
        self._epoch += 1
        address, manifest = await self._trainer.host_weights(self._epoch, 1 + len(self._rollouts))
        joins = (
            rollout.join_weights(replace(address, rank=rank), manifest)
            for rank, rollout in enumerate(self._rollouts.values(), start=1)
        )
        await asyncio.gather(*joins)

    async def go_on_without(self, lost: Iterable[str]) -> None:
        """A new epoch of the others."""
        for name in lost:
            del self._rollouts[name]
        await self.open_epoch()

    def begin(self, version: PolicyVersion) -> Transaction:
        """Ask the rollouts to receive `version` and the trainer to send it, behind the commands that make it."""
        if self.committed is not None and version <= self.committed:
            raise InvariantViolated(f"version {version} is published after {self.committed}")
        return Transaction(self, version)


class Transaction:
    """One publication: calls to the ports become events, the machine's actions become calls."""

    def __init__(self, publisher: Publisher, version: PolicyVersion):
        self._publisher = publisher
        self._version = version
        self._clock = asyncio.get_running_loop().time
        self._calls: dict[asyncio.Task[Any], tuple[str, Callable[[str], Event]]] = {}
        self._unreachable: set[str] = set()
        self._pause = 0.0
        self._bytes = 0
        self._post()

    def _post(self) -> None:
        publisher, version = self._publisher, self._version
        self._epoch = publisher._epoch
        self._call(publisher._trainer.name, self._sent(publisher._trainer.send_weights(version, self._epoch)), _sent)
        for name, rollout in publisher._rollouts.items():
            self._call(name, rollout.receive_weights(version, self._epoch), Verified)

    async def finish(self) -> PublicationFigures:
        """See the publication through, once the trainer has made the version: the deadlines count from here.

        Raises ServiceFault naming the members on which it failed, where it is not enough to go on without rollouts whose
        connection broke.
        """
        publisher, began = self._publisher, self._clock()
        machine = await self._attempt()
        while machine.reason:
            if not self._may_go_on(machine):
                raise _fault(machine, publisher._settings)
            await self._over()
            await publisher.go_on_without(machine.lost)
            if machine.phase == "done":  # the version counts, and the others have it
                break
            self._post()
            machine = await self._attempt()
        publisher.committed = self._version
        return PublicationFigures(seconds=self._clock() - began, pause_seconds=self._pause, bytes=self._bytes)

    async def _attempt(self) -> Publication:
        publisher, now = self._publisher, self._clock()
        machine = Publication(self._version, publisher._rollouts, publisher._trainer.name, publisher._seconds, now)
        # A reception that is posted late only delays the sender, which announces itself before its first byte.
        for name in publisher._rollouts:
            machine.handle(Prepared(name), now)
        while not machine.final:
            await self._step(machine)
        return machine

    def _may_go_on(self, machine: Publication) -> bool:
        """Whether those that were lost are rollouts whose connection broke, and others live. Silence is another matter: who is
        silent may come back with a version that counts no more."""
        rollouts = self._publisher._rollouts.keys()
        return bool(machine.lost) and machine.lost <= self._unreachable & rollouts and machine.lost != rollouts

    async def _over(self) -> None:
        """The calls of an attempt that failed have ended: no late order of it meets the next epoch's group."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=ABORT_SECONDS)
        self.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._calls.clear()

    def cancel(self) -> None:
        """Withdraw the calls that are under way, if any; to be called in the end whatever happened."""
        for task in self._calls:
            task.cancel()

    async def _step(self, machine: Publication) -> None:
        """Wait for an answer or the deadline, and let the machine say what follows."""
        assert machine.next_deadline is not None
        timeout = max(0.0, machine.next_deadline - self._clock())
        if self._calls:
            done, _ = await asyncio.wait(self._calls, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        else:
            done = await asyncio.sleep(timeout, set())
        for task in done:
            name, answered = self._calls.pop(task)
            if isinstance(task.exception(), Unreachable):
                self._unreachable.add(name)
            self._act(machine.handle(_event(name, task, answered), self._clock()))
        if not done:
            self._act(machine.handle(Tick(), self._clock()))

    def _act(self, actions: list[Action]) -> None:
        publisher = self._publisher
        for action in actions:
            if isinstance(action, Commit):
                for name in action.members:
                    self._call(name, self._commit(publisher._rollouts[name]), Committed)
            elif isinstance(action, Abort):
                for name in action.members:
                    member = publisher._rollouts.get(name, publisher._trainer)
                    self._call(name, member.abort_weights(self._version, self._epoch), Aborted)

    def _call(self, name: str, call: Awaitable[Any], answered: Callable[[str], Event]) -> None:
        self._calls[asyncio.ensure_future(call)] = (name, answered)

    async def _commit(self, rollout: RolloutPort) -> None:
        self._pause = max(self._pause, await rollout.commit_weights(self._version, self._epoch))

    async def _sent(self, answer: Awaitable[WeightsSent]) -> None:
        self._bytes = (await answer).bytes


def _sent(_: str) -> Event:
    return Sent()


def _event(name: str, task: asyncio.Task[Any], answered: Callable[[str], Event]) -> Event:
    error = task.exception()
    if error is None:
        return answered(name)
    if isinstance(error, Unreachable | Unanswered):
        return Lost(name, str(error))
    if isinstance(error, SluiceError):
        return Failed(name, str(error))
    raise error


def _fault(machine: Publication, settings: Settings) -> ServiceFault:
    """Names the members that were lost, or else whoever failed first."""
    who, reason = ", ".join(sorted(machine.lost)) or "publication", machine.reason
    if machine.phase == "done" and settings.in_flight == "drain":  # it got as far as the commit
        reason += "; with publication.in_flight drain, samples under way have to end within publication.commit_timeout"
    return ServiceFault(who, "publish", reason)
