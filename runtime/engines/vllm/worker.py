"""What Sluice adds to vLLM's workers, which are processes of their own: they load weights out of shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from runtime.weights.shared import Location, Mapped


class WeightLoading:
    """Mixed into vLLM's worker class by `worker_extension_cls`; `collective_rpc` calls its methods by name."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        model_config: Any

    def sluice_load(self, locations: Sequence[Sequence[Any]]) -> None:
        """Load a whole set of weights, of which this worker takes its part, in place of those that the model has.

        Some of vLLM's layers keep their weights in a layout of the device's, so they cannot be copied into one by one. vLLM
        puts layers of the checkpoint's shape in place, fills and converts each, and copies it over the old one. When that
        fails, the weights are a mixture, but the next load finds the model in order.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                with torch.device(self.model_runner.device):
                    model.load_weights(self.sluice_weights(locations))
            finally:
                finalize_layerwise_reload(model, self.model_config)
        if self.model_runner.device.type != "cpu":
            getattr(torch, self.model_runner.device.type).synchronize()  # the buffers are overwritten after this

    def sluice_weights(self, locations: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, as a checkpoint's files would give them."""
        mapped = Mapped()
        for fields in locations:
            location = Location(*fields)
            yield location.name, mapped.tensor(location)
