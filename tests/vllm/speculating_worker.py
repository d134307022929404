"""Workers on CPUs that speculate: vLLM 0.30 has kernels for it, and puts them where they are no longer looked for."""

from __future__ import annotations

import vllm.utils.cpu_triton_utils as cpu_kernels
from vllm.v1.sample import rejection_sampler

from runtime.rollout.vllm.worker import WeightLoading

for _name in ("expand", "rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
    getattr(rejection_sampler, f"_{_name}").kernel = getattr(cpu_kernels, f"{_name}_kernel")


class SpeculatingOnCpu(WeightLoading):
    """As Sluice's own."""
