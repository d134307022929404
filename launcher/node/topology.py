"""How each process of a run is started: turns the configuration and a node's launches into command lines. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from launcher.node.environment import affinity, environment, hccl_ports
from launcher.node.local_node import Machine
from runtime.cluster.nodes import Launch
from runtime.cluster.topology import Instance, group_of, settings_of
from runtime.config import Computing, Config, Environment, FromEnvironment
from runtime.config.service_checks import hccl_beside_workers
from runtime.process import os_process
from runtime.process.network import host_port
from sluice import start


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """One operating-system process that the launcher starts (one that starts the ranks, for an SPMD role)."""

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str | FromEnvironment]
    cpus: tuple[int, ...] = ()  # processors that it may run on; () = all
    services: tuple[str, ...] = ()  # names of the run's services in it, which get keys
    ends_by: int = signal.SIGTERM  # the signal that asks it to end; at SIGTERM a service waits for the coordinator's request
    signals_held: bool = False  # SIGTERM and SIGHUP are kept until the process handles them (`os_process.heed_signals`)


def coordinator_spec(
    config: Config,
    config_path: Path,
    python: str,
    where: Sequence[str],
    launched: float,
    trains: bool = True,
    machine: Machine = Machine(),  # noqa: B008  immutable
) -> ProcessSpec:
    """Return how to start the coordinator. `where`: `--ready-fd` and the descriptor on which it reports its address, or
    `--address` and the address of the coordinator that it replaces. `launched`: when the user asked for the run."""
    settings = config.services.coordinator
    arguments = ("--config", str(config_path), *where, *(() if trains else ("--evaluate",)))
    return ProcessSpec(
        name="coordinator",
        role="coordinator",
        command=start.command("services.coordinator", *arguments, python=settings.python or python),
        env={"SLUICE_LAUNCHED": repr(launched), **environment(settings, 1, machine)},
        cpus=affinity(settings),
        signals_held=True,
    )


def service_specs(
    config: Config,
    launches: Sequence[Launch],
    config_path: Path,
    python: str,
    coordinator: str,
    cores: int,
    machine: Machine = Machine(),  # noqa: B008
) -> dict[str, ProcessSpec]:
    """Return by name how each launch is started. Processes that compute share `cores`, unless `env` sets OMP_NUM_THREADS."""
    arguments = ("--config", str(config_path), "--coordinator", coordinator)
    roles = {launch.name: settings_of(config, Instance(launch.role, launch.name)) for launch in launches}
    computing = sum(len(launch.ranks) or 1 for launch in launches if isinstance(roles[launch.name], Computing))
    threads = max(1, cores // max(1, computing))
    npus = {launch.name: launch.devices for launch in launches if machine.kind == "npu" and launch.devices}
    ports = hccl_ports(npus, hccl_beside_workers(config))
    specs = {}
    for launch in launches:
        role, world = roles[launch.name], len(group_of(config, Instance(launch.role, launch.name)))
        own = "" if isinstance(role, Environment) else role.python  # an environment's interpreter is its agents'
        env = environment(role, threads if isinstance(role, Computing) else 1, machine, launch.devices)
        specs[launch.name] = ProcessSpec(
            name=launch.name,
            role=launch.role,
            command=_command(launch, world, own or python, arguments),
            env={**ports.get(launch.name, {}), **env, **_key(launch), os_process.NODE: config_path.stem},
            cpus=affinity(role),
            services=tuple(f"{launch.role}-{rank}" for rank in launch.ranks) or (launch.name,),
            ends_by=signal.SIGINT,
            signals_held=True,
        )
    return specs


def restarts(config: Config, launches: Sequence[Launch]) -> dict[str, int]:
    """Return by name the settings of what this node restarts by itself: all but its parts of groups that span nodes."""
    own = [Instance(launch.role, launch.name) for launch in launches if launch.rendezvous is None]
    return {instance.name: settings_of(config, instance).restarts for instance in own}


def _key(launch: Launch) -> dict[str, str]:
    """Return the variable with the key of a group across nodes. Other users can read command lines, but not environments."""
    return {} if launch.rendezvous is None else {os_process.STORE_KEY: launch.rendezvous.key.hex()}


def _command(launch: Launch, world: int, python: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts a single process, or this node's ranks of a group of `world`."""
    service = (f"services.{launch.role}", "--name", launch.name, *arguments)
    meeting = launch.rendezvous
    if len(launch.ranks) < 2 and meeting is None:
        return start.command(*service, python=python)
    where = () if meeting is None else ("--at", host_port(meeting.host, meeting.port))
    ranks = ("--ranks", ",".join(map(str, launch.ranks)), "--world", str(world))
    return start.command("launcher.node.ranks", "--group", launch.name, *ranks, *where, start.__file__, *service, python=python)
