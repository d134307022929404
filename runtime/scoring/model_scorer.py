"""Scores of groups by a reward model: what it reads of a reply, and how its numbers become scores. Loads no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from runtime import codec, config
from runtime.data.tokenizer import Tokenizer
from runtime.errors import InvalidMessage, UserError
from runtime.rewards.combination import column
from runtime.rewards.rules import RuleOutcome
from runtime.types import REWARD_MODEL, GroupPayload, ScoreRequest, Scores

log = logging.getLogger("sluice")

TOO_LONG, NOT_FINITE = "model:too long", "model:not finite"

Texts = Sequence[Sequence[np.ndarray]]  # token ids of prompt and reply, by group and sample


class Classifier(Protocol):
    """A model that gives one number for a text."""

    vocab_size: int
    positions: int

    def score(self, groups: Texts) -> list[np.ndarray]:
        """float32, one for each text of each group."""


class ModelScorer:
    """Scores groups by `rewards.model`, weighted."""

    def __init__(self, settings: config.RewardModel, policy: str, model: Classifier, fail: bool):
        """`policy` is the policy's folder. `fail`: a sample without a finite score raises instead of being masked.

        Raises UserError when the model is to read text and its folder cannot render or tokenise it.
        """
        self._settings = settings
        self._model = model
        self._limit = settings.max_tokens or model.positions
        self._blamed = REWARD_MODEL if fail else ""
        self._policy = Tokenizer(policy)
        self._own = _own_tokenizer(settings, self._policy)
        log.info("%s reads %s", settings.path, "the policy's tokens" if self._own is None else "conversations as text")

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Scores of each group, in order. A sample that is too long, or whose score is not finite, has valid 0 and is counted.

        Raises InvalidMessage, computing nothing, for what cannot be read; ServiceFault with `on_error: fail`.
        """
        payloads = [codec.decode(GroupPayload, request.payload) for request in requests]
        texts = self._tokens(payloads) if self._own is None else self._conversations(self._own, requests, payloads)
        values = self._model.score([[text for text in group if len(text) <= self._limit] for group in texts])
        scores = []
        for payload, group, found in zip(payloads, texts, values, strict=True):
            given = iter(found.tolist())
            outcomes = [_outcome(next(given)) if len(text) <= self._limit else RuleOutcome(error=TOO_LONG) for text in group]
            scores.append(column(payload.group_id, REWARD_MODEL, self._settings.weight, outcomes, self._blamed))
        return scores

    def _tokens(self, payloads: Sequence[GroupPayload]) -> Texts:
        for payload in payloads:
            payload.check(self._model.vocab_size)
        return [[np.concatenate((payload.prompt, sample.tokens)) for sample in payload.samples] for payload in payloads]

    def _conversations(self, own: Tokenizer, requests: Sequence[ScoreRequest], payloads: Sequence[GroupPayload]) -> Texts:
        """The problem's messages and the reply as the assistant's, by the model's own chat template."""
        replies = self._policy.decode_batch([sample.tokens for payload in payloads for sample in payload.samples])
        owners = [request for request, payload in zip(requests, payloads, strict=True) for _ in payload.samples]
        for request in requests:
            if not request.messages:
                raise InvalidMessage(f"group {request.group_id}: no messages, which a reward model that reads text needs")
        ids = iter(
            own.encode_answered(
                [
                    [*request.messages, {"role": "assistant", "content": reply}]
                    for request, reply in zip(owners, replies, strict=True)
                ]
            )
        )
        return [[next(ids) for _ in payload.samples] for payload in payloads]


def _own_tokenizer(settings: config.RewardModel, policy: Tokenizer) -> Tokenizer | None:
    """The reward model's, when it is to read text; None when it reads the policy's tokens."""
    if settings.input == "tokens" or (settings.input == "auto" and not (Path(settings.path) / "tokenizer.json").is_file()):
        return None
    own = Tokenizer(settings.path)
    # Tokens that only the reward model has, for padding say, do no harm.
    if settings.input == "auto" and policy.vocabulary.items() <= own.vocabulary.items():
        return None
    try:
        _ = own.template
    except UserError as error:
        raise UserError(f"rewards.model.path: its tokenizer is not the policy's, so it reads text, but: {error}") from None
    return own


def _outcome(value: float) -> RuleOutcome:
    return RuleOutcome(value) if math.isfinite(value) else RuleOutcome(error=NOT_FINITE)
