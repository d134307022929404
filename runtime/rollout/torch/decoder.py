"""A lean decoder for the families of `runtime.models.families`: few operators a step.

Tokens are flattened to [m, hidden]; only the attention knows sequences. The residual stream, norms, rotations, softmax
statistics and the returned logits are float32, whatever dtype the weights have: the trainer computes under `torch.autocast`,
which rounds at the same places. In bfloat16, roundings at other places moved log-probabilities by 0.05 nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.errors import UserError
from runtime.models.experts import clamped_swiglu, mixture, route, route_corrected, swiglu
from runtime.models.families.shape import LATENT_EPS, ExpertShape, LatentShape
from runtime.models.forward import Packing, Rope, exact_on_cpu, packed_attention
from runtime.models.hf_folder import ModelConfig, WeightFiles, read_config
from runtime.process import platform
from runtime.rollout.torch.decoder_weights import DecoderWeights, LayerWeights, mismatch

# ---- Attention. The parts of the lean decoder's attention: rotations, and attention over cached keys and values.


def attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: float, sinks: None
) -> torch.Tensor:
    """Attend [n, kv_heads, queries, d] to [n, kv_heads, length, d] with an additive mask [n, kv_heads, 1, length]. Return
    [n, kv_heads * queries * d]. Takes no sinks."""
    mask = bias.expand(-1, -1, query.shape[2], -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).reshape(len(query), -1)


def attend_batched(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend as `attend_fused` does, by batched matrix products. `sinks` [heads]: one for each head. The heads that share a
    key-value head stand in for queries."""
    n, kv_heads, _, _ = query.shape
    query, keys, values, bias = (each.flatten(0, 1) for each in (query, keys, values, bias))
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale)
    if sinks is not None:
        own = sinks.view(kv_heads, -1).repeat(n, 1).unsqueeze(-1).to(scores.dtype)
        scores = torch.cat((scores, own), -1)
    shares = torch.softmax(scores, -1, dtype=torch.float32)[..., : keys.shape[1]]
    return torch.bmm(shares.to(values.dtype), values).view(n, -1)


# ---- Latent
#
# Multi-head latent attention of the lean decoder (DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C).
#
# The cache has one vector a token for all heads: the normed latent, from which keys and values are made, and the rotated part
# of the keys. Whole texts are attended with keys and values. A decode step does not make keys and values: the up-projection of
# the keys is absorbed into the query, and the up-projection of the values comes after attention. Attention then has one
# key-value head, and its values are a part of its keys.
#
# m tokens; a head of queries and keys has `head` = `plain` + `rotated` elements, a cache entry `cached` = `rank` + `rotated`.


