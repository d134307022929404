"""From groups as they travel to the arrays that a training step computes on. numpy on the host, one copy to the device.

B rows (samples), R reply tokens of one sample, `flat` arrays hold all replies back to back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from runtime import batching, codec
from runtime.engines import ragged
from runtime.engines.packed_attention import Packing
from runtime.errors import InvalidMessage
from runtime.types import GroupPayload, Logprobs, TrainGroup

_SAMPLE_DTYPES = {"tokens": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int64"}
BUCKET_RATIO = 1.5  # longest to shortest row of one attention call: padding against the number of calls


@dataclass(frozen=True)
class Rows:
    """The samples of some groups. `reference` is None where the algorithm has no KL term."""

    prompts: np.ndarray  # int32, flat over groups
    prompt_start: np.ndarray  # int64 [groups]
    prompt_length: np.ndarray  # int64 [groups]
    group: np.ndarray  # int64 [B], from 0
    start: np.ndarray  # int64 [B], of the reply in the flat arrays
    length: np.ndarray  # int64 [B], R
    tokens: np.ndarray  # int32 flat
    mask: np.ndarray  # bool flat; false throughout a sample that is not valid
    behaviour: np.ndarray  # float32 flat
    steps: np.ndarray  # int64 flat, step of the version that sampled the token
    reference: np.ndarray | None  # float32 flat
    rewards: np.ndarray  # float32 [B]
    truncated: np.ndarray  # bool [B], whether the reply was cut off by length
    valid: np.ndarray  # bool [B]

    def grid(self, flat: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """[len(rows), longest reply of `rows`] of `flat`, 0 beyond each reply."""
        lengths = self.length[rows]
        out = np.zeros((len(rows), int(lengths.max(initial=0))), np.float32)
        out[np.repeat(np.arange(len(rows)), lengths), ragged.ramps(lengths)] = flat[ragged.spans(self.start[rows], lengths)]
        return out

    def trained(self) -> np.ndarray:
        """bool [B]: whether the sample has a token to train on."""
        totals = np.concatenate(([0], np.cumsum(self.mask, dtype=np.int64)))
        return totals[self.start + self.length] > totals[self.start]


def decode_groups(groups: Sequence[TrainGroup], vocab_size: int, with_reference: bool) -> Rows:
    """Decode and check; nothing is computed from a batch that does not meet its schema.

    Raises InvalidMessage, naming the group.
    """
    payloads = [codec.decode(GroupPayload, group.payload) for group in groups]
    references = [_reference(group) for group in groups] if with_reference else None
    for index, (group, payload) in enumerate(zip(groups, payloads, strict=True)):
        _check(group, payload, vocab_size, references[index] if references else None)
    samples = [sample for payload in payloads for sample in payload.samples]
    length = np.array([len(sample.tokens) for sample in samples], np.int64)
    prompt_length = np.array([len(payload.prompt) for payload in payloads], np.int64)
    valid = _concatenate([group.valid for group in groups], np.uint8) != 0
    return Rows(
        prompts=_concatenate([payload.prompt for payload in payloads], np.int32),
        prompt_start=ragged.starts(prompt_length),
        prompt_length=prompt_length,
        group=np.repeat(np.arange(len(payloads)), [len(payload.samples) for payload in payloads]),
        start=ragged.starts(length),
        length=length,
        tokens=_concatenate([sample.tokens for sample in samples], np.int32),
        mask=(_concatenate([sample.loss_mask for sample in samples], np.uint8) != 0) & np.repeat(valid, length),
        behaviour=_concatenate([sample.logprobs for sample in samples], np.float32),
        steps=_concatenate([sample.versions for sample in samples], np.int64) & 0xFFFFFFFF,
        reference=None if references is None else _concatenate([reference.values for reference in references], np.float32),
        rewards=_concatenate([group.rewards for group in groups], np.float32),
        truncated=np.array([sample.finish_reason == "length" for sample in samples], bool),
        valid=valid,
    )


def join(parts: Sequence[Rows]) -> Rows:
    """The samples of all `parts`, at least one, in their order."""
    if len(parts) == 1:
        return parts[0]
    joined = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Rows)}
    # What points into other arrays moves by what lies before the part.
    for name, target in (("prompt_start", "prompts"), ("group", "prompt_start"), ("start", "tokens")):
        before = ragged.starts(np.array([len(array) for array in joined[target]], np.int64))
        joined[name] = [array + shift for array, shift in zip(joined[name], before, strict=True)]
    whole: dict[str, Any] = {name: None if arrays[0] is None else np.concatenate(arrays) for name, arrays in joined.items()}
    return Rows(**whole)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _reference(group: TrainGroup) -> Logprobs:
    if group.reference is None:
        raise InvalidMessage(
            f"group {group.group_id}: has no reference log-probabilities, but algorithm.kl_coefficient is not 0"
        )
    return codec.decode(Logprobs, group.reference)


def _check(group: TrainGroup, payload: GroupPayload, vocab_size: int, reference: Logprobs | None) -> None:
    where = f"group {group.group_id}"
    n = len(payload.samples)
    if payload.group_id != group.group_id or not n or len(group.rewards) != n or len(group.valid) != n:
        raise InvalidMessage(
            f"{where}: the payload is of group {payload.group_id} with {n} samples, "
            f"with {len(group.rewards)} rewards and {len(group.valid)} flags"
        )
    if not len(payload.prompt):
        raise InvalidMessage(f"{where}: the prompt is empty")
    for index, sample in enumerate(payload.samples):
        lengths = {len(sample.tokens), len(sample.loss_mask), len(sample.logprobs), len(sample.versions)}
        if len(lengths) != 1:
            raise InvalidMessage(f"{where}, sample {index}: arrays of different lengths {sorted(lengths)}")
        for field, dtype in _SAMPLE_DTYPES.items():
            if getattr(sample, field).dtype != dtype:
                raise InvalidMessage(f"{where}, sample {index}: {field} is {getattr(sample, field).dtype}, not {dtype}")
    tokens = np.concatenate([payload.prompt, *(sample.tokens for sample in payload.samples)])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidMessage(f"{where}: a token outside the vocabulary of {vocab_size}")
    if reference is not None and len(reference.values) != len(tokens) - len(payload.prompt):
        raise InvalidMessage(f"{where}: {len(reference.values)} reference log-probabilities for other replies")


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: T packed tokens, N trained tokens among them, and [B, R] grids of the replies."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    packing: Packing
    predictors: torch.Tensor  # int64 [N], packed index of the token whose logits give the trained one
    targets: torch.Tensor  # int64 [N]
    cells: torch.Tensor  # int64 [N], where the trained token lies in the flattened grid
    mask: torch.Tensor  # float32 [B, R]
    behaviour: torch.Tensor  # float32 [B, R]
    advantages: torch.Tensor  # float32 [B, R] or [B, 1]
    reference: torch.Tensor | None  # float32 [B, R]
    fresh: torch.Tensor  # float32 [B, R], 1 on trained tokens that the weights of this very step sampled


def plan(rows: Rows, chosen: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut the samples `chosen` into micro-batches by length (prompt and reply) within `budget` tokens."""
    lengths = (rows.prompt_length[rows.group[chosen]] + rows.length[chosen]).tolist()
    return [chosen[indices] for indices in batching.micro_batches(lengths, budget)]


