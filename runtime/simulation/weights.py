"""A weight sync in a simulation: the members of an epoch meet, a version travels, and everybody's part is known."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from runtime.process.aio import done_within
from runtime.types import PolicyVersion


class EpochMember(Protocol):
    """What an epoch asks of a simulated process."""

    name: str
    cluster: Any

    async def spend(self, seconds: float) -> float: ...

    def fault(self, phase: str, message: str, deadline: float | None = None) -> Exception: ...


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

    async def meet(self, process: EpochMember, timeout: float) -> None:
        """Raises ServiceFault when not all come in time, or it is broken."""
        self._here.add(process.name)
        if len(self._here) == len(self.names):
            self._reach("met")
        await self._until(process, "join", timeout, "met")

    async def send(self, process: EpochMember, version: PolicyVersion, timeout: float) -> None:
        """Returns once every receiver has every byte. Of versions before the last one nothing is kept."""
        for old in sorted(self.verified)[:-1]:
            del self.verified[old], self._received[old]
        self._reach(("sent", version))
        await self._until(process, "transfer", timeout, ("received", version))

    async def receive(self, process: EpochMember, version: PolicyVersion, seconds: float, timeout: float) -> None:
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

    async def _until(self, process: EpochMember, phase: str, timeout: float, what: Any) -> None:
        if not await done_within(self._event(what).wait(), timeout):
            self.leave(process.name, "has waited in vain")
            raise process.fault(phase, "others did not come", timeout)
        if what not in self._reached:
            raise process.fault(phase, self.broken)
        await process.spend(0.0)
