"""Waits with a deadline: what they answer, and that a cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest

from runtime.process.aio import done_within


def test_it_says_whether_the_work_was_done_and_raises_what_it_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        event = asyncio.Event()
        assert not await done_within(event.wait(), 0.0)
        asyncio.get_running_loop().call_soon(event.set)
        assert await done_within(event.wait(), 100.0)
        with pytest.raises(ValueError, match="no"):
            await done_within(fails(), 100.0)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost(turns: int) -> None:
    """asyncio.wait_for of Python 3.11 and before answers as if nobody had cancelled, after one or two of these turns."""

    async def main() -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(done_within(event.wait(), 100.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():  # else it had answered before
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())
