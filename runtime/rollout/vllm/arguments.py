"""The arguments of the vLLM engine, and Sluice's sampling options in vLLM's terms. Pure: nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from runtime.config import RolloutParallel
from runtime.errors import InvalidMessage, UserError
from runtime.types import GroupRequest, SamplingParams

KEY = "services.rollout.engine_args"

# Arguments that Sluice sets itself, and the key that decides each; "" if no other value works.
OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "",
    "dtype": "services.rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and the lengths of replies",
    "max_num_seqs": "services.rollout.max_num_seqs",
    "tensor_parallel_size": "services.rollout.parallel.tensor",
    "pipeline_parallel_size": "services.rollout.parallel.pipeline",
    "data_parallel_size": "services.rollout.parallel.data",
    "enable_expert_parallel": "services.rollout.parallel.expert",
    # New weights would go to the places that experts had at the start.
    "enable_eplb": "",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), "services.rollout.parallel.nodes"),
    **dict.fromkeys(("data_parallel_address", "data_parallel_rpc_port"), "services.rollout.parallel.nodes"),
    # Other ways to start an engine's processes, or further ones.
    **dict.fromkeys(("prefill_context_parallel_size", "enable_elastic_ep"), ""),
    **dict.fromkeys((f"data_parallel_{name}" for name in ("rank", "start_rank", "size_local", "backend")), ""),
    **dict.fromkeys(("data_parallel_external_lb", "data_parallel_hybrid_lb"), ""),
    "distributed_executor_backend": "",
    "logprobs_mode": "",
    "worker_cls": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "weight_sync",
    "enable_sleep_mode": "",
    "speculative_config": "",
    "disable_log_stats": "",
    "load_format": "",
    "runner": "",
    "enable_return_routed_experts": "moe.router_replay",
}

_ADDITIONAL = "additional_config"  # vLLM's argument for its plugins, such as vllm-ascend

# Keys of it that vllm-ascend must have off, and why. Its mode `rl_config` turns off the first alone, and is newer.
_OFF = {
    "weight_nz_mode": ("0", "new weights cannot be loaded into the NPU format FRACTAL_NZ"),
    "enable_reduce_sample": ("false", "log-probabilities would be of a part of the vocabulary"),
}


def with_plugin(arguments: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments: Sluice's, and the user's over them, also within `additional_config`."""
    merged = {**arguments, **user}
    if _ADDITIONAL in arguments:
        merged[_ADDITIONAL] = {**arguments[_ADDITIONAL], **user.get(_ADDITIONAL, {})}
    return merged


def own_faults(arguments: Mapping[str, Any], key: str = KEY) -> Iterator[str]:
    """Yield one line for each argument that Sluice sets itself. `key`: the section of the arguments."""
    for name in arguments:
        if name in OWN:
            instead = f"; {OWN[name]} decides it" if OWN[name] else ""
            yield f"{key}.{name}: Sluice sets it{instead}"
    additional = arguments.get(_ADDITIONAL, {})
    if not isinstance(additional, Mapping):
        yield f"{key}.{_ADDITIONAL}: {additional!r}; must be a mapping"
        return
    for name, (off, why) in _OFF.items():
        if (value := additional.get(name, 0)) != 0:
            yield f"{key}.{_ADDITIONAL}.{name}: {value!r}; must be {off}: {why}"


def unknown_faults(arguments: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    """Yield one line for each argument that this vLLM does not know, with the nearest known one."""
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            yield f"{KEY}.{name}: this vLLM has no such argument" + (f"; nearest is '{near[0]}'" if near else "")


def require_spread(parallel: RolloutParallel, experts: bool) -> None:
    """Check that vLLM 0.30 can spread a model over processes on CPUs. `experts`: whether it has any. Raises UserError."""
    lacking = {
        "pipeline": parallel.pipeline > 1 and "no buffers for what a stage gets from the one before",
        "expert": parallel.expert > 1 and "a kernel of experts that takes all experts for its own",
        "data": experts and parallel.data > 1 and "no exchange of tokens between ranks with experts",
    }
    for name, what in lacking.items():
        if what:
            value = getattr(parallel, name)
            raise UserError(f"services.rollout.parallel.{name}: {value}; must be 1 on CPUs, for which vllm has {what}")


class UnitPlace(NamedTuple):
    """Where a process of an engine that spans nodes is, and where all of them meet: at two ports of the first node."""

    node: int = 0  # of the engine's nodes; on node 0 is the core
    address: str = ""  # of this node
    host: str = ""  # of node 0
    ports: tuple[int, int] = (0, 0)  # for the workers' group, and for data-parallel ranks

    def arguments(self, nodes: int) -> dict[str, Any]:
        """Return vLLM's arguments of an engine over so many nodes."""
        if nodes == 1:
            return {}
        workers, ranks = self.ports
        meeting = {"master_addr": self.host, "master_port": workers, "data_parallel_rpc_port": ranks}
        return {"nnodes": nodes, "node_rank": self.node, "data_parallel_address": self.host, **meeting}


# vLLM silently raises lower temperatures to this value.
LEAST_TEMPERATURE = 0.01


def check_temperature(request: GroupRequest) -> None:
    """Check that vLLM takes the temperature unchanged. Raises InvalidMessage if not."""
    temperature = request.sampling.temperature
    if 0 < temperature < LEAST_TEMPERATURE:
        raise InvalidMessage(
            f"group {request.group_id}: temperature is {temperature}; vLLM samples at 0 or at {LEAST_TEMPERATURE} and above"
        )


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one sample's own generator, in [0, 2**63). Streams of different (seed, sample) are independent."""
    # Two words of 32 bits, as SeedSequence would otherwise give (2**32, 0) the entropy of (0, 1, 0).
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, sample]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def as_vllm(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return arguments of `vllm.SamplingParams` with the same meaning. Both apply min-p, top-k, top-p in this order."""
    routed = {"routed_experts_prompt_start": sampling.experts_from} if sampling.experts_from >= 0 else {}
    return {
        **routed,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only the request's stop tokens stop a reply
        "logprobs": 0,  # only of the sampled token
        "detokenize": False,
    }
