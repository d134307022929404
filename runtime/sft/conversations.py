"""Conversations in supervised training: rows of tokens, and a mask of the tokens that the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from runtime.data.handlers import SlotTemplate
from runtime.data.templates import ChatTemplate, Message
from runtime.errors import UserError

Render = Callable[[Sequence[Message], bool], str]
"""Renders a conversation as text; with True, up to where the assistant's reply begins."""


class SftRow(NamedTuple):
    """One row of a batch. The last token is a taught one."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]: the assistant's tokens, up to the token that ends its reply


def turns(render: Render, conversation: Sequence[Message], origin: str) -> list[list[str]]:
    """Return rows of text parts: the assistant's input and its reply, in turn. A conversation is one row if its template writes
    earlier replies as they were generated; otherwise (Qwen3's leaves out earlier thoughts) several, each up to another reply.
    Raises UserError, which names the template by `origin`, if the text before a reply is not that before a generated one."""
    rows: list[list[str]] = []
    before = ""
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        given, whole = render(conversation[:index], True), render(conversation[: index + 1], False)
        if not whole.startswith(given):
            raise UserError(f"{origin}: does not write a reply directly after the prompt that generation begins with")
        if rows and given.startswith(before):
            rows[-1] += [given[len(before) :], whole[len(given) :]]
        else:
            rows.append([given, whole[len(given) :]])
        before = whole
    return rows


def taught_row(parts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> SftRow:
    """Return the row of an assistant's inputs and replies, in turn. Tokens after a reply's end are not taught."""
    tokens: list[int] = []
    mask: list[bool] = []
    for index, part in enumerate(parts):
        ends = [position + 1 for position, token in enumerate(part) if token in stop_ids]
        taught = (ends[-1] if ends else len(part)) if index % 2 else 0
        tokens += part
        mask += [True] * taught + [False] * (len(part) - taught)
    end = len(mask) - mask[::-1].index(True) if True in mask else 0
    return SftRow(np.array(tokens[:end], np.int32), np.array(mask[:end], bool))


def taught_rows(
    template: ChatTemplate | SlotTemplate,
    encode: Callable[[list[str]], Iterable[list[int]]],
    conversations: Iterable[Sequence[Message]],
    stop_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[list[SftRow]]:
    """Return the rows of each conversation, which `template` renders with `tools`. `encode` returns the tokens of texts."""

    def render(messages: Sequence[Message], prompt: bool) -> str:
        return template.render(messages, prompt, tools) if isinstance(template, ChatTemplate) else template.render(messages)

    texts = [turns(render, each, template.origin) for each in conversations]
    encoded = iter(encode([part for rows in texts for row in rows for part in row]))
    return [[taught_row([next(encoded) for _ in row], stop_ids) for row in rows] for rows in texts]
