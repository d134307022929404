"""Checks of devices, of who shares one, and of the ports that HCCL meets on. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.cluster.topology import Instance, fleets, instances, place_in_fleet, processes, replicas, takes_turns
from runtime.config import Computing, Config, ReferenceScorer, Rollout, Trainer
from runtime.process.network import is_loopback
from runtime.weights.transports import resolve

_COLLECTIVE = ("collective", "delta")
RESERVED = 1024  # ports below belong to the system


def device_faults(config: Config, trains: bool) -> Iterator[str]:
    """One line per fault."""
    for path, role in processes(config).items():
        if isinstance(role, Computing) and role.devices:
            yield from _devices(path, role)
    yield from _hccl_ports(config, trains)
    if trains and not takes_turns(config):  # which has a check of its own
        yield from _shared_device(config)


def _devices(key: str, role: Computing) -> Iterator[str]:
    count = len(role.devices)
    if twice := {str(device) for index, device in enumerate(role.devices) if device in role.devices[:index]}:
        yield f"{key}.devices: names {', '.join(sorted(twice))} twice; must name each device once"
    if isinstance(role, Trainer) or (isinstance(role, ReferenceScorer) and role.engine == "megatron"):
        if count != role.processes:
            yield f"{key}.devices: {count} of them for {role.processes} processes; must be one each"
    elif isinstance(role, Rollout) and role.engine != "torch":
        needed = role.replicas * role.tensor_parallel
        if count != needed:
            yield (
                f"{key}.devices: {count} of them for {role.replicas} replicas of tensor_parallel {role.tensor_parallel}; "
                f"must be {needed}"
            )
    elif count != role.replicas:  # type: ignore[attr-defined]  # every other role has replicas
        yield f"{key}.devices: {count} of them for {role.replicas} replicas; must be one each"  # type: ignore[attr-defined]


def _shared_device(config: Config) -> Iterator[str]:
    """NCCL and HCCL refuse two members on one device. Who names none has its own."""
    settings = config.publication
    transport = resolve(settings.transport, settings.backend, {"trainer-0": "this"})
    if settings.backend == "gloo" or transport not in _COLLECTIVE:
        return
    taken: dict[int, str] = {}
    for name, devices in _publishing(config):
        if not devices:
            continue
        device = devices[0]
        if device in taken:
            key = f"transport: {transport}" if settings.backend == "auto" else f"backend: {settings.backend}"
            yield (
                f"publication.{key} takes one member a device, but {taken[device]} and {name} have {device}; must be backend "
                "gloo, or transport shared_memory, or other services.*.devices"
            )
            return
        taken[device] = name


def _publishing(config: Config) -> Iterator[tuple[str, list[int]]]:
    """The members of the publication group, and the devices that each has all for itself."""
    yield "trainer-0", config.services.trainer.devices[:1]
    for name, fleet in replicas(config).items():
        place, size = place_in_fleet(config, Instance("rollout", name)), len(fleet.devices) // fleet.replicas
        yield name, fleet.devices[place * size : (place + 1) * size]


def hccl_beside_workers(config: Config) -> bool:
    """Whether, on NPUs, a rollout receives weights over HCCL on the NPU on which the first of vLLM's workers meets the others
    over HCCL too."""
    settings = config.publication
    if takes_turns(config) or settings.backend not in ("auto", "hccl"):
        return False
    machines = {"trainer-0": "this", "rollout-0": "this" if is_loopback(config.network.interface) else ""}
    if settings.transport == "shared_memory" or resolve(settings.transport, settings.backend, machines) not in _COLLECTIVE:
        return False
    return any(fleet.engine == "vllm" and fleet.tensor_parallel > 1 for fleet in fleets(config).values())


def _hccl_ports(config: Config, trains: bool) -> Iterator[str]:
    network, port = config.network, config.services.coordinator.port
    ranges = {"hccl_host_ports": network.hccl_host_ports, "hccl_npu_ports": network.hccl_npu_ports}
    needed = sum(instance.rank == 0 for instance in instances(config, trains)) * (2 if hccl_beside_workers(config) else 1)
    for name, (first, last) in ranges.items():
        if not RESERVED <= first <= last:
            yield f"network.{name}: [{first}, {last}] is not a range of ports from {RESERVED} to 65535, first and last"
        elif last - first + 1 < needed:
            yield f"network.{name}: [{first}, {last}] has fewer ports than the run needs, {needed}"
        elif first <= port <= last:
            yield f"network.{name}: [{first}, {last}] contains services.coordinator.port {port}"
    (first, last), (other, end) = ranges.values()
    if first <= end and other <= last:
        yield f"network.hccl_npu_ports: [{other}, {end}] overlaps hccl_host_ports [{first}, {last}]"
