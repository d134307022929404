"""The environment variables of each process, from the configuration and the machine's resources. Only `faults` does I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.node import local_node
from launcher.node.local_node import VISIBLE, Machine
from runtime import timeouts
from runtime.cluster.topology import processes
from runtime.config import Computing, Config, FromEnvironment, Process, Spread
from runtime.config.secret_values import missing, references

# Variables that torch reads once. On CPUs they give huge pages: the first write to new memory takes a fifth of the time.
OF_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR", "THP_MEM_ALLOC_ENABLE": "1"}
HCCL_PORTS = 51  # as many as in the ranges of CANN's own examples, 60000-60050 and 61000-61050
HOST_PORTS = 60000, 60999  # first and last for HCCL on the host; a role's own variables stand over them
NPU_PORTS = 61000, 61999  # and on the NPUs' own interfaces
# torch's TCPStore looks up the name of every address that it connects to. Without a name server that takes 5 s of each
# rendezvous of the sync group, although torch does not need the name.
_SHORT_LOOKUPS = {"RES_OPTIONS": f"timeout:{timeouts.NAME_LOOKUP} attempts:1"}


def environment(role: Process, threads: int, machine: Machine, devices: Sequence[int] = ()) -> dict[str, str | FromEnvironment]:
    """Return the variables of the role's processes: its own over Sluice's. `devices`: the indices of the machine's devices for
    the process; empty = the devices that it inherits. Thread counts are limited: several thread pools on the same cores slow
    each other down severely."""
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
    child processes, on any node, use HCCL on the same NPU.

    No variables are needed if no NPU has two processes: HCCL's defaults do. Otherwise every process gets ranges of its own: all
    members of a communicator must set ranges, and processes of one NPU must have different ranges. Child processes take ports
    of their parent's ranges.
    """
    taken = [npu for npus in used.values() for npu in npus]
    if not used or (not shared and len(taken) == len(set(taken))):
        return {}
    host, npu = (port_ranges(ports, len(used)) for ports in (HOST_PORTS, NPU_PORTS))
    return {
        name: {"HCCL_HOST_SOCKET_PORT_RANGE": host[index], "HCCL_NPU_SOCKET_PORT_RANGE": npu[index]}
        for index, name in enumerate(used)
    }


def port_ranges(ports: tuple[int, int], count: int) -> list[str]:
    """Return `count` adjacent ranges FIRST-LAST of equal length, at most HCCL_PORTS, from `ports` (first and last port).

    Raises ValueError if there are fewer ports than ranges.
    """
    first, last = ports
    size = min(HCCL_PORTS, (last - first + 1) // count)
    if size < 1:
        raise ValueError(f"{count} processes do not fit into the ports {first} to {last}")
    return [f"{start}-{start + size - 1}" for start in range(first, first + count * size, size)]


def faults(config: Config, machine: Machine) -> Iterator[str]:
    """Return one line for each thing that the configuration asks for and this machine lacks."""
    for path, role in processes(config).items():
        yield from _cpu_faults(f"{path}.cpus", role, machine)
        if not config.services.coordinator.host:  # with a host there may be other nodes, and the role may run there
            yield from (missing(key, name) for key, name in references(role, path).items() if name not in machine.variables)


def _cpu_faults(key: str, role: Process, machine: Machine) -> Iterator[str]:
    try:
        missing = set(affinity(role)) - machine.cpus
    except ValueError as error:
        yield f"{key}: {error}; must be a list such as 0-15,32"
        return
    if missing:
        given = local_node.shown_cpus(machine.cpus)
        yield f"{key}: {role.cpus}, but this machine has no {local_node.shown_cpus(missing)}; must be of {given}"
