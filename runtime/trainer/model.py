"""Where a model under training lies, in what it computes, and what updates it. Policy and critic share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.config import Config, Optimizer, Trainer
from runtime.errors import UserError
from runtime.process import platform
from runtime.trainer.fsdp import sharding


@dataclass(frozen=True)
class RankPlace:
    """This process's place in its service's group."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class TrainingPosition:
    """How far training is: the step that comes next, and the KL term's coefficient, None where a checkpoint has none."""

    step: int
    kl_coefficient: float | None


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What forward and backward passes compute in."""
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype: 'float16' cannot be trained (its gradients underflow); must be one of auto, float32, bfloat16"
        )
    return platform.resolve_dtype(config.model.dtype, device)


def place(model: Any, settings: Trainer, key: str, compute: torch.dtype, rank_place: RankPlace) -> None:
    """Bring `model` into training mode and onto its device, or spread it over the ranks. `settings` is the section `key`."""
    world_size, device = rank_place.world_size, rank_place.device
    if settings.cpu_offload and (world_size == 1 or device.type == "cpu"):
        raise UserError(
            f"{key}.cpu_offload: true needs accelerators and {key}.processes > 1 "
            f"(here: {device.type}, {world_size}); must be false"
        )
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if world_size > 1:
        sharding.shard(model, device, compute, settings.cpu_offload)
    else:
        model.to(device)


def make_optimizer(options: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay. Fused where there is a kernel: on a CPU it takes a third of foreach's time."""
    kinds = {parameter.device.type for parameter in parameters.values()}
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=kinds <= {"cpu", "cuda"},
    )
