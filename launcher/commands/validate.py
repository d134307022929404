"""`sluice validate`: all faults of a configuration that can be found without starting it, and where its processes go."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from launcher.node.local_node import LocalNode, on_this_machine, placement_faults, placement_table
from launcher.node.topology import machine_faults
from launcher.registered_names import faults_of_own_files, known_names
from runtime.cluster import topology
from runtime.cluster.topology import has_several_nodes
from runtime.config import Config, loading
from runtime.config.checks import semantic_faults
from runtime.config.model_checks import kv_caches, memory_of_copies, memory_of_ranks
from runtime.config.service_checks import unequal_numbers
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ConfigError
from runtime.models import tiny_model
from runtime.models.vllm_sharding import undeclared
from runtime.telemetry.shown import say

# By key: what version 0.1 did if a file did not name the key.
_IN_0_1 = {"checkpoint.every": 0, "network.security": "none", "training.depth": "bound", "training.lr_staleness_power": 0.0}


def run(options: argparse.Namespace) -> None:
    validate(options.config, options.overrides, since=options.since)


def validate(path: Path, overrides: Sequence[str], since: str | None = None) -> None:
    """Print that the file is valid, its placement and the memory of ranks. `since`: the version that the file was written for;
    also print the defaults that have changed since. Raises UserError."""
    config = loading.resolve(loading.load(path, overrides))
    here = LocalNode.of(config)
    memory = here.memory(config)
    faults = [*semantic_faults(config, known_names(), memory), *machine_faults(config, here.machine)]
    if faults := faults or [*placement_faults(config, here.offer, trains=True), *faults_of_own_files(config)]:
        raise ConfigError(faults)
    if (model := config.model.path) and not model.startswith(tiny_model.PREFIX):
        _ = Tokenizer.of(config).template  # raises if there is no template or no tokenizer
    if not has_several_nodes(config.cluster):  # else this machine may be no node of the run
        on_this_machine(config)
    console = Console()
    say(console, f"{path}: valid")
    for line in _other_defaults(config) if since else []:
        say(console, line)
    for key, model in topology.named_paths(config).items():
        if model.startswith(tiny_model.PREFIX):
            say(console, f"{key}: {model}, small and random, is made when a run starts")
    console.print(placement_table(config, here.offer))
    for line in _memory(config, memory):
        say(console, line)
    if model and not model.startswith(tiny_model.PREFIX) and (note := undeclared(config)):
        say(console, note)
    for line in unequal_numbers(config, on_cpus=memory is not None):
        say(console, f"warning: {line}")


def _other_defaults(config: Config) -> Iterator[str]:
    """Yield a line for each key that has its default here, if version 0.1 had another default."""
    for key, before in _IN_0_1.items():
        section, _, name = key.partition(".")
        settings = getattr(config, section)
        if (value := getattr(settings, name)) == getattr(type(settings)(), name):
            yield f"{key}: {value} by default; version 0.1 did what {before} does"


def _memory(config: Config, available: int | None) -> list[str]:
    """Return what processes are known to hold. `available`: the memory that they have, on CPUs; None if unknown."""
    caches = kv_caches(config, on_cpus=available is not None)
    lines = [f"{path}: about {size / 1e9:.1f} GB of KV cache a replica" for path, size in caches.items()]
    for role, held in memory_of_ranks(config, on_cpus=available is not None).items():
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in msgspec.structs.asdict(held).items() if size)
        lines.append(f"{role}: about {held.total / 1e9:.1f} GB a rank ({parts})")
    for role, size in memory_of_copies(config).items():
        mirrored = ", twice that where its ranks are on several nodes"
        lines.append(f"{role}: about {size / 1e9:.1f} GB of host memory for the copies of all ranks{mirrored}")
    if lines and available is None:
        lines.append("How much memory the devices have is not known here: each process compares when it starts")
    return lines
