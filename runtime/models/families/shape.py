"""The sizes of a model, as its Hugging Face config.json tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.errors import UserError


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers of a model."""

    count: int  # in each of these layers
    intermediate_size: int  # of one expert
    per_token: int  # experts that a token is given to
    normalized: bool  # the weights of those add up to 1
    layers: frozenset[int]  # those that have experts; the others have one MLP


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an MLP that is not of experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # lm_head is the embedding
    experts: ExpertShape | None = None


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of a model without experts. `where` is what messages call the file.

    Raises UserError for a key that is missing or of a wrong type, and for heads that are no multiple of key-value heads.
    """
    heads = number(config, "num_attention_heads", where)
    # Written as null, these two mean what they mean when they are left out.
    kv_heads = heads if config.get("num_key_value_heads") is None else number(config, "num_key_value_heads", where)
    hidden_size = number(config, "hidden_size", where)
    head_dim = hidden_size // heads if config.get("head_dim") is None else number(config, "head_dim", where)
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return ModelShape(
        vocab_size=number(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=number(config, "intermediate_size", where),
        layers=number(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def number(config: Mapping[str, Any], key: str, where: str) -> int:
    """`config[key]`. Raises UserError unless it is a positive integer."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; must be a positive integer")
    return value
