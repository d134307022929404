"""Mistral: Llama's layers, whose attention may reach back over a window of tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.models.families.family import Family, ParameterMapping, attention, dense
from runtime.models.families.shape import windows


class Mistral(Family):
    model_type = "mistral"
    architecture = "Mistral"
    unsupported = {"attention_bias": False}  # noqa: RUF012
    defaults = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}  # noqa: RUF012

    @classmethod
    def traits(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {"windows": windows(config, where, alike=True)}

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from attention(self.shape)
        yield from dense(self.shape)
