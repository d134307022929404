"""What rules, remote rewards and reward models read of a group's episodes. Pure.

An episode is judged by its last branch. Most rules look for a final answer, and what an environment says may look like one: so
the text that they are given is what the model wrote last, and the whole conversation lies beside it. A reply is both at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from runtime.types import GroupPayload, Sample

_HEAD = 8  # tokens, of which the mark that opens a thought may be
_OPENED = re.compile(r"<think>\s*\Z")


class ReplyDecoder(Protocol):
    """What is needed of a tokenizer."""

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Without special tokens."""


class ReadReply(Struct, frozen=True):
    """`text`: the model's last turn, with the `<think>` that its prompt may end with; "" where it had none. `conversation`: all
    that stands behind the group's prompt, by the model and its environment; "" where that is `text` alone."""

    row: Sample
    text: str
    conversation: str

    @property
    def everything(self) -> str:
        return self.conversation or self.text


def read_replies(payload: GroupPayload, tokenizer: ReplyDecoder) -> list[ReadReply]:
    """Of each episode."""
    rows = payload.last_rows
    spans = [_last_turn(row) for row in rows]
    turns = [row.tokens[span] for row, span in zip(rows, spans, strict=True)]
    several = [len(turn) < len(row.tokens) for turn, row in zip(turns, rows, strict=True)]
    whole = [row.tokens for row, more in zip(rows, several, strict=True) if more]
    before = [row.tokens[: span.start] if span.start else payload.prompt for row, span in zip(rows, spans, strict=True)]
    texts = tokenizer.decode_batch([*turns, *whole, *(each[-_HEAD:] for each in (*before, payload.prompt))])
    heads, first, count = texts[-1 - len(rows) : -1], texts[-1], len(rows)
    rest = (_thought(text, first) for text in texts[count : count + len(whole)])
    return [
        ReadReply(row, _thought(text, head), next(rest) if more else "")
        for row, text, head, more in zip(rows, texts, heads, several, strict=False)
    ]


def _thought(text: str, before: str) -> str:
    """A reply with the mark that opens its thought, where the template has written that before it."""
    found = _OPENED.search(before)
    return text if found is None or not text or text.lstrip().startswith("<think>") else found.group() + text


def last_turn(row: Sample) -> np.ndarray:
    """int32: the last run of tokens that are trained."""
    return row.tokens[_last_turn(row)]


def _last_turn(row: Sample) -> slice:
    given = np.flatnonzero(row.loss_mask == 0)
    trained = np.flatnonzero(row.loss_mask)
    if not len(given) or not len(trained):
        return slice(0, len(trained))
    before = given[given < trained[-1]]
    return slice(before[-1] + 1 if len(before) else 0, trained[-1] + 1)
