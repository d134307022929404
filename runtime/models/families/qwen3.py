"""Qwen3: each head of q and k is normalised."""

from __future__ import annotations

from runtime.models.families.family import Family


class Qwen3(Family):
    model_type = "qwen3"
    architecture = "Qwen3"
    qk_norm = True
    only_mapped = {"attention_bias": False}  # noqa: RUF012
