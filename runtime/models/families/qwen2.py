"""Qwen2 and Qwen2.5: q, k and v have biases."""

from __future__ import annotations

from runtime.models.families.family import Family


class Qwen2(Family):
    model_type = "qwen2"
    architecture = "Qwen2"
    qkv_bias = True
