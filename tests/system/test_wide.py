"""Whole runs of families that Sluice knows nothing of: FSDP2 over two processes trains transformers' model, vLLM rolls it out,
and the reference is transformers' too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.opted import opted
from tests.system.conftest import make_data
from tests.system.runs import VLLM_PYTHON, needs_vllm, steps, summary, trained, write_config
from tests.system.test_vllm import CLOSE, START
from tests.unit.tiny_models import save_served

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(900)]

OVERRIDES = {"qwen3_next": [f"{key}=bfloat16" for key in ("model.dtype", "weight_sync.dtype", "services.rollout.dtype")]}
FAR = 0.05  # the mean gap of a mixture of experts whose engines round to bfloat16, each in its own way


@pytest.mark.parametrize("family", ["olmo3", *opted("granite", "phi3", "qwen3_next")])
def test_five_steps(tmp_path: Path, family: str) -> None:
    if family in OVERRIDES and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("needs a processor with AVX-512 BF16: vLLM's gated delta net on CPUs has nothing else")
    tiny = make_data(tmp_path / "tiny")
    save_served(tiny / "model", family)
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        algorithm={"entropy_coefficient": 0.05},  # random weights earn no reward, and yet are to move
        training={"steps": 5, "optimizer": {"learning_rate": 1e-3}},
        weight_sync={"in_flight": "recompute"},  # tokens after a swap would be of new weights on older ones' keys
        services={"trainer": {"processes": 2}, "rollout": {"engine": "vllm", "replicas": 1, "python": str(VLLM_PYTHON)}},
        deadlines={"start": START},
    )
    run = trained(config, *OVERRIDES.get(family, ()), folder=tmp_path / "run", timeout=START)
    points = steps(run.folder)
    assert summary(run.folder)["groups"] == {"retired": 20, "dropped": 0} and len(points) == 5
    for point in points:
        assert point["actor/grad_norm"] > 0 and point["mismatch/probes"] and point["mismatch/tokens"]
        assert point["mismatch/abs_logprob"] < FAR and (family in OVERRIDES or point["mismatch/max"] < CLOSE)
    assert points[-1]["actor/kl"] > 100 * CLOSE**2  # the policy has moved away from the reference, which stayed
