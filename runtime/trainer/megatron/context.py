"""Context parallelism: the ranks of a group compute a part of each micro-batch's tokens each.

With C ranks the packed tokens are cut into 2C chunks, and rank c has chunks c and 2C - 1 - c: under the causal mask the
later tokens of a sequence are more work, and so all ranks have about as much. Queries stay where they are; keys and values
are gathered, in the order of the ranks. A rank has the logits of the trained tokens that it predicts. What is computed of
these, a number for each, is gathered before it is laid out by samples, so every rank has the whole loss, and the gradient
of its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist

from runtime.models.passes import Packing
from runtime.trainer.attention_rows import query_rows
from runtime.trainer.micro_batch import MicroBatch, padded


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

    def of_tokens(self, name: str) -> torch.Tensor:
        return super().of_tokens(name)[self.chosen]


def part_of(batch: MicroBatch, group: dist.ProcessGroup, multiple: int = 1) -> ContextShard:
    """This rank's part of `batch`, of a multiple of `multiple` tokens."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    before = batch.input_ids.shape[1]
    batch = padded(batch, 2 * count * multiple)
    total, device = batch.input_ids.shape[1], batch.input_ids.device
    paths = np.concatenate([batch.paths, np.arange(before, total)])  # what is padding attends to itself
    sequences = np.concatenate([batch.sequences, [[len(batch.paths), 0, total - before]]])
    where = np.concatenate([tokens_of(each, count, total) for each in range(count)])
    own = tokens_of(rank, count, total)
    place = np.full(total, -1)  # among this rank's tokens
    place[own] = np.arange(len(own))
    predictors = place[batch.predictors.cpu().numpy()]
    chosen = np.flatnonzero(predictors >= 0)

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    index = send(own)
    packing = packing_of(paths, sequences, own, np.argsort(where), device)
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


def packing_of(paths: np.ndarray, sequences: np.ndarray, own: np.ndarray, place: np.ndarray, device: torch.device) -> Packing:
    """How the tokens `own` attend; `paths` and `sequences` as in MicroBatch. `place`, int64 [T]: where each packed token's key
    lies."""
    asks = np.full(len(place), -1)
    asks[own] = np.arange(len(own))
    return query_rows(paths, _stretches(paths, sequences, own), asks, place, device, ratio=1.0)


def _stretches(paths: np.ndarray, sequences: np.ndarray, own: np.ndarray) -> np.ndarray:
    """int64 [stretches, 3]: tokens in a row of one sequence, of one chunk: where the sequence begins in `paths`, how many of it
    come before, and how many they are."""
    path, shared, tokens = sequences[sequences[:, 2] > 0].T
    begin = paths[path + shared]
    size, found = len(own) // 2, []
    for half in range(2):
        first = own[half * size]
        low, high = np.maximum(begin, first), np.minimum(begin + tokens, first + size)
        found.append(np.stack((path, shared + low - begin, high - low), 1)[low < high])
    return np.concatenate(found)
