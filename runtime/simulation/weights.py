"""A weight sync in a simulation: the members of an epoch meet, a version travels, and everybody's part is known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runtime.process.aio import done_within
from runtime.types import PolicyVersion

if TYPE_CHECKING:
    from runtime.simulation.process import SimulatedProcess


class SyncEpoch:
    """As a collective is, it fails for all as one leaves it or ends."""

    def __init__(self, names: tuple[str, ...]):
        """`names`: the sender's first."""
        self.names = names
        self.broken = ""  # why
        self.bad: set[PolicyVersion] = set()
        """Versions with a wrong byte for everybody."""
        self.verified: dict[PolicyVersion, set[str]] = {}
        self._received: dict[PolicyVersion, set[str]] = {}
        self._here: set[str] = set()
        self._sending: set[PolicyVersion] = set()
        self._changed: list[asyncio.Event] = []

    async def meet(self, process: SimulatedProcess, timeout: float) -> None:
        """Raises ServiceFault when not all come in time, or it is broken."""
        self._here.add(process.name)
        self._tell()
        await self._until(process, "join", timeout, lambda: self._here >= set(self.names))

    async def send(self, process: SimulatedProcess, version: PolicyVersion, timeout: float) -> None:
        """Returns once every receiver has every byte."""
        self._sending.add(version)
        self._tell()
        received = self._received.setdefault(version, set())
        await self._until(process, "transfer", timeout, lambda: received >= set(self.names[1:]))

    async def receive(self, process: SimulatedProcess, version: PolicyVersion, seconds: float, timeout: float) -> None:
        """The bytes come once the sender sends; they take `seconds`. Their checksums, a tenth of that, hold or do not."""
        await self._until(process, "announce", timeout, lambda: version in self._sending)
        await process.spend(seconds)
        if self.broken:
            raise process.fault("transfer", self.broken)
        self._received.setdefault(version, set()).add(process.name)
        self._tell()
        await process.spend(seconds / 10)
        if process.name in process.cluster.corrupt or version in self.bad:
            process.cluster.corrupt.discard(process.name)
            self.leave(process.name, "left after a checksum that does not match")
            raise process.fault("verify", f"version {version}: the checksum does not match")
        self.verified.setdefault(version, set()).add(process.name)
        self._tell()

    def leave(self, name: str, reason: str = "left") -> None:
        if name in self.names:
            self.broken = self.broken or f"{name} {reason}"
            self._tell()

    def _tell(self) -> None:
        for changed in self._changed:
            changed.set()

    async def _until(self, process: SimulatedProcess, phase: str, timeout: float, holds) -> None:  # type: ignore[no-untyped-def]
        give_up, changed = process.loop.time() + timeout, asyncio.Event()
        self._changed.append(changed)
        try:
            while not holds():
                changed.clear()
                if self.broken:
                    raise process.fault(phase, self.broken)
                if not await done_within(changed.wait(), give_up - process.loop.time()):
                    self.leave(process.name, "has waited in vain")
                    raise process.fault(phase, "others did not come", timeout)
            await process.spend(0.0)
        finally:
            self._changed.remove(changed)
