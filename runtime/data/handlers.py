"""From rows of a file to problems: a handler knows one layout of columns.

A handler is `handler(row, data) -> (messages, label)`; it raises `Rejected` for a row that cannot be used (dropped and
counted by reason) and `MissingColumn` for a column that is not there (an error: the configuration names the wrong one).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from runtime import config
from runtime.data.reading import Row, read_rows
from runtime.errors import UserError
from runtime.registry import Registry

Messages = list[dict[str, str]]
Handler = Callable[[Row, config.Data], tuple[Messages, str]]

HANDLERS: Registry[Handler] = Registry("data.handler")


class Problem(msgspec.Struct, frozen=True):
    """One prompt with its label. `id` is unique in a file and the same in every run: "gsm8k/train:17"."""

    id: str
    messages: Messages
    label: str
    source: str  # the file's folder and stem: "gsm8k/train"


class ProblemSet(msgspec.Struct, kw_only=True):
    """The problems of one file, in its order, and the rows left out, counted by reason."""

    problems: list[Problem]
    rows: int
    dropped: dict[str, int] = {}

    def report(self) -> str:
        """One line for the log: "7474 rows, 7472 problems (dropped: 2 null label)"."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{self.rows} rows, {len(self.problems)} problems" + (f" (dropped: {reasons})" if reasons else "")


class Rejected(Exception):
    """A row that is left out; the message is the reason under which it is counted."""


class MissingColumn(Exception):
    """A row without the column that the configuration key `key` names."""

    def __init__(self, key: str, column: str):
        super().__init__(key, column)
        self.key, self.column = key, column


def load_problems(path: str, data: config.Data, key: str = "data.train") -> ProblemSet:
    """Read `path` with the handler `data.handler`. `key` is the configuration key that named the path.

    Raises UserError for an unknown handler, an unusable file, a missing column, and a file of which no row is left.
    """
    handler = HANDLERS.get(data.handler)
    file = Path(path)
    source = f"{file.absolute().parent.name}/{file.stem}"
    problems: list[Problem] = []
    dropped: Counter[str] = Counter()
    for position, row in read_rows(file, key):
        try:
            messages, label = handler(row, data)
        except Rejected as reason:
            dropped[str(reason)] += 1
        except MissingColumn as missing:
            columns = ", ".join(sorted(row))
            where = f"{path}:{position}"
            raise UserError(f"{missing.key}: {where} has no column {missing.column!r} (its columns: {columns})") from None
        else:
            problems.append(Problem(f"{source}:{position}", messages, label, source))
    found = ProblemSet(problems=problems, rows=len(problems) + sum(dropped.values()), dropped=dict(dropped))
    if not problems:
        raise UserError(f"{key}: {path}: no row is left of {found.report()}")
    return found


@HANDLERS.register("plain")
def plain(row: Row, data: config.Data) -> tuple[Messages, str]:
    """The columns `data.prompt_key` (text) and `data.label_key` (text or a number) as they are."""
    prompt = _column(row, data.prompt_key, "data.prompt_key")
    label = _column(row, data.label_key, "data.label_key")
    return _conversation(prompt, data), _label(label)


_CALCULATOR = re.compile(r"<<[^<>]*>>")


@HANDLERS.register("gsm8k")
def gsm8k(row: Row, data: config.Data) -> tuple[Messages, str]:
    """GSM8K as published: the label is the number after the last `####`, without thousands commas."""
    prompt = _column(row, data.prompt_key, "data.prompt_key")
    solution = _label(_column(row, data.label_key, "data.label_key"))
    _, mark, answer = _CALCULATOR.sub("", solution).rpartition("####")
    if not mark:
        raise Rejected("label without ####")
    return _conversation(prompt, data), _label(answer.replace(",", ""))


def _column(row: Row, column: str, key: str) -> Any:
    if column not in row:
        raise MissingColumn(key, column)
    return row[column]


def _conversation(prompt: Any, data: config.Data) -> Messages:
    if not isinstance(prompt, str) or not prompt.strip():
        raise Rejected("empty prompt" if prompt is None or isinstance(prompt, str) else "prompt that is not text")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


def _label(value: Any) -> str:
    """The label as text; a whole float loses its point (contest files write 142 as 142.0)."""
    if value is None:
        raise Rejected("null label")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Rejected("label that is neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if not text:
        raise Rejected("empty label")
    return text
