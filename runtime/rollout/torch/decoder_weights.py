"""The parameters of a decoder: one object, which an engine replaces between two steps.

Projections with the same input are one matrix (query, key and value; gate and up); Hugging Face has one tensor for each. A
table lists the tensors of each parameter; everything else here follows from the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from runtime.errors import InvalidMessage
from runtime.models.families.family import ROUTER_BIAS, dtype_of
from runtime.models.families.shape import ExpertShape
from runtime.models.hf_folder import ModelConfig, misfit

_HEAD, _EMBEDDING, _NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


class _Part(NamedTuple):
    """A tensor by its Hugging Face name, as a part of a parameter."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0  # above 0: repeated for so many heads; otherwise its rows follow the rows of the part before

    @property
    def rows(self) -> int:
        return self.heads or self.shape[0]


_Parts = tuple[_Part, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. H hidden size, D head_dim, W = heads · D, Q = W + 2 · kv_heads · D, I intermediate size. Each of E experts has
    a gate_up and a down, stacked along the first dimension."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [Q, H]
    output: torch.Tensor  # [H, W]
    mlp_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 · I, H], or [E · 2 · I, H]
    down: torch.Tensor  # [H, I], or [E · H, I]
    qkv_bias: torch.Tensor | None = None  # [Q]
    output_bias: torch.Tensor | None = None  # [H]
    qk_norm: torch.Tensor | None = None  # [heads + kv_heads, D]
    router: torch.Tensor | None = None  # [E, H]
    attention_norm: torch.Tensor | None = None  # [H], of the attention's output; the next one is of the MLP's output
    mlp_out_norm: torch.Tensor | None = None  # [H]
    sinks: torch.Tensor | None = None  # [heads]
    # For experts with biases, where `gate_up` is [E, H, 2 · I], gate and up in turn, and `down` is [E, I, H].
    logit_bias: torch.Tensor | None = None  # [E], the router's
    gate_up_bias: torch.Tensor | None = None  # [E, 2 · I]
    down_bias: torch.Tensor | None = None  # [E, H]
    score_bias: torch.Tensor | None = None  # [E], float32: corrects scores
    shared_gate_up: torch.Tensor | None = None  # [2 · S, H], of the experts of all tokens
    shared_down: torch.Tensor | None = None  # [H, S]
    # For latent attention, where `qkv` has the down-projections; without a rank of queries it projects queries directly.
    query_norm: torch.Tensor | None = None  # [rank of queries]
    query_up: torch.Tensor | None = None  # [heads · (plain + rotated), rank of queries]
    latent_norm: torch.Tensor | None = None  # [rank]
    latent_up: torch.Tensor | None = None  # [heads · (plain + value), rank]


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters. Only `load` writes to them, and never while a forward pass runs."""

    config: ModelConfig
    embedding: torch.Tensor  # [vocabulary, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [vocabulary, H], the embedding if they are tied
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The parameters in memory of their own, by their first tensor's Hugging Face name."""

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
        """Return weights in uninitialised memory, for `load` to fill."""
        copies: dict[str, torch.Tensor] = {}

        def parameter(parts: _Parts) -> torch.Tensor:
            name = parts[0].name
            own = dtype_of(name, dtype)
            return copies.setdefault(name, torch.empty(_fused_shape(parts), device=device, dtype=own))

        return replace(cls._of(config, parameter), copies=copies)

    @classmethod
    @torch.no_grad()
    def adopt(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> DecoderWeights:
        """Take over a complete set of weights by Hugging Face names, without a copy as far as possible.

        A parameter is a view of the given memory if that has the right device and dtype and its parts adjoin. Otherwise, and
        for norms that are repeated for each head, it is a copy. The memory must stay unchanged as long as the result is used.
        Raises InvalidMessage if names or shapes do not fit the model.
        """
        require_fit(config, tensors)

        copies: dict[str, torch.Tensor] = {}

        def parameter(parts: _Parts) -> torch.Tensor:
            given, name = [tensors[part.name] for part in parts], parts[0].name
            own = dtype_of(name, dtype)
            view = _adjoined(parts, given, device, own)
            if view is not None:
                return view
            copies[name] = torch.empty(_fused_shape(parts), device=device, dtype=own)
            for rows, tensor in zip(copies[name].split([part.rows for part in parts]), given, strict=True):
                rows.copy_(tensor)
            return copies[name]

        return replace(cls._of(config, parameter), copies=copies)

    @classmethod
    def _of(cls, config: ModelConfig, parameter: Callable[[_Parts], torch.Tensor]) -> DecoderWeights:
        layers = tuple(
            LayerWeights(**{field: parameter(parts) for field, parts in _layer_parts(config, index).items()})
            for index in range(config.layers)
        )
        outer = {name: parameter((part,)) for name, part in _outer_parts(config).items()}
        return cls(config, outer[_EMBEDDING], layers, outer[_NORM], outer.get(_HEAD, outer[_EMBEDDING]))

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy some of the weights in place, cast to the model's dtype."""
        for name, tensor in tensors:
            if name in self._views:  # a tied head is the embedding, which has its own name
                self._views[name].copy_(tensor)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all tensors; several may be views of one memory."""
        return self._views.values()

    @cached_property
    def _views(self) -> dict[str, torch.Tensor]:
        """Each tensor's view by its Hugging Face name; [heads, D] for a repeated norm."""
        views = {_EMBEDDING: self.embedding, _NORM: self.norm}
        if not self.config.tied:
            views[_HEAD] = self.head
        for index, layer in enumerate(self.layers):
            for name, parts in _layer_parts(self.config, index).items():
                rows = getattr(layer, name).split([part.rows for part in parts])
                views.update(zip((part.name for part in parts), rows, strict=True))
        return views


def mismatch(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return in one line why a set of weights of these names and shapes is not complete; None if it is.

    The name lm_head.weight may be present or absent if the head is tied to the embedding.
    """
    return misfit(_shapes(config), shapes, _HEAD if config.tied else "")


def require_fit(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidMessage unless `tensors` are a complete set of weights."""
    fault = mismatch(config, {name: tensor.shape for name, tensor in tensors.items()})
    if fault:
        raise InvalidMessage(f"weights do not fit the model: {fault}")


@lru_cache(maxsize=4)
def _shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all allowed tensors, by Hugging Face name."""
    shapes = {part.name: part.shape for part in _outer_parts(config).values()}
    shapes[_HEAD] = shapes[_EMBEDDING]
    for index in range(config.layers):
        shapes.update((part.name, part.shape) for parts in _layer_parts(config, index).values() for part in parts)
    return shapes


def _outer_parts(config: ModelConfig) -> dict[str, _Part]:
    table = (config.vocab_size, config.hidden_size)
    parts = [_Part(_EMBEDDING, table), _Part(_NORM, table[1:])] + ([] if config.tied else [_Part(_HEAD, table)])
    return {part.name: part for part in parts}


def _layer_parts(config: ModelConfig, index: int) -> dict[str, _Parts]:
    """Return by field of `LayerWeights` the tensors that the model has for it, in order."""
    hidden = config.hidden_size
    heads = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    widths = {each: count * config.head_dim for each, count in heads.items()}
    at = f"model.layers.{index}.self_attn."
    norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.output_norms:
        norms |= {"attention_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        norms["mlp_out_norm"] = "post_feedforward_layernorm"
    parts: dict[str, _Parts] = {
        **{field: (_Part(f"model.layers.{index}.{name}.weight", (hidden,)),) for field, name in norms.items()},
        **_projections(config, at),
        **_mlp_parts(config, index),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = tuple(_Part(f"{at}{each}_proj.bias", (width,)) for each, width in widths.items())
    if config.output_bias:
        parts["output_bias"] = (_Part(f"{at}o_proj.bias", (hidden,)),)
    if config.sinks:
        parts["sinks"] = (_Part(f"{at}sinks", (config.heads,)),)
    if config.qk_norm:
        parts["qk_norm"] = tuple(_Part(f"{at}{each}_norm.weight", (config.head_dim,), heads[each]) for each in ("q", "k"))
    return parts


def _projections(config: ModelConfig, at: str) -> dict[str, _Parts]:
    """Return the projections of the attention whose tensor names begin with `at`."""
    hidden, latent = config.hidden_size, config.latent
    if latent is None:
        widths = {"q": config.heads * config.head_dim, **dict.fromkeys("kv", config.kv_heads * config.head_dim)}
        return {
            "qkv": tuple(_Part(f"{at}{each}_proj.weight", (width, hidden)) for each, width in widths.items()),
            "output": (_Part(f"{at}o_proj.weight", (hidden, widths["q"])),),
        }
    queries, down = config.heads * latent.head, _Part(f"{at}kv_a_proj_with_mqa.weight", (latent.cached, hidden))
    parts: dict[str, _Parts] = {
        "latent_norm": (_Part(f"{at}kv_a_layernorm.weight", (latent.rank,)),),
        "latent_up": (_Part(f"{at}kv_b_proj.weight", (config.heads * (latent.plain + latent.value), latent.rank)),),
        "output": (_Part(f"{at}o_proj.weight", (hidden, config.heads * latent.value)),),
    }
    if latent.query_rank is None:
        return {"qkv": (_Part(f"{at}q_proj.weight", (queries, hidden)), down), **parts}
    return {
        "qkv": (_Part(f"{at}q_a_proj.weight", (latent.query_rank, hidden)), down),
        "query_norm": (_Part(f"{at}q_a_layernorm.weight", (latent.query_rank,)),),
        "query_up": (_Part(f"{at}q_b_proj.weight", (queries, latent.query_rank)),),
        **parts,
    }


def _mlp_parts(config: ModelConfig, index: int) -> dict[str, _Parts]:
    at, hidden, inner, experts = f"model.layers.{index}.", config.hidden_size, config.intermediate_size, config.experts
    if experts is not None and experts.biased:
        return _biased_parts(f"{at}{experts.block}.", hidden, experts)
    others: dict[str, _Parts] = {}
    each, parts = [f"{at}mlp."], ("gate_proj", "up_proj", "down_proj")
    if experts is not None and index in experts.layers:
        at, parts, inner = f"{at}{experts.block}.", experts.parts, experts.intermediate_size
        each = [f"{at}experts.{expert}." for expert in range(experts.count)]
        others = {"router": (_Part(f"{at}gate.weight", (experts.count, hidden)),)}
        if experts.corrected:
            others["score_bias"] = (_Part(f"{at}gate.{ROUTER_BIAS}", (experts.count,)),)
        if experts.shared_size:
            others |= _gated_parts("shared_", [f"{at}shared_experts."], parts, experts.shared_size, hidden)
    return {**_gated_parts("", each, parts, inner, hidden), **others}


def _gated_parts(prefix: str, each: Sequence[str], parts: tuple[str, str, str], inner: int, hidden: int) -> dict[str, _Parts]:
    return {
        f"{prefix}gate_up": tuple(_Part(f"{mlp}{part}.weight", (inner, hidden)) for mlp in each for part in parts[:2]),
        f"{prefix}down": tuple(_Part(f"{mlp}{parts[2]}.weight", (hidden, inner)) for mlp in each),
    }


def _biased_parts(at: str, hidden: int, experts: ExpertShape) -> dict[str, _Parts]:
    count, inner = experts.count, experts.intermediate_size
    shapes = {
        "router": ("router.weight", (count, hidden)),
        "logit_bias": ("router.bias", (count,)),
        "gate_up": ("experts.gate_up_proj", (count, hidden, 2 * inner)),
        "gate_up_bias": ("experts.gate_up_proj_bias", (count, 2 * inner)),
        "down": ("experts.down_proj", (count, inner, hidden)),
        "down_bias": ("experts.down_proj_bias", (count, hidden)),
    }
    return {field: (_Part(f"{at}{name}", shape),) for field, (name, shape) in shapes.items()}


def _fused_shape(parts: _Parts) -> tuple[int, ...]:
    first = parts[0]
    return (sum(part.rows for part in parts), *(first.shape if first.heads else first.shape[1:]))


def _adjoined(parts: _Parts, given: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the memory of all parts as one parameter; None if the parts do not adjoin."""
    first = given[0]
    if any(part.heads for part in parts):
        return None
    end = first.data_ptr()
    for tensor in given:
        fits = tensor.device == device and tensor.dtype == dtype and tensor.is_contiguous()
        whole = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and tensor.data_ptr() == end
        if not (fits and whole):
            return None
        end += tensor.nbytes
    shape = _fused_shape(parts)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return first.detach().as_strided(shape, strides, first.storage_offset())
