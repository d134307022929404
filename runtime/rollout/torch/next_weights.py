"""The version that an engine takes over next: where it lies, and what of it is there already."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from runtime.errors import UserError
from runtime.process import platform
from runtime.rollout.torch.decoder_weights import DecoderWeights, are_of, require_fit


class NextWeights:
    """On CPUs it is the memory in which it was received, where that has the engine's dtype, and copies, which take the memory
    of weights that are not in use any more; elsewhere it is a copy on the device."""

    def __init__(self, first: DecoderWeights):
        """`first`: the weights that the engine begins with."""
        self._config, self._device, self._dtype = first.config, first.embedding.device, first.embedding.dtype
        self.adopts = str(self._dtype).removeprefix("torch.") if self._device.type == "cpu" else ""
        """As `RolloutEngine.adopts`."""
        self.staged: DecoderWeights | None = None
        self._spare: DecoderWeights | None = None  # not in use
        self._taken_in: set[str] = set()  # of the next version: what lies in `_spare` already

    async def reserve(self, unused: DecoderWeights | None) -> None:
        """As `RolloutEngine.reserve`. `unused`: the engine's weights, where it has generated nothing from them."""
        self.staged = None  # which may lie in `_spare`
        self._taken_in.clear()
        if unused is not None:
            self._spare = unused
        elif self._spare is None:
            self._spare = await asyncio.to_thread(self._zeros)

    def _zeros(self) -> DecoderWeights:
        """Memory that was written to: the first to write to a page waits until the system has made it."""
        weights = DecoderWeights.empty(self._config, self._device, self._dtype)
        for tensor in weights.copies.values():
            tensor.zero_()
        return weights

    def take_in(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `RolloutEngine.take_in`."""
        if self._spare is not None and are_of(self._config, tensors):
            self._spare.load(tensors)
            self._taken_in.update(tensors)

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `RolloutEngine.stage`."""
        self.staged = None  # so that no third set of weights is in memory
        self.staged = await asyncio.to_thread(self._prepare, tensors)
        self._taken_in.clear()

    def _prepare(self, tensors: Mapping[str, torch.Tensor]) -> DecoderWeights:
        require_fit(self._config, tensors)
        if self.adopts:
            if self._spare is None or not self._taken_in >= tensors.keys():
                self._spare = DecoderWeights.adopt(self._config, tensors, self._device, self._dtype, self._spare)
            return self._spare  # whose memory the next version takes where this one is staged in vain
        try:
            weights = DecoderWeights.empty(self._config, self._device, self._dtype)
            with platform.beside(self._device):
                weights.load(tensors)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"services.rollout.slots: a weight sync holds the weights twice on {self._device}, which has not the memory; "
                f"take fewer slots, or engine vllm ({error})"
            ) from error
        return weights

    def take_over(self, before: DecoderWeights) -> DecoderWeights:
        """What was staged, in the place of `before`, whose copies lend their memory to the version after it."""
        staged, self.staged = self.staged, None
        assert staged is not None
        # The first weights have memory of their own for everything, which most later ones need not.
        kept = self.adopts and staged.embedding is not before.embedding and staged.copies.keys() == before.copies.keys()
        self._spare = before if kept else None
        return staged
