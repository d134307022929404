"""Checks of the roles: nodes, addresses, ports, devices, colocation, engines, weight sync. Loads neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from runtime.cluster import topology
from runtime.cluster.topology import fleets, processes, takes_turns
from runtime.config import Cluster, Computing, Config, Moe, Placed, Rollout, RolloutParallel, Services
from runtime.config.base import DType, computed_dtype
from runtime.models import hf_folder
from runtime.process.network import is_loopback
from runtime.rollout.vllm.arguments import LEAST_TEMPERATURE, own_faults
from runtime.weights.plan import shared_machines, transports

# ---- The reference and teachers, and the policy's experts


def reference_faults(config: Config) -> Iterator[str]:
    mode, coefficient = config.reference.source, config.algorithm.kl_coefficient
    if mode == "none" and coefficient > 0:
        yield f"reference.source: none leaves the KL term of algorithm.kl_coefficient {coefficient:g} without its reference"
    if mode == "adapter_off" and config.lora is None:
        yield "reference.source: adapter_off needs a lora section; it is the policy without its adapters"
    settings = config.services.reference
    if settings.engine == "torch" and settings.processes > 1:
        yield f"services.reference.processes: {settings.processes} is for engine megatron; engine torch takes replicas"
    if settings.engine == "megatron" and settings.replicas > 1:
        yield f"services.reference.replicas: {settings.replicas} is for engine torch; engine megatron takes processes"
    for key, folder in topology.teachers(config).items():
        if not coefficient:
            yield f"{key}: '{folder}' has no use without a KL term; algorithm.kl_coefficient must be above 0"
        elif mode != "service" or settings.engine == "megatron":
            needed = "reference.source service and services.reference.engine torch, which holds several models"
            yield f"{key}: '{folder}' needs {needed}"
    if config.algorithm.advantage == "none" and not coefficient and not config.algorithm.entropy_coefficient:
        yield "algorithm.advantage: none leaves nothing to learn; algorithm.kl_coefficient must be above 0"
    if config.algorithm.advantage == "none" and config.algorithm.dynamic_sampling:
        yield "algorithm.dynamic_sampling: true drops groups by rewards, which advantage none does not look at; must be false"


def moe_faults(config: Config, policy: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for each fault. `policy`: the contents of its config.json, if known."""
    experts, off = hf_folder.experts_of(policy or {}), msgspec.structs.asdict(Moe())
    fixed = "is for models whose scores have a bias, as deepseek_v3's and glm4_moe's, and model.path has none"
    for name, value in msgspec.structs.asdict(config.moe).items():
        faults = {
            "is for models with experts, and model.path has none": policy is not None and experts is None,
            "is not for adapters (lora), whose router is fixed": config.lora is not None and name != "router_replay",
            fixed: name == "bias_update" and experts is not None and not experts.corrected,
        }
        wrong = [fault for fault, there in faults.items() if there and value != off[name]]
        yield from (f"moe.{name}: {value} {fault}; must be {off[name]}" for fault in wrong[:1])


RENDEZVOUS = 2  # of the weights: the next epoch's opens before the last one's is closed
RESERVED = 1024  # ports below belong to the system
HCCL_PORTS = 60000, 61999  # first and last that the launcher gives to processes that share an NPU
HOSTS = tuple(role for role in Services.__struct_fields__ if isinstance(getattr(Services(), role), Computing))
_VLLM_ALONE = ("parallel", "engine_args")
_DEFAULT = Rollout()
_OF_16_BITS = [dtype for dtype in get_args(DType) if dtype not in ("auto", "float32")]


