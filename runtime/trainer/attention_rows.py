"""Which packed tokens attend together, as rows of attention calls: from numpy on the host to tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from runtime.models.passes import Packing
from runtime.trainer.rows import length_buckets

BUCKET_RATIO = 1.5  # longest to shortest row of one attention call: padding against the number of calls


def attention_rows(paths: np.ndarray, sequences: np.ndarray, device: torch.device) -> Packing:
    """How `sequences` attend, both as in MicroBatch. Where a row before has half of one or more, its own tokens alone are
    queries; where less, all are, which a causal kernel makes up for, and the same output is found twice."""
    begin, shared, own = sequences[sequences[:, 2] > 0].T
    before = np.where(2 * shared < shared + own, 0, shared)
    every = np.arange(int(paths.max(initial=-1)) + 1)
    return query_rows(paths, np.stack([begin, before, shared + own - before], 1), every, every, device)


def padded_rows(paths: np.ndarray, sequences: np.ndarray, device: torch.device) -> Packing:
    """`sequences`, as of `attention_rows`, whole, in one bucket. What several have is computed in each, taken from the last."""
    kept = sequences[sequences[:, 2] > 0]
    begin, length = kept[:, :1], kept[:, 1:].sum(1, keepdims=True)
    cell = np.arange(int(length.max()))
    there = cell < length
    rows = paths[np.where(there, begin + cell, begin)]
    cells = np.zeros(int(paths.max()) + 1, np.int64)
    cells[rows[there]] = np.flatnonzero(there)
    made = [torch.from_numpy(each).to(device, non_blocking=True) for each in (rows, cells)]
    return Packing(rows=made[:1], cells=made[1])


def query_rows(
    paths: np.ndarray,
    stretches: np.ndarray,
    asks: np.ndarray,
    keys: np.ndarray,
    device: torch.device,
    ratio: float = BUCKET_RATIO,
) -> Packing:
    """How tokens attend to those before them. `stretches`: int64 [n, (where their row begins in `paths`, how many tokens of it
    are before them, how many they are)]. `asks`, `keys`: int64 [T], where the query and the key of each packed token lie; -1
    for a token that does not ask.

    Stretches alike, by `ratio`, make up a bucket: all in it begin where the one with the fewest tokens before it does.
    """
    rows, queries, cells, used = [], [], np.zeros(int(asks.max(initial=-1)) + 1, np.int64), 0
    for bucket, before in _buckets(stretches, ratio):
        begin, tokens = bucket[:, :1], bucket[:, 1:].sum(1, keepdims=True)
        cell = np.arange(int(tokens.max()))
        there = cell < tokens
        packed = paths[np.where(there, begin + cell, begin)]
        real = there[:, before:]
        asked = np.where(real, asks[packed[:, before:]], 0)
        cells[asked[real]] = used + np.flatnonzero(real)
        used += real.size
        queries.append(torch.from_numpy(asked).to(device, non_blocking=True))
        rows.append(torch.from_numpy(keys[packed]).to(device, non_blocking=True))
    return Packing(rows=rows, cells=torch.from_numpy(cells).to(device, non_blocking=True), queries=queries)


def _buckets(stretches: np.ndarray, ratio: float) -> Iterator[tuple[np.ndarray, int]]:
    """Stretches of about as many tokens before them and of their own, and the fewest that one of them has before it."""
    for alike in _runs(stretches, stretches[:, 1], ratio):
        before = int(alike[0, 1])
        for bucket in _runs(alike, alike[:, 1:].sum(1) - before, BUCKET_RATIO):
            yield bucket, before


def _runs(stretches: np.ndarray, sizes: np.ndarray, ratio: float) -> list[np.ndarray]:
    """`stretches` of about one size, ascending."""
    order = np.argsort(sizes, kind="stable")
    return np.split(stretches[order], np.cumsum(length_buckets(sizes[order].tolist(), ratio))[:-1])
