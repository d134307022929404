"""The head of a language model under training, in chunks of tokens: logits of all tokens at once are never in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 25  # logits of one chunk, float32: 128 MiB

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