def network_faults(config: Config, trains: bool) -> Iterator[str]:
    yield from cluster_faults(config.cluster)
    for path, role in processes(config).items():
        names = role.placement if isinstance(role, Placed) and isinstance(role.placement, list) else None
        if names == []:
            yield f"{path}.placement: empty; must be pack, spread, or name at least one node"
        elif twice := _twice(names or []):
            yield f"{path}.placement: names '{twice[0]}' twice; must name each node once"
    several, standby = topology.has_several_nodes(config.cluster), config.services.coordinator.standby
    if standby and not several:
        yield f"services.coordinator.standby: '{standby}', but the run has one node; needs cluster.nodes or cluster.min_nodes"
    if several:
        yield from _reachable(config)
    if config.cluster.shared_folder:
        if config.checkpoint.gather:
            yield "checkpoint.gather: true, but with cluster.shared_folder all is in one folder; must be false"
    elif standby:
        unshared = "is for nodes that share a folder, and cluster.shared_folder is false; must be left out"
        yield f"services.coordinator.standby: {unshared}"
    if config.network.tls is not None and config.network.security not in ("auto", "tls"):
        mode = config.network.security
        yield f"network.tls: is not used with network.security {mode}; must be left out, or that be tls or auto"
    yield from scraping_faults(config)
    yield from _ports(config, several, trains)


def scraping_faults(config: Config) -> Iterator[str]:
    """Yield a line for each fault. On other machines only requests with the token may read metrics."""
    settings, network = config.metrics.prometheus, config.network
    if settings is None or settings.token is not None or network.security == "none" or is_loopback(network.interface):
        return
    must = "must be {from: NAME}, the variable that each request has to carry, or network.security be none"
    yield f"metrics.prometheus.token: missing; with network.interface '{network.interface}' it {must}"


