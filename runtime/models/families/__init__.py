"""Model families: how their Hugging Face tensors map to megatron-core's parameters. Pure; loads neither torch nor megatron.

A family is one file with one class, and its line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import UserError
from runtime.models.families.deepseek_v3 import DeepseekV3
from runtime.models.families.family import Family
from runtime.models.families.gemma3 import Gemma3
from runtime.models.families.glm4_moe import Glm4Moe
from runtime.models.families.gpt_oss import GptOss
from runtime.models.families.layout import Layout
from runtime.models.families.llama import Llama
from runtime.models.families.mistral import Mistral
from runtime.models.families.mixtral import Mixtral
from runtime.models.families.parameter import Parameter
from runtime.models.families.qwen2 import Qwen2
from runtime.models.families.qwen3 import Qwen3
from runtime.models.families.qwen3_moe import Qwen3Moe

_ALL: tuple[type[Family], ...] = (Llama, Qwen2, Qwen3, Qwen3Moe, Mistral, Mixtral, Gemma3, GptOss, DeepseekV3, Glm4Moe)
FAMILIES = {family.model_type: family for family in _ALL}

__all__ = ["FAMILIES", "Family", "Layout", "Parameter", "family_for"]


def family_for(
    config: Mapping[str, Any], where: str = "config.json", *, value_head: bool = False, mapped: bool = True
) -> Family:
    """Return the mapping of the model that a Hugging Face config.json describes. `where` is the file's name in messages.

    `value_head`: for a critic, with one number a token instead of the language model's head. `mapped`: a mapping to
    megatron-core is needed, not only names and shapes. Raises UserError, which names a family or feature without mapping.
    """
    name = config.get("model_type")
    allowed = f"must be one of {', '.join(name for name, family in FAMILIES.items() if not (mapped and family.unmapped))}"
    if name not in FAMILIES:
        raise UserError(f"{where}: model_type {name!r} has no mapping to megatron-core; {allowed}")
    if mapped and (missing := FAMILIES[name].unmapped):
        raise UserError(f"{where}: model_type {name!r} has no mapping to megatron-core, for {missing}; {allowed}")
    return FAMILIES[name](config, where, value_head)
