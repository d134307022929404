"""Configuration: folders of models and the memory that they need, checked without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.engines.limits import kv_cache_bytes
from tests.unit.config_cases import PPO, checked, model_folder


def test_model_folders(sound: dict[str, Any], tmp_path: Path) -> None:
    policy = Path(sound["model"]["path"])
    wide = model_folder(tmp_path / "wide", vocab_size=301)
    (fault,) = checked(sound, model={"reference": str(wide)})
    assert fault == f"model.reference: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(wide)}}))
    assert fault == f"critic.path: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (model_folder(tmp_path / "empty") / "model.safetensors").unlink()
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(tmp_path / "empty")}}))
    assert fault == f"critic.path: '{tmp_path / 'empty'}' has no weights (*.safetensors)"

    (policy / "model.safetensors").unlink()
    assert checked(sound) == [f"model.path: '{policy}' has no weights (*.safetensors)"]
    (policy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    assert checked(sound) == [f"model.path: '{policy}' lacks 1.safetensors, which its index names, and 1 more"]
    for shard in "12":
        (policy / f"{shard}.safetensors").write_bytes(b"w")
    assert checked(sound) == []
    (policy / "tokenizer.json").unlink()
    (policy / "config.json").write_text("{")
    assert checked(sound) == [
        f"model.path: '{policy}' has no config.json of a Llama-like model",
        f"model.path: '{policy}' has no tokenizer.json",
    ]


def test_other_experts_are_generated_and_referenced_by_no_embedded_engine(sound: dict[str, Any], tmp_path: Path) -> None:
    sparse = str(model_folder(tmp_path / "sparse", model_type="qwen2_moe", num_experts=4))
    rollouts = "services.rollout.engine: torch has experts of qwen3_moe alone, and model.path is a qwen2_moe; must be vllm"
    reference = "services.reference.engine: torch has experts of qwen3_moe alone, and the model is a qwen2_moe; must be another"
    ours = str(model_folder(tmp_path / "ours", model_type="qwen3_moe", num_experts=4))
    assert checked(sound, model={"path": ours}, algorithm={"kl_coefficient": 0.1}) == []
    assert checked(sound, model={"path": sparse}) == [rollouts]
    diverging = {"algorithm": {"kl_coefficient": 0.1}}
    assert checked(sound, model={"path": sparse}, **diverging) == [rollouts, reference]
    assert checked(sound, model={"reference": sparse}, **diverging) == [reference]
    assert checked(sound, model={"path": sparse, "reference": sound["model"]["path"]}, **diverging) == [rollouts]


def test_kv_cache(sound: dict[str, Any]) -> None:
    # Qwen2.5-7B: 28 layers, 4 KV heads of 128; bf16 costs 57,344 bytes a token.
    qwen = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    assert kv_cache_bytes(qwen, 1, 1, 2) == 57_344
    assert kv_cache_bytes(qwen, 16, 1000, 4) == 57_344 * 2 * 16_000
    del qwen["num_key_value_heads"]
    assert kv_cache_bytes(qwen | {"head_dim": 64}, 1, 1, 2) == 57_344 * 7 // 2

    needed = 2 * (2 * 2 * 2 * 16 * 2) * (64 + 1) * 128  # 2 replicas of bf16; one sequence more is a probe
    services = {"rollout": {"replicas": 2, "dtype": "bfloat16"}}
    assert checked(sound, available_bytes=needed, services=services) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=services)
    assert fault.startswith("services.rollout.slots: 64 slots of 128 tokens in 2 replica(s) need 0.0 GiB of KV cache")
    fleets = {"rollout": [{"dtype": "bfloat16"}, {"replicas": 1, "dtype": "bfloat16"}]}
    assert checked(sound, available_bytes=needed, services=fleets) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=fleets)
    assert fault.startswith("services.rollout.1.slots: 64 slots")
    (fault,) = checked(sound, available_bytes=3 << 30, services={"rollout": {"slots": 1 << 18, "dtype": "float32"}})
    assert fault.endswith("need 16.0 GiB of KV cache; 3.0 GiB are available")