def cluster_faults(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each fault of the nodes."""
    if cluster.nodes == "auto":
        return
    if not cluster.nodes:
        yield "cluster.nodes: empty; must be auto, or name at least one node"
        return
    names = [node.name for node in cluster.nodes]
    for index, name in enumerate(names):
        if not name:
            yield f"cluster.nodes.{index}.name: '' is no name; must be what its agent is called (--name, or its host name)"
        elif name in names[:index]:
            yield f"cluster.nodes.{index}.name: '{name}' is that of another node; must be its own"
    if cluster.min_nodes > len(names):
        yield f"cluster.min_nodes: {cluster.min_nodes}, but cluster.nodes names {len(names)}; must be at most that"


def _twice(named: list[Any]) -> list[str]:
    return sorted({str(each) for index, each in enumerate(named) if each in named[:index]})


def _reachable(config: Config) -> Iterator[str]:
    interface, coordinator = config.network.interface, config.services.coordinator
    if is_loopback(interface):
        must = "on several nodes it must be a network (10.1.0.0/16), an interface (eth0), or auto"
        yield f"network.interface: '{interface}' is loopback, by which no other node is reached; {must}"
    if not coordinator.host or is_loopback(coordinator.host):
        wrong = f"'{coordinator.host}' is loopback" if coordinator.host else "missing"
        must = "on several nodes it must be the address that all reach the coordinator by"
        yield f"services.coordinator.host: {wrong}; {must}"
    nodes = config.cluster.nodes
    if coordinator.standby and nodes != "auto" and coordinator.standby not in (names := [node.name for node in nodes]):
        yield f"services.coordinator.standby: '{coordinator.standby}' is no node; must be one of {', '.join(names)}"
    if not coordinator.port:
        yield "services.coordinator.port: 0 is any free port, on one node; on several it must be named"


def _ports(config: Config, several: bool, trains: bool) -> Iterator[str]:
    """Yield a line for each fault of the ports. On `several` nodes it is unknown how many a machine needs."""
    port, ascend = config.services.coordinator.port, config.services.platform == "ascend"
    if ascend and HCCL_PORTS[0] <= port <= HCCL_PORTS[1]:
        yield f"services.coordinator.port: {port} is one of HCCL's, {HCCL_PORTS[0]} to {HCCL_PORTS[1]}; must be another"
    if config.network.port_range is None:
        return
    first, last = config.network.port_range
    count, scraped = len(topology.instances(config, trains)), config.metrics.prometheus
    listening = count + (not port) + trains * RENDEZVOUS + (0 if scraped is None else count + (not scraped.port))
    if not RESERVED <= first <= last:
        yield f"network.port_range: [{first}, {last}] is not a range of ports from {RESERVED} to 65535, first and last"
    elif not several and last - first + 1 < listening:
        yield f"network.port_range: [{first}, {last}] has fewer ports than the run needs, {listening}"
    elif ascend and first <= HCCL_PORTS[1] and HCCL_PORTS[0] <= last:
        yield f"network.port_range: [{first}, {last}] overlaps HCCL's ports, {HCCL_PORTS[0]} to {HCCL_PORTS[1]}"


def device_faults(config: Config, trains: bool) -> Iterator[str]:
    for path, role in processes(config).items():
        if not isinstance(role, Computing) or not role.devices:
            continue
        if twice := _twice(role.devices):
            yield f"{path}.devices: names {', '.join(twice)} twice; must name each device once"
        count, needed = len(role.devices), topology.devices_of(config, path.split(".")[1], role)
        if count != needed:
            yield f"{path}.devices: {count} of them, but its processes take {needed}; must be {needed}"
    if trains and not takes_turns(config):  # which has a check of its own
        yield from _shared_device(config)


def _shared_device(config: Config) -> Iterator[str]:
    """Yield a line if two members share a device, which NCCL and HCCL refuse. A role that names no device has its own."""
    settings = config.weight_sync
    if settings.backend == "gloo" or shared_machines(settings.transport, settings.backend, {"trainer-0": "this"}) != ("",):
        return
    taken = dict.fromkeys(config.services.trainer.devices[:1], "trainer-0")
    for name, fleet in topology.replicas(config).items():
        place, size = topology.place_in_fleet(config, topology.Instance("rollout", name)), len(fleet.devices) // fleet.replicas
        if not size:
            continue
        shared = [device for device in fleet.devices[place * size :][:size] if device in taken]
        if shared:
            device = shared[0]
            key = "transport: collective" if settings.backend == "auto" else f"backend: {settings.backend}"
            must = "must be backend gloo, or transport shared_memory, or other services.*.devices"
            yield f"weight_sync.{key} takes one member a device, but {taken[device]} and {name} have {device}; {must}"
            return
        taken |= dict.fromkeys(fleet.devices[place * size :][:size], name)


def hccl_beside_workers(config: Config) -> bool:
    """Return whether, on NPUs, a rollout receives weights over HCCL on the NPUs of vLLM's workers, which use HCCL too."""
    settings = config.weight_sync
    if takes_turns(config) or settings.backend not in ("auto", "hccl") or settings.transport == "shared_memory":
        return False
    machines = {"trainer-0": "this", "rollout-0": "this" if is_loopback(config.network.interface) else ""}
    shared = shared_machines(settings.transport, settings.backend, machines)
    return "collective" in transports(shared, 1) and any(
        fleet.engine == "vllm" and fleet.parallel.devices > 1 for fleet in fleets(config).values()
    )


def colocation_faults(config: Config, trains: bool) -> Iterator[str]:
    if config.gateway is not None and takes_turns(config):
        yield "services.rollout.colocate: trainer is not for a run with a gateway, whose episodes go on between two calls"
    running = {instance.role for instance in topology.instances(config)}
    for path, settings in processes(config).items():
        if isinstance(settings, Computing) and settings.colocate and (fault := _host_fault(config, path, settings, running)):
            yield f"{path}.{fault}"
    if trains and takes_turns(config):
        yield from _turns(config)
    elif trains and config.training.partial_rollouts:
        yield "training.partial_rollouts: true, but rollouts and trainer do not take turns (colocate: trainer); must be false"


def _host_fault(config: Config, path: str, settings: Computing, running: set[str]) -> str:
    role, host = path.split(".")[1], settings.colocate
    others = ", ".join(name for name in HOSTS if name != role)
    if role == "trainer":
        return f"colocate: {host}: others lie on the trainer's devices; must be services.{host}.colocate: trainer instead"
    if host not in HOSTS:
        return f"colocate: '{host}' is no role with devices; must be one of {others}"
    if host == role:
        return f"colocate: {host} is the role itself; must be one of {others}"
    if role in running and host not in running:
        return f"colocate: this run has no {host}; must be another, or left out"
    hosts = topology.sections(config, host).values()
    if further := sorted({one.colocate for one in hosts if one.colocate}):
        return f"colocate: {host} lies on the devices of {further[0]} itself; must be a role with devices of its own"
    if settings.devices:
        return f"devices: {settings.devices}, but colocate says that they are those of {host}; must be one of both"
    having = [device for one in hosts for device in one.devices]
    guests = [one for one in topology.sections(config, role).values() if one.colocate == host]
    needed = sum(topology.devices_of(config, role, one) for one in guests)
    if having and needed > len(having):
        return f"colocate: needs {needed} devices, but {host} has {len(having)} (services.{host}.devices)"
    return ""


def _turns(config: Config) -> Iterator[str]:
    """Yield a line for each setting that conflicts with rollouts and trainer on the same devices."""
    staleness, weight_sync = config.training.staleness, config.weight_sync
    if config.training.partial_rollouts:  # replies go on in the next turn
        if staleness == 0:
            yield "training.staleness: 0, but with training.partial_rollouts replies have several versions; must be at least 1"
        if weight_sync.in_flight == "drain":
            yield "weight_sync.in_flight: drain, but training.partial_rollouts has replies go on; must be keep or recompute"
        if config.gateway is not None:
            ends = "whose episodes end in the turn that they begin in"
            yield f"training.partial_rollouts: true does not go with a gateway, {ends}"
    elif staleness > 1:
        must = "must be 0 or 1, or training.partial_rollouts true"
        yield f"training.staleness: {staleness}, but rollouts and trainer take turns (colocate: trainer); {must}"
    for path, fleet in fleets(config).items():
        if fleet.colocate != "trainer":
            yield f"{path}.colocate: must be trainer, as that of other fleets: all rollouts take turns with it, or none"
    if weight_sync.backend in ("nccl", "hccl"):
        wrong = "takes one member a device, and rollouts lie on the trainer's"
        yield f"weight_sync.backend: {weight_sync.backend} {wrong}; must be auto or gloo"


def rollout_faults(config: Config, model: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for each fault. `model`: the contents of the policy's config.json, if known."""
    for key, fleet in fleets(config).items():
        if fleet.engine == "torch":
            given = [name for name in _VLLM_ALONE if getattr(fleet, name) != getattr(_DEFAULT, name)]
            yield from (f"{key}.{name}: is for engine vllm" for name in given)
            continue
        # An interpreter of its own has other packages; the process says so itself.
        if not fleet.python and importlib.util.find_spec("vllm") is None:
            how = "install vllm-ascend" if config.services.platform == "ascend" else "run make install-vllm"
            yield f"{key}.engine: vllm is not installed here; {how}, and name its interpreter in {key}.python"
        yield from own_faults(fleet.engine_args, f"{key}.engine_args")
        yield from (f"{key}.parallel.{fault}" for fault in _parallel_faults(fleet.parallel, config.moe, model))
        yield from (f"{key}.parallel.nodes: {fleet.parallel.nodes}{fault}" for fault in _spanning_faults(config, fleet))
    if any(fleet.engine == "vllm" for fleet in fleets(config).values()):
        chosen = {"sampling.temperature": config.sampling.temperature, "evaluation.temperature": config.evaluation.temperature}
        for index, each in enumerate(config.evaluation.sets):
            chosen[f"evaluation.sets.{index}.temperature"] = each.temperature or 0.0
        for key, temperature in chosen.items():
            if 0 < temperature < LEAST_TEMPERATURE:
                yield f"{key}: {temperature} is too low for engine vllm; must be 0 or at least {LEAST_TEMPERATURE}"
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if (value := getattr(config.sampling, name)) != off:
                yield f"sampling.{name}: {value} needs rollouts of engine torch: vllm reports no kept sets; must be {off}"


def _parallel_faults(parallel: RolloutParallel, moe: Moe, model: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for each fault of an engine's layout. `model`: as for `rollout_faults`."""
    heads, layers = ((model or {}).get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    experts, most = hf_folder.count_experts(model or {}), parallel.tensor * parallel.data
    if heads is not None and heads % parallel.tensor:
        yield f"tensor: {parallel.tensor} does not divide the model's {heads} attention heads"
    if layers is not None and layers < parallel.pipeline:
        yield f"pipeline: {parallel.pipeline} stages, but the model has {layers} layers; must be at most that"
    if parallel.pipeline > 1 and moe.router_replay == "routing":
        yield f"pipeline: {parallel.pipeline}, but vllm tells no routes over stages; must be 1, or moe.router_replay off"
    if parallel.expert not in (1, most):
        yield f"expert: {parallel.expert}; vllm spreads experts over tensor × data devices: must be {most}, or 1"
    elif parallel.expert > 1 and model is not None and not experts:
        yield f"expert: {parallel.expert} is for models with experts, and model.path has none; must be 1"
    elif experts % parallel.expert:
        yield f"expert: {parallel.expert} does not divide the model's {experts} experts"


def _spanning_faults(config: Config, fleet: Rollout) -> Iterator[str]:
    """Yield the end of a line for each fault of a fleet whose engines span nodes."""
    parallel, cluster, staging = fleet.parallel, config.cluster, config.weight_sync.staging_bytes
    if parallel.nodes == 1:
        return
    over, count = ("data", parallel.data) if parallel.data > 1 else ("tensor × pipeline", parallel.tensor * parallel.pipeline)
    if count % parallel.nodes:
        yield f" does not divide parallel.{over}, {count}; must divide it"
    named = len(cluster.nodes) if cluster.nodes != "auto" else cluster.min_nodes
    there, key = (len(fleet.placement), "placement") if isinstance(fleet.placement, list) else (max(1, named), "cluster")
    if there < parallel.nodes:
        yield f", but {key} has {there}; must be at most that"
    elif not topology.has_several_nodes(cluster):
        yield ", but the run has one node; needs cluster.nodes or cluster.min_nodes"
    refused = {"weight_sync.staging_bytes": staging, "colocate": fleet.colocate, "devices": fleet.devices}
    yield from (f" does not go with {name} {value}; must be 1, or that be left out" for name, value in refused.items() if value)


def elastic_faults(config: Config) -> Iterator[str]:
    for role in topology.UPDATED:
        if getattr(config.services, role).elastic and config.checkpoint.in_memory == "off":
            yield f"services.{role}.elastic: true needs the copies of checkpoint.in_memory, which is off; must be false"


def weight_sync_faults(config: Config) -> Iterator[str]:
    settings = config.weight_sync
    if settings.transport == "shared_memory" and settings.backend != "auto":
        yield f"weight_sync.backend: {settings.backend} is for a collective; transport shared_memory has none, so must be auto"
    if settings.encoding == "delta" and settings.dtype == "float32":
        wrong = "float32 changes in nearly every element, and encoding delta would send it all"
        yield f"weight_sync.dtype: {wrong}; must be auto or {' or '.join(_OF_16_BITS)}"
    if settings.staging_bytes:
        needs = {
            "weight_sync.in_flight must be drain": settings.in_flight == "drain",
            "weight_sync.encoding must be whole": settings.encoding == "whole",
            "services.rollout.engine must be vllm": all(fleet.engine == "vllm" for fleet in fleets(config).values()),
            "lora must be null": config.lora is None,
        }
        yield from (f"weight_sync.staging_bytes: {settings.staging_bytes}: {need}" for need, met in needs.items() if not met)


def unequal_numbers(config: Config, on_cpus: bool) -> Iterator[str]:
    """Yield a warning for each setting that makes rollouts compute with other numbers than the trainer.

    `on_cpus`: both compute on CPUs, where `auto` is float32. The gaps are those of SmolLM2-135M-Instruct on CPUs."""
    computes = computed_dtype("auto", config.model.dtype, on_cpus)
    weight_sync = config.weight_sync
    of_deltas = weight_sync.encoding == "delta" and weight_sync.dtype == "auto"
    if computes == "float32" and (of_deltas or weight_sync.dtype not in ("auto", "float32")):
        key, value = ("encoding", "delta") if of_deltas else ("dtype", weight_sync.dtype)
        rounds = f"{value} rounds the weights to 16 bits, and the trainer computes in float32"
        far = "log-probabilities of rollouts will be 0.02 to 0.03 nats from the trainer's in the mean"
        yield f"weight_sync.{key}: {rounds}: {far}, and small updates will not reach rollouts"
    for path, fleet in fleets(config).items():
        if (found := computed_dtype(fleet.dtype, config.model.dtype, on_cpus)) != computes:
            far = "log-probabilities of rollouts will be 0.03 to 0.1 nats from the trainer's in the mean"
            yield f"{path}.dtype: rollouts compute in {found}, and the trainer in {computes}: {far}"
