"""What is refused of the section `moe`, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config_cases import checked, model_folder

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ALL = {"replay": "routing", "aux_loss": 0.01, "z_loss": 0.001}
BIAS = "moe.bias_update: 0.001 is for models whose scores have a bias, as deepseek_v3's and glm4_moe's, and model.path has none"


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(model_folder(tmp_path / "experts", **EXPERTS))}


def test_a_model_with_experts_may_have_all_but_a_bias_that_it_has_not(sound: dict[str, Any], experts: dict[str, Any]) -> None:
    assert checked(sound, model=experts, moe=ALL) == []
    assert checked(sound, model=experts, moe=ALL | {"bias_update": 0.001}) == [f"{BIAS}; must be 0.0"]


def test_models_without_experts_adapters_and_megatron_have_none(sound: dict[str, Any], experts: dict[str, Any]) -> None:
    none = "is for models with experts, and model.path has none"
    assert checked(sound, moe=ALL | {"bias_update": 0.001}) == [
        f"moe.replay: routing {none}; must be off",
        f"moe.aux_loss: 0.01 {none}; must be 0.0",
        f"moe.z_loss: 0.001 {none}; must be 0.0",
        f"moe.bias_update: 0.001 {none}; must be 0.0",
    ]
    fault = "moe.replay: routing is not for adapters (lora); must be off"
    assert fault in checked(sound, model=experts, moe={"replay": "routing"}, lora={})
    services = {"trainer": {"engine": "megatron"}}
    fault = "moe.replay: routing needs services.trainer.engine torch; must be off"
    assert fault in checked(sound, model=experts, moe={"replay": "routing"}, services=services)
