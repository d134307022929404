"""A lean decoder for the Llama, Qwen2 and Qwen3 families, Qwen3's mixture of experts included: few operators a step.

Tokens are flattened to [m, hidden]; only the attention knows of sequences. Softmax statistics, norms and logits are float32
whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from runtime.errors import UserError
from runtime.models.experts import mixture, route
from runtime.models.families.shape import ExpertShape
from runtime.models.hf_config import ModelConfig, read_config
from runtime.models.hf_weights import WeightFiles
from runtime.process import platform
from runtime.rollout.torch.decoder_weights import DecoderWeights, mismatch

# ----------------------------------------------------------------------------------------------------------------------
# The key-value cache: static memory, one slot per sequence.
#
# Layout [layers, 2, slots, kv_heads, max_length, head_dim], the 2 being keys and values. The active slots are always
# 0..n-1, so that a decode step reads neighbouring slots, cut to the longest length among them, as a view.


def kv_bytes(config: ModelConfig, slots: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Bytes of the cache of `slots` sequences of `max_model_len` tokens."""
    return 2 * config.layers * slots * config.kv_heads * max_model_len * config.head_dim * dtype.itemsize


class KVCache:
    def __init__(self, config: ModelConfig, slots: int, max_model_len: int, device: torch.device, dtype: torch.dtype):
        """Raises UserError when the device has not the memory."""
        needed, available = kv_bytes(config, slots, max_model_len, dtype), platform.memory(device).available
        if needed > available:
            raise UserError(
                f"services.rollout.slots: {slots} sequences of {max_model_len} tokens need {needed} bytes of key-value cache, "
                f"but {device} has {available} bytes available; at most {available * slots // needed} slots fit"
            )
        # Zeros, because a masked position still multiplies its value by a probability of 0.
        self.data = torch.zeros(
            config.layers, 2, slots, config.kv_heads, max_model_len, config.head_dim, device=device, dtype=dtype
        )
        self.max_length = max_model_len
        self._flat = self.data.view(config.layers, -1, config.head_dim)
        first = torch.arange(2 * slots * config.kv_heads, device=device) * max_model_len
        self._first = first.view(2, slots, config.kv_heads).transpose(0, 1).reshape(slots, 2 * config.kv_heads)

    def locate(self, positions: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Where `slots` [n] int64, 0..n-1 if left out, keep the keys and values of their `positions` [n] int64:
        [n * 2 * kv_heads], for `append`."""
        first = self._first[: len(positions)] if slots is None else self._first.index_select(0, slots)
        return (first + positions.unsqueeze(1)).flatten()

    def append(self, layer: int, where: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Write [n, 2 * kv_heads, head_dim], keys before values, at `where` (from `locate`)."""
        self._flat[layer].index_copy_(0, where, keys_values.reshape(-1, keys_values.shape[-1]))

    def views(self, slots: slice, length: int) -> tuple[torch.Tensor, ...]:
        """Layer by layer the keys, then the values, [slots, kv_heads, length, head_dim], of neighbouring slots."""
        return self.data[:, :, slots, :, :length].flatten(0, 1).unbind()

    def held(self, slot: int, length: int) -> torch.Tensor:
        """The first positions of a slot, as a view: [layers, 2, kv_heads, length, head_dim]."""
        return self.data[:, :, slot, :, :length]

    def fill(self, slot: int, text: torch.Tensor) -> None:
        """Write the first positions of a slot: a text's [layers, 2, kv_heads, length, head_dim]."""
        self.data[:, :, slot, :, : text.shape[3]].copy_(text)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        held = self.data[:, :, one, :, :length].clone()
        self.move(other, one, length)
        self.data[:, :, other, :, :length].copy_(held)

    def release(self) -> None:
        """Give the memory back. What was in the slots is lost."""
        self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, zeroed. Raises RuntimeError when there is not enough."""
        self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
        self.data.zero_()


# ----------------------------------------------------------------------------------------------------------------------


# Attention of one layer: (layer, [m, heads + 2 * kv_heads, head_dim], rotated) -> [m, heads * head_dim].
Attention = Callable[[int, torch.Tensor], torch.Tensor]

LENGTH_STEP = 8  # cached lengths are cut to a multiple of this: fused kernels want aligned masks


def round_up(length: int, step: int) -> int:
    return -(-length // step) * step


class Span(NamedTuple):
    """Neighbouring slots start..end-1, none of which has more than `longest` positions, its newest token's included."""

    start: int
    end: int
    longest: int


class _SpanPart(NamedTuple):
    """The tokens of a span, and what they attend to."""

    tokens: slice
    views: tuple[torch.Tensor, ...]  # of the cache, from `KVCache.views`
    biases: dict[int, torch.Tensor]  # by the window of a layer
    places: tuple[torch.Tensor, torch.Tensor] | None  # where slots have several tokens: from `_places`


class Decoder:
    """Inference only: call under `torch.inference_mode()`."""

    def __init__(self, weights: DecoderWeights):
        """`weights` is replaced by assignment, between two calls."""
        self.weights = weights
        self.config = weights.config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._cos, self._sin = _rope_tables(self.config, 0, self.device, self.dtype)
        self._windows = self.config.windows or (0,) * self.config.layers
        # For one query a sequence, MKL's batched GEMM takes 0.75 of the time of torch's CPU attention kernel.
        self._attend_cached = _attend_batched if self.device.type == "cpu" else _attend_fused

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device, dtype: torch.dtype) -> Decoder:
        """Load a Hugging Face folder. Raises UserError for a folder that is missing, incomplete or of another family."""
        config, files = read_config(path), WeightFiles(path)
        fault = mismatch(config, files.shapes)
        if fault:
            raise UserError(f"model {path}: {fault}")
        weights = DecoderWeights.empty(config, device, dtype)
        for name, tensor in files:
            weights.load({name: tensor})
        return cls(weights)

    def reserve_positions(self, length: int) -> None:
        """Make sure that positions 0..length-1 can be rotated."""
        if length > len(self._cos):
            self._cos, self._sin = _rope_tables(self.config, length, self.device, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden] to float32 [m, vocab_size]."""
        return F.linear(hidden, self.weights.head).float()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        past: int = 0,
    ) -> torch.Tensor:
        """Whole sequences at once: int64 `tokens` and `positions` [b, t] to the last layer's normed output [b, t, hidden].

        `allowed` [b, t, past + t] bool: which keys a query sees; causal when None, so that padding on the right is harmless.
        `kept` [layers, 2, b, kv_heads, past + t, head_dim] receives keys and values, behind those of `past` tokens that it has
        already. With these, `allowed` has to be given.
        """
        config, (b, t) = self.config, tokens.shape
        widths = [config.heads, config.kv_heads, config.kv_heads]
        masks = {window: self._mask(allowed, window, past, t) for window in set(self._windows)}

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.transpose(1, 2) for part in qkv.view(b, t, -1, config.head_dim).split(widths, 2))
            if kept is not None:
                kept[layer, 0, :, :, past:].copy_(key)
                kept[layer, 1, :, :, past:].copy_(value)
                if past:
                    key, value = kept[layer]
            mask = masks[self._windows[layer]]
            out = F.scaled_dot_product_attention(
                query, self._per_head(key), self._per_head(value), attn_mask=mask, is_causal=mask is None
            )
            return out.transpose(1, 2).reshape(b * t, -1)

        return self._run(tokens.flatten(), positions.flatten(), attend).view(b, t, -1)

    def _mask(self, allowed: torch.Tensor | None, window: int, past: int, t: int) -> torch.Tensor | None:
        """bool [b or 1, 1, t, past + t]: which keys `t` queries behind `past` tokens see; None: all up to their own."""
        if not 0 < window < past + t:
            return None if allowed is None else allowed.unsqueeze(1)
        columns = torch.arange(past + t, device=self.device)
        distance = columns[past:, None] - columns
        seen = (distance >= 0 if allowed is None else allowed) & (distance < window)
        return seen.unsqueeze(-3)

    def _per_head(self, keys: torch.Tensor) -> torch.Tensor:
        """[b, kv_heads, t, d] repeated for the query heads that share them: [b, heads, t, d]."""
        return keys.repeat_interleave(self.config.heads // self.config.kv_heads, 1)

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        spans: Sequence[Span],
        counts: np.ndarray | None = None,
    ) -> torch.Tensor:
        """One step of the sequences in slots 0..n-1: their newest tokens to the next tokens' float32 logits [m, vocab].

        `tokens` and `positions` are int64 [m]; the tokens' keys and values are appended to `cache`. `spans` cover the n
        slots, so that short sequences need not be attended over the length of the longest. `counts` int64 [n]: so many
        tokens of each slot, which follow each other; one, if left out.
        """
        config, m = self.config, len(tokens)
        where = cache.locate(positions, None if counts is None else self._to_device(np.repeat(np.arange(len(counts)), counts)))
        parts = [self._part(span, positions, cache, counts) for span in spans if span.start < span.end]

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            cache.append(layer, where, qkv[:, config.heads :])
            # The query heads that share a key-value head stand in for a sequence of queries: no key is repeated.
            query = qkv[:, : config.heads].view(m, config.kv_heads, -1, config.head_dim)
            out = [self._attend_part(query[p.tokens], layer, p) for p in parts]
            return (out[0] if len(out) == 1 else torch.cat(out)).view(m, -1)

        return self.logits(self._run(tokens, positions, attend))

    def _part(self, span: Span, positions: torch.Tensor, cache: KVCache, counts: np.ndarray | None) -> _SpanPart:
        slots = slice(span.start, span.end)
        most = 1 if counts is None else int(counts[slots].max())
        length = min(round_up(span.longest + most - 1, LENGTH_STEP), cache.max_length)
        if counts is None:
            biases = self._cached_biases(positions[slots].unsqueeze(1), length)
            return _SpanPart(slots, cache.views(slots, length), biases, None)
        first = int(counts[: span.start].sum())
        tokens = slice(first, first + int(counts[slots].sum()))
        padded, back = (self._to_device(each) for each in _places(counts[slots]))
        biases = self._cached_biases(positions[tokens].index_select(0, padded.flatten()).view(padded.shape), length)
        return _SpanPart(tokens, cache.views(slots, length), biases, (padded.flatten(), back))

    def _attend_part(self, query: torch.Tensor, layer: int, part: _SpanPart) -> torch.Tensor:
        """Attention of the part's tokens, [m, kv_heads, queries, d] to [m, heads * d]."""
        keys, values, bias = *part.views[2 * layer : 2 * layer + 2], part.biases[self._windows[layer]]
        if part.places is None:
            return self._attend_cached(query, keys, values, bias).view(len(query), -1)
        padded, back = part.places
        n, (_, heads, queries, dim) = len(keys), query.shape
        # [n, kv_heads, most * queries, d]: the tokens of a slot stand in for queries too.
        several = query.index_select(0, padded).view(n, -1, heads, queries, dim).transpose(1, 2).reshape(n, heads, -1, dim)
        out = self._attend_cached(several, keys, values, bias).view(n, heads, -1, queries, dim)
        return out.transpose(1, 2).reshape(len(padded), -1).index_select(0, back)

    def _cached_biases(self, positions: torch.Tensor, length: int) -> dict[int, torch.Tensor]:
        return {window: self._cached_bias(positions, length, window) for window in set(self._windows)}

    def _cached_bias(self, positions: torch.Tensor, length: int, window: int) -> torch.Tensor:
        """For queries at `positions` [n, most]: 0 where a sequence has keys, the query's own included, -inf beyond and before a
        `window` that is not 0:
        [n, kv_heads, 1, length], or where `most` is above 1, [n, kv_heads, most * queries, length]."""
        most = positions.shape[1]
        back = positions.unsqueeze(2) - torch.arange(length, device=self.device)
        unseen = (back < 0) | (back >= window) if window else back < 0
        bias = torch.zeros(unseen.shape, device=self.device, dtype=self.dtype).masked_fill_(unseen, -math.inf)
        if most > 1:
            bias = bias.repeat_interleave(self.config.heads // self.config.kv_heads, 1)
        bias = bias.unsqueeze(1).expand(-1, self.config.kv_heads, -1, -1)
        return bias.contiguous() if self._attend_cached is _attend_batched else bias

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        config, eps, weights = self.config, self.config.norm_eps, self.weights
        hidden_shape, rotated = (config.hidden_size,), config.heads + config.kv_heads
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        x = F.embedding(tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            qkv = F.linear(F.rms_norm(x, hidden_shape, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(tokens), -1, config.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (config.head_dim,), None, eps) * layer.qk_norm)
            swapped = qk.roll(config.head_dim // 2, -1)
            qk.mul_(cos).addcmul_(swapped, sin)
            x = torch.addmm(x, attend(index, qkv), layer.output.t())
            if layer.output_bias is not None:
                x += layer.output_bias
            normed = F.rms_norm(x, hidden_shape, layer.mlp_norm, eps)
            if layer.router is not None and config.experts is not None:
                x += routed(normed, layer.router, layer.gate_up, layer.down, config.experts)
                continue
            gate, up = F.linear(normed, layer.gate_up).chunk(2, 1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        return F.rms_norm(x, hidden_shape, weights.norm, eps)


def _places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For `counts` tokens of each of n slots, m in all: the token at each place of an array [n, most], its slot's last where
    there is none, and each token's place in the flattened array, [m]."""
    ends = counts.cumsum()
    offsets = np.arange(counts.max())
    padded = (ends - counts)[:, None] + np.minimum(offsets, counts[:, None] - 1)
    return padded, np.flatnonzero(offsets < counts[:, None])


def _attend_fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention of [n, kv_heads, queries, d] over [n, kv_heads, length, d] with an additive one,
    [n, kv_heads, 1 or queries, length]. The result has the shape of `query`, flattened somehow."""
    mask = bias.expand(-1, -1, query.shape[2], -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).reshape(len(query), -1)


def _attend_batched(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same by batched matrix products."""
    query, keys, values, bias = (each.flatten(0, 1) for each in (query, keys, values, bias))
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def _rope_tables(
    config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, 1, head_dim] of rotary embeddings (Su et al. 2021, RoFormer, equation 34, in halves).

    The first half of the sines is negated: rotating is then x * cos + roll(x, head_dim / 2) * sin.
    """
    frequencies = config.rope.frequencies(config.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).unsqueeze(1)
    cos, sin = angles.cos() * config.rope.amplitude, angles.sin() * config.rope.amplitude
    return (
        torch.cat((cos, cos), -1).to(device, dtype),
        torch.cat((-sin, sin), -1).to(device, dtype),
    )


def routed(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: ExpertShape
) -> torch.Tensor:
    """The MLP of a layer with a mixture of experts, [m, H] to [m, H]: `router` [E, H]; `gate_up` [E · 2 · I, H] and `down`
    [E · H, I], one expert's after the other."""
    weights, chosen = route(F.linear(x, router), experts.per_token, experts.normalized)
    gate_up, down = gate_up.view(experts.count, -1, x.shape[1]), down.view(experts.count, x.shape[1], -1)
    return mixture(x, weights, chosen, gate_up, down)
