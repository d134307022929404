"""What the vLLM engine is started with. Pure: nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

KEY = "services.rollout.engine_args"

# What Sluice sets itself, and the key that decides it; "" where nothing else works.
OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "",
    "dtype": "services.rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and the lengths of replies",
    "max_num_seqs": "services.rollout.slots",
    "tensor_parallel_size": "services.rollout.tensor_parallel",
    "pipeline_parallel_size": "services.rollout.tensor_parallel",
    "data_parallel_size": "services.rollout.replicas",
    "distributed_executor_backend": "",
    "logprobs_mode": "",
    "worker_cls": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "publication",
    "enable_sleep_mode": "",
    "speculative_config": "",
    "disable_log_stats": "",
    "load_format": "",
    "runner": "",
}


def own_faults(arguments: Mapping[str, Any], key: str = KEY) -> Iterator[str]:
    """One line for each argument that Sluice sets itself. `key`: where they are in the configuration."""
    for name in arguments:
        if name in OWN:
            instead = f"; {OWN[name]} decides it" if OWN[name] else ""
            yield f"{key}.{name}: Sluice sets it{instead}"


def unknown_faults(arguments: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    """One line for each argument that this version of vLLM does not know, with the nearest that it does."""
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            yield f"{KEY}.{name}: this vLLM has no such argument" + (f"; nearest is '{near[0]}'" if near else "")
