"""A late rollout is brought up to date by another one, processes all: the trainer sends it nothing, unless that one dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runtime.types import PolicyVersion
from tests.system.publication_fleet import TRAINER, Fleet, Process, fleet, until

PATIENCE = 60.0
VERSION = PolicyVersion(0, 1)


async def come(here: Fleet) -> Process:
    """Another rollout comes, and serves."""
    late = await here.process("rollout-2")
    here.arrive(late)
    await until(lambda: late.port in here.pool.serving, PATIENCE)
    return late


async def is_up_to_date(here: Fleet, late: Process) -> None:
    trainer, held = await here.processes[TRAINER].ask("report"), await late.ask("report")
    assert held["digest"] == trainer["digest"]
    assert held["swapped"] == [VERSION.pack()]


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_another_rollout_sends_it_the_version_and_the_trainer_sends_nothing(transport: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with fleet(tmp_path, transport, 2) as here:
            await here.publisher.publish(VERSION)
            late = await come(here)
            assert here.moments.calls["transfer"] == 1  # of the trainer's
            await is_up_to_date(here, late)
            for rollout in here.rollouts[:2]:
                assert (await rollout.ask("report"))["swapped"] == [VERSION.pack()]
            await here.settled(3, PATIENCE)
            await here.publisher.publish(PolicyVersion(0, 2))
            assert here.moments.calls["transfer"] == 2
            assert not here.losses

    asyncio.run(test())


def test_where_the_peer_is_killed_in_the_middle_the_trainer_does(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleet(tmp_path, "collective", 2) as here:
            await here.publisher.publish(VERSION)
            peer = here.processes["rollout-0"]
            assert here.pool.serving[0] is peer.port
            await peer.ask("die", where=0.5)
            late = await come(here)
            assert [unit.name for unit in here.losses] == ["rollout-0"]
            assert here.moments.calls["transfer"] == 2
            await is_up_to_date(here, late)
            await here.settled(3, PATIENCE)  # with the one that came in the place of the peer
            assert not here.failures

    asyncio.run(test())
