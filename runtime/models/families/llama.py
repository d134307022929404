"""Llama 2 and 3, and what shares their layers."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.models.families.family import Family, ParameterMapping, attention, dense


class Llama(Family):
    model_type = "llama"
    architecture = "Llama"
    unsupported = {"attention_bias": False, "mlp_bias": False}  # noqa: RUF012

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from attention(self.shape)
        yield from dense(self.shape)
