"""Checks of roles that lie on another role's devices, and of what takes turns there. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.cluster.topology import fleets, instances, processes, takes_turns
from runtime.config import Computing, Config, ReferenceScorer, Rollout, Scorer, Trainer

HOSTS = ("rollout", "reward_model", "reference", "trainer", "critic")


def colocation_faults(config: Config, trains: bool) -> Iterator[str]:
    """One line per fault."""
    running = {instance.role for instance in instances(config)}
    for path, settings in processes(config).items():
        if isinstance(settings, Computing) and settings.colocate:
            fault = _host_fault(config, path, settings, running)
            if fault:
                yield f"{path}.{fault}"
    if trains and takes_turns(config):
        yield from _turns(config)


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
    if further := sorted({one.colocate for one in _settings(config, host) if one.colocate}):
        return f"colocate: {host} lies on the devices of {further[0]} itself; must be a role with devices of its own"
    if settings.devices:
        return f"devices: {settings.devices}, but colocate says that they are those of {host}; must be one of both"
    having = [device for one in _settings(config, host) for device in one.devices]
    needed = sum(_needed(one) for one in _settings(config, role) if one.colocate == host)
    if having and needed > len(having):
        return f"colocate: needs {needed} devices, but {host} has {len(having)} (services.{host}.devices)"
    return ""


def _settings(config: Config, role: str) -> list[Computing]:
    return list(fleets(config).values()) if role == "rollout" else [getattr(config.services, role)]


def _needed(settings: Computing) -> int:
    """Devices of all its processes."""
    if isinstance(settings, Rollout):
        return settings.replicas * settings.tensor_parallel
    if isinstance(settings, Trainer) or (isinstance(settings, ReferenceScorer) and settings.engine == "megatron"):
        return settings.processes
    assert isinstance(settings, Scorer)
    return settings.replicas


def _turns(config: Config) -> Iterator[str]:
    """What does not go with rollouts and trainer on the same devices."""
    staleness, publication = config.training.staleness, config.publication
    if staleness > 1:
        yield f"training.staleness: {staleness}, but rollouts and trainer take turns (colocate: trainer); must be 0 or 1"
    for path, fleet in fleets(config).items():
        if fleet.colocate != "trainer":
            yield f"{path}.colocate: must be trainer, as that of other fleets: all rollouts take turns with it, or none"
    if not publication.overlap:
        yield "publication.overlap: false sends a rollout that comes late no version while the trainer is off; must be true"
    if publication.in_flight in ("keep", "recompute"):
        yield (
            f"publication.in_flight: {publication.in_flight}, but no sample is in flight at a swap where rollouts and trainer "
            "take turns; must be auto"
        )
    if publication.backend in ("nccl", "hccl"):
        yield (
            f"publication.backend: {publication.backend} takes one member a device, and rollouts lie on the trainer's; must be "
            "auto or gloo"
        )
