"""The processes of a run, as the configuration defines them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Cluster, Computing, Config, Parallel, Process, Rollout, RolloutParallel, Spread, Trainer

ENVIRONMENT = "environment"  # the role whose processes play episodes
UPDATED = ("trainer", "critic")  # the roles whose state no other process can make again


class Instance(Struct, frozen=True):
    """One process of a role by its name, over all its incarnations; `rank` is 0 for a process that stands alone. The processes
    of a rollout over several nodes are rollout-0, rollout-0n1 and on."""

    role: str
    name: str
    rank: int = 0


def instances(config: Config, trains: bool = True) -> list[Instance]:
    """List every process that registers, by the roles' sections. `trains`: False for an evaluation, of rollouts and rewards."""
    out: list[Instance] = []
    for role in config.services.__struct_fields__:
        if role == "rollout":
            out += [one for name in replicas(config) for one in group_of(config, Instance(role, name))]
        elif _has(config, role, trains):
            group = is_group(config, role)
            count = sum(_count(config, role, settings) for settings in sections(config, role).values())
            out += [Instance(role, f"{role}-{index}", index if group else 0) for index in range(count)]
    return out


def unit_of(name: str) -> tuple[str, int]:
    """Return the name of the unit of a rollout's process, and the number of the process: ("rollout-0", 1) for rollout-0n1."""
    stem, _, index = name.rpartition("-")
    first, _, number = index.partition("n")
    return f"{stem}-{first}", int(number or 0)


def _count(config: Config, role: str, settings: Process) -> int:
    """Return the number of processes of one section."""
    count: int = getattr(settings, "processes" if is_group(config, role) else "replicas")
    return count


def devices_each(settings: Process) -> int:
    """Return the number of accelerators of one process."""
    return settings.parallel.devices_each if isinstance(settings, Rollout) else int(isinstance(settings, Computing))


def devices_of(config: Config, role: str, settings: Process) -> int:
    """Return the number of accelerators of all processes of one section."""
    nodes = settings.parallel.nodes if isinstance(settings, Rollout) else 1
    return _count(config, role, settings) * nodes * devices_each(settings)


def _has(config: Config, role: str, trains: bool) -> bool:
    """Return True if a run has processes of `role`. A role that is not listed here needs only its section."""
    needed = {
        "coordinator": False,  # the other processes register with it
        "gateway": config.gateway is not None,
        "reward": bool(config.rewards.rules or config.rewards.remote),
        "reward_model": config.rewards.model is not None,
        "reference": trains and uses_reference(config),
        "trainer": trains,
        "critic": trains and config.critic is not None,
    }
    return needed.get(role, True)


def sections(config: Config, role: str) -> dict[str, Any]:
    """Return the settings of the processes of `role` that the run starts, by YAML path: services.ROLE, or below it one for each
    item of a list or name of a mapping. Empty without such a section, or if the user starts these processes."""
    path, found = f"services.{role}", getattr(config.services, role)
    if isinstance(found, list | dict):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        each = {f"{path}.{name}": settings for name, settings in items}
    else:
        each = {path: found}
    return {key: each[key] for key in each if isinstance(each[key], Process) and getattr(each[key], "server", None) is None}


def fleets(config: Config) -> dict[str, Rollout]:
    """Return the fleets of rollouts by YAML path: services.rollout, or services.rollout.0 and on for a list."""
    return sections(config, "rollout")


def rollout_parallel(config: Config) -> RolloutParallel:
    """Return the layout of the engine that is largest on a node. Each process of a rollout has as many receivers of weights as
    this has devices there."""
    found = (fleet.parallel for fleet in fleets(config).values())
    return max(found, key=lambda each: each.devices_each, default=RolloutParallel())


def players(config: Config) -> dict[str, str]:
    """Return the YAML path of the settings, services.environment.NAME, by the name of each environment process."""
    each = [path for path, settings in sections(config, ENVIRONMENT).items() for _ in range(settings.replicas)]
    return {f"{ENVIRONMENT}-{index}": path for index, path in enumerate(each)}


def processes(config: Config) -> dict[str, Process]:
    """Return the common settings of each role's processes by YAML path; for rollouts, of each fleet."""
    return {path: settings for role in config.services.__struct_fields__ for path, settings in sections(config, role).items()}


def replicas(config: Config) -> dict[str, Rollout]:
    """Return the settings of every rollout's fleet by the rollout's name. Names count over all fleets: rollout-0 and on."""
    each = [fleet for fleet in fleets(config).values() for _ in range(fleet.replicas)]
    return {f"rollout-{index}": fleet for index, fleet in enumerate(each)}


def slots(config: Config) -> dict[str, int]:
    """Return how many sequences each rollout generates at once, by its name."""
    return {name: fleet.max_num_seqs for name, fleet in replicas(config).items()}


def place_in_fleet(config: Config, instance: Instance) -> int:
    """Return the index of an instance among the replicas of its fleet or role."""
    return _fleet_of(config, instance)[2]


def _fleet_of(config: Config, instance: Instance) -> tuple[str, Process, int]:
    """Return the YAML path of an instance's settings, the settings, and its index among their processes. The settings are those
    of a rollout's fleet, or of a process's environment. Raises KeyError."""
    index = int(unit_of(instance.name)[0].rpartition("-")[2])
    for path, settings in sections(config, instance.role).items():
        count = _count(config, instance.role, settings)
        if index < count:
            return path, settings, index
        index -= count
    raise KeyError(instance.name)


