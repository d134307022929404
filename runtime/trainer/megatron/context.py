"""Context parallelism: the ranks of a group compute a part of each micro-batch's tokens each.

With C ranks the packed tokens are cut into 2C chunks, and rank c has chunks c and 2C - 1 - c: under the causal mask the
later tokens of a sequence are more work, and so all ranks have about as much. Queries stay where they are; keys and values
are gathered, in the order of the ranks. A rank has the logits of the trained tokens that it predicts. What is computed of
these, a number for each, is gathered before it is laid out by samples, so every rank has the whole loss, and the gradient
of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist

from runtime.models.hf_policy import Packing
from runtime.trainer.backend import BUCKET_RATIO, MicroBatch, padded
from runtime.trainer.rows import length_buckets

Bucket = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ContextShard(MicroBatch):
    """A rank's part of a micro-batch: its tokens, of which its n `predictors` and `targets` are. The rest is of the whole."""

    chosen: torch.Tensor  # int64 [n], which of the N trained tokens the rank predicts
    group: dist.ProcessGroup

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Values [n] of this rank's trained tokens among those of all, [N]. Gradients reach this rank's own."""
        found = values.new_zeros(len(self.cells))
        found[self.chosen] = values.detach()
        dist.all_reduce(found, group=self.group)
        return found.index_copy(0, self.chosen, values)

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        return super().grid(self.whole(values))


def part_of(batch: MicroBatch, group: dist.ProcessGroup, multiple: int = 1) -> ContextShard:
    """This rank's part of `batch`, of a multiple of `multiple` tokens."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    before = batch.input_ids.shape[1]
    batch = padded(batch, 2 * count * multiple)
    total, device = batch.input_ids.shape[1], batch.input_ids.device
    sequences = np.concatenate([batch.sequences, [[before, total - before, 0, 0]]])  # what is padding attends to itself
    where = np.concatenate([tokens_of(each, count, total) for each in range(count)])
    own = tokens_of(rank, count, total)
    place = np.full(total, -1)  # among this rank's tokens
    place[own] = np.arange(len(own))
    predictors = place[batch.predictors.cpu().numpy()]
    chosen = np.flatnonzero(predictors >= 0)

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    index = send(own)
    packing = packing_of(sequences, own, np.argsort(where), device)
    changed = {
        "input_ids": batch.input_ids[:, index],
        "position_ids": batch.position_ids[:, index],
        "packing": packing,
        "predictors": send(predictors[chosen]),
        "targets": batch.targets[send(chosen)],
        "kept": None if batch.kept is None else batch.kept[send(chosen)],
    }
    known = {field.name: getattr(batch, field.name) for field in fields(MicroBatch)}
    return ContextShard(**known | changed, chosen=send(chosen), group=group)


def tokens_of(rank: int, count: int, total: int) -> np.ndarray:
    """int64 [total / count], ascending: the packed tokens of a rank; `total` is a multiple of 2 · `count`."""
    return np.arange(total).reshape(2 * count, -1)[[rank, 2 * count - 1 - rank]].ravel()


def packing_of(sequences: np.ndarray, own: np.ndarray, place: np.ndarray, device: torch.device) -> Packing:
    """How the tokens `own` attend. `place`, int64 [T]: where each packed token's key lies."""
    rows, queries, cells = [], [], np.empty(len(own), np.int64)
    begin = 0
    for asked, keys, used in _buckets(_stretches(sequences, own)):
        cells[asked[used]] = begin + np.flatnonzero(used)
        begin += asked.size
        queries.append(torch.from_numpy(asked).to(device, non_blocking=True))
        rows.append(torch.from_numpy(place[keys]).to(device, non_blocking=True))
    return Packing(rows=rows, cells=torch.from_numpy(cells).to(device, non_blocking=True), queries=queries)


def _stretches(sequences: np.ndarray, own: np.ndarray) -> np.ndarray:
    """int64 [stretches, 6]: tokens in a row of one sequence, of one chunk: place among `own`, number, how many of the sequence
    and its prompt come before, begin and tokens of the prompt, begin of the sequence."""
    begin, tokens, prompt_begin, prompt = sequences.T
    size, found = len(own) // 2, []
    for half in range(2):
        first = own[half * size]
        low, high = np.maximum(begin, first), np.minimum(begin + tokens, first + size)
        columns = (low - first + half * size, high - low, prompt + low - begin, prompt_begin, prompt, begin)
        found.append(np.stack(columns, 1)[low < high])
    return np.concatenate(found)


def _buckets(stretches: np.ndarray) -> Iterator[Bucket]:
    """Those of as many tokens before them and about as many of their own attend at once: int64 [rows, longest], places among
    the rank's own tokens, int64 [rows, before + longest], the packed tokens that they attend to, and, bool like the first,
    which are not padding.
    """
    for before in np.unique(stretches[:, 2]):
        alike = stretches[stretches[:, 2] == before]
        alike = alike[np.argsort(alike[:, 1], kind="stable")]
        sizes = length_buckets(alike[:, 1].tolist(), BUCKET_RATIO)
        for bucket in np.split(alike, np.cumsum(sizes)[:-1]):
            place, tokens, _, prompt_begin, prompt, begin = (column[:, None] for column in bucket.T)
            cell = np.arange(tokens.max())
            used = cell < tokens
            key = np.arange(before + len(cell))
            keys = np.where(key < prompt, prompt_begin + key, begin + key - prompt)
            yield np.where(used, place + cell, 0), np.where(key < before + tokens, keys, 0), used