def pack(rows: Rows, chosen: np.ndarray, advantages: np.ndarray, step: int, device: torch.device) -> MicroBatch:
    """Pack the samples `chosen`, ascending by length, each with a reply of at least one token; `advantages` is of all rows.

    The last token of a reply predicts nothing and is left out. Prompts come first, each once, then the replies.
    """
    prompts, prompt_of = np.unique(rows.group[chosen], return_inverse=True)
    prompt_length, fed = rows.prompt_length[prompts], rows.length[chosen] - 1
    prompt_begin = ragged.starts(prompt_length)
    reply_begin = int(prompt_length.sum()) + ragged.starts(fed)
    own_prompt = prompt_length[prompt_of]
    tokens = np.concatenate(
        [
            rows.prompts[ragged.spans(rows.prompt_start[prompts], prompt_length)],
            rows.tokens[ragged.spans(rows.start[chosen], fed)],
        ]
    )
    positions = np.concatenate([ragged.ramps(prompt_length), ragged.spans(own_prompt, fed)])

    where = ragged.spans(rows.start[chosen], rows.length[chosen])
    kept = rows.mask[where]
    row = np.repeat(np.arange(len(chosen)), rows.length[chosen])[kept]
    offset = ragged.ramps(rows.length[chosen])[kept]
    last_of_prompt = (prompt_begin + prompt_length - 1)[prompt_of]
    predictors = np.where(offset == 0, last_of_prompt[row], reply_begin[row] + offset - 1)
    mask = rows.grid(rows.mask, chosen)
    width = mask.shape[1]

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        input_ids=send(tokens.astype(np.int64)[None]),
        position_ids=send(positions[None]),
        packing=_packing(prompt_begin[prompt_of], own_prompt, reply_begin, fed, len(tokens), device),
        predictors=send(predictors),
        targets=send(rows.tokens[where][kept].astype(np.int64)),
        cells=send(row * width + offset),
        mask=send(mask),
        behaviour=send(rows.grid(rows.behaviour, chosen)),
        advantages=send(advantages[chosen, :width].astype(np.float32)),
        reference=None if rows.reference is None else send(rows.grid(rows.reference, chosen)),
        fresh=send(mask * rows.grid(rows.steps == step, chosen)),
    )


def _packing(
    prompt_begin: np.ndarray, prompt: np.ndarray, reply_begin: np.ndarray, reply: np.ndarray, tokens: int, device: torch.device
) -> Packing:
    """Attention rows of `prompt` then `reply` tokens, given where each part lies among the packed `tokens`; all arrays [B]."""
    length = prompt + reply
    sizes = np.array(batching.length_buckets(length.tolist(), BUCKET_RATIO), np.int64)
    widths = length[np.cumsum(sizes) - 1]  # rows ascend, so a bucket's last is its longest
    row_begin = ragged.starts(np.repeat(widths, sizes))
    cell = np.concatenate([ragged.spans(row_begin, prompt), ragged.spans(row_begin + prompt, reply)])
    source = np.concatenate([ragged.spans(prompt_begin, prompt), ragged.spans(reply_begin, reply)])
    gather = np.zeros(int((sizes * widths).sum()), np.int64)
    gather[cell] = source
    take = np.empty(tokens, np.int64)
    take[source] = cell  # every copy of a shared prompt computes the same output; any one will do
    parts = torch.from_numpy(gather).to(device, non_blocking=True).split((sizes * widths).tolist())
    return Packing(
        rows=[part.view(size, width) for part, size, width in zip(parts, sizes.tolist(), widths.tolist(), strict=True)],
        cells=torch.from_numpy(take).to(device, non_blocking=True),
    )


def nothing(with_reference: bool, device: torch.device) -> MicroBatch:
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
        behaviour=none,
        advantages=none,
        reference=none if with_reference else None,
        fresh=none,
    )
