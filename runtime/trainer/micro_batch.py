"""One forward pass's worth of rows, packed: from the host to tensors on the device, in one copy.

B rows, R reply tokens of the longest, T packed tokens, N trained ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from runtime.models.passes import Packing
from runtime.trainer.collectives import RankInfo
from runtime.trainer.rows import Rows, cut_by_length, length_buckets, ramps, spans, starts
from runtime.types import common

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


REACH = 8  # tokens that attention gathers for each packed one, at most: what it gathers takes memory, too


# ---- Prefix tree
#
# What several rows begin with is computed once: a group's prompt, and all that branches of an episode have in common. numpy
# on the host; pure.
#
# A token of two rows is the same where all tokens before it are: then so is what the model makes of it. That is found by
# comparing tokens. Rows are put into an order in which each shares most with the one before it, and only what it does not
# share is packed. A *tree* is a run of rows each of which shares something with the one before.
#
# B rows, T packed tokens.


def in_tree_order(rows: Rows, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows `chosen`, each with a reply of at least one token, in the order of their trees; how many tokens of each are fed
    to the model; and with how many of these it begins as the row before it. int64 [B] each, prompts included.

    The last token of a reply predicts nothing and is not fed.
    """
    replies = {row: rows.tokens[rows.start[row] : rows.start[row] + rows.length[row] - 1] for row in chosen.tolist()}
    order = sorted(replies, key=lambda row: (rows.group[row], rows.episode[row], replies[row].tobytes()))
    shared = np.zeros(len(order), np.int64)
    for index, (before, row) in enumerate(pairwise(order), start=1):
        if rows.group[row] == rows.group[before]:
            shared[index] = rows.prompt_length[rows.group[row]]
            if rows.episode[row] == rows.episode[before]:
                shared[index] += common(replies[before], replies[row])
    found = np.array(order, np.int64)
    return found, rows.prompt_length[rows.group[found]] + rows.length[found] - 1, shared


def of_fed(rows: Rows, chosen: np.ndarray, prompts: np.ndarray, replies: np.ndarray) -> np.ndarray:
    """What `prompts` and `replies`, flat as in Rows, say of the tokens of the rows `chosen` that are fed, back to back."""
    group, fed = rows.group[chosen], rows.length[chosen] - 1
    prompt = rows.prompt_length[group]
    begins = starts(prompt + fed)
    out = np.empty((int((prompt + fed).sum()), *prompts.shape[1:]), np.result_type(prompts, replies))
    out[spans(begins, prompt)] = prompts[spans(rows.prompt_start[group], prompt)]
    out[spans(begins + prompt, fed)] = replies[spans(rows.start[chosen], fed)]
    return out


