"""What the lean decoder's attention is made of: rotations, masks, and attention over cached keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from runtime.models.passes import with_sinks
from runtime.models.rope import Rope

_BLOCK = 1024  # queries at once, at least, where attention has a mask: it grows with them


def rope_tables(rope: Rope, dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [length, 1, dim], of rotary embeddings (Su et al. 2021, RoFormer, equation 34, in halves).

    The first half of the sines is negated: rotating is then x * cos + roll(x, dim / 2) * sin.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rope.frequencies(dim)).unsqueeze(1)
    cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def within(allowed: torch.Tensor | None, positions: torch.Tensor, past: int, window: int) -> torch.Tensor | None:
    """Of `allowed` [b, t, past + t], which keys each query at `positions` [b, t] sees, those that are not further back than a
    `window` that is not 0. The keys of `past` tokens are those right before the first query."""
    if allowed is None or not window:
        return allowed
    before = torch.arange(-past, 0, device=positions.device) + positions[:, :1]
    return allowed & (positions.unsqueeze(2) - torch.cat((before, positions), 1).unsqueeze(1) < window)


def attend_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [b, heads, t, d] to itself, of each token over those before it; with a `window` that is not 0, over so many,
    its own included."""
    t = query.shape[2]
    if sinks is None and not 0 < window < t:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    step, parts = max(window, _BLOCK), []
    for start in range(0, t, step):
        end, first = min(start + step, t), max(0, start - window + 1) if window else 0
        columns = torch.arange(first, end, device=query.device)
        back = columns[start - first :, None] - columns
        mask = (back >= 0) & (back < (window or end))
        parts.append(attend_masked(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], mask, scale, sinks))
    return torch.cat(parts, 2)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same over the keys of which `mask` is true."""
    width = value.shape[-1]
    if sinks is not None:
        query, key, value, mask = with_sinks(query, key, value, sinks, scale, mask)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)[..., :width]


def cached_bias(positions: torch.Tensor, length: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """For queries at `positions` [n, most], [n, most, length]: 0 where a sequence has keys, the query's own included, -inf
    beyond, and before the last `window` of them where that is not 0."""
    back = positions.unsqueeze(2) - torch.arange(length, device=positions.device)
    unseen = (back < 0) | (back >= window) if window else back < 0
    return torch.zeros(unseen.shape, device=positions.device, dtype=dtype).masked_fill_(unseen, -math.inf)


def attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: float, sinks: None
) -> torch.Tensor:
    """Attention of [n, kv_heads, queries, d] over [n, kv_heads, length, d] with an additive one,
    [n, kv_heads, 1 or queries, length]. The result has the shape of `query`, flattened somehow. There are no sinks."""
    mask = bias.expand(-1, -1, query.shape[2], -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).reshape(len(query), -1)


def attend_batched(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same by batched matrix products. `sinks` [heads]: of the heads that share a key-value head, which stand in for
    queries, each has its own."""
    n, kv_heads, queries, _ = query.shape
    query, keys, values, bias = (each.flatten(0, 1) for each in (query, keys, values, bias))
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale)
    if sinks is None:
        return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)
    own = sinks.view(kv_heads, -1).repeat(n, queries * kv_heads // len(sinks)).unsqueeze(-1).to(scores.dtype)
    shares = torch.softmax(torch.cat((scores, own), -1), -1, dtype=torch.float32)[..., :-1]
    return torch.bmm(shares.to(values.dtype), values)
