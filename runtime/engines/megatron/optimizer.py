"""megatron-core's distributed optimizer: gradients summed over the blocks, master weights and Adam's moments shared out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig

from runtime.config import Optimizer
from runtime.engines.megatron import facade


class Updates:
    """A model's gradients, as sums over everything that was added since they were cleared, and its updates by AdamW."""

    def __init__(self, model: torch.nn.Module, options: Optimizer, dtype: torch.dtype, device: torch.device):
        """`model` holds the weights to begin with. Biases and norms do not decay."""
        self._decay = options.weight_decay
        self.device = device
        config: Any = model.config
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            module=model,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=options.learning_rate,
            min_lr=0.0,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # the step clips
        )
        with facade.moving(device):
            self.optimizer = core.get_megatron_optimizer(settings, [self.model], **_no_decay(settings))
        self._make_moments()

    def clear(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self) -> list[torch.Tensor]:
        """Of this rank's part of the model, before `finish` those of its block alone."""
        return [parameter.main_grad for parameter in self.model.parameters()]

    def finish(self) -> float:
        """Sum the gradients over the blocks. Returns their squared norm, of the whole model; perhaps NaN."""
        finalize_model_grads([self.model], None)
        self.optimizer.prepare_grads()
        total = torch.zeros((), dtype=torch.float32 if self.device.type == "npu" else torch.float64, device=self.device)
        for part in self._parts():
            for gradient in part.get_main_grads_for_grad_norm():
                total += torch.linalg.vector_norm(gradient).to(total).square()
        dist.all_reduce(total)
        return float(total)

    def step(self, scale: float, rate: float) -> None:
        """Update the weights by the gradients that `finish` left, times `scale`."""
        parameters = [parameter for part in self._parts() for parameter in part.get_parameters()]
        torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._decay * group.get("wd_mult", 1.0)
        self.optimizer.step_with_ready_grads()

    def _parts(self) -> Iterator[Any]:
        yield from getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def torch_parts(self) -> Iterator[Any]:
        """Those whose inner optimizer is torch's, for want of a fused one."""
        return (part for part in self._parts() if isinstance(part.optimizer, torch.optim.AdamW))

    def _make_moments(self) -> None:
        """As they are before the first step: a checkpoint's are loaded into those that exist."""
        for part in self.torch_parts():
            for parameter in part.get_parameters():
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _no_decay(settings: OptimizerConfig) -> dict[str, Any]:
    """What older versions do unasked, newer ones want to be told."""
    if "config_overrides" in inspect.signature(core.get_megatron_optimizer).parameters:
        return {"config_overrides": core.get_standard_config_overrides(settings)}
    return {}
