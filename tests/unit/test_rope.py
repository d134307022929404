"""Frequencies of rotary embeddings: transformers' own, and the formulas of the papers in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import UserError
from runtime.models.rope import read_rope, yarn_growth
from tests.closeness import assert_close

DIM, THETA, POSITIONS = 16, 500.0, 128

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, as it was written first": {"type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn of a model that was not stretched in config.json": {"rope_type": "yarn", "factor": 4.0},
    "yarn with nulls": {**YARN, "beta_fast": None, "attention_factor": None},
    "yarn, bounds not rounded": {**YARN, "truncate": False},
    "yarn, other bounds": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn, bounds alike": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, its growth given": {**YARN, "attention_factor": 1.25},
    "yarn, as DeepSeek has it": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


def described(scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_theta": THETA, "rope_scaling": scaling, "max_position_embeddings": POSITIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_amplitude_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = KINDS[kind]
    # As its own modules call it: some of its functions want a config without the older spelling.
    config = LlamaConfig(**described(scaling), head_dim=DIM)
    name = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    expected, amplitude = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))
    rope = read_rope(described(scaling), "config.json")
    assert_close(rope.frequencies(DIM), expected, terms=4)
    if name != "llama3":  # which transformers computes in another order
        assert torch.equal(rope.frequencies(DIM), expected)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_linear_scaling_is_that_of_the_paper() -> None:
    exact = THETA ** (-np.arange(0, DIM, 2) / DIM) / 2.5
    found = read_rope(described(KINDS["linear"]), "config.json").frequencies(DIM)
    assert_close(found, exact, terms=8)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_is_that_of_the_paper(truncate: bool) -> None:
    """Equations 17 and 23 in arXiv:2309.00071: theta_d = (1 - ramp) · theta_d / s + ramp · theta_d, over the index d."""
    original, factor, fast, slow = 32, 4.0, 4.0, 1.0
    exact = []
    bounds = [DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (fast, slow)]
    if truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], DIM - 1)
    for index in range(DIM // 2):
        frequency = THETA ** (-2 * index / DIM)
        kept = 1 - min(max((index - low) / (high - low), 0.0), 1.0)
        exact.append(kept * frequency + (1 - kept) * frequency / factor)
    scaling = {**YARN, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    rope = read_rope(described(scaling), "config.json")
    assert_close(rope.frequencies(DIM), np.array(exact), terms=8)
    assert len(set(np.round(np.array(exact) * THETA ** (np.arange(0, DIM, 2) / DIM), 3))) > 2  # kept, divided, and between
    assert rope.amplitude == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-12)


def test_the_growth_of_an_unstretched_model_is_none() -> None:
    assert yarn_growth(1.0) == 1.0
    assert yarn_growth(4.0, 0.5) == pytest.approx(1 + 0.05 * math.log(4))


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type 'dynamic' is not supported; must be one of default, linear, llama3",
        ),
        ({"rope_type": "linear"}, "rope_scaling: Object missing required field `factor`"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope_scaling: Expected `float` >= 1\.0 - at `\$\.factor`"),
        ({"rope_type": "yarn", "factor": "much"}, r"rope_scaling: Expected `float`, got `str` - at `\$\.factor`"),
        (LLAMA3, "rope_scaling: Object missing required field `original_max_position_embeddings`"),
        ("linear", "rope_scaling is 'linear'; must be an object or null"),
        ({"rope_type": "default", "rope_theta": 1}, r"rope_theta: Expected `float` > 1\.0"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_theta: Expected `float`, got `str`"),
    ],
)
def test_what_is_unknown_or_missing_is_one_line(scaling: Any, told: str) -> None:
    with pytest.raises(UserError, match=f"^config.json: {told}") as raised:
        read_rope(described(scaling), "config.json")
    assert len(str(raised.value).splitlines()) == 1
