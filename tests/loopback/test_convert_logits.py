"""A converted model computes in megatron-core's GPTModel what transformers computes of the Hugging Face folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from launcher.conversion import conversion
from runtime.errors import InvariantViolated, UserError
from runtime.models.families import Layout, family
from runtime.models.forward import ROUTER_BIAS
from tests.closeness import FLOAT32, LOGITS, forward_terms
from tests.unit.family_cases import CONFIGS, write_folder
from tests.unit.test_convert import sluice

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_1 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GROUPED = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}
# Twice √n·u of the largest logit, for n roundings between the tokens and the logits: see tests/closeness.py.
DIFFERENCE = 2 * math.sqrt(forward_terms(tokens=64, layers=4)) * FLOAT32 * LOGITS
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1": ("llama", {"rope_scaling": LLAMA_3_1, "rope_theta": 5e5, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2-tied", {}),
    "llama-yarn": ("llama", {"rope_scaling": YARN, "rope_theta": 5e2}),
    "qwen3": ("qwen3", {"rope_theta": 1e6}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {"sliding_window": 16}),
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": None}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3-grouped": ("deepseek_v3", GROUPED),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
}


def make_model(folder: Path, case: str) -> None:
    """As transformers itself makes and names it; norms and biases are given values that matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base, changes = CASES[case]
    config = {**CONFIGS[base], **changes, "initializer_range": 0.05}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith(ROUTER_BIAS):
            torch.nn.init.normal_(buffer, 0.6, 0.1)
    model.save_pretrained(folder)


@pytest.fixture(autouse=True)
def _needs_megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")


def silent(phase: str, done: int, total: int) -> None: ...


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers_own(case: str, tmp_path: Path) -> None:
    make_model(tmp_path / "hf", case)
    expert = 2 if case.startswith(("qwen3_moe", "mixtral", "deepseek", "glm4")) else 1
    layout = Layout(tensor=2, pipeline=2, expert=expert, layers_per_stage=(1, 3))
    report = conversion.to_core(tmp_path / "hf", tmp_path / "core", layout, check_logits=True, show=silent)
    assert report.difference is not None
    assert report.difference < DIFFERENCE
    back = conversion.to_hf(tmp_path / "core", tmp_path / "back", check_logits=True, show=silent)
    assert back.difference == report.difference
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(
        torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items()
    )


def test_cosines_that_grow_for_a_part_of_the_heads_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "glm4_moe", rope_scaling=YARN)
    with pytest.raises(UserError, match="rope_type yarn with partial_rotary_factor is not supported with megatron-core"):
        conversion.to_core(tmp_path / "hf", tmp_path / "core", Layout(), check_logits=True, show=silent)


def test_in_another_dtype_both_are_rounded_alike(tmp_path: Path) -> None:
    make_model(tmp_path / "hf", "qwen3")
    options = ["--in", tmp_path / "hf", "--out", tmp_path / "core", "--params-dtype", "bf16", "--check-logits"]
    assert sluice("hf2mcore", *options) == 0


def test_a_table_that_is_wrong_both_ways_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip would not show it."""

    right = family.attention

    def attention(*args: Any, **options: Any) -> Iterator[family.ParameterMapping]:
        yield from (replace(entry, groups=1) for entry in right(*args, **options))

    make_model(tmp_path / "hf", "qwen2")
    monkeypatch.setattr(family, "attention", attention)
    with pytest.raises(InvariantViolated, match="its logits differ from those of"):
        conversion.to_core(tmp_path / "hf", tmp_path / "core", Layout(), check_logits=True, show=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


@pytest.mark.parametrize(
    "options,told",
    [
        ([], "error: --check-logits: engine megatron needs a package: pip install 'sluice-rl[megatron]'"),
        (["--value-head"], "error: --check-logits: a model with a value head has no logits"),
    ],
)
def test_what_cannot_be_compared_is_refused_first(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "hf", "qwen2")
    if not options:
        monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing", None)
    assert sluice("hf2mcore", "--in", tmp_path / "hf", "--out", tmp_path / "core", "--check-logits", *options) == 2
    assert capsys.readouterr().err.startswith(told)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
