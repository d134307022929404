"""Helpers for asyncio: the first error of a task group, the loop's clock, waits that lose no cancellation, threads."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def now() -> float:
    """Return the seconds of the running loop's clock: time.monotonic to the millisecond; in a simulation a virtual clock."""
    return asyncio.get_running_loop().time()


def first_error(error: BaseException) -> BaseException:
    """Return the first exception in an exception group, at any depth, or the exception itself."""
    while nested := getattr(error, "exceptions", ()):
        error = nested[0]
    return error


async def done_within(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Run `work` for at most `seconds`, then cancel it. Returns whether it ended in time; raises its exceptions. Before Python
    3.12, asyncio.wait_for loses a cancellation that comes together with the end of the work: the canceller waits forever."""
    working = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({working}, timeout=max(0.0, seconds))
        if done:
            working.result()
        return bool(done)
    finally:
        working.cancel()


async def unless_failed(beside: Collection[asyncio.Future[None]], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. If a future of `beside` fails first, cancel `work`, then raise that failure."""
    task = asyncio.create_task(work)
    going: set[asyncio.Future[Any]] = set(beside)
    try:
        while not task.done():
            done, _ = await asyncio.wait({*going, task}, return_when=asyncio.FIRST_COMPLETED)
            for ended in going & done:
                ended.result()
            going -= done
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def still_missing(missing: Callable[[], Sequence[T]], changed: asyncio.Event, deadline: float) -> Sequence[T]:
    """Wait until `missing()` is empty, or until `deadline` on the loop's clock. Returns the last `missing()`. The caller sets
    `changed` whenever `missing()` may have changed."""
    while found := missing():
        changed.clear()
        if not await done_within(changed.wait(), deadline - now()):
            break
    return found


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a new thread. A cancellation of the task that awaits the future does not end the work."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_complete, args=(future, work), name=name, daemon=True).start()
    return future


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
        drop_frames(error)
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, work  # the error's traceback holds this frame


def drop_frames(error: BaseException | None) -> None:
    """Empty the frames that `error` and its causes passed through.

    Their locals hold stores and process groups. Without this, the sockets of these stay open as long as the error lives.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
