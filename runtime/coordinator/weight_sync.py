"""Drives weight publications: the epochs' groups, and `publication.Publication` against the clock and the ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from runtime.commands import WeightsSent
from runtime.config import Publication as Settings
from runtime.coordinator.membership import Epoch
from runtime.coordinator.rollout_pool import RolloutPool
from runtime.coordinator.weight_sync_protocol import (
    Abort,
    Aborted,
    Action,
    Commit,
    Committed,
    Event,
    Failed,
    MemberUnreachable,
    PhaseSeconds,
    Prepared,
    Sent,
    Tick,
    Verified,
    WeightSync,
)
from runtime.errors import InvariantViolated, ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.ports import RolloutPort, TrainerPort, WeightMember
from runtime.telemetry.metrics import PublicationFigures
from runtime.types import PolicyVersion
from runtime.weights.plan import resolve_transport

TRIES = 3  # of a rendezvous, or a publication, that fails although nobody is lost

log = logging.getLogger("sluice")


class Publisher:
    """One publication at a time, each in an epoch of exactly the rollouts that live. `committed` is the version that counts.

    Whoever is lost is left out of the next epoch, in which the same version is tried again. A newcomer is in the next epoch
    too; as soon as no publication is under way the committed version is sent once more, so that a newcomer need not wait for a
    step. The sender has it in its buckets; without `publication.overlap` it gathers it anew, and can do so until the next
    version is being made: of that one the newcomer is a receiver, and needs no other.
    """

    def __init__(self, trainer: TrainerPort, pool: RolloutPool, settings: Settings, prepare_seconds: float):
        self._trainer = trainer
        self._pool = pool
        self._settings = settings
        self._seconds = PhaseSeconds(
            prepare=prepare_seconds,
            transfer=settings.transfer_timeout,
            verify=settings.transfer_timeout,
            commit=settings.commit_timeout,
            abort=settings.abort_timeout,
        )
        self._lock = asyncio.Lock()  # held by the publication that is under way
        self._held = False  # whether nothing is published but what is asked for
        self._awaited = False  # whether the next version, which is being made, waits for it
        self._epoch = Epoch(0, ())  # the newest that was connected, and its members by name
        self._members: dict[str, RolloutPort] = {}
        self.transport = ""
        """Which one the weights of the newest epoch that was connected take, or "" """
        self._changed = asyncio.Event()
        pool.subscribe(self._changed.set)
        self.abort = ""
        """Why the newest publication that was aborted was, or "" """

    @property
    def committed(self) -> PolicyVersion | None:
        return self._pool.membership.committed

    def seconds(self, behind: bool) -> PhaseSeconds:
        """The deadlines of an attempt. `behind`: the weights are gathered behind what the trainer has begun, for which it may
        take as long as for a step; its own deadline of the transfer counts from then."""
        seconds = self._seconds
        return replace(seconds, transfer=seconds.transfer + seconds.prepare) if behind else seconds

    async def run(self) -> None:
        """Keep the epoch that of the living, until cancelled. Raises ServiceFault when that fails for another reason than a
        rollout."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._lock:
                await self._renew()

    def close(self) -> None:
        """The trainer publishes no more: who does needs another epoch."""
        self._pool.unsubscribe(self._changed.set)
        self._pool.membership.break_up(self._pool.membership.epoch.number)

    async def begin(self, version: PolicyVersion) -> Transaction:
        """Ask the rollouts to receive `version` and the trainer to send it, behind the commands that make it.

        Waits while another publication is under way, or no rollout lives; `Transaction.close` has to follow. To be called right
        after those commands are posted, and after the version before is committed: so the trainer has a version until that
        counts, whatever becomes of its first transfer.
        """
        if self.committed is not None and version <= self.committed:
            raise InvariantViolated(f"version {version} is published after {self.committed}")
        if self._held:
            return await self._begun(version, lambda: None)
        self._awaited = True
        try:
            await self._lock.acquire()
        finally:
            self._awaited = False
        return await self._begun(version, self._lock.release)

    async def _begun(self, version: PolicyVersion, closed: Callable[[], None]) -> Transaction:
        try:
            if self._pool.membership.stale:
                await self._open_epoch()
            return Transaction(self, version, closed)
        except BaseException:
            closed()
            raise

    async def hold(self) -> None:
        """Once this returns, nothing is published until `free` but what `begin` and `publish` are asked for."""
        await self._lock.acquire()
        self._held = True

    def free(self) -> None:
        """Newcomers are sent the committed version again."""
        self._held = False
        self._lock.release()

    async def publish(self, version: PolicyVersion) -> PublicationFigures:
        """`version`, which the trainer has."""
        transaction = await self.begin(version)
        try:
            return await transaction.finish()
        finally:
            transaction.close()

    async def _renew(self) -> None:
        """Open a new epoch if the last is stale, and bring the committed version to whoever is new."""
        membership = self._pool.membership
        if self.committed is None or not membership.living or not membership.stale:
            return
        await self._open_epoch()
        if membership.newcomers and self._can_resend():
            transaction = Transaction(self, self.committed)
            try:
                await transaction.finish(self._can_resend)
            finally:
                transaction.close()

    def _can_resend(self) -> bool:
        """Whether the trainer has the committed version, or will have it when it comes to a command that is posted now."""
        return self._settings.overlap or not self._awaited

    async def _open_epoch(self) -> None:
        """A group of the trainer and every living rollout. Who does not come is lost, and the next epoch is without it.

        Raises ServiceFault when no rollout comes, or the group fails for no rollout's fault `TRIES` times.
        """
        fruitless = 0
        while True:
            await self._pool.somebody()
            epoch = self._pool.membership.open()
            fault = await self._meet(epoch)
            if fault is None:
                return
            log.warning("epoch %d: %s", epoch.number, fault)
            if set(epoch.members) <= set(self._pool.membership.living):
                fruitless += 1
            if fruitless == TRIES:
                raise fault

    async def _meet(self, epoch: Epoch) -> SluiceError | None:
        """Connect the group; None when it is connected. Raises UserError when its members cannot have the transport that was
        asked for."""
        ports = [self._pool.port(member) for member in epoch.members]
        machines = {**self._trainer.machines, **{port.name: port.machine for port in ports}}
        transport = resolve_transport(self._settings.transport, self._settings.backend, machines)
        names = [self._trainer.name, *(port.name for port in ports)]
        address, manifest = await self._trainer.host_weights(epoch.number, names, transport)
        joins = [
            asyncio.ensure_future(port.join_weights(replace(address, rank=rank), manifest))
            for rank, port in enumerate(ports, start=address.senders)
        ]
        try:
            await asyncio.wait(joins, return_when=asyncio.FIRST_EXCEPTION)
            if not any(join.done() and join.exception() for join in joins):
                self._epoch, self._members, self.transport = epoch, {port.name: port for port in ports}, transport
                log.info("epoch %d: %s to %s by %s", epoch.number, self._trainer.name, ", ".join(self._members), transport)
                return None
            self._pool.membership.break_up(epoch.number)
            failed = next(error for join in joins if join.done() and (error := join.exception()))
            if not isinstance(failed, SluiceError):
                raise failed
            return await self._leave(epoch, ports, failed)
        finally:
            for join in joins:
                join.add_done_callback(_seen)
                join.cancel()

    async def _leave(self, epoch: Epoch, ports: Sequence[RolloutPort], failed: SluiceError) -> SluiceError:
        """Nobody waits for the one that failed: all leave. Whoever does not confirm that is given up, and whoever did was only
        kept waiting. Returns what is worth telling.
        """
        version = self.committed or PolicyVersion()
        members: tuple[WeightMember, ...] = (self._trainer, *ports)
        left = await asyncio.gather(*(one.abort_weights(version, epoch.number) for one in members), return_exceptions=True)
        for error in left:
            if isinstance(error, BaseException) and not isinstance(error, SluiceError):
                raise error
        if isinstance(left[0], SluiceError):
            raise left[0]
        for port, error in zip(ports, left[1:], strict=True):
            if isinstance(error, Unreachable | Unanswered):
                self._pool.lose(port, str(error))
                failed = failed if isinstance(failed, Unreachable | Unanswered) else error
        return failed


