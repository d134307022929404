"""The forward-only scorer of a frozen model that Sluice's own decoder does not compute: what `scorer_torch` says, by
transformers' model, as the trainer runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from runtime.algorithms.losses import token_logprobs
from runtime.errors import InvalidMessage
from runtime.models import hf_policy, passes
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import RankInfo
from runtime.trainer.head import token_numbers
from runtime.trainer.micro_batch import Columns, MicroBatch, micro_batches
from runtime.trainer.rows import Rows, ramps
from runtime.types import LogprobRequest, Logprobs

Infer = Callable[[Rows, Columns], Iterator[tuple[MicroBatch, torch.Tensor]]]  # log-probabilities [N] at a column `temperature`


def require_temperatures(requests: Sequence[LogprobRequest]) -> None:
    """Raises InvalidMessage for one that is none."""
    for request in requests:
        if not request.temperature > 0:
            raise InvalidMessage(f"group {request.group_id}: temperature is {request.temperature}, must be above 0")


def score(requests: Sequence[LogprobRequest], vocab_size: int, infer: Infer) -> list[Logprobs]:
    """log_softmax(logits / temperature)[token] of every reply token, over the tokens that it was sampled from, as the requests
    are in order.

    Raises InvalidMessage, computing nothing, for a payload that cannot be decoded, or token ids outside the vocabulary.
    """
    require_temperatures(requests)
    rows = train_rows.decode_samples(requests, vocab_size)
    predicted = ramps(rows.length) + np.repeat(rows.prompt_length[rows.group], rows.length) > 0
    rows = replace(rows, mask=predicted)  # also of tokens that are not trained on
    values = np.zeros(len(rows.tokens), np.float32)
    temperatures = np.array([request.temperature for request in requests], np.float32)[rows.group]
    for batch, numbers in infer(rows, {"temperature": np.repeat(temperatures, rows.length)}):
        values[batch.places] = numbers.cpu().numpy()[: len(batch.places)]
    parts = rows.by_group(values)
    return [Logprobs(group_id=request.group_id, values=part) for request, part in zip(requests, parts, strict=True)]


class PolicyScorer:
    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Raises UserError when the model cannot be loaded."""
        self._model = hf_policy.load_policy(model_path).eval().requires_grad_(False)
        for parameter in self._model.parameters():  # not the buffers, as those of rotary embeddings want float32
            parameter.data = parameter.data.to(dtype)
        self._model.to(device)
        self.device = device
        self.weights: Iterable[torch.Tensor] = self._model.parameters()
        self._rank_info = RankInfo(0, 1, device)
        self._budget = max_tokens_per_microbatch

    @torch.inference_mode()
    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        """As `score`."""
        return score(requests, self._model.config.vocab_size, self._infer)

    def _infer(self, rows: Rows, columns: Columns) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        packs = passes.packs(self._model)
        for batch in micro_batches(rows, rows.trained(), columns, self._budget, self._rank_info, packs):
            logits = passes.predict(self._model, batch.input_ids, batch.position_ids, batch.packing, batch.predictors)
            yield batch, token_numbers(token_logprobs, logits, None, logits.shape[1], batch)[0]
