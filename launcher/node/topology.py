"""How each process of a run is started: turns the configuration and a node's launches into command lines and environments."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from launcher.node import local_node
from launcher.node.local_node import VISIBLE, Machine
from runtime import timeouts
from runtime.cluster.nodes import Launch
from runtime.cluster.topology import Instance, group_of, processes, settings_of
from runtime.config import Computing, Config, Environment, FromEnvironment, Process, Spread, Trainer
from runtime.config.secret_values import missing, references
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
    ranks: bool = False  # the parent of ranks of trainer or critic, which outlives them (`launcher.node.ranks`)
    signals_held: bool = False  # SIGTERM and SIGHUP are kept until the process handles them (`os_process.heed_signals`)


def coordinator_spec(
    config: Config, config_path: Path, python: str, where: Sequence[str], launched: float, trains: bool, machine: Machine
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
    config: Config, launches: Sequence[Launch], config_path: Path, python: str, coordinator: str, cores: int, machine: Machine
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
        met = {}
        if (meeting := launch.rendezvous) is not None and launch.ranks:
            # The key of a group across nodes. Other users can read command lines, but not environments.
            met = {os_process.STORE_KEY: meeting.key.hex()}
        elif meeting is not None:
            met = {os_process.MEETING: f"{meeting.host} {meeting.port} {meeting.other}"}
        specs[launch.name] = ProcessSpec(
            name=launch.name,
            role=launch.role,
            command=_command(launch, role, world, own or python, arguments),
            env={**ports.get(launch.name, {}), **env, **met, os_process.NODE: config_path.stem},
            cpus=affinity(role),
            services=tuple(f"{launch.role}-{rank}" for rank in launch.ranks) or (launch.name,),
            ranks=isinstance(role, Trainer),
            ends_by=signal.SIGINT,
            signals_held=True,
        )
    return specs


def restarts(config: Config, launches: Sequence[Launch]) -> dict[str, int]:
    """Return by name the settings of what this node restarts by itself: all but its parts of groups that span nodes."""
    own = [Instance(launch.role, launch.name) for launch in launches if launch.rendezvous is None]
    return {instance.name: settings_of(config, instance).restarts for instance in own}


def _command(launch: Launch, settings: Process, world: int, python: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts a single process, or this node's ranks of a group of `world`."""
    service = (f"services.{launch.role}", "--name", launch.name, *arguments)
    meeting, trains = launch.rendezvous, isinstance(settings, Trainer)
    if not launch.ranks or (len(launch.ranks) < 2 and meeting is None and not trains):
        return start.command(*service, python=python)
    where = () if meeting is None else ("--at", host_port(meeting.host, meeting.port))
    ranks = ("--ranks", ",".join(map(str, launch.ranks)), "--world", str(world), *where)
    if isinstance(settings, Trainer) and settings.standby:
        ranks += ("--standby", ",".join((*_IMPORTED[settings.engine], service[0])))
    return start.command("launcher.node.ranks", "--group", launch.name, *ranks, start.__file__, *service, python=python)


_IMPORTED = {  # by engine: the modules that a rank needs; they import others
    "torch": ("runtime.trainer.rank", "runtime.trainer.fsdp.backend", "transformers.modeling_utils"),
    "megatron": ("runtime.trainer.rank", "runtime.trainer.megatron.backend"),
}


# ---- Environment variables, from the configuration and the machine's resources

# Variables that torch reads once. On CPUs they give huge pages: the first write to new memory takes a fifth of the time.
OF_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR", "THP_MEM_ALLOC_ENABLE": "1"}
HCCL_PORTS = 51  # as many as in the ranges of CANN's own examples, 60000-60050 and 61000-61050
HOST_PORTS = 60000, 60999  # first and last for HCCL on the host; a role's own variables stand over them
NPU_PORTS = 61000, 61999  # and on the NPUs' own interfaces
# torch's TCPStore looks up the name of every address that it connects to. Without a name server that takes 5 s of each
# rendezvous of the sync group, although torch does not need the name.
_SHORT_LOOKUPS = {"RES_OPTIONS": f"timeout:{timeouts.NAME_LOOKUP} attempts:1"}


