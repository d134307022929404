"""Publications under random faults: every one ends in a commit in time, and nobody is left with other weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from runtime.types import PolicyVersion
from tests.system.publication_faults import FAULTS, NONE, TRAINER, fleet, trial, until

ROUNDS = 1  # of each fault
PATIENCE = 60.0
VERSION = PolicyVersion(0, 1)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_every_publication_is_a_transaction(transport: str, tmp_path: Path) -> None:
    done = asyncio.run(trial(ROUNDS, 0, transport, tmp_path))
    assert Counter(fault for fault, _ in done.outcomes) >= Counter(
        {NONE: 2 * ROUNDS * len(FAULTS)} | dict.fromkeys(FAULTS, ROUNDS)
    )
    assert done.groups > 0


def test_where_a_peer_is_killed_as_it_sends_a_newcomer_the_version_the_trainer_does(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleet(tmp_path, "collective", 2) as here:
            await here.publisher.publish(VERSION)
            peer = here.processes["rollout-0"]
            assert here.pool.serving[0] is peer.port
            await peer.ask("die", where=0.5)
            late = await here.process("rollout-2")
            here.arrive(late)
            await until(lambda: late.port in here.pool.serving, PATIENCE)
            assert [unit.name for unit in here.losses] == ["rollout-0"]
            assert here.moments.calls["transfer"] == 2  # of the trainer's
            trainer, held = await here.processes[TRAINER].ask("report"), await late.ask("report")
            assert held["digest"] == trainer["digest"]
            assert held["swapped"] == [VERSION.pack()]
            await here.settled(3, PATIENCE)  # with the one that came in the place of the peer
            assert not here.failures

    asyncio.run(test())
