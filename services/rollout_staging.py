"""How a rollout takes in a version that is sent to it: beside the weights in use (shadow), or over them (inplace)."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

from runtime.config import Publication
from runtime.errors import Cancelled, DeadlineExceeded
from runtime.types import PolicyVersion
from services.standstill import Standstill

if TYPE_CHECKING:
    import torch

    from runtime.rollout.engine import RolloutEngine
    from runtime.weights.group import WeightGroup
    from runtime.weights.plan import Manifest
    from runtime.weights.receiver import InplaceReceiver, Staged, WeightReceiver

log = logging.getLogger("sluice")


class Staging(ABC):
    """Used on the event loop, by one reception at a time. The receiver's memory outlives epochs."""

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str):
        self._engine = engine
        self._settings = settings
        self._name = name

    @abstractmethod
    def prepare(self, manifest: Manifest) -> None:
        """Have memory for what is sent by `manifest`. Raises InvalidMessage."""

    @abstractmethod
    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> None:
        """Receive `version` and, if it is `needed`, bring the engine as far as `swap`; it is verified in any case.

        Raises what the receiver's future does, and Cancelled after `forget`.
        """

    @abstractmethod
    def taken_over(self) -> None:
        """The engine has swapped in what was received."""

    @abstractmethod
    def forget(self) -> None:
        """What was received, or is on its way, is not to be swapped in. Idempotent."""


class ShadowStaging(Staging):
    """Generation goes on meanwhile, and until `swap`."""

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, shared: bool):
        """`shared`: the engine's workers are processes of their own, which read the weights where they were staged."""
        super().__init__(engine, settings, name)
        self._shared = shared
        self._receiver: WeightReceiver | None = None
        self._staged: Staged | None = None
        self._wanted: object | None = None  # stands for the reception under way, or what it brought

    def prepare(self, manifest: Manifest) -> None:
        from runtime.weights.receiver import WeightReceiver

        if self._receiver is None or self._receiver.manifest != manifest:
            self._receiver = WeightReceiver(manifest, sets=2 if self._engine.adopts else 1, shared=self._shared)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> None:
        assert self._receiver is not None
        wanted = self._wanted = object()
        staged = await asyncio.wrap_future(self._receiver.receive(group, version, self._settings.transfer_timeout))
        try:
            if needed and wanted is self._wanted:
                await self._engine.stage(staged.tensors())
        except BaseException:
            staged.release()
            raise
        if not needed:
            staged.release()
        elif wanted is self._wanted:
            self._staged = staged
        else:
            staged.release()
            raise Cancelled(f"{self._name}: version {version} was withdrawn while it was staged")

    def taken_over(self) -> None:
        if self._staged is not None:
            if self._engine.adopts:
                self._staged.adopt()
            else:
                self._staged.release()
            self._staged = None

    def forget(self) -> None:
        self._wanted = None
        if self._staged is not None:
            self._staged.release()
            self._staged = None


class InplaceStaging(Staging):
    """Generation stands still from the first verified bucket on, which is written over the engine's weights, until the commit.

    Once a part of a version is written the engine is torn, and generates nothing until a whole one is committed. So it need
    not be kept from advancing after `forget`.
    """

    def __init__(self, engine: RolloutEngine, settings: Publication, name: str, standstill: Standstill):
        super().__init__(engine, settings, name)
        self._standstill = standstill
        self._receiver: InplaceReceiver | None = None
        self._wanted: object | None = None  # stands for the reception under way, or what it brought

    def prepare(self, manifest: Manifest) -> None:
        from runtime.weights.receiver import InplaceReceiver

        if self._receiver is None or self._receiver.manifest != manifest:
            self._receiver = InplaceReceiver(manifest)

    async def receive(self, group: WeightGroup, version: PolicyVersion, needed: bool) -> None:
        assert self._receiver is not None
        loop, timeout = asyncio.get_running_loop(), self._settings.transfer_timeout
        wanted = self._wanted = object()

        async def load(tensors: Mapping[str, torch.Tensor]) -> None:
            if wanted is self._wanted:
                await self._standstill.begin()
            if wanted is not self._wanted:
                raise Cancelled(f"{self._name}: version {version} was withdrawn during its transfer")
            await self._engine.load(tensors, version)

        def unpack(tensors: Mapping[str, torch.Tensor], give_up: float) -> None:
            """In the reception's thread."""
            loaded = asyncio.run_coroutine_threadsafe(load(tensors), loop)
            try:
                loaded.result(max(0.0, give_up - time.monotonic()))
            except FutureTimeout:
                loaded.cancel()
                drains = self._settings.in_flight == "drain"
                what = "samples that were running did not end" if drains else "generation did not stand still"
                raise DeadlineExceeded(self._name, "transfer", what, timeout) from None

        try:
            await asyncio.wrap_future(self._receiver.receive(group, version, timeout, unpack if needed else None))
        except Exception:
            if self._engine.torn:
                log.warning("%s: version %s came in part: nothing is generated until a whole one has", self._name, version)
            raise

    def taken_over(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._wanted = None
        self._standstill.end()
