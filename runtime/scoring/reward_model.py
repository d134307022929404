"""The forward-only engine of a reward model: a Hugging Face sequence classifier with one label, on packed texts.

Its number for a text is the head's output at the last token that is not padding, as transformers has it. Texts of a group begin
with the same tokens: these are computed once in a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.models.value_model import LABEL
from runtime.trainer.batch import attention_rows
from runtime.trainer.batching import micro_batches, ramps, spans, starts

KEY = "rewards.model.path"


class TorchRewardModel:
    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, max_tokens_per_microbatch: int):
        """Raises UserError when `path` is no folder of a causal sequence classifier with one label, or is incomplete."""
        classifier = hf_policy.load_packed("AutoModelForSequenceClassification", path, KEY, num_labels=1)
        if not hasattr(classifier, "score"):
            raise UserError(f"{KEY}: {path!r}: a {classifier.config.model_type} model has no `score` head on its last token")
        self._body = getattr(classifier, classifier.base_model_prefix).requires_grad_(False).eval()
        for parameter in self._body.parameters():  # but not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
        self._body.to(device)
        # In float32 whatever the weights are: steps of bfloat16 would make different replies equal.
        self._head = classifier.score.requires_grad_(False).float().to(device)
        self._pad = classifier.config.pad_token_id
        # A critic's output at a token is the value of the state behind it, and it never learned one of a finished reply.
        self._is_critic = classifier.config.id2label == {0: LABEL}
        self._device = device
        self._budget = max_tokens_per_microbatch
        self.vocab_size: int = classifier.config.vocab_size
        self.positions: int = getattr(classifier.config, "max_position_embeddings", sys.maxsize)

    @torch.inference_mode()
    def score(self, groups: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """float32, one for each text (int token ids, none empty) of each group."""
        texts = [text for group in groups for text in group]
        sizes = np.array([len(group) for group in groups], np.int64)
        owner, shared = np.repeat(np.arange(len(groups)), sizes), np.array([_common(group) for group in groups], np.int64)
        values = np.empty(len(texts), np.float32)
        for batch in micro_batches([len(text) for text in texts], self._budget):
            values[batch] = self._forward([texts[index] for index in batch], owner[batch], shared)
        return np.split(values, np.cumsum(sizes)[:-1]) if groups else []

    def _forward(self, texts: Sequence[np.ndarray], owner: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """One micro-batch, ascending by length: first what the texts of each group share, each once, then their tails."""
        owners, first, group = np.unique(owner, return_index=True, return_inverse=True)
        head = shared[owners]
        own_head = head[group]
        tail = np.array([len(text) for text in texts], np.int64) - own_head
        head_begin, tail_begin = starts(head), int(head.sum()) + starts(tail)
        heads = [texts[index][:length] for index, length in zip(first, head, strict=True)]
        tails = [text[length:] for text, length in zip(texts, own_head, strict=True)]
        tokens = np.concatenate([*heads, *tails]).astype(np.int64)
        positions = np.concatenate([ramps(head), spans(own_head, tail)])
        packing = attention_rows(head_begin[group], own_head, tail_begin, tail, len(tokens), self._device)
        hidden = self._body(
            input_ids=self._send(tokens[None]), position_ids=self._send(positions[None]), packing=packing, use_cache=False
        ).last_hidden_state[0]
        last = np.array([self._last(text) for text in texts], np.int64)
        where = np.where(last < own_head, head_begin[group] + last, tail_begin + last - own_head)
        scores: torch.Tensor = self._head(hidden.index_select(0, self._send(where)).float())
        return scores.squeeze(1).cpu().numpy()

    def _last(self, text: np.ndarray) -> int:
        """The token at which the score is read."""
        if self._is_critic:
            return max(len(text) - 2, 0)
        real = np.flatnonzero(text != self._pad) if self._pad is not None else [len(text) - 1]
        return int(real[-1]) if len(real) else 0

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _common(texts: Sequence[np.ndarray]) -> int:
    """With how many equal tokens all `texts` begin; 0 when there is none."""
    length = min(map(len, texts), default=0)
    for text in texts[1:]:
        different = np.flatnonzero(text[:length] != texts[0][:length])
        length = int(different[0]) if len(different) else length
    return length
