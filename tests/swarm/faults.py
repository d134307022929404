"""What goes wrong in a simulated run, and when: drawn from a seed, or given."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct

from runtime.errors import StorageFull
from runtime.ledger.reader import DATABASE
from runtime.simulation.cluster import SimulatedCluster
from runtime.simulation.loop import BEGAN, Crash, SimulatedLoop


def garble(database: Path) -> None:
    database.with_name(f"{DATABASE}-wal").unlink(missing_ok=True)
    database.write_bytes(b"SQLite format 3" + bytes(range(256)) * 16)


def cut(ledger: Path, percent: int) -> None:
    """Of the write-ahead log so much is left."""
    log = ledger / f"{DATABASE}-wal"
    if log.exists():
        os.truncate(log, log.stat().st_size * percent // 100)


Kind = Literal["kill", "stop", "cut", "slow", "corrupt", "node", "full", "clock", "crash", "agents"]
DRAWN: tuple[Kind, ...] = ("kill", "stop", "cut", "slow", "corrupt", "node", "full", "clock", "crash")

DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"cut-{percent}": partial(cut, percent=percent) for percent in range(0, 100, 10)},
    "gone-0": lambda ledger: ledger.joinpath(DATABASE).unlink(),
    "gone-1": shutil.rmtree,
    "emptied-0": lambda ledger: ledger.joinpath(DATABASE).write_bytes(b""),
    "garbage-0": lambda ledger: garble(ledger / DATABASE),
}
AFTER = 3.0  # seconds between a fault and one that follows it, on average: a process is back after about as long


class Fault(Struct, frozen=True):
    """`at`: seconds of virtual time. `who`: a process, or a node; of `crash` what has become of the ledger (`DAMAGES`) when the
    next life begins, which is given and never drawn. `seconds`: how long it lasts, 0 for good; of `clock`: how
    far it is set before the next start. `rounds`: of `crash`, the rounds of callbacks that are still run then; of `full`, the
    attempts to write that fail before there is room again."""

    kind: Kind
    at: float
    who: str = ""
    seconds: float = 0.0
    rounds: int = 0

    def __str__(self) -> str:
        more = f"+{self.rounds}" if self.rounds else f"/{self.seconds:g}" if self.seconds else ""
        return f"{self.kind}{':' if self.who else ''}{self.who}@{self.at:.6g}{more}"


def draw(chance: random.Random, units: Sequence[str], nodes: int, within: float, most: int) -> list[Fault]:
    """Up to `most` faults of a run that would take `within` seconds without. Half of them come while the run has just got over
    one before: newcomers, recoveries and second attempts have faults of their own."""
    faults: list[Fault] = []
    for _ in range(chance.randint(0, most)):
        at = chance.uniform(0.0, within)
        if faults and chance.random() < 0.5:
            at = faults[-1].at + chance.expovariate(1 / AFTER)
        faults.append(_one(chance, units, nodes, within, at))
    return sorted(faults, key=lambda fault: fault.at)


def _one(chance: random.Random, units: Sequence[str], nodes: int, within: float, at: float) -> Fault:
    kind, who = chance.choice(DRAWN), chance.choice(units)
    brief = min(within, 3.0)  # a link that is slow for longer ends a run
    lasts = chance.choice((0.0, chance.uniform(0.0, brief)))
    if kind == "slow":
        lasts = chance.uniform(0.0, brief)
    if kind == "corrupt":
        who = chance.choice([unit for unit in units if unit.startswith(("rollout", "trainer"))])
    if kind == "node":
        who = f"node-{chance.randrange(nodes)}"
    if kind == "clock":
        lasts = chance.uniform(-3600.0, 3600.0)
    if kind in ("full", "clock", "crash"):
        who = ""
    rounds = chance.randrange(20) if kind == "crash" else chance.choice((60, 1, 2)) if kind == "full" else 0
    return Fault(kind, at, who, lasts if kind in ("stop", "slow", "clock") else 0.0, rounds)


class Faults:
    """Of all lives of a run: what a crash has left for later comes in the next."""

    def __init__(self, faults: Sequence[Fault], chance: random.Random):
        self.clock = 0.0  # seconds by which the wall clock has jumped
        self.failing_writes = 0  # the next so many
        self._left = list(faults)
        self._chance = chance
        self._crash_at: int | None = None
        self.damage = ""  # of the ledger, by the crash that came last
        self._loop: SimulatedLoop

    def begin(self, loop: SimulatedLoop, cluster: SimulatedCluster) -> None:
        self._loop, self._crash_at = loop, None
        for fault in self._left:
            loop.call_at(max(loop.time(), BEGAN + fault.at), self._happen, fault, cluster)

    def check_disk(self) -> None:
        if self.failing_writes:
            self.failing_writes -= 1
            raise StorageFull("simulated")

    def crash(self, rounds: int) -> None:
        if self._crash_at is not None and rounds >= self._crash_at:
            self._crash_at = None
            raise Crash

    def _happen(self, fault: Fault, cluster: SimulatedCluster) -> None:
        self._left.remove(fault)
        self._loop.note(str(fault))
        if fault.kind == "crash":
            self._crash_at, self.damage = self._loop.rounds + fault.rounds, fault.who
        elif fault.kind == "full":
            self.failing_writes = fault.rounds
        elif fault.kind == "clock":
            self.clock += fault.seconds
        elif fault.kind == "node":
            cluster.lose_node(fault.who)
        elif fault.kind == "agents":
            for node in cluster.cores:
                cluster.agents.lose(node)
        elif fault.kind == "corrupt":
            cluster.corrupt.add(fault.who)
        else:
            self._befall(fault, cluster)

    def _befall(self, fault: Fault, cluster: SimulatedCluster) -> None:
        process = cluster.processes[fault.who]
        after: Callable[[], None] | None = None
        if fault.kind == "kill":
            cluster.kill(process)
        elif fault.kind == "cut":
            process.cut()
        elif fault.kind == "stop":
            process.stop()
            after = process.go_on
        else:
            process.slow = self._chance.choice((3.0, 30.0, 300.0))

            def after() -> None:
                process.slow = 1.0

        if fault.seconds and after is not None:
            self._loop.call_later(fault.seconds, after)
