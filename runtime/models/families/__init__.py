"""Model families: how their Hugging Face tensors map to megatron-core's parameters. Pure; loads neither torch nor megatron.

A family is one class, and its name in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import UserError
from runtime.models.families.dense import Gemma3, Llama, Mistral, Qwen2, Qwen3
from runtime.models.families.family import Family
from runtime.models.families.layout import Layout
from runtime.models.families.parameter import Parameter
from runtime.models.families.routed import DeepseekV3, Glm4Moe, GptOss, Mixtral, Qwen3Moe

_ALL: tuple[type[Family], ...] = (Llama, Qwen2, Qwen3, Qwen3Moe, Mistral, Mixtral, Gemma3, GptOss, DeepseekV3, Glm4Moe)
FAMILIES = {family.model_type: family for family in _ALL}

__all__ = ["FAMILIES", "Family", "Layout", "Parameter", "family_for"]


def family_for(
    config: Mapping[str, Any], where: str = "config.json", *, value_head: bool = False, mapped: bool = True
) -> Family:
    """Return the mapping of the model that a Hugging Face config.json describes. `where` is the file's name in messages.
    `value_head`: for a critic, with one number a token instead of the language model's head. `mapped`: a mapping to
    megatron-core is needed, not only names and shapes. Raises UserError, which names a family or feature without mapping."""
    name = config.get("model_type")
    allowed = f"must be one of {', '.join(name for name, family in FAMILIES.items() if not (mapped and family.unmapped))}"
    if name not in FAMILIES:
        raise UserError(f"{where}: model_type {name!r} has no mapping to megatron-core; {allowed}")
    if mapped and (missing := FAMILIES[name].unmapped):
        raise UserError(f"{where}: model_type {name!r} has no mapping to megatron-core, for {missing}; {allowed}")
    config = {**FAMILIES[name].defaults, **config}
    shape = FAMILIES[name].supported(config, where)
    if mapped and shape.output_bias:
        found = f"attention_bias {config['attention_bias']!r}"
        raise UserError(f"{where}: {found} is not supported with megatron-core; must be False")
    return FAMILIES[name](shape, value_head)
