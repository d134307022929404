"""What the tests of the ledger share: a ledger that is open, a buffer that records in it, and groups made ready and trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from runtime.coordinator.buffer import Buffer
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.states import Mark
from tests.unit.test_buffer import generated, ids, scores, ticket

T = TypeVar("T")


NEEDS = Mark.SCORED | Mark.REFERENCED


def with_ledger(folder: Path, use: Callable[[LedgerWriter], Awaitable[T]], segment_bytes: int = 1 << 20) -> T:
    async def session() -> T:
        ledger = await LedgerWriter.open(folder, segment_bytes)
        try:
            return await use(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asyncio.wait_for(session(), 30))


def buffer_on(ledger: LedgerWriter, step: int = 0, per_step: int = 2, staleness: int = 2) -> Buffer:
    return Buffer(needs=NEEDS, groups_per_step=per_step, staleness=staleness, journal=ledger, clock=time.time, step=step)


def make_ready(buffer: Buffer, *group_ids: int) -> None:
    for group_id in group_ids:
        if group_id not in buffer:
            buffer.admit(ticket(group_id))
        buffer.dispatch(group_id, "rollout-0")
        buffer.generated(generated(group_id, buffer.committed))
        buffer.scored(scores(group_id))
        buffer.referenced(group_id, b"reference %d" % group_id)


def train(buffer: Buffer, step: int) -> list[int]:
    taken = ids(buffer.take(step, whole=True))
    buffer.consume(step)
    buffer.commit(step + 1)
    return taken
