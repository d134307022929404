"""Llama 2 and 3, and models with the same layers."""

from __future__ import annotations

from runtime.models.families.family import Family


class Llama(Family):
    model_type = "llama"
    architecture = "Llama"
    only_mapped = {"attention_bias": False}  # noqa: RUF012
