"""Waits: on the event loop with a deadline, for a thread, and in writes until a full or failing disk takes them."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from runtime import timeouts
from runtime.errors import ServiceFault

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
            for each in going & done:
                each.result()
            going -= done
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def still_missing(missing: Callable[[], Sequence[T]], changed: asyncio.Event, deadline: float) -> Sequence[T]:
    """Wait until `missing()` is empty, or `deadline` on the loop's clock; return it. `changed`: set when it may change."""
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
    """Empty the frames of `error` and its causes, whose locals would keep stores, groups and their sockets open as long."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


# ---- Writes that wait while a disk is full or a file system fails, with one log line, and then try again

log = logging.getLogger("sluice")

_PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)


def write(file: FileIO, data: bytes) -> None:
    """Write all of `data` once, from a thread that may wait. `file` must be unbuffered. Raises ServiceFault."""
    left = memoryview(data)

    def once() -> None:
        nonlocal left
        while left:
            left = left[file.write(left) :]

    until_done(once, Path(str(file.name)), len(data))


def until_done(work: Callable[[], T], path: Path, nbytes: int = 0) -> T:
    """Repeat `work`, a write of `nbytes` (0: unknown) to `path`, until it succeeds. Raises ServiceFault for a lasting error."""
    logged = False
    while True:
        try:
            return work()
        except OSError as error:
            why = _waits(error, path, nbytes)
            if not logged:
                log.warning("%s", why)
            logged = True
            time.sleep(timeouts.DISK_RETRY)


async def done(work: Callable[[], T], path: Path, say: Callable[[str], None] = log.warning) -> T:
    """Do the same as `until_done` on an event loop, without blocking it, until cancelled. `say`: shows a line."""
    shown = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            why = _waits(error, path, 0)
            if not shown:
                say(why)
            shown = True
            await asyncio.sleep(timeouts.DISK_RETRY)


def _waits(error: OSError, path: Path, nbytes: int) -> str:
    """Return the line about a passing error. Raises ServiceFault for a permanent error."""
    if error.errno not in _PASSES:
        raise ServiceFault("coordinator", "write", f"{path}: {error}") from error
    size = f"{nbytes} bytes can be written to " if nbytes else "there is room for "
    return f"waits until {size}{path}: {error.strerror}"
