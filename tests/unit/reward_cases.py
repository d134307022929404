"""Groups of replies as the reward services get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from runtime import types
from runtime.types import FinishReason, GroupPayload, Sample, ScoreRequest


def make_sample(tokens: np.ndarray | Sequence[int]) -> Sample:
    count = len(tokens)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.ones(count, np.uint8),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        finish_reason="stop",
    )


def make_branch(*parts: tuple[str, bool], finish: FinishReason = "stop") -> Sample:
    """Texts as their bytes, each with whether it is the model's, trained in this branch."""
    tokens = [list(text.encode()) for text, _ in parts]
    mask = [np.full(len(part), trained, np.uint8) for part, (_, trained) in zip(tokens, parts, strict=True)]
    whole = make_sample([token for part in tokens for token in part])
    return replace(whole, loss_mask=np.concatenate([np.zeros(0, np.uint8), *mask]), finish_reason=finish)


def make_request(
    group_id: int,
    prompt: np.ndarray | Sequence[int],
    replies: Sequence[np.ndarray | Sequence[int]],
    messages: list[dict[str, str]] | None = None,
    label: str = "5",
    extra: dict[str, Any] | None = None,
) -> ScoreRequest:
    payload = GroupPayload.of(group_id, np.asarray(prompt, np.int32), list(map(make_sample, replies)))
    return ScoreRequest(
        group_id=group_id,
        label=label,
        payload=types.encode(payload),
        source="test/train",
        messages=messages or [],
        extra=extra or {},
    )
