"""One row of a file as a handler reads it: prompt, label and system text, by the configured columns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

Row = dict[str, Any]
Messages = list[dict[str, str]]

ROLES = ("system", "user", "assistant")
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}  # by "from", with the text as "value"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_encode = msgspec.json.Encoder(decimal_format="number").encode


class Rejected(Exception):
    """A row that is left out; the message is the reason under which it is counted."""


class MissingColumn(Exception):
    """A row without the column that holds `role`: "prompt", "query", "label", "system", "difficulty", "environment" or
    "additional"."""

    def __init__(self, role: str, column: str):
        super().__init__(role, column)
        self.role, self.column = role, column


class FieldColumns(Struct, frozen=True, kw_only=True):
    """The column of each role; "" for none. The columns of roles in `optional` may be missing from a row."""

    prompt: str
    label: str
    query: str = ""
    system: str = ""
    optional: tuple[str, ...] = ()


class Fields:
    """A row with its columns. The methods raise Rejected for an unusable value, MissingColumn for a missing column."""

    def __init__(self, row: Row, columns: FieldColumns, system_prompt: str = ""):
        self.row = row
        self._columns = columns
        self._system_prompt = system_prompt

    def value(self, role: str) -> Any:
        """Return the value in the column of `role`; None if the format has no such column."""
        column = getattr(self._columns, role)
        if not column or (role in self._columns.optional and column not in self.row):
            return None
        if column not in self.row:
            raise MissingColumn(role, column)
        return self.row[column]

    def named(self, role: str) -> bool:
        """Return whether the format has a column of `role`."""
        return bool(getattr(self._columns, role))

    def has(self, role: str) -> bool:
        """Return whether the row has the column of `role`."""
        return getattr(self._columns, role) in self.row

    def conversation(self) -> Messages:
        """Return the prompt as messages, the system text first. A text has the query in a line of its own below."""
        prompt, query = _chat_if_any(self.value("prompt")), self.value("query")
        if isinstance(prompt, list):
            messages = _chat(prompt)
        elif prompt is None or isinstance(prompt, str):
            parts = [prompt or "", query if isinstance(query, str) else ""]
            messages = [{"role": "user", "content": "\n".join(part for part in parts if part)}]
        else:
            raise Rejected("prompt that is not text")
        if not messages[-1]["content"].strip():
            raise Rejected("empty prompt")
        return self._with_system(messages)

    def _with_system(self, messages: Messages) -> Messages:
        system = self._system()
        return messages if not system or messages[0]["role"] == "system" else [{"role": "system", "content": system}, *messages]

    def chat(self) -> Messages:
        """Return the prompt as messages, the system text first. Any role may have the last message."""
        prompt = _chat_if_any(self.value("prompt"))
        if not isinstance(prompt, list):
            raise Rejected("prompt that is not a chat")
        return self._with_system(_turns(prompt))

    def label(self) -> str:
        """Return the label as text, without the point of a whole float: contest files write 142 as 142.0."""
        return label_text(self.value("label"))

    def _system(self) -> str:
        value = self.value("system")
        if value is not None and not isinstance(value, str):
            raise Rejected("system text that is not text")
        return value or self._system_prompt


def extra(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns `names` as JSON values: dates are text, bytes base64, NaN null. Raises MissingColumn, Rejected."""
    for name in names:
        if name not in row:
            raise MissingColumn("additional", name)
    found: dict[str, Any] = msgspec.json.decode(
        _json({name: row[name] for name in names}, "additional column that is no JSON value")
    )
    return found


def _json(value: Any, fault: str) -> str:
    try:
        return _encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        raise Rejected(fault) from None


def label_text(value: Any) -> str:
    """Return a label as text: a whole number without a point (142.0 as 142), a mapping or a list of mappings (such as tests of
    programs) as JSON. Raises Rejected for a null or empty label and for other types."""
    if value is None:
        raise Rejected("null label")
    if isinstance(value, dict) or (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        return _json(value, "label that is no JSON value")
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise Rejected("label that is neither text nor a number")
    if isinstance(value, (float, Decimal)):
        if math.isnan(value):
            raise Rejected("null label")  # as pandas writes one
        value = int(value) if math.isfinite(value) and value == int(value) else value
    text = (format(value, "f") if isinstance(value, Decimal) else str(value)).strip()
    if not text:
        raise Rejected("empty label")
    return text


def difficulty(row: Row, column: str) -> float:
    """Return the difficulty of a row's problem, above 0: a number, or the number in a text ("Level 3").

    Raises Rejected for 0, which files write for unknown, and MissingColumn for a missing column."""
    if column not in row:
        raise MissingColumn("difficulty", column)
    value = row[column]
    if isinstance(value, str):
        found = _NUMBER.search(value)
        value = float(found.group()) if found else None
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not math.isfinite(value) or value <= 0:
        raise Rejected("unknown difficulty")
    return float(value)


def question(messages: Messages) -> str:
    """Return the problem itself: what the user says last."""
    return next(message["content"] for message in reversed(messages) if message["role"] == "user")


def _chat(turns: list[Any]) -> Messages:
    messages = _turns(turns)
    if messages[-1]["role"] != "user":
        raise Rejected("chat that does not end with the user")
    return messages


def _chat_if_any(prompt: Any) -> Any:
    """Return the chat that a text holds as JSON, as in tables with a column of texts; return any other prompt unchanged."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("[{"):
        return prompt
    try:
        turns = msgspec.json.decode(prompt, type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError):
        return prompt
    return turns if all({"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys() for turn in turns) else prompt


def _turns(turns: list[Any]) -> Messages:
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Rejected("prompt that is not text")
        role, content = turn.get("role"), turn.get("content")
        if role is None:
            role, content = _SHAREGPT.get(str(turn.get("from"))), turn.get("value")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "\n".join(str(part.get("text")) for part in content)
        if role not in ROLES or not isinstance(content, str):
            raise Rejected("prompt that is not text")
        messages.append({"role": role, "content": content})
    if not messages:
        raise Rejected("empty prompt")
    return messages
