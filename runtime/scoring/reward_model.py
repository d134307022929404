"""The forward-only engine of a reward model: a Hugging Face sequence classifier with one label, on packed texts.

A text's score is the head's output at the last token that is not padding. What a group's texts begin with is computed once.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from runtime import config, types
from runtime.data.tokenizer import Tokenizer
from runtime.errors import InvalidMessage, UserError
from runtime.models import hf_policy
from runtime.models.forward import cut_by_length, ramps, starts, tree_paths
from runtime.models.hf_policy import LABEL
from runtime.rewards.rules import RuleOutcome
from runtime.rewards.scorer import column, read_replies
from runtime.trainer.micro_batch import attention_rows
from runtime.types import REWARD_MODEL_COLUMN, GroupPayload, ScoreRequest, Scores, common

log = logging.getLogger("sluice")

TOO_LONG, NOT_FINITE = "model:too long", "model:not finite"

Texts = Sequence[Sequence[np.ndarray]]  # token ids of prompt and reply (of an episode its last branch), by group and episode


class ModelScorer:
    """Makes the input of `rewards.model`, and converts the model's numbers to weighted scores of groups."""

    def __init__(self, settings: config.RewardModel, policy: str, model: TorchRewardModel, fail: bool):
        """Set up the scorer. `policy` is the policy's folder. `fail`: a sample without a finite score raises an error. Raises
        UserError if the model reads text and its folder cannot render or tokenise it."""
        self._settings = settings
        self._model = model
        self._limit = settings.max_tokens or model.positions
        self._blamed = REWARD_MODEL_COLUMN if fail else ""
        self._policy = Tokenizer(policy)
        self._own = _own_tokenizer(settings, self._policy)
        log.info("%s reads %s", settings.path, "the policy's tokens" if self._own is None else "conversations as text")

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each group. A sample that is too long, or has no finite score, is counted as invalid. Raises
        InvalidMessage before any pass if a payload cannot be read; ServiceFault with `on_error: fail`."""
        payloads = [types.decode(GroupPayload, request.payload) for request in requests]
        texts = self._tokens(payloads) if self._own is None else self._conversations(self._own, requests, payloads)
        values = self._model.score([[text for text in group if len(text) <= self._limit] for group in texts])
        scores = []
        for payload, group, found in zip(payloads, texts, values, strict=True):
            given = iter(found.tolist())
            outcomes = [_outcome(next(given)) if len(text) <= self._limit else RuleOutcome(error=TOO_LONG) for text in group]
            scores.append(column(payload.group_id, REWARD_MODEL_COLUMN, self._settings.weight, outcomes, self._blamed))
        return scores

    def _tokens(self, payloads: Sequence[GroupPayload]) -> Texts:
        for payload in payloads:
            payload.check(self._model.vocab_size)
        return [[np.concatenate((payload.prompt, row.tokens)) for row in payload.last_rows] for payload in payloads]

    def _conversations(self, own: Tokenizer, requests: Sequence[ScoreRequest], payloads: Sequence[GroupPayload]) -> Texts:
        """Return tokens by the model's own chat template: the problem's messages, then one of the assistant with the rest."""
        for request in requests:
            if not request.messages:
                raise InvalidMessage(f"group {request.group_id}: no messages, which a reward model that reads text needs")
        replies = [
            [reply.conversation or reply.text for reply in read_replies(payload, self._policy.texts)] for payload in payloads
        ]
        conversations = [
            [*request.messages, {"role": "assistant", "content": reply}]
            for request, group in zip(requests, replies, strict=True)
            for reply in group
        ]
        ids = iter(own.encode_answered(conversations))
        return [[next(ids) for _ in group] for group in replies]


def _own_tokenizer(settings: config.RewardModel, policy: Tokenizer) -> Tokenizer | None:
    """Return the reward model's tokenizer if the model reads text; None if it reads the policy's tokens."""
    if settings.input == "tokens" or (settings.input == "auto" and not (Path(settings.path) / "tokenizer.json").is_file()):
        return None
    own = Tokenizer(settings.path)
    # Tokens that only the reward model has, such as padding, do no harm.
    if settings.input == "auto" and policy.vocabulary.items() <= own.vocabulary.items():
        return None
    try:
        _ = own.template
    except UserError as error:
        raise UserError(f"rewards.model.path: its tokenizer differs from the policy's, so it reads text: {error}") from None
    return own


def _outcome(value: float) -> RuleOutcome:
    return RuleOutcome(value) if math.isfinite(value) else RuleOutcome(error=NOT_FINITE)


KEY = "rewards.model.path"


class TorchRewardModel:
    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Load the model. Raises UserError unless `path` is a complete causal sequence classifier with one label."""
        classifier = hf_policy.load_model("AutoModelForSequenceClassification", path, KEY, num_labels=1)
        if not hasattr(classifier, "score"):
            raise UserError(f"{KEY}: {path!r}: a {classifier.config.model_type} model has no `score` head on its last token")
        self._body = getattr(classifier, classifier.base_model_prefix).requires_grad_(False).eval()
        for parameter in self._body.parameters():  # buffers stay as they are: rotary frequencies need float32
            parameter.data = parameter.data.to(dtype)
        self._body.to(device)
        # float32 for any weights: bfloat16 is so coarse that different replies would have equal scores.
        self._head = classifier.score.requires_grad_(False).float().to(device)
        self._pad = classifier.config.pad_token_id
        # A critic's output at a token is the value of the state after it; it never learned the value after a finished reply.
        self._is_critic = classifier.config.id2label == {0: LABEL}
        self._device = device
        self._budget = max_tokens_per_microbatch
        self.vocab_size: int = classifier.config.vocab_size
        self.positions: int = getattr(classifier.config, "max_position_embeddings", sys.maxsize)

    @torch.inference_mode()
    def score(self, groups: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Return one float32 for each text (int token ids, none empty) of each group."""
        texts = [text for group in groups for text in group]
        sizes = np.array([len(group) for group in groups], np.int64)
        begins = [min((common(group[0], text) for text in group), default=0) for group in groups]  # equal tokens
        owner, shared = np.repeat(np.arange(len(groups)), sizes), np.array(begins, np.int64)
        values = np.empty(len(texts), np.float32)
        for batch in cut_by_length([len(text) for text in texts], self._budget):
            values[batch] = self._forward([texts[index] for index in batch], owner[batch], shared)
        return np.split(values, np.cumsum(sizes)[:-1]) if groups else []

    def _forward(self, texts: Sequence[np.ndarray], owner: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Return the scores of one micro-batch. Tokens that a group's texts share are packed once, with its first text."""
        order = np.argsort(owner, kind="stable")
        lengths = np.array([len(texts[index]) for index in order], np.int64)
        first = np.diff(owner[order], prepend=-1) != 0
        known = np.where(first, 0, shared[owner[order]])
        paths, begins = tree_paths(lengths, known), starts(lengths)
        own = ramps(lengths) >= np.repeat(known, lengths)
        tokens, positions = np.concatenate([texts[index] for index in order]).astype(np.int64)[own], ramps(lengths)[own]
        packing = attention_rows(paths, np.stack([begins, known, lengths - known], 1), self._device)
        hidden = self._body(
            input_ids=self._send(tokens[None]), position_ids=self._send(positions[None]), packing=packing, use_cache=False
        ).last_hidden_state[0]
        where = np.empty(len(texts), np.int64)
        where[order] = paths[begins + [self._last(texts[index]) for index in order]]
        scores: torch.Tensor = self._head(hidden.index_select(0, self._send(where)).float())
        return scores.squeeze(1).cpu().numpy()

    def _last(self, text: np.ndarray) -> int:
        """Return the index of the token at which the score is read."""
        if self._is_critic:
            return max(len(text) - 2, 0)
        real = np.flatnonzero(text != self._pad) if self._pad is not None else [len(text) - 1]
        return int(real[-1]) if len(real) else 0

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
