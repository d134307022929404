"""The forward-only scorer of a frozen model: log-probabilities of replies that another model sampled.

A row is a prompt and as many of its replies as fit. Each reply sees only the prompt and itself: a group's prompt is computed
once, and short replies need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from runtime import types
from runtime.algorithms.losses import token_logprobs
from runtime.commands import Offload, Onload
from runtime.errors import InvalidMessage
from runtime.models import forward, hf_policy
from runtime.models.adapters import HostOffload
from runtime.process import platform
from runtime.rollout.torch.decoder import Decoder
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import RankInfo, confined, micro_batches, token_numbers
from runtime.trainer.micro_batch import Columns, MicroBatch
from runtime.trainer.rows import Rows, ramps
from runtime.types import GroupPayload, LogprobRequest, Logprobs, TokenSets

# ---- Scorer policy
#
# The forward-only scorer of a frozen model that Sluice's own decoder does not support. It computes what `TorchScorer` computes
# with transformers' model, as the trainer runs it.

Infer = Callable[[Rows, Columns], Iterator[tuple[MicroBatch, torch.Tensor]]]  # log-probabilities [N]; column `temperature`


def require_temperatures(requests: Sequence[LogprobRequest]) -> None:
    """Check the temperatures. Raises InvalidMessage unless all are above 0."""
    for request in requests:
        if not request.temperature > 0:
            raise InvalidMessage(f"group {request.group_id}: temperature is {request.temperature}, must be above 0")


def score(requests: Sequence[LogprobRequest], vocab_size: int, infer: Infer) -> list[Logprobs]:
    """Return log_softmax(logits / temperature)[token] of every reply token, over the tokens that sampling allowed, in the order
    of the requests.

    Raises InvalidMessage before any pass if a payload cannot be decoded or has token ids outside the vocabulary.
    """
    require_temperatures(requests)
    rows = train_rows.decode_samples(requests, vocab_size)
    predicted = ramps(rows.length) + np.repeat(rows.prompt_length[rows.group], rows.length) > 0
    rows = replace(rows, mask=predicted)  # includes tokens that are not trained
    values = np.zeros(len(rows.tokens), np.float32)
    temperatures = np.array([request.temperature for request in requests], np.float32)[rows.group]
    for batch, numbers in infer(rows, {"temperature": np.repeat(temperatures, rows.length)}):
        values[batch.places] = numbers.cpu().numpy()[: len(batch.places)]
    parts = rows.by_group(values)
    return [Logprobs(group_id=request.group_id, values=part) for request, part in zip(requests, parts, strict=True)]


class PolicyScorer:
    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Load the model. Raises UserError if it cannot be loaded."""
        self._model = hf_policy.load_policy(model_path).eval().requires_grad_(False)
        for parameter in self._model.parameters():  # buffers stay as they are: rotary embeddings need float32
            parameter.data = parameter.data.to(dtype)
        self._model.to(device)
        self.device = device
        self.weights: Iterable[torch.Tensor] = self._model.parameters()
        self._rank_info = RankInfo(0, 1, device)
        self._budget = max_tokens_per_microbatch

    @torch.inference_mode()
    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        """Return the log-probabilities as `score`."""
        return score(requests, self._model.config.vocab_size, self._infer)

    def _infer(self, rows: Rows, columns: Columns) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        packs = forward.packs(self._model)
        for batch in micro_batches(rows, rows.trained(), columns, self._budget, self._rank_info, packs):
            logits = forward.predict(self._model, batch.input_ids, batch.position_ids, batch.packing, batch.predictors)
            yield batch, token_numbers(token_logprobs, logits, None, logits.shape[1], batch)[0]


# Attention within a row is dense over its replies: beyond this length, a shared prompt costs more than it saves.
_ROW_TOKENS = 512
_LENGTH_RATIO = 1.25  # longest to shortest row of a micro-batch; trades padding against the number of calls
_LOGIT_ELEMENTS = 1 << 26  # in one chunk of logits, float32: 256 MiB


@dataclass
class _Row:
    """One prompt and some of its replies, with the offsets of their log-probabilities in the request's result."""

    request: int
    prompt: np.ndarray
    replies: list[np.ndarray]
    offsets: list[int]
    temperature: float
    kept: TokenSets | None  # of all replies of the request

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(map(len, self.replies))


