"""Pack rows into the tensors of one forward pass and copy them from the host to the device in one go.

B rows, R tokens of the longest reply, T packed tokens, N trained tokens. A rank's routers see t tokens in l layers, and a token
takes k experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from runtime.models.forward import Packing, cut_by_length, query_rows, ramps, spans, starts, tree_paths
from runtime.trainer.routes import GroupRoutes
from runtime.trainer.rows import Rows
from runtime.types import common


def attention_rows(paths: np.ndarray, sequences: np.ndarray, device: torch.device) -> Packing:
    """Return how `sequences` attend; `paths` and `sequences` as in MicroBatch. If an earlier row has at least half of a
    sequence's tokens, only the sequence's own tokens are queries. Otherwise all its tokens are queries, as a causal kernel
    computes them faster; the shared tokens' output is then computed twice."""
    begin, shared, own = sequences[sequences[:, 2] > 0].T
    before = np.where(2 * shared < shared + own, 0, shared)
    every = np.arange(int(paths.max(initial=-1)) + 1)
    return query_rows(paths, np.stack([begin, before, shared + own - before], 1), every, every, device)


def padded_rows(paths: np.ndarray, sequences: np.ndarray, device: torch.device) -> Packing:
    """Return `sequences` whole and in one bucket. The output of a token that several rows share is taken from the last one."""
    kept = sequences[sequences[:, 2] > 0]
    begin, length = kept[:, :1], kept[:, 1:].sum(1, keepdims=True)
    cell = np.arange(int(length.max()))
    valid = cell < length
    rows = paths[np.where(valid, begin + cell, begin)]
    cells = np.zeros(int(paths.max()) + 1, np.int64)
    cells[rows[valid]] = np.flatnonzero(valid)
    made = [torch.from_numpy(each).to(device, non_blocking=True) for each in (rows, cells)]
    return Packing(rows=made[:1], cells=made[1])


REACH = 8  # at most this many tokens are gathered by attention for each packed token: gathered tokens take memory, too


# ---- Prefix tree: tokens that several rows begin with (a prompt, the common part of an episode's branches) are computed once.
# Two rows share a token if it and all tokens before it are equal: the model then computes the same for it. The rows are ordered
# so that each row shares as much as possible with the row before it. Only the tokens that it does not share are packed. A
# *tree* is a run of rows in which each row shares tokens with the row before it.


