"""Configuration: folders of models, and the engines that take them, checked without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.models.families import FAMILIES
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
        f"model.path: '{policy}' has no config.json of a language model",
        f"model.path: '{policy}' has no tokenizer.json",
    ]


DECODED = f"must be one of {', '.join(FAMILIES)}"
DIVERGING = {"algorithm": {"kl_coefficient": 0.1}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize("kind", ["phi3", "granite", "qwen2_moe"])
def test_embedded_rollouts_take_the_decoders_families_alone_and_references_others_too(
    sound: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    other = str(model_folder(tmp_path / "other", model_type=kind, **EXPERTS))
    unknown = f"model_type '{kind}' is not supported; {DECODED}"
    rollouts = (
        f"services.rollout.engine: torch: model.path: {unknown}; rollouts need services.rollout.engine vllm for this model"
    )
    assert checked(sound, model={"path": other}) == [rollouts]
    assert checked(sound, model={"path": other}, **DIVERGING) == [rollouts]
    assert checked(sound, model={"reference": other}, **DIVERGING) == []
    assert checked(sound, model={"path": other}, services={"rollout": {"engine": "vllm", "python": sys.executable}}) == []
    ours = str(model_folder(tmp_path / "ours", model_type="qwen3_moe", **EXPERTS))
    assert checked(sound, model={"path": ours}, **DIVERGING) == []


def test_sizes_that_other_families_call_otherwise_are_not_asked_for(sound: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "other", model_type="gpt2")
    described = json.loads((folder / "config.json").read_text())
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    (folder / "config.json").write_text(json.dumps({name: each for name, each in described.items() if name not in sizes}))
    vllm = {"rollout": {"engine": "vllm", "python": sys.executable}}
    assert checked(sound, model={"path": str(folder)}, services=vllm) == []
    (of_rollouts,) = checked(sound, model={"path": str(folder)})
    assert of_rollouts.startswith("services.rollout.engine: torch: model.path: model_type 'gpt2' is not supported; ")


def test_what_the_decoder_does_not_compute_of_its_families_is_refused(sound: dict[str, Any], tmp_path: Path) -> None:
    stretched = str(model_folder(tmp_path / "a", rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    assert checked(sound, model={"path": stretched}) == [
        "services.rollout.engine: torch: model.path: rope_type 'dynamic' is not supported; must be one of default, linear, "
        "llama3, yarn; rollouts need services.rollout.engine vllm for this model"
    ]


UNTRAINED = [
    ({"model_type": "qwen2_5_vl"}, "the installed transformers has no "),
    (
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config has quant_method 'mxfp4', which is not trained; must be a folder of bfloat16 weights",
    ),
    ({"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}, "quantization_config: quant_method 'awq', "),
]
UNPACKED = [
    (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        "a qwen3_next model cannot run packed (linear_attention); all layers must be full or sliding attention",
    ),
    ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "a gemma2 model cannot run packed (its attention has soft"),
]


@pytest.mark.parametrize(("described", "fault"), UNTRAINED + UNPACKED)
def test_trainer_and_critic_take_what_transformers_runs_and_reward_models_run_packed(
    sound: dict[str, Any], tmp_path: Path, described: dict[str, Any], fault: str
) -> None:
    other = str(
        model_folder(tmp_path / "other", **described, architectures=["XForSequenceClassification"], id2label={"0": "a"})
    )
    vllm = {"rollout": {"engine": "vllm", "python": sys.executable}}
    trains = (described, fault) in UNPACKED
    of_trainer = checked(sound, model={"path": other}, services=vllm)
    of_critic = checked(sound, **PPO | {"critic": {"path": other}})
    assert (len(of_trainer), len(of_critic)) == ((0, 0) if trains else (1, 1))
    assert all(each.startswith(f"services.trainer.engine: torch: model.path: {fault}") for each in of_trainer)
    assert all(each.startswith(f"services.critic.engine: torch: critic.path: {fault}") for each in of_critic)
    (of_scorer,) = checked(sound, rewards={"model": {"path": other, "max_tokens": 128}})
    assert of_scorer.startswith(f"rewards.model.path: {fault}")
    for role in ("trainer", "critic", "reward_model"):  # another interpreter has another transformers
        own = {"services": vllm | {role: {"python": sys.executable}}}
        elsewhere = {"trainer": {"model": {"path": other}}, "critic": PPO | {"critic": {"path": other}}}
        settings = elsewhere.get(role, {"rewards": {"model": {"path": other, "max_tokens": 128}}})
        assert checked(sound, **own, **settings) == []


def test_megatron_names_the_folder_that_it_cannot_take(sound: dict[str, Any], tmp_path: Path) -> None:
    other = str(model_folder(tmp_path / "other", model_type="phi3"))
    stretched = str(model_folder(tmp_path / "a", model_type="qwen2", rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    spread = {"engine": "megatron", "python": sys.executable}
    assert checked(sound, **PPO | {"critic": {"path": other}}, services={"critic": spread}) == [
        "critic.path: model_type 'phi3' has no mapping to megatron-core; must be one of llama, qwen2, qwen3, qwen3_moe, "
        "mistral, mixtral, deepseek_v3, glm4_moe"
    ]
    assert checked(sound, model={"reference": stretched}, services={"reference": spread}, **DIVERGING) == [
        "model.reference: rope_type 'dynamic' is not supported; must be one of default, linear, llama3, yarn"
    ]


def test_weights_in_float8_are_for_the_embedded_engines(sound: dict[str, Any], tmp_path: Path) -> None:
    float8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    other = str(model_folder(tmp_path / "other", quantization_config=float8))
    assert checked(sound, model={"path": other}) == []
    assert checked(sound, model={"path": other}, services={"rollout": {"engine": "vllm", "python": sys.executable}}) == [
        "services.rollout.engine: vllm: model.path is quantised, what is published is not; must be torch, or another folder"
    ]
    awq = str(model_folder(tmp_path / "awq", quantization_config={"quant_method": "awq"}))
    told = (
        "model.path: quantization_config: quant_method 'awq', fmt 'e4m3', weight_block_size None is not supported; must be fp8"
    )
    assert all(told in fault for fault in checked(sound, model={"path": awq}))
