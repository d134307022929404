"""The groups under training, trainer and critic, as long as both are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from runtime.errors import ServiceFault, Unreachable
from runtime.ports import UpdatePort
from runtime.process.aio import first_error
from runtime.status import Loss

log = logging.getLogger("sluice")


class Watch:
    """When one is lost the other is given up: both go back to one checkpoint, and neither could without the other."""

    def __init__(self, models: Sequence[UpdatePort], tell: Callable[[Loss], None], replaced: Callable[[], bool]):
        """`tell` is told of each that is lost or given up. `replaced`: whether others would come; if not, a loss is a fault."""
        self._models = models
        self._tell = tell
        self._replaced = replaced
        self._gone = asyncio.Event()
        self._name = self._reason = ""
        for model in models:
            model.when_lost(partial(self._lose, model))

    @property
    def fault(self) -> ServiceFault:
        """Whose loss it was, and why."""
        return Unreachable(self._name, "run", self._reason)

    async def holds(self, course: Coroutine[Any, Any, None]) -> bool:
        """Whether `course` came to its end; False when it was cut short because a group was lost, and others will come.

        Raises what it raised, or the loss as a ServiceFault.
        """
        going, gone = asyncio.ensure_future(course), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({going, gone}, return_when=asyncio.FIRST_COMPLETED)
            if going.done():
                error = going.exception()
                if error is None:
                    return True
                self._blame(first_error(error))
                if not (self._gone.is_set() and self._replaced()):
                    raise error
            elif not self._replaced():
                raise self.fault
            return False
        finally:
            for task in (going, gone):
                task.cancel()
            await asyncio.gather(going, gone, return_exceptions=True)

    def _lose(self, model: UpdatePort, reason: str) -> None:
        if self._gone.is_set():
            return
        self._name, self._reason = model.name, reason
        self._gone.set()
        log.warning("%s (incarnation %d) is lost: %s", model.name, model.incarnation, reason)
        if not self._replaced():
            return
        for one in self._models:
            why = reason if one is model else f"goes back to a checkpoint with {model.name}"
            one.give_up(why)
            self._tell(Loss(name=one.name, incarnation=one.incarnation, reason=why))

    def _blame(self, error: BaseException) -> None:
        """A group that does not take part in a publication is lost as well."""
        for model in self._models:
            if isinstance(error, ServiceFault) and error.phase == "publish" and model.name in error.service.split(", "):
                self._lose(model, error.reason)
