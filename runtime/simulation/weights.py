"""A weight sync in a simulation: an epoch's members meet, a version travels, and each member's progress is recorded."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from runtime.process.waiting import done_within
from runtime.types import PolicyVersion


class EpochMember(Protocol):
    """The parts of a simulated process that an epoch uses."""

    name: str
    cluster: Any

    async def spend(self, seconds: float) -> float: ...

    def fault(self, phase: str, message: str, deadline: float | None = None) -> Exception: ...


class SyncEpoch:
    """An epoch that fails for all members if one leaves or ends, as a collective does. Events count the awaited members."""

    def __init__(self, names: tuple[str, ...]):
        """Make the epoch of the members `names`, the sender first."""
        self.names = names
        self.broken = ""  # the reason, once the epoch is broken
        self.bad: set[PolicyVersion] = set()
        """Versions with a wrong byte for all receivers."""
        self.verified: dict[PolicyVersion, set[str]] = {}
        self._received: dict[PolicyVersion, set[str]] = {}
        self._here: set[str] = set()
        self._reached: set[Any] = set()
        self._events: dict[Any, asyncio.Event] = {}  # set when reached, or when the epoch is broken

    async def meet(self, process: EpochMember, timeout: float) -> None:
        """Wait for all members. Raises ServiceFault if a member is late, or the epoch is broken."""
        self._here.add(process.name)
        if len(self._here) == len(self.names):
            self._reach("met")
        await self._until(process, "join", timeout, "met")

    async def send(self, process: EpochMember, version: PolicyVersion, timeout: float) -> None:
        """Send a version, and wait until every receiver has every byte. Forgets versions before the last."""
        for old in sorted(self.verified)[:-1]:
            del self.verified[old], self._received[old]
        self._reach(("sent", version))
        await self._until(process, "transfer", timeout, ("received", version))

    async def receive(self, process: EpochMember, version: PolicyVersion, seconds: float, timeout: float) -> None:
        """Receive a version's bytes in `seconds`, then verify their checksums in a tenth of that. Raises ServiceFault."""
        # The sender's `send` unblocks this; a member that leaves breaks the epoch and ends it.
        await self._until(process, "announce", timeout, ("sent", version))
        # The bytes travel; the last receiver's arrival unblocks the sender.
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
            self.leave(process.name, "has timed out")
            raise process.fault(phase, "others did not come", timeout)
        if what not in self._reached:
            raise process.fault(phase, self.broken)
        await process.spend(0.0)