def environment(role: Process, threads: int, machine: Machine, devices: Sequence[int] = ()) -> dict[str, str | FromEnvironment]:
    """Return the variables of the role's processes: its own over Sluice's. `devices`: indices of the machine's; empty = what it
    inherits. Thread counts are limited: several thread pools on the same cores slow each other down severely."""
    count = role.env.get("OMP_NUM_THREADS") or str(min(threads, len(affinity(role)) or threads))
    own: dict[str, str] = {}
    if isinstance(role, Spread) and max(role.parallel.tensor, role.parallel.context) > 1:
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # kernels run in the order of their launch, which megatron-core relies on
    if devices:
        own[VISIBLE[machine.kind]] = ",".join(machine.devices[device] for device in devices)
    made: dict[str, str | FromEnvironment] = {
        **OF_TORCH,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads spin while a group's few replies are decoded
        **(_SHORT_LOOKUPS if isinstance(role, Computing) else {}),
        **own,
        **role.env,
    }
    if machine.kind == "npu" and isinstance(role, Computing) and machine.jemalloc:
        made.setdefault("LD_PRELOAD", ":".join(filter(None, (machine.jemalloc, machine.preload))))
    return made


def affinity(role: Process) -> tuple[int, ...]:
    """Return the processors that the role's processes may run on; () = the launcher's processors."""
    return local_node.parse_cpus(role.cpus) if role.cpus else ()


def hccl_ports(used: Mapping[str, Sequence[int]], shared: bool = False) -> dict[str, dict[str, str]]:
    """Return by process the variables with the ports of HCCL. `used`: the NPUs that each process computes on. `shared`: whether
    child processes, on any node, use HCCL on the same NPU. No variables are needed if no NPU has two processes: HCCL's defaults
    do. Otherwise every process gets ranges of its own: all members of a communicator must set ranges, and processes of one NPU
    must have different ranges. Child processes take ports of their parent's ranges."""
    taken = [npu for npus in used.values() for npu in npus]
    if not used or (not shared and len(taken) == len(set(taken))):
        return {}
    host, npu = (port_ranges(ports, len(used)) for ports in (HOST_PORTS, NPU_PORTS))
    return {
        name: {"HCCL_HOST_SOCKET_PORT_RANGE": host[index], "HCCL_NPU_SOCKET_PORT_RANGE": npu[index]}
        for index, name in enumerate(used)
    }


def port_ranges(ports: tuple[int, int], count: int) -> list[str]:
    """Return `count` adjacent ranges FIRST-LAST of equal length, at most HCCL_PORTS, from `ports` (first and last port). Raises
    ValueError if there are fewer ports than ranges."""
    first, last = ports
    size = min(HCCL_PORTS, (last - first + 1) // count)
    if size < 1:
        raise ValueError(f"{count} processes do not fit into the ports {first} to {last}")
    return [f"{start}-{start + size - 1}" for start in range(first, first + count * size, size)]


def machine_faults(config: Config, machine: Machine) -> Iterator[str]:
    """Return one line for each thing that the configuration asks for and this machine lacks."""
    for path, role in processes(config).items():
        try:
            if missing_cpus := set(affinity(role)) - machine.cpus:
                lacks = f"this machine has no {local_node.shown_cpus(missing_cpus)}"
                yield f"{path}.cpus: {role.cpus}, but {lacks}; must be of {local_node.shown_cpus(machine.cpus)}"
        except ValueError as error:
            yield f"{path}.cpus: {error}; must be a list such as 0-15,32"
        if not config.services.coordinator.host:  # with a host there may be other nodes, and the role may run there
            yield from (missing(key, name) for key, name in references(role, path).items() if name not in machine.variables)
