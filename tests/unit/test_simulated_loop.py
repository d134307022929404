"""The event loop of simulations: virtual time, an order drawn from the seed, work for executors in this thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.simulation.loop import BEGAN, Crash, SimulatedLoop, SimulatedWorld, Stuck

HOUR = 3600.0
NAMES = tuple("abcdefgh")


@contextmanager
def loop_of(seed: str = "0", world: SimulatedWorld | None = None) -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(seed, world or SimulatedWorld())  # type: ignore[abstract]
    try:
        yield loop
    finally:
        loop.end()


def run(main: Callable[[], Coroutine[Any, Any, Any]], seed: str = "0") -> tuple[Any, str]:
    with loop_of(seed) as loop:
        return loop.run(main()), loop.trace


async def together() -> list[str]:
    """What sleeps as long as the others, in the order in which it wakes."""
    woken: list[str] = []

    async def sleeper(name: str) -> None:
        await asyncio.sleep(HOUR)
        woken.append(name)

    await asyncio.gather(*map(sleeper, NAMES))
    return woken


def test_time_stands_still_but_for_timers() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        await asyncio.sleep(HOUR)
        seen.append(loop.time())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2 * HOUR)
        return [*seen, loop.time()]

    assert run(main)[0] == [BEGAN, BEGAN + HOUR, BEGAN + 3 * HOUR]


def test_the_seed_alone_draws_the_order_of_what_becomes_ready_together() -> None:
    orders = {seed: run(together, seed) for seed in map(str, range(20))}
    assert all(sorted(order) == list(NAMES) for order, _ in orders.values())
    assert len({tuple(order) for order, _ in orders.values()}) > 10  # of 8! orders
    assert orders == {seed: run(together, seed) for seed in orders}


def test_what_one_callback_schedules_keeps_its_order() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(0)  # it was scheduled last
        return seen

    for seed in map(str, range(10)):
        assert run(main, seed)[0] == list(range(20))


def test_who_waits_for_ever_is_named() -> None:
    async def waits_in_vain() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"waits_in_vain at .*test_simulated_loop\.py:\d+"):
        run(waits_in_vain)


def test_an_executors_work_is_done_in_order_and_takes_its_time() -> None:
    class Slow(SimulatedWorld):
        seconds = iter((3.0, 1.0, 2.0))

        def storage_seconds(self) -> float:
            return next(self.seconds)

    done: list[int] = []

    async def main() -> float:
        loop, executor = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        await asyncio.gather(*(loop.run_in_executor(executor, done.append, number) for number in range(3)))
        return loop.time()

    with loop_of(world=Slow()) as loop:
        assert loop.run(main()) == BEGAN + 3.0
    assert done == [0, 1, 2]


def test_a_full_disk_is_what_the_work_raises() -> None:
    class Full(SimulatedWorld):
        def check_storage(self) -> None:
            raise OSError("no room")

    async def main() -> None:
        await asyncio.to_thread(lambda: None)

    with loop_of(world=Full()) as loop, pytest.raises(OSError, match="no room"):
        loop.run(main())


def test_an_error_that_nobody_awaits_ends_it() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(HOUR)

    with pytest.raises(ZeroDivisionError):
        run(main)


def test_a_crash_comes_between_two_rounds_and_cleans_up_afterwards() -> None:
    left: list[float] = []

    async def main() -> None:
        try:
            await asyncio.sleep(HOUR)
        finally:
            await asyncio.sleep(1.0)
            left.append(asyncio.get_running_loop().time())

    class Killed(SimulatedWorld):
        def before_round(self, rounds: int) -> None:
            if rounds == 1:
                raise Crash

    with loop_of(world=Killed()) as loop:
        with pytest.raises(Crash):
            loop.run(main())
        assert left == []
    assert left == [BEGAN + 1.0]
