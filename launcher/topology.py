"""Which processes a run has, and how each is started. Pure: from the configuration to command lines."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from launcher.environment import environment, hccl_ports, part, used_npus
from launcher.machine import Machine
from runtime.config import Config, Process, Restarts, Spread
from runtime.topology import Member, members, place_in_fleet, replicas


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """One operating-system process that the launcher starts (a torchrun that starts several, for an SPMD role)."""

    name: str
    role: str
    command: tuple[str, ...]
    env: dict[str, str]


def coordinator_spec(
    config: Config,
    config_path: Path,
    python: str,
    ready_fd: int,
    launched: float,
    trains: bool = True,
    machine: Machine = Machine(),  # noqa: B008  immutable
) -> ProcessSpec:
    """The coordinator, which says its address on the file descriptor `ready_fd`. `launched`: when the run was asked for."""
    settings = config.services.coordinator
    arguments = ("--config", str(config_path), "--ready-fd", str(ready_fd), *(() if trains else ("--evaluate",)))
    return ProcessSpec(
        name="coordinator",
        role="coordinator",
        command=(settings.python or python, "-m", "services.coordinator", *arguments),
        env={"SLUICE_LAUNCHED": repr(launched), **environment(settings, 1, machine)},
    )


def service_specs(
    config: Config,
    config_path: Path,
    python: str,
    coordinator: str,
    cores: int,
    trains: bool = True,
    machine: Machine = Machine(),  # noqa: B008
) -> list[ProcessSpec]:
    """Every process but the coordinator. `cores` are shared out among those that compute, unless `threads` is set."""
    arguments = ("--config", str(config_path), "--coordinator", coordinator)
    needed = members(config, trains)
    computing = sum(member.role != "reward" for member in needed)
    threads = max(1, cores // computing)
    started = [member for member in needed if not member.rank]
    parts = {member.name: _part(config, member) for member in started}
    used = {
        member.name: used_npus(_role(config, member), machine, parts[member.name], _ranks(config, member)) for member in started
    }
    ports = hccl_ports(config.network, {name: npus for name, npus in used.items() if npus})
    return [
        ProcessSpec(
            name=member.name,
            role=member.role,
            command=_command(config, member, python, arguments),
            env={
                **ports.get(member.name, {}),
                **environment(_role(config, member), 1 if member.role == "reward" else threads, machine, parts[member.name]),
            },
        )
        for member in started
    ]


def restarts(config: Config) -> dict[str, Restarts]:
    """By name, for everything that is started but the coordinator; a group has the name of its first rank."""
    started = [member for member in members(config) if not member.rank]
    return {member.name: _role(config, member).restarts for member in started}  # type: ignore[attr-defined]  # such roles' own


def _command(config: Config, member: Member, python: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    start: tuple[str, ...] = (_role(config, member).python or python, "-m")
    if (ranks := _ranks(config, member)) > 1:
        start += ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m")
    return (*start, f"services.{member.role}", "--name", member.name, *arguments)


def _role(config: Config, member: Member) -> Process:
    role: Process = replicas(config).get(member.name) or getattr(config.services, member.role)
    return role


def _ranks(config: Config, member: Member) -> int:
    role = _role(config, member)
    return role.processes if isinstance(role, Spread) else 1


def _part(config: Config, member: Member) -> list[int]:
    role = _role(config, member)
    return part(role, place_in_fleet(config, member), getattr(role, "replicas", 1))