def uses_reference(config: Config) -> bool:
    """Return True if the run needs a reference service: only this gives the frozen model's log-probabilities."""
    return config.reference.source == "service" and config.algorithm.kl_coefficient > 0


def group_of(config: Config, instance: Instance) -> list[Instance]:
    """Return the instances that live and die together with `instance`, in order: the ranks of its group, the processes of its
    rollout, or itself alone."""
    if is_group(config, instance.role):
        return [one for one in instances(config) if one.role == instance.role]
    settings, first = settings_of(config, instance), unit_of(instance.name)[0]
    nodes = settings.parallel.nodes if isinstance(settings, Rollout) else 1
    return [Instance(instance.role, f"{first}n{node}" if node else first, node) for node in range(nodes)]


def takes_turns(config: Config) -> bool:
    """Return True if rollouts and trainer share devices and take turns."""
    return any(fleet.colocate == "trainer" for fleet in fleets(config).values())


def shares_devices(config: Config, role: str) -> bool:
    """Return True if rollouts may share the devices of `role`: these are free for its replacement only once rollouts sleep."""
    return takes_turns(config) and role in UPDATED


def reference_takes_part(config: Config) -> bool:
    """Return True if the reference has a turn of its own between rollouts and trainer."""
    return takes_turns(config) and uses_reference(config) and config.services.reference.colocate == "trainer"


def alternates(config: Config) -> bool:
    """Return True if trainer and critic share devices, and the state of each is off them while the other updates."""
    trainer, critic = config.services.trainer, config.services.critic
    return config.critic is not None and critic.colocate == "trainer" and bool(trainer.offloaded or critic.offloaded)


def block_size(parallel: Parallel) -> int:
    """Return the number of processes that share one model."""
    return parallel.tensor * parallel.context * parallel.pipeline


def data_leaders(settings: Spread) -> range:
    """Return the ranks of a group that are given data: the first of each block that holds the model.

    Ranks count tensor-parallel first, then context-parallel, then blocks, pipeline stages last, as megatron-core has it."""
    parallel = settings.parallel
    return range(0, settings.processes // parallel.pipeline, parallel.tensor * parallel.context)


def path_of(config: Config, instance: Instance) -> str:
    """Return the YAML path of an instance's settings: of a rollout, its fleet's."""
    return _fleet_of(config, instance)[0]


def settings_of(config: Config, instance: Instance) -> Process:
    """Return the settings at `path_of`."""
    return _fleet_of(config, instance)[1]


def is_group(config: Config, role: str) -> bool:
    """Return True if a role's instances are the ranks of one SPMD group, which live and die together."""
    return role in UPDATED or (role == "reference" and config.services.reference.engine == "megatron")


def with_rollouts(config: Config, replicas: int) -> Config:
    """Return the configuration with another number of rollouts. Requires one fleet."""
    assert isinstance(config.services.rollout, Rollout)
    return replace(config, services=replace(config.services, rollout=replace(config.services.rollout, replicas=replicas)))


def with_ranks(config: Config, role: str, ranks: int) -> Config:
    """Return the configuration with another number of ranks of `role`, trainer or critic."""
    settings: Trainer = getattr(config.services, role)
    parallel = replace(settings.parallel, data=ranks // block_size(settings.parallel))
    resized = replace(settings, processes=ranks, parallel=parallel if settings.engine == "megatron" else settings.parallel)
    return replace(config, services=replace(config.services, **{role: resized}))


def elastic_sizes(config: Config, role: str) -> Iterator[int]:
    """Yield the numbers of ranks with which an elastic `role` can train, the largest first: whole blocks, over which prompts
    of an update and experts are even."""
    settings: Trainer = getattr(config.services, role)
    parallel, training = settings.parallel, config.training
    block = block_size(parallel)
    for blocks in range(settings.processes // block, 0, -1):
        if not (training.mini_batch_size or training.groups_per_step) % blocks and not blocks % parallel.expert:
            yield blocks * block


def named_paths(config: Config) -> dict[str, str]:
    """Return, by key, the folders that must be the same on every node."""
    named = {
        "run.dir": config.run.dir,
        "model.path": config.model.path,
        "model.reference": config.model.reference,
        "critic.path": config.critic.path if config.critic is not None else "",
        "rewards.model.path": config.rewards.model.path if config.rewards.model is not None else "",
    }
    return {key: path for key, path in (named | teachers(config)).items() if path}


def teachers(config: Config) -> dict[str, str]:
    """Return, by key, the references of single data sources, which replace `model.reference` for their prompts."""
    train = [] if isinstance(config.data.train, str) else config.data.train
    return {f"data.train.{at}.reference": source.reference for at, source in enumerate(train) if source.reference}


def model_key(config: Config, role: str) -> str:
    """Return the key that names the model folder of trainer, critic or reference: the policy's key if there is no other."""
    key = {"reference": "model.reference", "critic": "critic.path"}.get(role, "model.path")
    return key if named_paths(config).get(key, config.model.path) != config.model.path else "model.path"


def warm_up_seconds(config: Config) -> float:
    """Return the longest time for making Sluice's own model and data, before the coordinator serves."""
    if config.warmup is None or (config.model.path and config.data.train):
        return 0.0
    return config.warmup.max_seconds


def has_several_nodes(cluster: Cluster) -> bool:
    """Return True if the run needs more than one machine."""
    return cluster.min_nodes > 1 or (cluster.nodes != "auto" and len(cluster.nodes) > 1)
