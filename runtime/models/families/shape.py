"""The sizes of a model, as its Hugging Face config.json tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.errors import UserError

LATENT_EPS = 1e-6  # of the norms in latent attention, whatever config.json says of the others


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers of a model."""

    count: int  # in each of these layers
    intermediate_size: int  # of one expert
    per_token: int  # experts that a token is given to
    normalized: bool  # the weights of those add up to 1
    layers: frozenset[int]  # those that have experts; the others have one MLP
    block: str = "mlp"  # what a layer calls them, and each its gate, up and down projections
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    biased: bool = False  # router and experts have biases; those of a layer are joined, and their MLP is gpt-oss's
    corrected: bool = False  # scores are sigmoids, and a bias that no gradient reaches takes part in the choice of experts
    groups: int = 1  # of neighbouring experts; a token chooses some of them first, and its experts out of these
    groups_per_token: int = 1
    scale: float = 1.0  # by which the weights are multiplied
    shared_size: int = 0  # intermediate size of what all tokens are given to besides; 0: there is none

    @property
    def routes(self) -> tuple[int, int, int]:
        """The layers, experts a token, and experts in each."""
        return len(self.layers), self.per_token, self.count


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the keys and values of all heads are made of
    one vector a token, `rank` wide, but for a part of the keys that is rotated and that all heads share."""

    query_rank: int | None  # of the vector that queries are made of; None: they are made of the hidden state
    rank: int
    plain: int  # of a head of queries and keys, what is not rotated
    rotated: int
    value: int  # a head of the values

    @property
    def head(self) -> int:
        """A head of queries and keys."""
        return self.plain + self.rotated

    @property
    def cached(self) -> int:
        """What of a token has to be remembered, for all heads."""
        return self.rank + self.rotated


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
    latent: LatentShape | None = None


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


def windows(config: Mapping[str, Any], where: str, *, alike: bool = False) -> tuple[int, ...]:
    """Of each layer, how many tokens attention reaches back to, its own included; 0: to the first. (): so in all layers.

    By `sliding_window`, and unless all layers are `alike` by `layer_types`. Raises UserError for layers of another kind.
    """
    layers = number(config, "num_hidden_layers", where)
    kinds = ["sliding_attention"] * layers if alike else config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UserError(f"{where}: layer_types is {kinds!r}; must be full_attention or sliding_attention for each layer")
    if config.get("sliding_window") is None:
        return ()
    window = number(config, "sliding_window", where)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_routed(config: Mapping[str, Any], where: str, count_key: str, **own: Any) -> ModelShape:
    """`read_shape` of a model with experts, whose number in a layer config.json calls `count_key`. They are in all layers, as
    wide as an MLP, and their weights add up to 1, unless `own`, fields of ExpertShape, says otherwise.

    Raises UserError as well for a number of experts a token that cannot be.
    """
    shape = read_shape(config, where)
    given: dict[str, Any] = {
        "count": number(config, count_key, where),
        "intermediate_size": shape.intermediate_size,
        "per_token": number(config, "num_experts_per_tok", where),
        "normalized": True,
        "layers": frozenset(range(shape.layers)),
    }
    experts = ExpertShape(**{**given, **own})
    if experts.per_token > experts.count:
        raise UserError(f"{where}: num_experts_per_tok is {experts.per_token}; must be at most {count_key} {experts.count}")
    if experts.per_token == 1 and experts.normalized:
        raise UserError(
            f"{where}: num_experts_per_tok 1 with weights that add up to 1 is not supported with megatron-core; must be more"
        )
    return msgspec.structs.replace(shape, experts=experts)
