"""Mistral: Llama's layers, with attention that may be limited to a window of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models.families.family import Family
from runtime.models.families.shape import ModelShape, windows


class Mistral(Family):
    model_type = "mistral"
    architecture = "Mistral"
    only_mapped = {"attention_bias": False}  # noqa: RUF012
    defaults = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}  # noqa: RUF012

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        return {"windows": windows(config, where, alike=True)}
