"""The parameters of a decoder: one object, which an engine replaces between two steps.

Projections with the same input are one matrix (query, key and value; gate and up); Hugging Face has one tensor for each. The
model's family lists the tensors of each parameter; everything else here follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from runtime.errors import InvalidMessage
from runtime.models.families import FAMILIES
from runtime.models.families.family import EMBEDDING, LM_HEAD
from runtime.models.forward import dtype_of
from runtime.models.hf_folder import ModelConfig
from runtime.rollout.engine import misfit

_NORM = "model.norm.weight"


class _Part(NamedTuple):
    """A tensor by its Hugging Face name, as a part of a parameter."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0  # above 0: repeated for so many heads; otherwise its rows follow the rows of the part before

    @property
    def rows(self) -> int:
        return self.heads or self.shape[0]


_Parts = list[_Part]


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

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
        """Return weights in uninitialised memory, for `load` to fill."""

        def parameter(parts: _Parts) -> torch.Tensor:
            return torch.empty(_fused_shape(parts), device=device, dtype=dtype_of(parts[0].name, dtype))

        return cls._of(config, parameter)

    @classmethod
    @torch.no_grad()
    def adopt(
        cls, config: ModelConfig, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> DecoderWeights:
        """Take over a complete set of weights by Hugging Face names, without a copy as far as possible.

        A parameter is a view of the given memory if that has the right device and dtype and its parts adjoin. Otherwise, and
        for norms that are repeated for each head, it is a copy. The memory must stay unchanged as long as the result is used.
        Raises InvalidMessage if names or shapes do not fit the model.
        """
        require_fit(config, tensors)

        def parameter(parts: _Parts) -> torch.Tensor:
            given, own = [tensors[part.name] for part in parts], dtype_of(parts[0].name, dtype)
            view = _adjoined(parts, given, device, own)
            if view is not None:
                return view
            copy = torch.empty(_fused_shape(parts), device=device, dtype=own)
            for rows, tensor in zip(copy.split([part.rows for part in parts]), given, strict=True):
                rows.copy_(tensor)
            return copy

        return cls._of(config, parameter)

    @classmethod
    def _of(cls, config: ModelConfig, parameter: Callable[[_Parts], torch.Tensor]) -> DecoderWeights:
        layers = tuple(LayerWeights(**{field: parameter(parts) for field, parts in layer.items()}) for layer in _layers(config))
        table = (config.vocab_size, config.hidden_size)
        embedding, norm = parameter([_Part(EMBEDDING, table)]), parameter([_Part(_NORM, table[1:])])
        return cls(config, embedding, layers, norm, embedding if config.tied else parameter([_Part(LM_HEAD, table)]))

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
        views = {EMBEDDING: self.embedding, _NORM: self.norm}
        if not self.config.tied:
            views[LM_HEAD] = self.head
        for layer, fields in zip(self.layers, _layers(self.config), strict=True):
            for name, parts in fields.items():
                rows = getattr(layer, name).split([part.rows for part in parts])
                views.update(zip((part.name for part in parts), rows, strict=True))
        return views


def mismatch(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return in one line why a set of weights of these names and shapes is not complete; None if it is. The name
    lm_head.weight may be present or absent if the head is tied to the embedding."""
    return misfit(_shapes(config), shapes, LM_HEAD if config.tied else "")


def require_fit(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidMessage unless `tensors` are a complete set of weights."""
    fault = mismatch(config, {name: tensor.shape for name, tensor in tensors.items()})
    if fault:
        raise InvalidMessage(f"weights do not fit the model: {fault}")


@lru_cache(maxsize=4)
def _shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all allowed tensors, by Hugging Face name."""
    return FAMILIES[config.family](config).tensors() | {LM_HEAD: (config.vocab_size, config.hidden_size)}


@lru_cache(maxsize=4)
def _layers(config: ModelConfig) -> list[dict[str, _Parts]]:
    """Return for each layer, by field of `LayerWeights`, the tensors that the model has for it, in order."""
    family, layers = FAMILIES[config.family](config), []
    for index in range(config.layers):
        parts: dict[str, _Parts] = {}
        for row in family.layer(index):
            own = parts.setdefault(row.field, [])
            repeats = (config.heads, config.kv_heads)[len(own)] if row.field == "qk_norm" else 0
            own += [_Part(f"model.layers.{index}.{source.name}", source.shape, repeats) for source in row.sources]
        layers.append(parts)
    return layers


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
