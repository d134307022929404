"""The forward-only scorer of a frozen model: log-probabilities of replies that another model sampled.

A group's prompt is computed once, as in training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, Protocol

import numpy as np
import torch

from runtime import types
from runtime.commands import Offload, Onload
from runtime.config import Config
from runtime.errors import InvalidMessage
from runtime.models import forward, hf_folder, hf_policy
from runtime.models.adapters import HostOffload
from runtime.process import platform
from runtime.rollout.torch.decoder import Decoder
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import PerToken, RankInfo, micro_batches, token_numbers
from runtime.trainer.micro_batch import Columns, MicroBatch
from runtime.trainer.rows import Routes, Rows
from runtime.types import LogprobRequest, Logprobs

Infer = Callable[[Rows, Columns], Iterator[tuple[MicroBatch, torch.Tensor]]]  # log-probabilities [N]; column `temperature`


def replayed(config: Config, folder: str) -> Routes | None:
    """Return the routes that the reference in `folder` takes over from the rollouts: those of a policy with as many experts."""
    if config.moe.router_replay == "off":
        return None
    policy, own = (hf_folder.experts_of(hf_folder.read_raw(path)) for path in (config.model.path, folder))
    return own.routes if policy is not None and own is not None and policy.routes == own.routes else None


def score(requests: Sequence[LogprobRequest], vocab_size: int, infer: Infer, routes: Routes | None = None) -> list[Logprobs]:
    """Return log_softmax(logits / temperature)[token] of every reply token, over the tokens that sampling allowed. `routes`: as
    in `Needs.experts`. Raises InvalidMessage before any pass for a temperature that is not above 0, a torn payload, or unknown
    token ids."""
    for request in requests:
        if not request.temperature > 0:
            raise InvalidMessage(f"group {request.group_id}: temperature is {request.temperature}, must be above 0")
    rows = train_rows.decode_samples(requests, vocab_size, routes)
    predicted = forward.ramps(rows.length) + np.repeat(rows.prompt_length[rows.group], rows.length) > 0
    rows = replace(rows, mask=predicted)  # includes tokens that are not trained
    values = np.zeros(len(rows.tokens), np.float32)
    temperatures = np.array([request.temperature for request in requests], np.float32)[rows.group]
    for batch, numbers in infer(rows, {"temperature": np.repeat(temperatures, rows.length)}):
        values[batch.places] = numbers.cpu().numpy()[: len(batch.places)]
    parts = rows.by_group(values)
    return [Logprobs(group_id=request.group_id, values=part) for request, part in zip(requests, parts, strict=True)]


class LocalScorer(ABC):
    """A scorer with the whole model in this process, on `device`. Its `weights` never change."""

    device: torch.device
    weights: Iterable[torch.Tensor]
    vocab_size: int
    packs = True  # whether the model runs packed
    routes: Routes | None = None  # if tokens go to the experts that they took in the rollout, as in `Needs.experts`

    def __init__(self, device: torch.device, max_tokens_per_microbatch: int):
        self.device, self._budget, self._rank_info = device, max_tokens_per_microbatch, RankInfo(0, 1, device)

    @abstractmethod
    def outputs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return outputs and head of the batch's predictors, as `token_numbers` takes them."""

    @torch.inference_mode()
    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        return score(requests, self.vocab_size, self._infer, self.routes)

    def _infer(self, rows: Rows, columns: Columns) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        for batch in micro_batches(rows, rows.trained(), columns, self._budget, self._rank_info, self.packs):
            yield batch, token_numbers(_chosen, *self.outputs(batch), self.vocab_size, batch)[0]


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> PerToken:
    """Return the tokens' log-probabilities, float32 [N], twice: nothing else is asked of a frozen model."""
    found = torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0]
    return found, found


class PolicyScorer(LocalScorer):
    """The scorer of a model that Sluice's own decoder does not support: transformers' model, as the trainer runs it."""

    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Load the model. Raises UserError if it cannot be loaded."""
        super().__init__(device, max_tokens_per_microbatch)
        self._model = hf_policy.load_policy(model_path).eval().requires_grad_(False)
        for parameter in self._model.parameters():  # buffers stay as they are: rotary embeddings need float32
            parameter.data = parameter.data.to(dtype)
        self._model.to(device)
        self.weights, self.vocab_size = self._model.parameters(), self._model.config.vocab_size
        self.packs = forward.packs(self._model)
        self._watches = [module.watch for module in self._model.modules() if hasattr(module, "watch")]

    def outputs(self, batch: MicroBatch) -> tuple[torch.Tensor, None]:
        for layer, watch in enumerate(self._watches):
            watch.taken = None if batch.experts is None else batch.experts[:, layer].long()
        return forward.predict(self._model, batch.input_ids, batch.position_ids, batch.packing, batch.predictors), None


class TorchScorer(LocalScorer):
    """The scorer with Sluice's own decoder."""

    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Load the model. Raises UserError if it cannot be loaded."""
        super().__init__(device, max_tokens_per_microbatch)
        self._decoder = Decoder.from_pretrained(model_path, device, dtype)
        self.weights, self.vocab_size = self._decoder.weights.tensors(), self._decoder.config.vocab_size

    def outputs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._decoder.reserve_positions(int(batch.sequences[:, 1:].sum(1).max()))
        hidden = self._decoder.packed(batch.input_ids[0], batch.position_ids[0], batch.packing, taken=batch.experts)
        hidden = hidden.index_select(0, batch.predictors)
        capped = self._decoder.config.softcap  # more than a product with the head
        return (self._decoder.logits(hidden), None) if capped else (hidden, self._decoder.weights.head)


class LogprobScorer(Protocol):
    device: torch.device
    weights: Iterable[torch.Tensor]  # they never change

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]: ...


class OffloadableScorer:
    """A reference that may share its devices: `Onload`, or else the next request, brings the model of `scorer` back."""

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
        for command, scorer in product(together, scorers.values()):
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
