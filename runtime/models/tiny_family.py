"""`tiny:FAMILY` in the place of a model's folder: a small random model of that family, to rehearse a configuration with.

The folder is a Hugging Face folder like any other, made where it is missing, and the same bytes wherever it is made. Its sizes
are multiples of what configs/models spreads models over. Neither torch nor transformers is loaded.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.config import Config, Warmup
from runtime.config.model import TINY_PREFIX as PREFIX
from runtime.errors import UserError
from runtime.models import tiny_model
from runtime.models.families import FAMILIES, Family, family_for

if TYPE_CHECKING:
    import numpy as np

NAMES = ", ".join(f"{PREFIX}{name}" for name in sorted(FAMILIES))

CONTEXT_TOKENS = 131_072  # more than any configuration of ours asks for
DEVIATION = 0.06  # of the weights
SEED = 7
RECIPE = 1  # part of the cache's key: raise it when this file changes what a folder holds

_SIZES = {
    "vocab_size": 256 + len(tiny_model.SPECIAL_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,  # the least that vLLM takes on CPUs
}
_OWN = {
    "qwen2": {"hidden_size": 256},  # vLLM divides it by the heads, whatever head_dim says
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
}


def fault(path: str) -> str:
    """What is wrong with a path that begins with PREFIX; "" for nothing, and for a folder."""
    if not path.startswith(PREFIX) or path.removeprefix(PREFIX) in FAMILIES:
        return ""
    return f"'{path}' is not one of {NAMES}"


def described(path: str, *, scores: bool = False) -> dict[str, Any] | None:
    """The config.json that `tiny:FAMILY` stands for; None for a folder, and for an unknown family.

    `scores`: of a reward model, a sequence classifier with one label.
    """
    name = path.removeprefix(PREFIX)
    if not path.startswith(PREFIX) or name not in FAMILIES:
        return None
    special = {token: 256 + index for index, token in enumerate(tiny_model.SPECIAL_TOKENS)}
    task = "ForSequenceClassification" if scores else "ForCausalLM"
    return {
        "model_type": name,
        "architectures": [FAMILIES[name].architecture + task],
        **_SIZES,
        **_OWN.get(name, {}),
        **({"id2label": {"0": "score"}, "label2id": {"score": 0}} if scores else {}),
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": special[tiny_model.END_OF_TURN],
        "pad_token_id": special[tiny_model.END_OF_TEXT],
    }


def made(config: Config) -> Config:
    """The configuration with folders in the place of every `tiny:FAMILY`; those that are missing are written.

    Raises UserError when they cannot be.
    """
    cache = Path((config.warmup or Warmup()).cache)

    def folder(path: str, *, scores: bool = False) -> str:
        found = described(path, scores=scores)
        return path if found is None else str(_written(cache, found, scores))

    model, critic, reward = config.model, config.critic, config.rewards.model
    return replace(
        config,
        model=replace(model, path=folder(model.path), reference=folder(model.reference)),
        critic=None if critic is None else replace(critic, path=folder(critic.path)),
        rewards=replace(
            config.rewards, model=None if reward is None else replace(reward, path=folder(reward.path, scores=True))
        ),
    )


def _written(cache: Path, described: dict[str, Any], scores: bool) -> Path:
    """The folder with that config.json, which appears whole or not at all."""
    digest = hashlib.sha256(json.dumps([RECIPE, SEED, DEVIATION, described], sort_keys=True).encode()).hexdigest()
    folder = cache / f"tiny-{described['model_type']}-{digest[:16]}"
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache) as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            _write(whole, described, family_for(described, value_head=scores))
            try:
                whole.rename(folder)
            except OSError:  # a folder that is not empty is never replaced: another process was first
                if not (folder / "config.json").exists():
                    raise
    except OSError as error:
        raise UserError(f"model.path: a tiny model cannot be written to {folder}: {error.strerror or error}") from error
    return folder


def _write(folder: Path, described: dict[str, Any], family: Family) -> None:
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tiny_model.write_tokenizer(folder, CONTEXT_TOKENS)
    save_file(dict(_weights(family)), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Norms of 1, biases of 0, normal matrices: float32."""
    import numpy as np

    random = np.random.default_rng(SEED)
    for name, shape in family.tensors().items():
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, np.float32)
        elif name.endswith("bias"):
            yield name, np.zeros(shape, np.float32)
        else:
            yield name, random.standard_normal(shape, np.float32) * np.float32(DEVIATION)
