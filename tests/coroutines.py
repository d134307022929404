"""Tests that are coroutines: decorators that give each to what runs it, with its fixtures."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

Test = Callable[..., Coroutine[Any, Any, None]]


def within(seconds: float) -> Callable[[Coroutine[Any, Any, object]], None]:
    """What runs a coroutine for so long at most."""

    async def bounded(test: Coroutine[Any, Any, object]) -> None:
        await asyncio.wait_for(test, seconds)

    return lambda test: asyncio.run(bounded(test))


def driven_by(run: Callable[[Coroutine[Any, Any, None]], Any]) -> Callable[[Test], Callable[..., None]]:
    """For `async def test(fixtures...)`: `run` gets the coroutine."""

    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(*args: Any, **fixtures: Any) -> None:
            run(test(*args, **fixtures))

        return whole

    return decorate


def handed(
    run: Callable[..., Any], *before: Any, needs: tuple[str, ...] = (), first: int = 1, **settings: Any
) -> Callable[[Test], Callable[..., None]]:
    """For `async def test(given..., fixtures...)`, whose `first` arguments `run` gives: it gets `before`, the fixtures that it
    `needs`, a function of those arguments, and `settings`."""

    def decorate(test: Test) -> Callable[..., None]:
        own = list(inspect.signature(test).parameters)[first:]
        names = [*own, *(name for name in needs if name not in own)]

        def whole(**fixtures: Any) -> None:
            bound = functools.partial(test, **{name: fixtures[name] for name in own})
            run(*before, *(fixtures[name] for name in needs), bound, **settings)

        functools.update_wrapper(whole, test)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return whole

    return decorate
