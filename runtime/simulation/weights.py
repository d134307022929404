"""A weight sync in a simulation: the members of an epoch meet, a version travels, and everybody's part is known."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from runtime.commands import HostWeights, ResendWeights, SendWeights, WeightsHosted, WeightsSent
from runtime.errors import SluiceError
from runtime.process.aio import done_within
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest

if TYPE_CHECKING:
    from runtime.simulation.process import SimulatedProcess


class SyncEpoch:
    """As a collective is, it fails for all as one leaves it or ends. What members wait for is counted, not looked for."""

    def __init__(self, names: tuple[str, ...]):
        """`names`: the sender's first."""
        self.names = names
        self.broken = ""  # why
        self.bad: set[PolicyVersion] = set()
        """Versions with a wrong byte for everybody."""
        self.verified: dict[PolicyVersion, set[str]] = {}
        self._received: dict[PolicyVersion, set[str]] = {}
        self._here: set[str] = set()
        self._reached: set[Any] = set()
        self._events: dict[Any, asyncio.Event] = {}  # each set once it is reached, or the epoch is broken

    async def meet(self, process: SimulatedProcess, timeout: float) -> None:
        """Raises ServiceFault when not all come in time, or it is broken."""
        self._here.add(process.name)
        if len(self._here) == len(self.names):
            self._reach("met")
        await self._until(process, "join", timeout, "met")

    async def send(self, process: SimulatedProcess, version: PolicyVersion, timeout: float) -> None:
        """Returns once every receiver has every byte. Of versions before the last one nothing is kept."""
        for old in sorted(self.verified)[:-1]:
            del self.verified[old], self._received[old]
        self._reach(("sent", version))
        await self._until(process, "transfer", timeout, ("received", version))

    async def receive(self, process: SimulatedProcess, version: PolicyVersion, seconds: float, timeout: float) -> None:
        """The bytes come once the sender sends; they take `seconds`. Their checksums, a tenth of that, hold or do not."""
        await self._until(process, "announce", timeout, ("sent", version))
        await process.spend(seconds)
        if self.broken:
            raise process.fault("transfer", self.broken)
        received = self._received.setdefault(version, set())
        received.add(process.name)
        if len(received) == len(self.names) - 1:
            self._reach(("received", version))
        await process.spend(seconds / 10)
        if process.name in process.cluster.corrupt or version in self.bad:
            process.cluster.corrupt.discard(process.name)
            self.leave(process.name, "left after a checksum that does not match")
            raise process.fault("verify", f"version {version}: the checksum does not match")
        self.verified.setdefault(version, set()).add(process.name)

    def leave(self, name: str, reason: str = "left") -> None:
        if name in self.names:
            self.broken = self.broken or f"{name} {reason}"
            for event in self._events.values():
                event.set()

    def _reach(self, what: Any) -> None:
        self._reached.add(what)
        self._event(what).set()

    def _event(self, what: Any) -> asyncio.Event:
        event = self._events.setdefault(what, asyncio.Event())
        if self.broken:
            event.set()
        return event

    async def _until(self, process: SimulatedProcess, phase: str, timeout: float, what: Any) -> None:
        if not await done_within(self._event(what).wait(), timeout):
            self.leave(process.name, "has waited in vain")
            raise process.fault(phase, "others did not come", timeout)
        if what not in self._reached:
            raise process.fault(phase, self.broken)
        await process.spend(0.0)


_MANIFEST = Manifest(tensors=(), bucket_bytes=1)


def host(process: SimulatedProcess, command: HostWeights) -> WeightsHosted:
    """`process` opens an epoch, as its sender."""
    epoch = process.cluster.epochs[command.epoch] = SyncEpoch(command.names)
    timeout = process.cluster.config.publication.join_timeout
    process.beside(_quietly(epoch.meet(process, timeout)))
    address = GroupAddress(
        *(),
        epoch=command.epoch,
        host=process.machine,
        port=1,
        rank=0,
        world_size=len(command.names),
        backend="gloo",
        timeout=timeout,
        transport=command.transport,
        names=command.names,
        key=b"",
    )
    return WeightsHosted(address, _MANIFEST)


async def _quietly(meeting: Any) -> None:
    """A sender connects beside what it is asked; its next transfer tells of a failure."""
    with suppress(SluiceError):
        await meeting


async def send(process: SimulatedProcess, command: SendWeights | ResendWeights, intact: bool) -> WeightsSent:
    """`process` sends what it has, `intact` or not. Raises ServiceFault."""
    epoch = process.cluster.epochs.get(command.epoch)
    if epoch is None:
        raise process.fault("transfer", f"there is no publication group of epoch {command.epoch}")
    limits, began = process.cluster.config.publication, process.loop.time()
    await epoch.meet(process, limits.join_timeout)
    if not intact:
        epoch.bad.add(command.version)
    await epoch.send(process, command.version, limits.transfer_timeout)
    return WeightsSent(round(process.cluster.costs.weights_bytes), process.loop.time() - began)
