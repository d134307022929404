"""From what the head of a language model takes to numbers of tokens, in chunks of these: logits of all tokens at once are never
in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from runtime.models.families.memory import CHUNK_ELEMENTS

LEFT_OUT = -1e30  # a logit without probability: finite at any temperature, so that 0 times it is 0

PerToken = tuple[torch.Tensor, torch.Tensor]


def in_chunks(compute: Callable[..., PerToken], width: int, *columns: torch.Tensor | None) -> PerToken:
    """`compute(*columns)`, two numbers [N] each, of `columns` [N, ...] (None stays None), a chunk of tokens at a time.

    `width`: the logits that `compute` makes for a token. Where there are several chunks, each one's are computed again in the
    backward pass. Few tokens, or a small vocabulary, are one chunk, whose logits are kept.
    """
    size = max(1, CHUNK_ELEMENTS // max(1, width))
    tokens = max(len(column) for column in columns if column is not None)
    if tokens <= size:
        return compute(*columns)
    found = [
        checkpoint(
            compute, *(None if column is None else column[start : start + size] for column in columns), use_reentrant=False
        )
        for start in range(0, tokens, size)
    ]
    logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logp, entropy


def confined(logits: torch.Tensor, kept: torch.Tensor | None, start: int = 0) -> torch.Tensor:
    """`logits` [N, v] of the vocabulary, or of its part from `start` on, with those of tokens that the sampler's filters left
    out so low that they have no probability, nor a gradient.

    `kept`: uint8 [N, bytes], a bit for each token of the vocabulary, the lowest of a byte first; None: all are there.
    """
    if kept is None:
        return logits
    width, first = logits.shape[1], start // 8
    bits = kept[:, first : -(-(start + width) // 8), None] >> torch.arange(8, dtype=torch.uint8, device=kept.device) & 1
    begin = start - 8 * first
    return logits.masked_fill(bits.flatten(1)[:, begin : begin + width] == 0, LEFT_OUT)
