"""Qwen2 and Qwen2.5: q, k and v have biases."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.models.families.family import Family, ParameterMapping, attention, dense


class Qwen2(Family):
    model_type = "qwen2"
    architecture = "Qwen2"
    unsupported = {"use_sliding_window": False}  # noqa: RUF012

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from attention(self.shape, bias=True)
        yield from dense(self.shape)