def in_tree_order(rows: Rows, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows `chosen` in tree order, with each row's number of fed tokens and of tokens shared with the row before.
    int64 [B] each, prompts included. The last token of a reply, which has at least one, predicts nothing and is not fed."""
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


def places_of_fed(rows: Rows, chosen: np.ndarray) -> np.ndarray:
    """Return the places of the tokens of `chosen` that are fed, back to back, int64. A token's *place* is its index in
    `rows.prompts`, or the number of these plus its index in `rows.tokens`."""
    group, fed = rows.group[chosen], rows.length[chosen] - 1
    prompt = rows.prompt_length[group]
    begins = starts(prompt + fed)
    out = np.empty(int((prompt + fed).sum()), np.int64)
    out[spans(begins, prompt)] = spans(rows.prompt_start[group], prompt)
    out[spans(begins + prompt, fed)] = len(rows.prompts) + spans(rows.start[chosen], fed)
    return out


def at_places(prompts: np.ndarray, replies: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the values of `prompts` and `replies` (flat as in Rows) at `places`; 0 at place -1."""
    in_prompt, in_reply = (places >= 0) & (places < len(prompts)), places >= len(prompts)
    out = np.zeros((len(places), *prompts.shape[1:]), np.result_type(prompts, replies))
    out[in_prompt], out[in_reply] = prompts[places[in_prompt]], replies[places[in_reply] - len(prompts)]
    return out


def cut_trees(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows in tree order into batches of at most `budget` packed tokens and `REACH * budget` gathered tokens. A tree that
    fits stays whole. A row that is longer than the budget is alone. Trees of similar size are batched together."""
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


class RoutedShare(NamedTuple):
    """The layers and tokens of a micro-batch that a rank's routers see. By default all."""

    layers: slice = slice(None)  # of the model's layers with experts
    tokens: Callable[[int], np.ndarray] = np.arange
    """Given the number of packed tokens, returns the packed indices of the routers' tokens, int64 [t]; -1: padding."""


ALL_ROUTED = RoutedShare()


def _taken(routes: GroupRoutes, packed: np.ndarray, share: RoutedShare) -> np.ndarray:
    """Return `MicroBatch.experts`, given the places of the packed tokens, int64 [T]. A token without known experts has k
    zeros; it gets k different experts, as megatron-core wants them."""
    own = share.tokens(len(packed))
    taken = routes.at(np.where(own < 0, -1, packed[own]), share.layers)
    per_token = taken.shape[2]
    if per_token > 1:
        taken[taken[..., 0] == taken[..., -1]] = np.arange(per_token)
    return taken if taken.dtype == np.uint8 else taken.astype(np.int32)


Columns = Mapping[str, np.ndarray]
"""The inputs of an objective by name: per reply token (flat, as in Rows), or per row ([B, R] or [B, 1])."""


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and of the objective: `columns`, by name."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    packing: Packing
    predictors: torch.Tensor  # int64 [N], packed index of the token whose logits predict the trained token
    targets: torch.Tensor  # int64 [N]
    cells: torch.Tensor  # int64 [N], index of the trained token in the flattened grid
    mask: torch.Tensor  # float32 [B, R]
    kept: torch.Tensor | None  # uint8 [N, bytes], the tokens that sampling allowed, as in `confined`; None: all
    experts: torch.Tensor | None  # uint8 or int32 [t, l, k], the experts that the tokens take; None: the router chooses
    columns: Mapping[str, torch.Tensor]  # float32 [B, R] or [B, 1]
    samples: np.ndarray  # int64 [B], indices of the rows; on the host
    places: np.ndarray  # int64 [N], index of the trained token in the flat arrays; on the host
    paths: np.ndarray  # int64 flat: the packed indices of each row's tokens from its first on; on the host
    sequences: np.ndarray  # int64 [B, (start of the row in `paths`, tokens that it shares with an earlier row, its own tokens,
    # which are packed back to back)]; on the host
    padding: int  # cells of the attention rows that hold no token
    attended: int  # all cells of the attention rows

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [N] of the trained tokens as [B, R], 0 elsewhere."""
        return values.new_zeros(self.mask.numel()).index_copy(0, self.cells, values).view(self.mask.shape)

    def of_tokens(self, name: str) -> torch.Tensor:
        """Return the column `name` [B, R] at the trained tokens, [N]."""
        return self.columns[name].flatten()[self.cells]


def plan(rows: Rows, chosen: np.ndarray, budget: int, packs: bool = True) -> list[np.ndarray]:
    """Cut the rows `chosen` into micro-batches within `budget` tokens; without `packs`, cells of the padded rows."""
    if not packs:
        lengths = rows.prompt_length[rows.group[chosen]] + rows.length[chosen] - 1
        return [chosen[indices] for indices in cut_by_length(lengths.tolist(), budget)]
    order, lengths, shared = in_tree_order(rows, chosen)
    return [order[indices] for indices in cut_trees(lengths.tolist(), shared.tolist(), budget)]


def pack(
    rows: Rows, chosen: np.ndarray, columns: Columns, device: torch.device, packs: bool = True, routed: RoutedShare = ALL_ROUTED
) -> MicroBatch:
    """Pack the rows `chosen`, each with a reply of at least one token; `columns` are of all rows. Tokens that rows share are
    packed once. If a prompt is empty, the first token of its replies is not trained. `routed`: what this rank needs of the
    tokens' experts."""
    chosen, lengths, shared = in_tree_order(rows, chosen)
    paths, begins = tree_paths(lengths, shared), starts(lengths)
    prompt = rows.prompt_length[rows.group[chosen]]
    own = ramps(lengths) >= np.repeat(shared, lengths)
    places = places_of_fed(rows, chosen)[own]
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
        input_ids=send(at_places(rows.prompts, rows.tokens, places).astype(np.int64)[None]),
        position_ids=send(ramps(lengths)[own][None]),
        packing=packing,
        predictors=send(paths[(begins + prompt)[row] + offset - 1]),
        targets=send(rows.tokens[where][kept].astype(np.int64)),
        cells=send(row * width + offset),
        mask=send(mask),
        kept=None if rows.kept is None else send(rows.kept.bitmaps(where[kept])),
        experts=None if rows.routes is None else send(_taken(rows.routes, places, routed)),
        columns={name: column(array) for name, array in columns.items()},
        samples=chosen,
        places=where[kept],
        paths=paths,
        sequences=sequences,
        padding=attended - int(lengths[lengths > shared].sum()),
        attended=attended,
    )


def empty_batch(names: Iterable[str], device: torch.device) -> MicroBatch:
    """Return a micro-batch of one untrained token. A rank with fewer micro-batches takes part in collectives with it."""
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
