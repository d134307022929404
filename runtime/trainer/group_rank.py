"""One rank of a group of processes that share a model: its place in the group, and its commands."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from runtime.config import Config, Spread
from runtime.errors import UserError
from runtime.models import limits
from runtime.models.hf_config import read_raw
from runtime.process import platform
from runtime.types import PolicyVersion, snake


class GroupRank:
    """Every method runs in the engine's thread, in the same order on every rank. A subclass names its `role`, and has a method
    for each command, of its name in snake case, which takes the command and returns its answer: a future of one that goes on
    beside the next commands."""

    role: ClassVar[str]

    def __init__(self, config: Config, rank: int, world_size: int):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.version = PolicyVersion()
        """Of the weights as they are."""

    def execute(self, command: Any) -> Any:
        """Carry out one command; returns its answer."""
        return getattr(self, snake(type(command).__name__))(command)


def join_group(role: str, settings: Spread, world_size: int, timeout: float) -> torch.device:
    """This rank's device; with several ranks, join torchrun's default group first. `timeout`: seconds of its collectives.

    Raises UserError when the role's `backend` does not work on that device.
    """
    device = platform.device(index=int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend_of(role, settings, device)
    if world_size > 1:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return device


def backend_of(role: str, settings: Spread, device: torch.device) -> platform.CollectiveBackend:
    """What the ranks of `role` meet over. Raises UserError when that does not work on `device`.

    torch's gloo knows no NPUs; on CUDA it has what FSDP2 needs, but neither the sends between stages nor the coalesced gathers
    of megatron-core.
    """
    staged = device.type == "cuda" and settings.engine == "torch"
    return platform.collective_backend(settings.backend, device, f"services.{role}.backend", gloo=staged)


def require_memory(role: str, config: Config, source: str, device: torch.device) -> None:
    """Before anything is loaded: raises UserError when a rank of `role` with the model of folder `source` is known to hold more
    than its device has."""
    if getattr(config.services, role).engine != "megatron":
        return
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    held = limits.rank_memory(config, role, read_raw(source), on_cpus=device.type == "cpu")
    if fault := limits.memory_fault(config, role, held, platform.memory(device).total // sharing):
        raise UserError(fault)