class LatentAttention:
    """The part of latent attention that depends on weights, without the output projection."""

    def __init__(self, heads: int, latent: LatentShape):
        self._heads, self.shape = heads, latent

    def project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the normed input [m, hidden] to queries [m, heads, head] and cache entries [m, cached]. cos, sin
        [m, 1, rotated]."""
        shape, assembled = self.shape, F.linear(x, layer.qkv)
        query, latent, rotated = assembled.split((assembled.shape[1] - shape.cached, shape.rank, shape.rotated), 1)
        if layer.query_up is not None:
            query = F.linear(F.rms_norm(query, query.shape[1:], layer.query_norm, LATENT_EPS), layer.query_up)
        plain, turned = query.view(len(x), self._heads, -1).split((shape.plain, shape.rotated), 2)
        query = torch.cat((plain, _rotated(turned, cos, sin)), 2)
        latent = F.rms_norm(latent, (shape.rank,), layer.latent_norm, LATENT_EPS)
        return query, torch.cat((latent, _rotated(rotated.unsqueeze(1), cos, sin).squeeze(1)), 1)

    def expand(self, layer: LayerWeights, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [b, heads, t, head] and values [b, heads, t, value] of cache entries [b, t, cached]."""
        shape = self.shape
        latent, rotated = entries.split((shape.rank, shape.rotated), 2)
        assert layer.latent_up is not None
        plain, value = (
            F.linear(latent, layer.latent_up)
            .view(*latent.shape[:2], self._heads, -1)
            .transpose(1, 2)
            .split((shape.plain, shape.value), 3)
        )
        return torch.cat((plain, rotated.unsqueeze(1).expand(-1, self._heads, -1, -1)), 3), value

    def absorb(self, layer: LayerWeights, query: torch.Tensor) -> torch.Tensor:
        """Turn queries [m, heads, head] into queries for cache entries as keys, [m, 1, heads, cached]."""
        plain, rotated = query.split((self.shape.plain, self.shape.rotated), 2)
        keys, _ = self._up(layer)
        latent = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat((latent, rotated), 2).unsqueeze(1)

    def values(self, layer: LayerWeights, mean: torch.Tensor) -> torch.Tensor:
        """Turn means of latents [m, heads · rank] into the output projection's input, [m, heads · value]."""
        _, values = self._up(layer)
        latent = mean.view(len(mean), self._heads, -1).transpose(0, 1)
        return torch.bmm(latent, values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _up(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the up-projections of keys, [heads, plain, rank], and of values, [heads, value, rank]."""
        assert layer.latent_up is not None
        keys, values = layer.latent_up.view(self._heads, -1, self.shape.rank).split((self.shape.plain, self.shape.value), 1)
        return keys, values


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [m, n, rotated]. The input's pairs are neighbours; the result's pairs are halves, in queries and keys alike."""
    halves = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
    return (halves * cos + halves.roll(halves.shape[2] // 2, -1) * sin).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The key-value cache: static memory, one slot per sequence.
#
# Layout [layers, parts, slots, heads, max_length, width] (`ModelConfig.cached`). Most models have two parts, keys and values,
# of kv_heads heads; latent attention has one part of one head. The active slots are always 0..n-1, so a decode step reads
# neighbouring slots as a view, cut to the longest length among them.


def kv_bytes(config: ModelConfig, slots: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Return the bytes of the cache of `slots` sequences of `max_model_len` tokens."""
    return config.layers * math.prod(config.cached) * slots * max_model_len * dtype.itemsize


class KVCache:
    def __init__(self, config: ModelConfig, slots: int, max_model_len: int, device: torch.device, dtype: torch.dtype):
        """Allocate the cache. Raises UserError if the device lacks the memory."""
        needed, available = kv_bytes(config, slots, max_model_len, dtype), platform.memory(device).available
        if needed > available:
            raise UserError(
                f"services.rollout.max_num_seqs: {slots} sequences of {max_model_len} tokens need {needed} bytes of KV cache, "
                f"but {device} has {available} bytes available; at most {available * slots // needed} slots fit"
            )
        parts, heads, width = config.cached
        # Zeros, because a masked position still multiplies its value by a probability of 0.
        self.data = torch.zeros(config.layers, parts, slots, heads, max_model_len, width, device=device, dtype=dtype)
        self.max_length = max_model_len
        self._flat = self.data.view(config.layers, -1, width)
        first = torch.arange(parts * slots * heads, device=device) * max_model_len
        self._first = first.view(parts, slots, heads).transpose(0, 1).reshape(slots, parts * heads)

    def locate(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices of `positions` [n] int64 in slots 0..n-1, for `append`: [n * parts * heads]."""
        return (self._first[: len(positions)] + positions.unsqueeze(1)).flatten()

    def append(self, layer: int, where: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Write [n, parts * heads, width], keys before values, at `where` (from `locate`)."""
        self._flat[layer].index_copy_(0, where, keys_values.reshape(-1, keys_values.shape[-1]))

    def views(self, slots: slice, length: int) -> tuple[torch.Tensor, ...]:
        """Return layer by layer the keys, then the values, or the one part, of neighbouring slots:
        [slots, heads, length, width]."""
        return self.data[:, :, slots, :, :length].flatten(0, 1).unbind()

    def held(self, slot: int, length: int) -> torch.Tensor:
        """Return the first positions of a slot as a view: [layers, parts, heads, length, width]."""
        return self.data[:, :, slot, :, :length]

    def fill(self, slot: int, text: torch.Tensor) -> None:
        """Write the first positions of a slot from a text's [layers, parts, heads, length, width]."""
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
        """Give the memory back. The contents of the slots are lost."""
        self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, zeroed. Raises RuntimeError if there is not enough."""
        self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
        self.data.zero_()


# Attention of one layer: (layer, queries [m, heads, head_dim], keys and values [m, 2 * kv_heads, head_dim] or latent entries
# [m, cached]), all rotated -> the input of the output projection, [m, heads * head_dim].
Attention = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

LENGTH_STEP = 8  # cached lengths are cut to a multiple of it: fused kernels need aligned masks


def round_up(length: int, step: int) -> int:
    return -(-length // step) * step


class Span(NamedTuple):
    """Neighbouring slots start..end-1 with at most `longest` positions each, the newest token included."""

    start: int
    end: int
    longest: int


class Decoder:
    """Inference only: call under `torch.inference_mode()`."""

    def __init__(self, weights: DecoderWeights):
        """Keep `weights`, which a caller replaces by assignment between two calls."""
        self.weights = weights
        self.config, self.cached = weights.config, weights.config.cached
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.chosen: list[torch.Tensor] | None = None  # if a list, each layer in turn appends its experts [m, k]
        self._latent = None if self.config.latent is None else LatentAttention(self.config.heads, self.config.latent)
        self._rotations = self._rotated(0)
        self._windows = self.config.windows or (0,) * self.config.layers
        self._scale = self.config.score_scale or self.config.head_dim**-0.5
        # A tensor, so that it rounds as in the trainer.
        self._embedding_scale = torch.tensor(self.config.embedding_scale, device=self.device, dtype=self.dtype).float()
        # For one query a sequence, MKL's batched GEMM takes 0.75 of the time of torch's CPU attention kernel; it rounds scores.
        batched = self.config.sinks or (self.device.type == "cpu" and self.dtype == torch.float32)
        self._attend_cached: Any = attend_batched if batched else attend_fused

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device, dtype: torch.dtype) -> Decoder:
        """Load a Hugging Face folder. Raises UserError for a folder that is missing, incomplete or of another family."""
        config, files = read_config(path), WeightFiles(path)
        fault = mismatch(config, files.shapes)
        if fault:
            raise UserError(f"model {path}: {fault}")
        weights = DecoderWeights.empty(config, device, dtype)
        weights.load(files)
        return cls(weights)

    def reserve_positions(self, length: int) -> None:
        """Extend the rotations to positions 0..length-1."""
        if length > len(self._rotations[0][0]):
            self._rotations = self._rotated(length)

    def _rotated(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines, float32 [length, 1, dim], of rotary embeddings (Su et al. 2021, RoFormer, equation 34,
        halves); the last pair is for layers with a window. The first half of the sines is negated: a rotation is then
        x * cos + roll(x, dim / 2) * sin."""
        local, dim, found = self.config.local_theta, self.config.rotary_dim or self.config.head_dim, []
        for rope in [self.config.rope] + ([] if local is None else [Rope(local)]):
            angles = torch.outer(torch.arange(length, dtype=torch.float32), rope.frequencies(dim)).unsqueeze(1)
            cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
            found.append((torch.cat((cos, cos), -1).to(self.device), torch.cat((-sin, sin), -1).to(self.device)))
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden` [m, hidden], float32 [m, vocab_size]."""
        logits, cap = F.linear(*exact_on_cpu(hidden, self.weights.head)), self.config.softcap
        return (torch.tanh(logits / cap) * cap if cap else logits).float()

    def packed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        packing: Packing,
        kept: tuple[torch.Tensor, torch.Tensor | slice] | None = None,
        taken: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute sequences at once: int64 `tokens` and `positions` [T] to the normed output [T, hidden]. `kept`: [layers, S,
        parts, heads, width], the cache entries of the S tokens that `packing` knows, and where among them it receives the T
        tokens' entries, an int64 [T] or a slice. Without it the S tokens are the T tokens. `taken`: the experts that the
        tokens go to, [T, layers with experts, k]; None: the router chooses."""

        def attend(layer: int, query: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
            weights, latent, window = self.weights.layers[layer], self._latent, self._windows[layer]
            entries = entries.reshape(len(entries), *self.cached)
            if kept is not None:
                kept[0][layer][kept[1]] = entries
                entries = kept[0][layer]
            query, states = query.transpose(0, 1)[None], entries.permute(1, 2, 0, 3)
            key, value = states[:, None] if latent is None else latent.expand(weights, states[0])
            made, _ = packed_attention(
                None, query, key, value, None, packing=packing, scaling=self._scale, sliding_window=window, s_aux=weights.sinks
            )
            return made[0].flatten(1)

        return self._run(tokens, positions, attend, taken)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache, spans: Sequence[Span]) -> torch.Tensor:
        """Decode one step of slots 0..n-1: their newest tokens to the next tokens' float32 logits [n, vocab]. `tokens` and
        `positions` are int64 [n]; the tokens' keys and values are appended to `cache`. `spans` cover the n slots, so that
        short sequences are not attended over the longest length."""
        config, latent, n = self.config, self._latent, len(tokens)
        where, parts = cache.locate(positions), []
        for start, end, longest in spans:
            slots, length = slice(start, end), min(round_up(longest, LENGTH_STEP), cache.max_length)
            if start < end:
                biases = {window: self._bias(positions[slots], length, window) for window in set(self._windows)}
                parts.append((slots, cache.views(slots, length), biases))

        def attend(layer: int, query: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
            weights, window, out = self.weights.layers[layer], self._windows[layer], []
            # The query heads that share a key-value head stand in for a sequence of queries: no key is repeated.
            shared = query.view(n, config.kv_heads, -1, query.shape[2])
            query = shared if latent is None else latent.absorb(weights, query)
            cache.append(layer, where, entries)
            for slots, views, biases in parts:
                keys = views[2 * layer if latent is None else layer]
                values = views[2 * layer + 1] if latent is None else keys[..., : latent.shape.rank]
                out.append(self._attend_cached(query[slots], keys, values, biases[window], self._scale, weights.sinks))
            made = out[0] if len(out) == 1 else torch.cat(out)
            return made if latent is None else latent.values(weights, made)

        return self.logits(self._run(tokens, positions, attend))

    def _bias(self, positions: torch.Tensor, length: int, window: int) -> torch.Tensor:
        """Return an additive mask [n, kv_heads, 1, length] for queries at `positions` [n]: 0 for a sequence's keys up to the
        query's own, -inf beyond them, and -inf before the last `window` keys if the window is not 0."""
        back = positions.unsqueeze(1) - torch.arange(length, device=positions.device)
        unseen = (back < 0) | (back >= window) if window else back < 0
        bias = torch.zeros(unseen.shape, device=positions.device, dtype=self.dtype).masked_fill_(unseen, -math.inf)
        bias = bias.view(len(bias), 1, 1, length).expand(-1, self.config.kv_heads, -1, -1)
        return bias.contiguous() if self._attend_cached is attend_batched else bias

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention, taken: torch.Tensor | None = None
    ) -> torch.Tensor:
        config, weights = self.config, self.weights
        routes = iter(() if taken is None else taken.long().unbind(1))
        rotations = [(cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self._rotations]
        x = F.embedding(tokens, weights.embedding).float()
        if config.embedding_scale != 1.0:
            x = x * self._embedding_scale
        for index, layer in enumerate(weights.layers):
            rotation = rotations[-1 if self._windows[index] else 0]
            made = attend(index, *self._project(layer, self._norm(x, layer.input_norm).to(self.dtype), *rotation))
            x = self._added(x, made, layer.output, layer.attention_norm, layer.output_bias)
            normed = self._norm(x, layer.mlp_norm).to(self.dtype)
            if layer.router is not None and config.experts is not None:
                x += routed(normed, layer, layer.router, config.experts, self.chosen, next(routes, None))
                continue
            gate, up = F.linear(normed, layer.gate_up).chunk(2, 1)
            gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
            x = self._added(x, gate.mul_(up), layer.down, layer.mlp_out_norm)
        return self._norm(x, weights.norm).to(self.dtype)

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and cache entries of a layer's normed input [m, hidden], as `Attention` takes them."""
        if self._latent is not None:
            return self._latent.project(layer, x, cos, sin)
        config = self.config
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        qk = qkv[:, : config.heads + config.kv_heads]
        exact = qk if layer.qk_norm is None else self._norm(qk, layer.qk_norm)
        exact = exact.float()  # without norms and in float32 this is still a view of qkv
        rotated = exact[..., : cos.shape[-1]]
        swapped = rotated.roll(cos.shape[-1] // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        if exact is not qk:
            qk.copy_(exact)
        return qkv[:, : config.heads], qkv[:, config.heads :]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension. `weight` has that dimension, or one more for heads. Round as transformers does: before
        the weight, which turns the result to float32, or after a centred weight."""
        shape, eps = x.shape[-1:], self.config.norm_eps
        if self.config.centred_norms:
            return (F.rms_norm(x.float(), shape, None, eps) * (1.0 + weight.float())).to(x.dtype)
        if x.dtype == torch.float32 and weight.dim() == 1:
            return F.rms_norm(x, shape, weight.float(), eps)
        return F.rms_norm(x.float(), shape, None, eps).to(x.dtype) * weight.float()

    def _added(
        self,
        x: torch.Tensor,
        made: torch.Tensor,
        weight: torch.Tensor,
        norm: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the projection of `made`, normed if there is a norm, to x."""
        if norm is None and bias is None and self.dtype == torch.float32:
            return torch.addmm(x, made, weight.t())
        out = F.linear(made, weight, bias)
        return x + (out if norm is None else self._norm(out, norm))


def routed(
    x: torch.Tensor,
    layer: LayerWeights,
    router: torch.Tensor,
    experts: ExpertShape,
    chosen: list[torch.Tensor] | None = None,
    taken: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a layer's experts to [m, H]. Append the experts' indices to `chosen`. `taken`: as in `route`."""
    if layer.score_bias is not None:
        sizes = experts.per_token, experts.groups, experts.groups_per_token, experts.scale
        routing = route_corrected(F.linear(x.float(), router.float()), layer.score_bias, *sizes, taken)
    else:
        routing = route(F.linear(x, router, layer.logit_bias), experts.per_token, experts.normalized, taken)
    if chosen is not None:
        chosen.append(routing[1])
    if layer.gate_up_bias is not None and layer.down_bias is not None:
        gate_up, down = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)
        return mixture(x, *routing, gate_up, down, (layer.gate_up_bias, layer.down_bias), clamped_swiglu)
    gate_up, down = layer.gate_up.view(experts.count, -1, x.shape[1]), layer.down.view(experts.count, x.shape[1], -1)
    made = mixture(x, *routing, gate_up, down)
    if layer.shared_gate_up is not None and layer.shared_down is not None:
        made = torch.addmm(made, swiglu(F.linear(x, layer.shared_gate_up)), layer.shared_down.t())
    return made