def tree_paths(lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """int64 [sum of lengths]: the packed tokens of each row from its first on, back to back, when what each row does not share
    with the one before is packed in the order of the rows."""
    begins = starts(lengths)
    paths = np.cumsum(ramps(lengths) >= np.repeat(shared, lengths)) - 1
    for index in np.flatnonzero(shared).tolist():
        begin, before, size = begins[index], begins[index - 1], shared[index]
        paths[begin : begin + size] = paths[before : before + size]
    return paths


def cut_trees(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows in the order of their trees into batches of at most `budget` packed tokens and REACH times as many gathered.

    A tree stays whole where it fits; a row that is longer than the budget is alone. Trees of about one size come together.
    """
    parts: list[tuple[float, list[int]]] = []
    packed = gathered = 0
    for index, (length, known) in enumerate(zip(lengths, shared, strict=True)):
        packed, gathered = packed + length - known, gathered + length
        if known and max(packed, gathered / REACH) <= budget:
            parts[-1][1].append(index)
        else:
            packed, gathered = length, length
            parts.append((0, [index]))
        parts[-1] = (max(packed, gathered / REACH), parts[-1][1])
    batches: list[list[int]] = []
    room = 0.0
    for size, part in sorted(parts, key=lambda part: part[0]):
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1] += part
        room -= size
    return batches


Columns = Mapping[str, np.ndarray]
"""What an objective computes on, by name: per reply token (flat, as in Rows), or per row ([B, R] or [B, 1])."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, and what the objective computes on: `columns`, by name."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    packing: Packing
    predictors: torch.Tensor  # int64 [N], packed index of the token whose logits give the trained one
    targets: torch.Tensor  # int64 [N]
    cells: torch.Tensor  # int64 [N], where the trained token lies in the flattened grid
    mask: torch.Tensor  # float32 [B, R]
    kept: torch.Tensor | None  # uint8 [N, bytes], what the tokens were sampled from, as of `confined`; None: all
    experts: torch.Tensor | None  # uint8 or int32 [T, L, k], those that the tokens take; None: those that the router chooses
    columns: Mapping[str, torch.Tensor]  # float32 [B, R] or [B, 1]
    samples: np.ndarray  # int64 [B], which of the rows; on the host
    places: np.ndarray  # int64 [N], where the trained token lies in the flat arrays; on the host
    paths: np.ndarray  # int64 flat: the packed tokens of each row from its first on; on the host
    sequences: np.ndarray  # int64 [B, (where it begins in `paths`, its tokens that a row before has, too, and those that are
    # its own, which are packed one behind the other)]; on the host
    padding: int  # cells of the attention rows that hold no token
    attended: int  # all cells of the attention rows

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N] of the trained tokens as [B, R], 0 elsewhere."""
        return values.new_zeros(self.mask.numel()).index_copy(0, self.cells, values).view(self.mask.shape)

    def of_tokens(self, name: str) -> torch.Tensor:
        """The column `name`, [B, R], at the trained tokens, [N]."""
        return self.columns[name].flatten()[self.cells]


def micro_batches(
    rows: Rows, chosen: np.ndarray, columns: Columns, budget: int, rank_info: RankInfo, packs: bool = True
) -> Iterator[MicroBatch]:
    """The rows `chosen` (bool [B]), each micro-batch within `budget` tokens. `packs`: as of ModelBackend.

    As many on every rank, so that all take part in the collectives of each.
    """
    made = plan(rows, np.flatnonzero(chosen), budget, packs)
    device = rank_info.device
    for index in range(rank_info.largest([len(made)])[0]):
        yield pack(rows, made[index], columns, device, packs) if index < len(made) else empty_batch(columns, device)


def plan(rows: Rows, chosen: np.ndarray, budget: int, packs: bool = True) -> list[np.ndarray]:
    """Cut the rows `chosen` into micro-batches within `budget` tokens, of which those that rows share count once; where they
    are not packed, every cell of theirs counts, padding as well."""
    if not packs:
        lengths = rows.prompt_length[rows.group[chosen]] + rows.length[chosen] - 1
        return [chosen[indices] for indices in cut_by_length(lengths.tolist(), budget)]
    order, lengths, shared = in_tree_order(rows, chosen)
    return [order[indices] for indices in cut_trees(lengths.tolist(), shared.tolist(), budget)]


def pack(rows: Rows, chosen: np.ndarray, columns: Columns, device: torch.device, packs: bool = True) -> MicroBatch:
    """Pack the rows `chosen`, each with a reply of at least one token; `columns` are of all rows.

    The last token of a reply predicts nothing and is left out; what rows share is there once. Where a prompt is empty, no
    reply's first token is trained.
    """
    chosen, lengths, shared = in_tree_order(rows, chosen)
    paths, begins = tree_paths(lengths, shared), starts(lengths)
    prompt = rows.prompt_length[rows.group[chosen]]
    own = ramps(lengths) >= np.repeat(shared, lengths)
    taken = None
    if rows.experts is not None and rows.prompt_experts is not None:
        taken = of_fed(rows, chosen, rows.prompt_experts, rows.experts)[own]
        taken = taken if taken.dtype == np.uint8 else taken.astype(np.int32)
    where = spans(rows.start[chosen], rows.length[chosen])
    kept = rows.mask[where]
    row = np.repeat(np.arange(len(chosen)), rows.length[chosen])[kept]
    offset = ramps(rows.length[chosen])[kept]
    mask = rows.grid(rows.mask, chosen)
    width = mask.shape[1]

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def column(array: np.ndarray) -> torch.Tensor:
        return send(rows.grid(array, chosen) if array.ndim == 1 else array[chosen, :width].astype(np.float32))

    sequences = np.stack([begins, shared, lengths - shared], 1)
    packing = (attention_rows if packs else padded_rows)(paths, sequences, device)
    attended = sum(part.numel() for part in packing.rows)
    return MicroBatch(
        input_ids=send(of_fed(rows, chosen, rows.prompts, rows.tokens)[own].astype(np.int64)[None]),
        position_ids=send(ramps(lengths)[own][None]),
        packing=packing,
        predictors=send(paths[(begins + prompt)[row] + offset - 1]),
        targets=send(rows.tokens[where][kept].astype(np.int64)),
        cells=send(row * width + offset),
        mask=send(mask),
        kept=None if rows.kept is None else send(rows.kept.bitmaps(where[kept])),
        experts=None if taken is None else send(taken),
        columns={name: column(array) for name, array in columns.items()},
        samples=chosen,
        places=where[kept],
        paths=paths,
        sequences=sequences,
        padding=attended - int(lengths[lengths > shared].sum()),
        attended=attended,
    )


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """With tokens added at the end that nothing looks at, so that T is a multiple of `multiple`."""
    missing = -batch.input_ids.shape[1] % multiple
    if not missing:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, missing)),
        position_ids=F.pad(batch.position_ids, (0, missing)),
        packing=replace(batch.packing, cells=F.pad(batch.packing.cells, (0, missing))),
    )


def empty_batch(names: Iterable[str], device: torch.device) -> MicroBatch:
    """A micro-batch of one token that is not trained, for ranks that have fewer than others but share their collectives."""
    zero, none = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 1, device=device)
    return MicroBatch(
        input_ids=zero[None],
        position_ids=zero[None],
        packing=Packing(rows=[zero[None]], cells=zero),
        predictors=zero,
        targets=zero,
        cells=zero,
        mask=none,
        kept=None,
        experts=None,
        columns=dict.fromkeys(names, none),
        samples=np.zeros(0, np.int64),
        places=np.zeros(0, np.int64),
        paths=np.zeros(1, np.int64),
        sequences=np.array([[0, 0, 1]]),
        padding=0,
        attended=0,
    )
