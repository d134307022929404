"""A lean decoder for the Llama, Qwen2 and Qwen3 families: few operators a step, weights loadable in place.

Tokens are flattened to [m, hidden]; only the attention knows of sequences. Projections that share their input are one
matrix (query, key and value; gate and up). Softmax statistics, norms and logits are float32 whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.engines.hf_weights import ModelConfig, WeightFiles, read_config
from runtime.engines.kv_cache import KVCache
from runtime.errors import InvalidMessage, UserError

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


class _Layer:
    """The parameters of one layer, uninitialised."""

    def __init__(self, config: ModelConfig, empty: Callable[..., torch.Tensor]):
        hidden, width = config.hidden_size, config.heads * config.head_dim
        qkv_width = width + 2 * config.kv_heads * config.head_dim
        self.input_norm = empty(hidden)
        self.qkv = empty(qkv_width, hidden)
        self.qkv_bias = empty(qkv_width) if config.qkv_bias else None
        self.qk_norm = empty(config.heads + config.kv_heads, config.head_dim) if config.qk_norm else None
        self.output = empty(hidden, width)
        self.output_bias = empty(hidden) if config.output_bias else None
        self.mlp_norm = empty(hidden)
        self.gate_up = empty(2 * config.intermediate_size, hidden)
        self.down = empty(hidden, config.intermediate_size)

    def named(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """Views of the fused parameters under their Hugging Face names."""
        widths = [config.heads * config.head_dim] + 2 * [config.kv_heads * config.head_dim]
        views = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.o_proj.weight": self.output,
            "mlp.down_proj.weight": self.down,
        }
        views.update(zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), self.gate_up.chunk(2), strict=True))
        views.update(zip((f"self_attn.{p}_proj.weight" for p in "qkv"), self.qkv.split(widths), strict=True))
        if self.qkv_bias is not None:
            views.update(zip((f"self_attn.{p}_proj.bias" for p in "qkv"), self.qkv_bias.split(widths), strict=True))
        if self.output_bias is not None:
            views["self_attn.o_proj.bias"] = self.output_bias
        if self.qk_norm is not None:
            heads = [config.heads, config.kv_heads]
            views.update(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self.qk_norm.split(heads), strict=True))
        return views


class Decoder:
    """Inference only: call under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        """A model with uninitialised weights."""
        self.config = config
        self.device = device
        self.dtype = dtype

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        self._embedding = empty(config.vocab_size, config.hidden_size)
        self._layers = [_Layer(config, empty) for _ in range(config.layers)]
        self._norm = empty(config.hidden_size)
        self._head = self._embedding if config.tied else empty(config.vocab_size, config.hidden_size)
        self._views = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        for index, layer in enumerate(self._layers):
            self._views.update((f"model.layers.{index}.{name}", view) for name, view in layer.named(config).items())
        if not config.tied:
            self._views["lm_head.weight"] = self._head
        self._cos, self._sin = _rope_tables(config, 0, device, dtype)
        # For one query a sequence, MKL's batched GEMM takes 0.75 of the time of torch's CPU attention kernel.
        self._attend_cached = _attend_batched if device.type == "cpu" else _attend_fused

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device, dtype: torch.dtype) -> Decoder:
        """Load a Hugging Face folder. Raises UserError for a folder that is missing, incomplete or of another family."""
        decoder = cls(read_config(path), device, dtype)
        files = WeightFiles(path)
        fault = decoder.mismatch(files.shapes)
        if fault:
            raise UserError(f"model {path}: {fault}")
        for name, tensor in files:
            decoder._copy(name, tensor)
        return decoder

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str | None:
        """What is wrong with a complete set of weights of these names and shapes, in one line; None when it fits.

        The name lm_head.weight may be present or absent when it is tied to the embedding.
        """
        missing = sorted(self._views.keys() - shapes.keys())
        unknown = sorted(shapes.keys() - self._views.keys() - ({"lm_head.weight"} if self.config.tied else set()))
        if missing or unknown:
            faults = [f"{what} {', '.join(names[:4])}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
            return f"{len(missing)} tensors missing, {len(unknown)} unknown: {'; '.join(faults)}"
        for name, shape in shapes.items():
            expected = self._shape(name)
            if tuple(shape) != expected:
                return f"{name} has shape {list(shape)}, must be {list(expected)}"
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # one vector for all heads
            return (self.config.head_dim,)
        view = self._views.get(name, self._embedding)  # a tied lm_head has the embedding's shape
        return tuple(view.shape)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a complete set of weights in place, cast to the model's dtype. Raises InvalidMessage, changing nothing."""
        fault = self.mismatch({name: tensor.shape for name, tensor in tensors.items()})
        if fault:
            raise InvalidMessage(f"weights do not fit the model: {fault}")
        for name, tensor in tensors.items():
            self._copy(name, tensor)

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        view = self._views.get(name)
        if view is not None:
            view.copy_(tensor)

    def reserve_positions(self, length: int) -> None:
        """Make sure that positions 0..length-1 can be rotated."""
        if length > len(self._cos):
            self._cos, self._sin = _rope_tables(self.config, length, self.device, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden] to float32 [m, vocab_size]."""
        return F.linear(hidden, self._head).float()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Whole sequences at once: int64 `tokens` and `positions` [b, t] to the last layer's normed output [b, t, hidden].

        `allowed` [b, t, t] bool: which keys a query sees; causal when None, so that padding on the right is harmless.
        `kept` [layers, 2, b, kv_heads, t, head_dim] receives keys and values.
        """
        config, (b, t) = self.config, tokens.shape
        widths = [config.heads, config.kv_heads, config.kv_heads]
        mask = None if allowed is None else allowed.unsqueeze(1)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.transpose(1, 2) for part in qkv.view(b, t, -1, config.head_dim).split(widths, 2))
            if kept is not None:
                kept[layer, 0].copy_(key)
                kept[layer, 1].copy_(value)
            out = F.scaled_dot_product_attention(
                query, self._per_head(key), self._per_head(value), attn_mask=mask, is_causal=mask is None
            )
            return out.transpose(1, 2).reshape(b * t, -1)

        return self._run(tokens.flatten(), positions.flatten(), attend).view(b, t, -1)

    def _per_head(self, keys: torch.Tensor) -> torch.Tensor:
        """[b, kv_heads, t, d] repeated for the query heads that share them: [b, heads, t, d]."""
        return keys.repeat_interleave(self.config.heads // self.config.kv_heads, 1)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache, spans: Sequence[Span]) -> torch.Tensor:
        """One step of the sequences in slots 0..n-1: each one's newest token to its next token's float32 logits [n, vocab].

        `tokens` and `positions` are int64 [n]; the tokens' keys and values are appended to `cache`. `spans` cover the n
        rows, so that short sequences need not be attended over the length of the longest.
        """
        config, n = self.config, len(tokens)
        where = cache.locate(positions)
        parts = []
        for span in spans:
            rows, length = slice(span.start, span.end), min(round_up(span.longest, LENGTH_STEP), cache.max_length)
            parts.append((rows, cache.views(rows, length), self._cached_bias(positions[rows], length)))

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            cache.append(layer, where, qkv[:, config.heads :])
            # The query heads that share a key-value head stand in for a sequence of queries: no key is repeated.
            query = qkv[:, : config.heads].view(n, config.kv_heads, -1, config.head_dim)
            out = [
                self._attend_cached(query[rows], views[2 * layer], views[2 * layer + 1], bias) for rows, views, bias in parts
            ]
            return (out[0] if len(out) == 1 else torch.cat(out)).view(n, -1)

        return self.logits(self._run(tokens, positions, attend))

    def _cached_bias(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """[n, kv_heads, 1, length]: 0 where a sequence has keys, its newest included, and -inf beyond."""
        unseen = torch.arange(length, device=self.device) > positions.unsqueeze(1)
        bias = torch.zeros(unseen.shape, device=self.device, dtype=self.dtype).masked_fill_(unseen, -math.inf)
        bias = bias.view(-1, 1, 1, length).expand(-1, self.config.kv_heads, -1, -1)
        return bias.contiguous() if self._attend_cached is _attend_batched else bias

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        config, eps = self.config, self.config.norm_eps
        hidden_shape, rotated = (config.hidden_size,), config.heads + config.kv_heads
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        x = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
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
            gate_up = F.linear(F.rms_norm(x, hidden_shape, layer.mlp_norm, eps), layer.gate_up)
            gate, up = gate_up.chunk(2, 1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        return F.rms_norm(x, hidden_shape, self._norm, eps)


def _attend_fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention of [n, kv_heads, queries, d] over [n, kv_heads, length, d] with an additive [n, kv_heads, 1, length]."""
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
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rope_frequencies(config)).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), -1).to(device, dtype),
        torch.cat((-sin, sin), -1).to(device, dtype),
    )


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: by what an angle grows from one position to the next."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config)


def _stretch(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Llama 3.1's rope scaling: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    scaling = config.rope_scaling
    assert scaling is not None
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
