"""A rollout's service whose memory comes and goes between publications: the real engine, and real transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runtime.commands import Level, Move
from runtime.errors import Cancelled, InvariantViolated
from runtime.types import GeneratedGroup
from tests.loopback.test_rollout_staging import Models, Site, version
from tests.unit.rollout_cases import request


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def on_site(models: Models, course: Callable[[Site], Awaitable[None]]) -> None:
    async def go() -> None:
        site = Site(models)
        running = asyncio.create_task(site.actor.run())
        await site.join()
        await course(site)
        running.cancel()
        await site.service.close()
        site.group.abort()

    asyncio.run(asyncio.wait_for(go(), 60.0))


def test_a_version_comes_while_there_is_no_cache(models: Models) -> None:
    async def course(site: Site) -> None:
        for step in (1, 2):
            await site.ask(Move(Level.ASLEEP))
            assert site.service.state == "asleep"
            waiting = site.actor.send(request(step))
            await site.ask(Move(Level.WEIGHTS))
            await site.publish(step)
            assert (site.service.state, site.service.version) == ("asleep", version(step))
            assert site.engine._cache.data.untyped_storage().nbytes() == 0
            await site.ask(Move(Level.AWAKE))
            assert site.service.state == "ready"
            group: GeneratedGroup = await waiting
            assert (group.oldest, group.newest) == (version(step), version(step))

    on_site(models, course)


def test_a_version_is_not_taken_over_asleep(models: Models) -> None:
    async def course(site: Site) -> None:
        await site.ask(Move(Level.ASLEEP))
        await site.transfer(1)
        with pytest.raises(InvariantViolated, match="asleep"):
            await site.commit(1)

    on_site(models, course)


def test_what_is_under_way_is_given_up_for_the_sleep(models: Models) -> None:
    async def course(site: Site) -> None:
        asked = site.actor.send(request(1, limit=240))
        while not site.engine.stats().running:  # noqa: ASYNC110 - it has to be in the middle of it, where it is for long
            await asyncio.sleep(0)
        await site.ask(Move(Level.ASLEEP))
        with pytest.raises(Cancelled, match="put to sleep"):
            await asked
        assert site.engine.stats().running == 0
        await site.ask(Move(Level.AWAKE))
        await site.actor.send(request(1))

    on_site(models, course)


def test_what_is_under_way_goes_on_after_a_sleep_that_keeps_it(models: Models) -> None:
    async def course(site: Site) -> None:
        asked = site.actor.send(request(1, limit=240))
        while not site.engine.stats().running:  # noqa: ASYNC110 - it has to be in the middle of it, where it is for long
            await asyncio.sleep(0)
        await site.ask(Move(Level.ASLEEP, keeps=True))
        assert site.engine.stats().running and not site.service.busy
        await site.ask(Move(Level.AWAKE))
        assert (await asked).group_id == 1
        again = site.actor.send(request(2, limit=240))
        while not site.engine.stats().running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await site.ask(Move(Level.ASLEEP, keeps=True))
        await site.ask(Move(Level.ASLEEP))  # as of a coordinator that takes over
        with pytest.raises(Cancelled, match="put to sleep"):
            await again

    on_site(models, course)
