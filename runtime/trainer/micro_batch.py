"""One forward pass's worth of rows, packed: from the host to tensors on the device, in one copy.

B rows, R reply tokens of the longest, T packed tokens, N trained ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from runtime.models.passes import Packing
from runtime.trainer.attention_rows import attention_rows, padded_rows
from runtime.trainer.prefix_tree import cut_trees, in_tree_order, of_fed, tree_paths
from runtime.trainer.rows import Rows, cut_by_length, ramps, spans, starts

if TYPE_CHECKING:
    from runtime.trainer.backend import RankInfo

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
