"""Which processes a run has, and how each is started. Pure: from the configuration to command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from runtime.config import Config, Process, Trainer
from runtime.topology import Member, members, replicas


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """One operating-system process that the launcher starts (a torchrun that starts several, for an SPMD role)."""

    name: str
    role: str
    command: tuple[str, ...]
    env: dict[str, str]


def coordinator_spec(
    config: Config, config_path: Path, python: str, ready_fd: int, launched: float, trains: bool = True
) -> ProcessSpec:
    """The coordinator, which says its address on the file descriptor `ready_fd`. `launched`: when the run was asked for."""
    settings = config.services.coordinator
    arguments = ("--config", str(config_path), "--ready-fd", str(ready_fd), *(() if trains else ("--evaluate",)))
    return ProcessSpec(
        name="coordinator",
        role="coordinator",
        command=(settings.python or python, "-m", "services.coordinator", *arguments),
        env={"SLUICE_LAUNCHED": repr(launched), **_environment(settings, 1)},
    )


def service_specs(
    config: Config, config_path: Path, python: str, coordinator: str, cores: int, trains: bool = True
) -> list[ProcessSpec]:
    """Every process but the coordinator. `cores` are shared out among those that compute, unless `threads` is set."""
    arguments = ("--config", str(config_path), "--coordinator", coordinator)
    return list(_specs(config, members(config, trains), arguments, python, cores))


def _specs(config: Config, needed: list[Member], arguments: tuple[str, ...], python: str, cores: int) -> Iterator[ProcessSpec]:
    computing = sum(member.role != "reward" for member in needed)
    threads = max(1, cores // computing)
    rollouts = replicas(config)
    for member in needed:
        if member.rank:
            continue
        role: Process = rollouts.get(member.name) or getattr(config.services, member.role)
        start: tuple[str, ...] = (role.python or python, "-m")
        ranks = role.processes if isinstance(role, Trainer) else 1
        if ranks > 1:
            start += ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m")
        yield ProcessSpec(
            name=member.name,
            role=member.role,
            command=(*start, f"services.{member.role}", "--name", member.name, *arguments),
            env=_environment(role, 1 if member.role == "reward" else threads),
        )


def _environment(role: Process, threads: int) -> dict[str, str]:
    """The role's own variables over Sluice's. Several pools of threads on the same cores slow each other down severely."""
    count = str(role.threads or threads)
    own: dict[str, str] = {}
    if isinstance(role, Trainer) and role.parallel.tensor > 1:
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # kernels run in the order of their launch, which megatron-core relies on
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONUNBUFFERED": "1",
        **own,
        **role.env,
    }