class TorchScorer:
    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Load the model. Raises UserError if it cannot be loaded."""
        self._decoder = Decoder.from_pretrained(model_path, device, dtype)
        self.device = device
        self.weights: Iterable[torch.Tensor] = self._decoder.weights.tensors()
        self.vocab_size = self._decoder.config.vocab_size
        self._budget = max_tokens_per_microbatch

    @torch.inference_mode()
    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        """Return log_softmax(logits / temperature)[token] of every reply token, over the tokens that sampling allowed, in the
        order of the requests.

        Raises InvalidMessage before any pass if a payload cannot be decoded or has token ids outside the vocabulary.
        """
        require_temperatures(requests)
        rows, results = [], []
        for index, request in enumerate(requests):
            payload = types.decode(GroupPayload, request.payload)
            payload.check(self.vocab_size)
            payload.check_sets(self.vocab_size)
            rows += _rows(index, request.temperature, payload)
            values = np.empty(len(payload.tokens), np.float32)
            results.append(Logprobs(group_id=request.group_id, values=values))
        if rows:
            self._decoder.reserve_positions(max(row.length for row in rows))
        # Separate, as a dense mask over a long causal row would be large; rows of several replies are short.
        for several in (False, True):
            alike = [row for row in rows if (len(row.replies) > 1) == several]
            for batch in _microbatches(alike, self._budget):
                self._score(batch, results)
        return results

    def _score(self, batch: Sequence[_Row], results: list[Logprobs]) -> None:
        """Score one micro-batch: rows sorted by falling length, all of one reply or all of several."""
        width = batch[0].length
        tokens, positions = np.zeros((2, len(batch), width), np.int64)
        segment = np.full((len(batch), width), -1)  # 0 the prompt, then the replies; -1 padding
        sources, targets, inverse = [], [], []
        kept: list[TokenSets | None] = []
        for index, row in enumerate(batch):
            end = len(row.prompt)
            tokens[index, :end] = row.prompt
            positions[index, :end] = np.arange(end)
            segment[index, :end] = 0
            for number, reply in enumerate(row.replies, 1):
                start, end = end, end + len(reply)
                tokens[index, start:end] = reply
                positions[index, start:end] = len(row.prompt) + np.arange(len(reply))
                segment[index, start:end] = number
                # The prompt's last token predicts the first token of every reply. Without a prompt no token does; that first
                # token is not trained, and its number has no meaning.
                first = index * width + max(len(row.prompt) - 1, 0)
                sources.append(np.concatenate(([first], index * width + np.arange(start, end - 1))))
                targets.append(reply)
                offset = row.offsets[number - 1]
                kept.append(row.kept and row.kept.part(slice(offset, offset + len(reply))))
            inverse.append(np.full(row.length - len(row.prompt), 1.0 / row.temperature, np.float32))
        allowed = self._allowed(segment) if len(batch[0].replies) > 1 else None
        hidden = self._decoder.forward(self._to_device(tokens), self._to_device(positions), allowed).flatten(0, 1)
        sets = TokenSets.joined(kept, [len(reply) for reply in targets])
        values = self._gather(hidden, *(np.concatenate(each) for each in (sources, targets, inverse)), kept=sets)
        position = 0
        for row in batch:
            for offset, reply in zip(row.offsets, row.replies, strict=True):
                results[row.request].values[offset : offset + len(reply)] = values[position : position + len(reply)]
                position += len(reply)

    def _allowed(self, segment: np.ndarray) -> torch.Tensor:
        """Return the mask, bool [b, t, t]: causal, the prompt and the query's own reply. Padding attends to padding."""
        own = self._to_device(segment)
        t = segment.shape[1]
        causal = torch.ones((t, t), dtype=torch.bool, device=self.device).tril()
        return ((own.unsqueeze(1) == 0) | (own.unsqueeze(1) == own.unsqueeze(2))) & causal

    def _gather(
        self,
        hidden: torch.Tensor,
        sources: np.ndarray,
        targets: np.ndarray,
        inverse: np.ndarray,
        *,
        kept: TokenSets | None,
    ) -> np.ndarray:
        """Return the log-probability of token `targets[i]` predicted at `sources[i]`. Only these positions have logits."""
        values = []
        chunk = max(1, _LOGIT_ELEMENTS // self.vocab_size)
        for start in range(0, len(sources), chunk):
            part = slice(start, start + chunk)
            logits = self._decoder.logits(hidden.index_select(0, self._to_device(sources[part])))
            logits = logits.mul_(self._to_device(inverse[part]).unsqueeze(1))
            if kept is not None:
                logits = confined(logits, self._to_device(kept.bitmaps(np.arange(len(sources))[part])))
            logp = torch.log_softmax(logits, -1)
            values.append(logp.gather(1, self._to_device(targets[part].astype(np.int64)).unsqueeze(1)).squeeze(1))
        return torch.cat(values).cpu().numpy() if values else np.empty(0, np.float32)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _rows(request: int, temperature: float, payload: GroupPayload) -> list[_Row]:
    """Pack the replies of a group into rows, first fit, the longest first."""
    ends = np.cumsum(payload.lengths, dtype=np.int64)
    replies = np.split(payload.tokens, ends[:-1])
    kept = payload.kept_sets()
    rows: list[_Row] = []
    for index in sorted(range(len(replies)), key=lambda i: -len(replies[i])):
        reply = replies[index]
        if not len(reply):
            continue
        row = next((row for row in rows if row.length + len(reply) <= _ROW_TOKENS), None)
        if row is None:
            row = _Row(request, payload.prompt, [], [], temperature, kept)
            rows.append(row)
        row.replies.append(reply)
        row.offsets.append(int(ends[index]) - len(reply))
    return rows


def _microbatches(rows: Sequence[_Row], budget: int) -> Iterator[Sequence[_Row]]:
    """Yield rows by falling length. A micro-batch ends before a row that is much shorter than its first, or if padded tokens
    would exceed the budget. A row is never split."""
    rows = sorted(rows, key=lambda row: -row.length)
    start = 0
    while start < len(rows):
        longest = rows[start].length
        most = max(1, budget // longest)
        end = start + 1
        while end < min(start + most, len(rows)) and longest <= _LENGTH_RATIO * rows[end].length:
            end += 1
        yield rows[start:end]
        start = end


# ----------------------------------------------------------------------------------------------------------------------
# A reference that shares its devices with other roles: the model is on them only while it scores.


class LogprobScorer(Protocol):
    device: torch.device
    weights: Iterable[torch.Tensor]  # they never change

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]: ...


class OffloadableScorer:
    """`scorer` with a model that `Onload`, or else the next request, brings back to its device."""

    def __init__(self, scorer: LogprobScorer, away: bool):
        """Wrap `scorer`. `away`: give up the device now."""
        self._scorer = scorer
        self._on_host = HostOffload(scorer.weights if scorer.device.type != "cpu" else (), frozen=True)
        self._away = False
        if away:
            self.handle(Offload())

    def handle(self, command: Onload | Offload) -> None:
        """Move the model off or onto the device, unless it is there already."""
        if self._away != isinstance(command, Offload):
            self._away = not self._away
            if self._away:
                self._on_host.offload()
                platform.release(self._scorer.device)
            else:
                self._on_host.onload()

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        self.handle(Onload())
        return self._scorer.logprobs(requests)


def answers(scorers: Mapping[str, OffloadableScorer], requests: Sequence[Any]) -> list[bytes | None]:
    """Answer requests for log-probabilities, and commands, in order. Adjacent requests for log-probabilities are computed
    together. `scorers`: by the model's name in a request. Raises InvalidMessage for another model."""
    out: list[bytes | None] = []
    for asked, alike in groupby(requests, lambda request: isinstance(request, LogprobRequest)):
        together = list(alike)
        if asked:
            out += _logprobs(scorers, together)
            continue
        for command in together:
            for scorer in scorers.values():
                scorer.handle(command)
        out += [None] * len(together)
    return out


def _logprobs(scorers: Mapping[str, OffloadableScorer], requests: Sequence[LogprobRequest]) -> list[bytes]:
    found: dict[int, bytes] = {}
    for model in {request.model for request in requests}:
        if model not in scorers:
            raise InvalidMessage(f"model {model!r} is not one of {list(scorers)}")
        own = [at for at, request in enumerate(requests) if request.model == model]
        found |= zip(own, map(types.encode, scorers[model].logprobs([requests[at] for at in own])), strict=True)
    return [found[at] for at in range(len(requests))]
