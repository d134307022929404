"""What the tests of the configuration share: files with a fault or none, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.loading import resolve
from runtime.errors import ConfigError

Loading = Callable[..., Config]


def faults_of(loading: Loading, text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loading(text, *overrides)
    assert str(caught.value).splitlines() == caught.value.faults
    return caught.value.faults


def model_folder(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"w")
    return path


KNOWN = {
    "algorithm.advantage": ["gae", "group_norm", "rloo"],
    "critic": ["gae"],
    "algorithm.loss": ["clip_cov", "decoupled", "gspo", "m2po", "ppo"],
    "algorithm.correction": ["none", "icepop"],
    "algorithm.aggregation": ["token_mean"],
    "algorithm.kl": ["k1", "k3"],
    "data.handler": ["plain"],
    "rewards.rules": ["accuracy", "format"],
}


def checked(raw: dict[str, Any], available_bytes: int | None = 1 << 40, **changes: dict[str, Any]) -> list[str]:
    merged = raw | {section: raw.get(section, {}) | values for section, values in changes.items()}
    return semantic_faults(resolve(msgspec.convert(merged, Config)), KNOWN, available_bytes)


PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {}}
TWO_ROLLOUTS = {"replicas": 2, "devices": [0, 1]}
