"""Checks of what processes hold against the memory that they have, where that is known. Loads no torch.

On accelerators it is not known before a process runs there: the processes compare it themselves when they start.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.cluster.topology import fleets
from runtime.config import Config
from runtime.config.checks.megatron import memory_of_ranks
from runtime.config.checks.models import policy_model, spread_models
from runtime.models.limits import kv_cache_bytes, memory_fault

_HINT = "; if it is to run on devices, cluster.nodes says so (name, devices)"
PROBES = 1  # slots of a replica besides its own: of the probe that compares its log-probabilities with the trainer's
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def kv_caches(config: Config, on_cpus: bool) -> dict[str, int]:
    """By fleet, of those on engine torch whose model is known: bytes of a replica's KV cache."""
    policy = policy_model(config)
    if policy is None:
        return {}
    auto = "float32" if on_cpus else "bfloat16"
    return {
        path: kv_cache_bytes(
            policy, fleet.slots + PROBES, _length(config), _DTYPE_BYTES[auto if fleet.dtype == "auto" else fleet.dtype]
        )
        for path, fleet in fleets(config).items()
        if fleet.engine == "torch"  # vLLM divides its own memory
    }


def kv_faults(config: Config, available: int | None) -> Iterator[str]:
    """One line per fleet that does not fit. `available`: bytes on the machine on whose CPUs all runs; None where it is not
    known."""
    if available is None:
        return
    free = available
    for path, each in kv_caches(config, on_cpus=True).items():
        fleet = fleets(config)[path]
        needed = fleet.replicas * each
        if needed > free:
            yield (
                f"{path}.slots: {fleet.slots} slots of {_length(config)} tokens in {fleet.replicas} replica(s) need "
                f"{needed / 2**30:.1f} GiB of KV cache; {free / 2**30:.1f} GiB are available{_HINT}"
            )
        free -= min(needed, free)


def rank_faults(config: Config, available: int | None) -> Iterator[str]:
    """The same of the roles on megatron-core, whose layouts are sound. The processes of a role share the memory."""
    if available is None:
        return
    for role, held in memory_of_ranks(config, spread_models(config), on_cpus=True).items():
        share = available // getattr(config.services, role).processes
        if fault := memory_fault(config, role, held, share):
            yield fault + _HINT


def _length(config: Config) -> int:
    """Tokens of a slot."""
    return config.data.max_prompt_tokens + max(config.sampling.max_new_tokens, config.evaluation.max_new_tokens)
