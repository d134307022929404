"""What the tests of the configuration share: files with a fault or none, and what is said of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.loading import resolve
from runtime.config.yaml_text import read_value
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


def configured(text: str) -> dict[str, Any]:
    """The keys of a line of YAML."""
    given: dict[str, Any] = read_value(f"{{{text}}}")
    return given


def cases(table: str) -> list[Any]:
    """Of a table for `parametrize`: each is `YAML => MESSAGE`, which goes on in lines that are indented."""
    found = [" ".join(each.split()).partition(" => ") for each in re.split(r"\n(?=\S)", table.strip())]
    return [pytest.param(configured(given), said, id=given) for given, _, said in found]


def paths(kind: inspect.Type, prefix: str = "") -> Iterator[str]:
    """Every key of our schema, sections included."""
    for variant in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(variant, inspect.Metadata):
            variant = variant.type
        if isinstance(variant, inspect.StructType):
            for field in variant.fields:
                yield prefix + field.encode_name
                yield from paths(field.type, f"{prefix}{field.encode_name}.")


def without_name(path: str) -> str:
    """Return `path` without the name in a mapping, as in `data.columns.prompt`."""
    return re.sub(r"(\.(?:columns|loss_options|advantage_options))\.\w+$", r"\1", path)


MODEL: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 301, "hidden_size": 48, "intermediate_size": 40}
MODEL |= {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {}}
TWO_ROLLOUTS = {"replicas": 2, "devices": [0, 1]}
