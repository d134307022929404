"""Sampling by inverse CDF: one uniform number a token, from a stream that depends on (seed, sample) alone.

So a reply does not depend on which other sequences share the batch, on its slot, or on the replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from runtime.columns import EncodedSet, encode_set
from runtime.types import GroupRequest, SamplingParams


class Kept(NamedTuple):
    """What filters left of m rows."""

    rows: torch.Tensor  # int64 [m], which rows these are
    sizes: torch.Tensor  # int64 [m], tokens that are left
    order: torch.Tensor  # int64 [m, vocabulary], of which they are the first


class DrawnTokens(NamedTuple):
    tokens: torch.Tensor  # int64 [n]
    logprobs: torch.Tensor  # float32 [n]
    kept: Kept | None = None  # of the rows that keep their sets


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """The first `count` numbers of the stream of (seed, sample): float32 [count], multiples of 2**-23 in [0, 1).

    Philox (Salmon et al. 2011) is counter-based: streams of different keys are independent. 23 bits, because then
    u * total < total holds in float32 too, for every total.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], np.uint64)
    bits = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def as_row(params: SamplingParams) -> tuple[float, float, float, float, float]:
    """A row of the array that `RowSampling` takes: 1/temperature (0: greedy), top-p and top-k (infinite: off), min-p; 1 to keep
    the set that they leave."""
    inverse = 1.0 / params.temperature if params.temperature else 0.0
    top_p = params.top_p if params.top_p < 1 else math.inf
    return inverse, top_p, params.top_k or math.inf, params.min_p, float(params.keep_sets)


class RowSampling:
    """The sampling parameters of n rows, prepared for `sample`; rebuilt only when the rows change."""

    def __init__(self, params: np.ndarray, device: torch.device):
        """`params` is float32 [n, 5], rows from `as_row`."""
        inverse, top_p, top_k, min_p, keeps = params.T
        greedy = inverse == 0
        filtered = ~greedy & ((top_p < 1) | (top_k < math.inf) | (min_p > 0))
        plain = ~(greedy | filtered)
        # Always a tensor when there is a temperature: a scalar might round otherwise than a mixed batch does.
        inverse = np.where(greedy, np.float32(1), inverse)
        self.inverse_temperature = None if (inverse == 1).all() else torch.from_numpy(inverse[:, None]).to(device)
        self.parts: list[tuple[Callable[[torch.Tensor, torch.Tensor], DrawnTokens], torch.Tensor]] = []
        if plain.all():
            return
        filters = torch.from_numpy(params[filtered, 1:4]).to(device)
        keeping = torch.from_numpy(np.flatnonzero(keeps[filtered])).to(device)
        draws = ((_draw, plain), (_draw_greedy, greedy), (partial(_draw_filtered, filters, keeping), filtered))
        for draw, own in draws:
            if own.any():
                self.parts.append((draw, torch.from_numpy(np.flatnonzero(own)).to(device)))


def sample(logits: torch.Tensor, u: torch.Tensor, rows: RowSampling) -> DrawnTokens:
    """Draw a token for each row of float32 `logits` [n, vocab] with the uniform numbers `u` float32 [n].

    The log-probability is that of the distribution drawn from: after temperature and filters. Greedy rows report the
    untempered log-softmax. Filters come in the order min-p, top-k, top-p, each on what the one before left.
    """
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature
    logp = torch.log_softmax(logits, -1)
    if not rows.parts:
        return _draw(logp, u)
    tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
    logprobs, kept = torch.empty_like(u), None
    for draw, indices in rows.parts:
        part = draw(logp.index_select(0, indices), u.index_select(0, indices))
        tokens.index_copy_(0, indices, part.tokens)
        logprobs.index_copy_(0, indices, part.logprobs)
        if part.kept is not None:
            kept = part.kept._replace(rows=indices.index_select(0, part.kept.rows))
    return DrawnTokens(tokens, logprobs, kept)


def sets_of(kept: Kept | None) -> dict[int, EncodedSet]:
    """On the host: by row the set that its token was drawn from."""
    if kept is None:
        return {}
    sizes, vocabulary = kept.sizes.tolist(), kept.order.shape[1]
    order = kept.order[:, : max(sizes)].int().cpu().numpy()
    return {row: encode_set(ids[:size], vocabulary) for row, size, ids in zip(kept.rows.tolist(), sizes, order, strict=True)}


def _draw(logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """The first token whose cumulative probability exceeds u times the total."""
    cumulative = logp.exp().cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # A parallel prefix sum need not be monotone to the last bit, hence the clamp.
    token = torch.searchsorted(cumulative, target, right=True).clamp_(max=logp.shape[-1] - 1)
    return DrawnTokens(token.squeeze(1), logp.gather(1, token).squeeze(1))


def _draw_greedy(logp: torch.Tensor, _: torch.Tensor) -> DrawnTokens:
    best = logp.max(-1)
    return DrawnTokens(best.indices, best.values)


def _draw_filtered(filters: torch.Tensor, keeping: torch.Tensor, logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """`filters` is [n, 3]: top-p, top-k, min-p. Each keeps the most probable tokens, so a prefix of the sorted row is left.
    `keeping`: int64, the rows whose sets are kept."""
    logp, order = torch.sort(logp, dim=-1, descending=True, stable=True)
    top_p, top_k, min_p = filters.split(1, 1)
    rank = torch.arange(logp.shape[-1], device=logp.device)
    probability = logp.exp()
    kept = (probability >= min_p * probability[:, :1]) & (rank < top_k)
    probability = probability * kept
    before = probability.cumsum(-1) - probability
    kept &= before < top_p * probability.sum(-1, keepdim=True)
    kept[:, 0] = True
    logp = logp.masked_fill(~kept, -math.inf)
    logp = logp - logp.logsumexp(-1, keepdim=True)
    cumulative = logp.exp().cumsum(-1)
    place = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True)
    sizes = kept.sum(-1, keepdim=True)
    place = torch.minimum(place, sizes - 1)
    sets = Kept(keeping, sizes[keeping, 0], order[keeping]) if len(keeping) else None
    return DrawnTokens(order.gather(1, place).squeeze(1), logp.gather(1, place).squeeze(1), sets)


def to_host(drawn: DrawnTokens) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities in one transfer, as each would wait for the device."""
    both = torch.stack((drawn.tokens.int(), drawn.logprobs.view(torch.int32))).cpu().numpy()
    return both[0].astype(np.int64), both[1].view(np.float32)


def streams(request: GroupRequest) -> np.ndarray:
    """float32 [n, max_new_tokens]: the uniform numbers of each sample's tokens."""
    limit, first = request.sampling.max_new_tokens, request.first
    return np.stack([uniforms(request.seed, index, limit) for index in range(first, first + request.n)])
