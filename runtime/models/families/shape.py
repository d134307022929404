"""The sizes of a model in its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.errors import UserError

LATENT_EPS = 1e-6  # of the norms in latent attention, whatever config.json says about other norms


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers of a model."""

    count: int  # experts in each of these layers
    intermediate_size: int  # of one expert
    per_token: int  # experts that a token goes to
    normalized: bool  # the weights of these experts add up to 1
    layers: frozenset[int]  # the layers with experts; other layers have one MLP
    block: str = "mlp"  # name of a layer's block of experts; `parts`: of an expert's gate, up and down projections
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    biased: bool = False  # router and experts have biases; a layer's experts are joined, and their MLP is gpt-oss's
    corrected: bool = False  # scores are sigmoids, and a bias without gradient is added for the choice of experts
    groups: int = 1  # of neighbouring experts; a token first chooses groups, and its experts from these groups
    groups_per_token: int = 1
    scale: float = 1.0  # factor of the weights
    shared_size: int = 0  # intermediate size of the shared experts, which all tokens go to; 0: none

    @property
    def routes(self) -> tuple[int, int, int]:
        """Number of layers with experts, experts a token, and experts in a layer."""
        return len(self.layers), self.per_token, self.count


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). The keys and values of all heads are computed
    from one vector a token, `rank` wide. Only a rotated part of the keys, which all heads share, is not."""

    query_rank: int | None  # width of the vector that queries are computed from; None: from the hidden state
    rank: int
    plain: int  # part of a head of queries and keys that is not rotated
    rotated: int
    value: int  # width of a head of values

    @property
    def head(self) -> int:
        """Width of a head of queries and keys."""
        return self.plain + self.rotated

    @property
    def cached(self) -> int:
        """Numbers in the cache for a token, for all heads."""
        return self.rank + self.rotated


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an MLP without experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # lm_head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape of a model without experts. `where` is the file's name in messages. Raises UserError if a key is missing
    or of a wrong type, or heads are no multiple of key-value heads."""
    heads = number(config, "num_attention_heads", where)
    # null has the same meaning for these two keys as leaving them out.
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
    """Return `config[key]`. Raises UserError unless it is a positive integer."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; must be a positive integer")
    return value


def windows(config: Mapping[str, Any], where: str, kinds: Any) -> tuple[int, ...]:
    """Return for each layer the tokens in reach of attention, its own included; 0: all tokens. (): all tokens in all layers.
    `kinds`: each layer's, as in `layer_types`. Raises UserError for layers of another kind."""
    layers = number(config, "num_hidden_layers", where)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UserError(f"{where}: layer_types is {kinds!r}; must be full_attention or sliding_attention for each layer")
    if config.get("sliding_window") is None:
        return ()
    window = number(config, "sliding_window", where)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_routed(config: Mapping[str, Any], where: str, count_key: str, **own: Any) -> ModelShape:
    """Read the shape of a model with experts; `count_key` is the key of the number of experts in a layer. All layers have
    experts, experts are as wide as an MLP, and weights add up to 1, unless `own`, fields of ExpertShape, says otherwise. Also
    raises UserError if the number of experts a token is impossible."""
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
