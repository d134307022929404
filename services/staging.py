"""Where a rollout receives versions, beside the weights that its engine generates with."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from runtime.commands import WeightsReceived
from runtime.config import Publication
from runtime.errors import Cancelled
from runtime.process import spans
from runtime.process.spans import PUBLICATION
from runtime.types import PolicyVersion

if TYPE_CHECKING:
    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import Staged, WeightReceiver


class Staging:
    """Receives versions beside the weights in use, so that generation goes on until `RolloutEngine.swap`.

    Used on the event loop, by one reception at a time. The receiver's memory outlives epochs.
    """

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        self._engine = engine
        self._settings = settings
        self._name = name
        self._shared = shared
        self.receiver: WeightReceiver | None = None
        """Of the newest manifest; None before the first."""
        self._adopts = False
        self._staged: Staged | None = None
        self._wanted: object | None = None  # identifies the reception whose version may be swapped in; None after `forget`

    def prepare(self, manifest: Manifest) -> None:
        """Make a receiver for the tensors of `manifest`. Raises InvalidMessage."""
        from runtime.weights.receiver import WeightReceiver

        if self.receiver is None or self.receiver.manifest != manifest:
            self._adopts = any(spec.dtype == self._engine.adopts for spec in manifest.tensors)
            self.receiver = WeightReceiver(manifest, sets=2 if self._adopts else 1, shared=self._shared)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> WeightsReceived:
        """Receive and verify `version`. Stage it in the engine if it is `needed`. Returns where the time went.

        Raises the errors of the receiver's future, and Cancelled after `forget`.
        """
        assert self.receiver is not None
        wanted = self._wanted = object()
        staged = await asyncio.wrap_future(self.receiver.receive(group, version, self._settings.transfer_timeout))
        before = time.monotonic()
        try:
            if needed and wanted is self._wanted:
                with spans.log.span("stage", PUBLICATION, step=version.step):
                    await self._engine.stage(staged.tensors())
        except BaseException:
            staged.release()
            raise
        if not needed:
            staged.release(held=not self._adopts)
        elif wanted is self._wanted:
            self._staged = staged
        else:
            staged.release()
            raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")
        return replace(staged.took, stage_seconds=time.monotonic() - before)

    def taken_over(self) -> None:
        """To be called once the engine has swapped in the version that was received."""
        if self._staged is not None:
            if self._adopts:
                self._staged.adopt()
            else:
                self._staged.release(held=True)
            self._staged = None

    def forget(self) -> None:
        """Give up the version that was received, or is under way: it will not be swapped in. Idempotent."""
        self._wanted = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None
