"""Texts computed at once: whole, or from where keys and values of their first tokens are there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from runtime.rollout.torch.decoder import Decoder

SHARED = 16  # tokens with which all texts begin, from which on these are computed once
MASK = 1 << 26  # entries of an attention mask; more new tokens are computed one part after another


class Computed(NamedTuple):
    last: torch.Tensor  # [texts, hidden]: the last layer's output of each text's last token
    keys_values: list[torch.Tensor]  # of each text, [layers, parts, heads, its length, width]


def beginnings(decoder: Decoder, texts: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Compute once what all texts begin with, as a system prompt: for `continued`. Empty where that is less than SHARED."""
    shortest = min(map(len, texts)) - 1
    same = (np.stack([text[:shortest] for text in texts]) == texts[0][:shortest]).all(0)
    shared = shortest if same.all() else int(same.argmin())
    if len(texts) == 1 or shared < SHARED:
        return []
    return whole(decoder, [texts[0][:shared]]).keys_values * len(texts)


def whole(decoder: Decoder, texts: Sequence[np.ndarray]) -> Computed:
    """`texts`: token ids, padded to the longest."""
    lengths = [len(text) for text in texts]
    padded = _padded(texts)
    kept = torch.empty(_shape(decoder, *padded.shape), device=decoder.device, dtype=decoder.dtype)
    positions = torch.arange(padded.shape[1], device=decoder.device).expand(padded.shape)
    hidden = decoder.forward(torch.from_numpy(padded).to(decoder.device), positions, kept=kept)
    return Computed(_last(hidden, lengths), [kept[:, :, row, :, :length] for row, length in enumerate(lengths)])


def continued(decoder: Decoder, texts: Sequence[np.ndarray], begun: Sequence[torch.Tensor]) -> Computed:
    """The same where each text's first keys and values, of fewer tokens than it has, are `begun`
    [layers, parts, heads, length, width]. Those are padded on the left, new tokens on the right."""
    lengths = np.array([each.shape[3] for each in begun])
    new = [text[length:] for text, length in zip(texts, lengths, strict=True)]
    padded, past = _padded(new), int(lengths.max())
    rows, count = padded.shape
    # Zeros, because a masked position still multiplies its value by a probability of 0.
    kept = torch.zeros(_shape(decoder, rows, past + count), device=decoder.device, dtype=decoder.dtype)
    for row, each in enumerate(begun):
        kept[:, :, row, :, past - each.shape[3] : past].copy_(each)

    # No text has a token at a position of padding, which is cut so that it can be rotated.
    ends = np.array([len(text) for text in texts])[:, None] - 1
    positions = torch.from_numpy(np.minimum(lengths[:, None] + np.arange(count), ends)).to(decoder.device)
    tokens = torch.from_numpy(padded).to(decoder.device)
    columns = torch.arange(past + count, device=decoder.device)
    there = columns >= torch.from_numpy(past - lengths).to(decoder.device).view(-1, 1, 1)
    step, parts = max(1, MASK // (rows * (past + count))), []
    for start in range(0, count, step):
        end = min(start + step, count)
        allowed = (there & (columns <= columns[past + start : past + end, None]))[:, :, : past + end]
        part = decoder.forward(tokens[:, start:end], positions[:, start:end], allowed, kept[..., : past + end, :], past + start)
        parts.append(part)
    return Computed(
        _last(torch.cat(parts, 1), [len(each) for each in new]),
        [kept[:, :, row, :, past - length : past + len(new[row])] for row, length in enumerate(lengths.tolist())],
    )


def _shape(decoder: Decoder, rows: int, length: int) -> tuple[int, ...]:
    config, (parts, heads, width) = decoder.config, decoder.config.cached
    return config.layers, parts, rows, heads, length, width


def _padded(texts: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [texts, longest]."""
    padded = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def _last(hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[texts, T, hidden] at the last of each text's `lengths` tokens."""
    last = torch.from_numpy(np.arange(len(lengths)) * hidden.shape[1] + np.array(lengths) - 1)
    return hidden.flatten(0, 1).index_select(0, last.to(hidden.device))
