"""What asyncio lacks: the first error out of a task group, the loop's clock, waits that lose no cancellation, threads."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def now() -> float:
    """Seconds on the running loop's clock: to the millisecond that of time.monotonic, in a simulation a virtual one."""
    return asyncio.get_running_loop().time()


def first_error(error: BaseException) -> BaseException:
    """The first exception in an exception group, however deep, or the exception itself."""
    while nested := getattr(error, "exceptions", ()):
        error = nested[0]
    return error


async def done_within(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Whether `work` is done within `seconds`; else it is cancelled. Raises what it raises. Before Python 3.12 asyncio.wait_for
    loses a cancellation that comes together with the end of the work, and whoever has cancelled waits for ever."""
    working = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({working}, timeout=max(0.0, seconds))
        if done:
            working.result()
        return bool(done)
    finally:
        working.cancel()


async def unless_failed(beside: Collection[asyncio.Future[None]], work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises what one of those `beside` it raises before, once `work` has ended for it."""
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
    """What is missing at `deadline`, on the loop's clock; nothing as soon as nothing is.

    `changed` is set whenever `missing()` may have become another.
    """
    while found := missing():
        changed.clear()
        if not await done_within(changed.wait(), deadline - now()):
            break
    return found


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own, which ends with it. Cancelling whoever awaits the future does not end the work."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_complete, args=(future, work), name=name, daemon=True).start()
    return future


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is the caller's, through the future
        drop_frames(error)
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, work  # the error's traceback holds this frame


def drop_frames(error: BaseException | None) -> None:
    """Empty the frames that `error` and its causes passed through.

    Their locals hold stores and process groups, whose sockets would stay open as long as somebody keeps the error.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