class Transaction:
    """One version until it counts: calls to the ports become events, the machine's actions become calls.

    An attempt that is aborted is followed by another in a new epoch, without whoever was lost in it.
    """

    def __init__(self, publisher: Publisher, version: PolicyVersion, closed: Callable[[], None] = lambda: None):
        self._publisher = publisher
        self._pool = publisher._pool
        self._version = version
        self._closed = closed
        self._clock = asyncio.get_running_loop().time
        self._calls: dict[asyncio.Task[Any], tuple[str, Callable[[str], Event]]] = {}
        self._pause = 0.0
        self._bytes = 0
        self._aborts = self._fruitless = 0
        self._behind = not publisher._settings.overlap
        self._post()

    async def finish(self, again: Callable[[], bool] = lambda: True) -> PublicationFigures:
        """See the publication through, once the trainer has made the version: the deadlines count from here. After an attempt
        that was aborted `again` says whether to make another.

        Raises ServiceFault when the trainer is lost, when no rollout comes back, or after `TRIES` attempts that failed although
        nobody was lost.
        """
        began = self._clock()
        while not await self._attempt():
            await self._publisher._open_epoch()
            if not again():
                break
            self._post()
        return PublicationFigures(
            seconds=self._clock() - began,
            pause_seconds=self._pause,
            bytes=self._bytes,
            aborts=self._aborts,
            epoch=self._epoch.number,
        )

    def close(self) -> None:
        """Withdraw the calls that are under way, if any; to be called in the end, whatever happened."""
        self._withdraw()
        closed, self._closed = self._closed, lambda: None
        closed()

    def _withdraw(self) -> None:
        for task in self._calls:
            task.add_done_callback(_seen)
            task.cancel()
        self._calls.clear()

    def _post(self) -> None:
        """The calls of one attempt, in the newest epoch."""
        self._epoch, self._ports = self._publisher._epoch, self._publisher._members
        number, trainer = self._epoch.number, self._publisher._trainer
        self._call(trainer.name, self._sent(trainer.send_weights(self._version, number)), _sent)
        for name, rollout in self._ports.items():
            self._call(name, rollout.receive_weights(self._version, number), Verified)

    async def _attempt(self) -> bool:
        """True once the version counts, False when it was aborted."""
        publisher, now = self._publisher, self._clock()
        machine = WeightSync(self._version, self._ports, publisher._trainer.name, publisher.seconds(self._behind), now)
        # A reception that is posted late only delays the sender, which announces itself before its first byte.
        for name in self._ports:
            machine.handle(Prepared(name), now)
        while not machine.final:
            await self._step(machine)
        self._withdraw()
        return self._conclude(machine)

    def _conclude(self, machine: WeightSync) -> bool:
        publisher, pool = self._publisher, self._pool
        self._fruitless += not machine.lost and machine.phase == "aborted"
        self._behind |= publisher._trainer.name in machine.failed  # it may not have the whole version, and gather it anew
        if publisher._trainer.name in machine.lost or self._fruitless == TRIES:
            raise _fault(machine)
        reason = machine.reason
        if machine.phase == "done" and publisher._settings.in_flight == "drain":  # it got as far as the commit
            reason += "; with publication.in_flight drain, samples under way have to end within publication.commit_timeout"
        for name in machine.lost:
            pool.lose(self._ports[name], reason)
        if machine.phase == "done":
            pool.commit(self._epoch, self._version, self._ports.keys() - machine.lost)
            return True
        self._aborts += 1
        publisher.abort = reason
        log.warning("publication aborted in epoch %d: %s", self._epoch.number, reason)
        pool.membership.break_up(self._epoch.number)
        return False

    async def _step(self, machine: WeightSync) -> None:
        """Wait for an answer or the deadline, and let the machine say what follows."""
        assert machine.next_deadline is not None
        timeout = max(0.0, machine.next_deadline - self._clock())
        if self._calls:
            done, _ = await asyncio.wait(self._calls, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        else:
            done = await asyncio.sleep(timeout, set())
        for task in done:
            name, answered = self._calls.pop(task)
            self._act(machine.handle(_event(name, task, answered), self._clock()))
        self._act(machine.handle(Tick(), self._clock()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Commit):
                for name in action.members:
                    self._call(name, self._commit(self._ports[name]), Committed)
            elif isinstance(action, Abort):
                for name in action.members:
                    member = self._ports.get(name, self._publisher._trainer)
                    self._call(name, member.abort_weights(self._version, self._epoch.number), Aborted)

    def _call(self, name: str, call: Awaitable[Any], answered: Callable[[str], Event]) -> None:
        self._calls[asyncio.ensure_future(call)] = (name, answered)

    async def _commit(self, rollout: RolloutPort) -> None:
        self._pause = max(self._pause, await rollout.commit_weights(self._version, self._epoch.number))

    async def _sent(self, answer: Awaitable[WeightsSent]) -> None:
        self._bytes = (await answer).bytes


def _seen(task: asyncio.Task[Any]) -> None:
    """What became of a call that was withdrawn concerns nobody."""
    if not task.cancelled():
        task.exception()


def _sent(_: str) -> Event:
    return Sent()


def _event(name: str, task: asyncio.Task[Any], answered: Callable[[str], Event]) -> Event:
    error = task.exception()
    if error is None:
        return answered(name)
    if isinstance(error, Unreachable | Unanswered):
        return MemberUnreachable(name, str(error))
    if isinstance(error, SluiceError):
        return Failed(name, str(error))
    raise error


def _fault(machine: WeightSync) -> ServiceFault:
    """Names the members that were lost, or else whoever failed first."""
    return ServiceFault(", ".join(sorted(machine.lost)) or "publication", "publish", machine.reason)
