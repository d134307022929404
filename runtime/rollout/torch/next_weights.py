"""The version that an engine takes over next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from runtime.errors import UserError
from runtime.models.adapters import are_adapters, merged
from runtime.models.families.family import ROUTER_BIAS
from runtime.models.hf_weights import WeightFiles
from runtime.process import platform
from runtime.rollout.torch.decoder_weights import DecoderWeights, require_fit

Tensors = Mapping[str, torch.Tensor]


class NextWeights:
    """On CPUs it is the memory in which it was received, where that has the engine's dtype; where all of it has another, it is
    copied over the weights in use at the swap, so that there is one set of them. Elsewhere it is a copy on the device. Where
    adapters come alone it is made of the model folder's files, on CPUs in the memory of the version before the one in use."""

    def __init__(self, first: DecoderWeights, folder: str):
        """`first`: the weights that the engine begins with, of the model `folder`."""
        self._folder = folder
        self._config, self._device, self._dtype = first.config, first.embedding.device, first.embedding.dtype
        self.adopts = str(self._dtype).removeprefix("torch.") if self._device.type == "cpu" else ""
        """As `RolloutEngine.adopts`."""
        self.staged: DecoderWeights | Tensors | None = None
        """Weights, or what is to be copied over those in use."""
        self._spare: DecoderWeights | None = None  # as new memory is slow on CPUs

    async def stage(self, tensors: Tensors) -> None:
        """As `RolloutEngine.stage`."""
        self.staged = None  # so that no third set of weights is in memory
        self.staged = await asyncio.to_thread(self._prepare, tensors)

    def _prepare(self, tensors: Tensors) -> DecoderWeights | Tensors:
        alone = are_adapters(tensors)
        if not alone:
            require_fit(self._config, tensors)
        if self.adopts and not alone:
            if all(each.dtype != self._dtype for name, each in tensors.items() if not name.endswith(ROUTER_BIAS)):
                return tensors
            return DecoderWeights.adopt(self._config, tensors, self._device, self._dtype)
        try:
            weights = self._spare or DecoderWeights.empty(self._config, self._device, self._dtype)
            self._spare = weights if self.adopts else None
            with platform.beside(self._device):
                weights.load(merged(WeightFiles(self._folder), tensors) if alone else tensors.items())
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"services.rollout.slots: a weight sync holds the weights twice on {self._device}, which has not the memory; "
                f"take fewer slots, or engine vllm ({error})"
            ) from error
        return weights

    def taken(self, before: DecoderWeights, staged: DecoderWeights) -> None:
        """The engine has `staged` in the place of `before`."""
        if staged is self._spare:
            self._spare = before
