"""Conversations as supervised training takes them: rows of tokens, and which of them the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from runtime.data.templates import Message
from runtime.errors import UserError

Render = Callable[[Sequence[Message], bool], str]
"""A conversation as text; with True, up to where the assistant's reply begins."""


class SftRow(NamedTuple):
    """One row of a batch. The last token is one that is taught."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]: what the assistant writes, up to the token that ends its reply


def turns(render: Render, conversation: Sequence[Message], origin: str) -> list[list[str]]:
    """What the assistant is given and what it writes, in turn: of one row; or of several, each of which ends with another
    reply, where the template writes earlier replies otherwise than they were generated (as Qwen3's, which leaves out thoughts).

    Raises UserError for a template, of which `origin` tells, that writes something else before a reply than generation begins
    with.
    """
    rows: list[list[str]] = []
    before = ""
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        given, whole = render(conversation[:index], True), render(conversation[: index + 1], False)
        if not whole.startswith(given):
            raise UserError(f"{origin}: writes a reply otherwise than behind the prompt that generation begins with")
        if rows and given.startswith(before):
            rows[-1] += [given[len(before) :], whole[len(given) :]]
        else:
            rows.append([given, whole[len(given) :]])
        before = whole
    return rows


def taught_row(parts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> SftRow:
    """From the tokens of what the assistant is given and what it writes, in turn. What the template puts behind the token that
    ends a reply is given, as nobody generates it."""
    tokens: list[int] = []
    mask: list[bool] = []
    for index, part in enumerate(parts):
        ends = [place + 1 for place, token in enumerate(part) if token in stop_ids]
        taught = (ends[-1] if ends else len(part)) if index % 2 else 0
        tokens += part
        mask += [True] * taught + [False] * (len(part) - taught)
    end = len(mask) - mask[::-1].index(True) if True in mask else 0
    return SftRow(np.array(tokens[:end], np.int32), np.array(mask[:end], bool))
