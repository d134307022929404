"""The first weights that are published show whether vLLM's model takes them all, and gets all that it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from runtime.errors import UserError
from runtime.types import PolicyVersion
from tests.vllm.rig import Rig
from tests.vllm.test_families import SHAPE

pytestmark = pytest.mark.timeout(600)

BIASES = [f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(2) for part in "qkv"]


@pytest.mark.parametrize(
    ("config", "theirs", "fault", "named"),
    [
        (Qwen2Config(**SHAPE), "LlamaForCausalLM", "6 published weights have no place in it", BIASES),
        (
            LlamaConfig(**SHAPE),
            "Qwen2ForCausalLM",
            "2 of its parameters get none",
            [f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in range(2)],
        ),
    ],
    ids=["no place", "no weight"],
)
def test_what_is_not_delivered_is_named(
    config: PretrainedConfig, theirs: str, fault: str, named: list[str], tmp_path: Path
) -> None:
    """vLLM itself starts, and would compute with other weights than the trainer has."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"architectures": [theirs]}))
    rig = Rig(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"^model\.path: vLLM.s model is not the trainer.s: {fault}") as caught:
            rig.run(rig.swap(dict(model.state_dict()), PolicyVersion(0, 0)))
        assert all(name in str(caught.value) for name in named)
        assert str(caught.value).count("model.layers") == len(named)
    finally:
        rig.close()
