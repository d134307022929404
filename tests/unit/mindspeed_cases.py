"""Configurations of MindSpeed-RL's with single keys changed, translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec import inspect

from launcher.importing.settings import FileEntry, Read, TranslatedKey
from launcher.importing.translation import Translation
from launcher.mindspeed.translate import translate
from runtime.errors import ConfigError

BASE: dict[str, dict[str, Any]] = {
    "megatron_training": {"tokenizer_name_or_path": "m", "global_batch_size": 32, "seq_length": 1024, "stage": "ray_grpo"},
    "actor_config": {"lr": 1e-6, "micro_batch_size": 2},
    "rl_config": {"max_prompt_length": 512, "n_samples_per_prompt": 4, "actor_resource.num_npus": 8},
    "generate_config": {"infer_tensor_parallel_size": 1, "sampling_config.temperature": 1.0},
}
OLDER: dict[str, dict[str, Any]] = {
    "training": {"global_batch_size": 8, "seq_length": 1024},
    "actor_rollout_ref.actor_rollout": {"num_gpus_for_train": 2, "num_gpus_for_infer": 2, "max_prompt_length": 512},
    "algorithm": {"verifier_function": ["acc"], "verifier_weight": [1.0]},
    "reward": {"verifier": True},
}


def made(*, model: Mapping[str, Any] | None = None, without: tuple[str, ...] = (), **changes: Mapping[str, Any]) -> Translation:
    return of("current", BASE, changes, model or {}, without)


def of(
    format: Any, base: dict[str, dict[str, Any]], changes: Mapping[str, Any], model: Mapping[str, Any], without: tuple[str, ...]
) -> Translation:
    sections = {name: dict(base.get(name, {})) | dict(changes.get(name, {})) for name in [*base, *changes]}
    if model:
        next(iter(sections.values()))["model"] = "m"
    entries = [FileEntry(section, name, value) for section, keys in sections.items() for name, value in keys.items()]
    entries += [FileEntry("model", name, value, model="m") for name, value in model.items()]
    return translate(Read(name="a", format=format, entries=tuple(entries)), without)


def at(translation: Translation, path: str) -> Any:
    """The value written at `path`; None where our default stays."""
    node: Any = translation.raw
    for part in path.split("."):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return None if node == {} else node


def row(translation: Translation, path: str) -> TranslatedKey:
    return next(row for row in translation.rows if row.path == path)


def refused(**changes: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        made(**changes)
    return error.value.faults


def paths(kind: inspect.Type, prefix: str = "") -> Iterator[str]:
    """Every key of our schema, sections included."""
    for variant in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(variant, inspect.Metadata):
            variant = variant.type
        if isinstance(variant, inspect.StructType):
            for field in variant.fields:
                yield prefix + field.encode_name
                yield from paths(field.type, f"{prefix}{field.encode_name}.")
