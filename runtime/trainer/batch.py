"""One forward pass's worth of samples, packed: from rows on the host to tensors on the device, in one copy.

B samples, R reply tokens of the longest, T packed tokens, N trained ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from runtime.models.packed_attention import Packing
from runtime.trainer import batching
from runtime.trainer.backend import RankInfo
from runtime.trainer.rows import Rows

BUCKET_RATIO = 1.5  # longest to shortest row of one attention call: padding against the number of calls

Columns = Mapping[str, np.ndarray]
"""What an objective computes on, by name: per reply token (flat, as in Rows), or per sample ([B, R] or [B, 1])."""


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
    columns: Mapping[str, torch.Tensor]  # float32 [B, R] or [B, 1]
    samples: np.ndarray  # int64 [B], which of the rows; on the host
    places: np.ndarray  # int64 [N], where the trained token lies in the flat arrays; on the host
    sequences: np.ndarray  # int64 [prompts and replies, (begin, tokens, begin of its prompt, tokens of that)]; on the host
    padding: int  # cells of the attention rows that hold no token
    attended: int  # all cells of the attention rows

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N] of the trained tokens as [B, R], 0 elsewhere."""
        return values.new_zeros(self.mask.numel()).index_copy(0, self.cells, values).view(self.mask.shape)


def micro_batches(rows: Rows, chosen: np.ndarray, columns: Columns, budget: int, rank_info: RankInfo) -> Iterator[MicroBatch]:
    """The samples `chosen` (bool [B]), each micro-batch within `budget` tokens.

    As many on every rank, so that all take part in the collectives of each.
    """
    made = plan(rows, np.flatnonzero(chosen), budget)
    device = rank_info.device
    for index in range(rank_info.largest([len(made)])[0]):
        yield pack(rows, made[index], columns, device) if index < len(made) else nothing(columns, device)


def plan(rows: Rows, chosen: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut the samples `chosen` into micro-batches by length (prompt and reply) within `budget` tokens."""
    lengths = (rows.prompt_length[rows.group[chosen]] + rows.length[chosen]).tolist()
    return [chosen[indices] for indices in batching.micro_batches(lengths, budget)]


def pack(rows: Rows, chosen: np.ndarray, columns: Columns, device: torch.device) -> MicroBatch:
    """Pack the samples `chosen`, ascending by length, each with a reply of at least one token; `columns` are of all rows.

    The last token of a reply predicts nothing and is left out. Prompts come first, each once, then the replies.
    """
    prompts, prompt_of = np.unique(rows.group[chosen], return_inverse=True)
    prompt_length, fed = rows.prompt_length[prompts], rows.length[chosen] - 1
    prompt_begin = batching.starts(prompt_length)
    reply_begin = int(prompt_length.sum()) + batching.starts(fed)
    own_prompt = prompt_length[prompt_of]
    of_prompts = rows.prompts[batching.spans(rows.prompt_start[prompts], prompt_length)]
    tokens = np.concatenate([of_prompts, rows.tokens[batching.spans(rows.start[chosen], fed)]])
    positions = np.concatenate([batching.ramps(prompt_length), batching.spans(own_prompt, fed)])

    where = batching.spans(rows.start[chosen], rows.length[chosen])
    kept = rows.mask[where]
    row = np.repeat(np.arange(len(chosen)), rows.length[chosen])[kept]
    offset = batching.ramps(rows.length[chosen])[kept]
    last_of_prompt = (prompt_begin + prompt_length - 1)[prompt_of]
    predictors = np.where(offset == 0, last_of_prompt[row], reply_begin[row] + offset - 1)
    mask = rows.grid(rows.mask, chosen)
    width = mask.shape[1]

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def column(array: np.ndarray) -> torch.Tensor:
        return send(rows.grid(array, chosen) if array.ndim == 1 else array[chosen, :width].astype(np.float32))

    begin_of_prompt = prompt_begin[prompt_of]
    packing = attention_rows(begin_of_prompt, own_prompt, reply_begin, fed, len(tokens), device)
    attended = sum(part.numel() for part in packing.rows)
    prompt_sequences = np.pad(np.stack([prompt_begin, prompt_length], 1), ((0, 0), (0, 2)))  # which have no other before them
    return MicroBatch(
        input_ids=send(tokens.astype(np.int64)[None]),
        position_ids=send(positions[None]),
        packing=packing,
        predictors=send(predictors),
        targets=send(rows.tokens[where][kept].astype(np.int64)),
        cells=send(row * width + offset),
        mask=send(mask),
        columns={name: column(array) for name, array in columns.items()},
        samples=chosen,
        places=where[kept],
        sequences=np.concatenate([prompt_sequences, np.stack([reply_begin, fed, begin_of_prompt, own_prompt], 1)]),
        padding=attended - int((own_prompt + fed).sum()),
        attended=attended,
    )


def attention_rows(
    prompt_begin: np.ndarray, prompt: np.ndarray, reply_begin: np.ndarray, reply: np.ndarray, tokens: int, device: torch.device
) -> Packing:
    """Attention rows of `prompt` then `reply` tokens, given where each part lies among the packed `tokens`; all arrays [B]."""
    length = prompt + reply
    sizes = np.array(batching.length_buckets(length.tolist(), BUCKET_RATIO), np.int64)
    widths = length[np.cumsum(sizes) - 1]  # rows ascend, so a bucket's last is its longest
    row_begin = batching.starts(np.repeat(widths, sizes))
    cell = np.concatenate([batching.spans(row_begin, prompt), batching.spans(row_begin + prompt, reply)])
    source = np.concatenate([batching.spans(prompt_begin, prompt), batching.spans(reply_begin, reply)])
    gather = np.zeros(int((sizes * widths).sum()), np.int64)
    gather[cell] = source
    take = np.empty(tokens, np.int64)
    take[source] = cell  # every copy of a shared prompt computes the same output; any one will do
    parts = torch.from_numpy(gather).to(device, non_blocking=True).split((sizes * widths).tolist())
    return Packing(
        rows=[part.view(size, width) for part, size, width in zip(parts, sizes.tolist(), widths.tolist(), strict=True)],
        cells=torch.from_numpy(take).to(device, non_blocking=True),
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


def nothing(names: Iterable[str], device: torch.device) -> MicroBatch:
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
        columns=dict.fromkeys(names, none),
        samples=np.zeros(0, np.int64),
        places=np.zeros(0, np.int64),
        sequences=np.array([[0, 1, 0, 0]]),
        padding=0,
        attended=0,
    )
