"""What rules, remote rewards and reward models read of a group's episodes. Pure.

An episode is judged by its last branch. Most rules look for a final answer, and what an environment says may look like one: so
the text that they are given is what the model wrote last, and the whole conversation lies beside it. A reply is both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from runtime.types import GroupPayload, Sample


class ReplyDecoder(Protocol):
    """What is needed of a tokenizer."""

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Without special tokens."""


class ReadReply(Struct, frozen=True):
    """`text`: the model's last turn; "" where it had none. `conversation`: all that stands behind the group's prompt, by the
    model and its environment; "" where that is `text` alone."""

    row: Sample
    text: str
    conversation: str

    @property
    def everything(self) -> str:
        return self.conversation or self.text


def read_replies(payload: GroupPayload, tokenizer: ReplyDecoder) -> list[ReadReply]:
    """Of each episode."""
    rows = payload.last_rows
    turns = [last_turn(row) for row in rows]
    several = [len(turn) < len(row.tokens) for turn, row in zip(turns, rows, strict=True)]
    whole = [row.tokens for row, more in zip(rows, several, strict=True) if more]
    texts = tokenizer.decode_batch([*turns, *whole])
    rest = iter(texts[len(rows) :])
    return [ReadReply(row, text, next(rest) if more else "") for row, text, more in zip(rows, texts, several, strict=False)]


def last_turn(row: Sample) -> np.ndarray:
    """int32: the last run of tokens that are trained."""
    given = np.flatnonzero(row.loss_mask == 0)
    trained = np.flatnonzero(row.loss_mask)
    if not len(given) or not len(trained):
        return row.tokens[: len(trained)]
    before = given[given < trained[-1]]
    return row.tokens[before[-1] + 1 if len(before) else 0 : trained[-1] + 1]
