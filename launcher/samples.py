"""`sluice samples`: what the model was asked, what it replied, and what that earned."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime import codec, config_loading, layout
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.ledger_reader import EvaluationRow, GroupRow, LedgerReader
from runtime.payloads import Handle, PayloadLost
from runtime.pipeline.states import Phase
from runtime.types import GroupPayload, PolicyVersion, Scores

N = TypeVar("N", int, float)


class Row(Struct, kw_only=True):
    """One sample. `versions` are those of its oldest and newest token; `rules` each rule's value."""

    group: int | str
    sample: int
    step: int | None
    state: str
    why: str | None  # it was dropped
    prompt: str
    reply: str
    label: str
    reward: float | None
    valid: bool | None
    rules: dict[str, float | None]  # None: the rule failed
    finish: str
    tokens: int
    versions: tuple[str, str]
    logprob: float  # mean over the reply's model tokens


def show(options: argparse.Namespace) -> None:
    """Print a table, or JSON lines. Raises UserError for a run without a ledger or a filter that cannot be read."""
    config = config_loading.load(options.run / layout.CONFIG, ())
    tokenizer = Tokenizer(config.model.path, config.model.chat_template)
    with LedgerReader(options.run / layout.LEDGER) as reader:
        rows = _rows(reader, _selected(reader, options), tokenizer)
        if options.jsonl:
            for row in rows:
                sys.stdout.write(json.dumps(structs.asdict(row)) + "\n")
        else:
            Console().print(_table(rows))


def _selected(reader: LedgerReader, options: argparse.Namespace) -> Iterator[GroupRow | EvaluationRow]:
    steps = _range("--step", options.step, int, 1 << 62)
    reward = _range("--reward", options.reward, float, math.inf)
    limit = options.limit or None
    if options.eval:
        return reader.evaluations(steps=steps, reward=reward, limit=limit)
    groups = reader.groups(group_id=options.group, steps=steps, states=_states(options.state), reward=reward)
    return islice((group for group in groups if "payload" in group.handles), limit)


def _states(names: list[str]) -> list[Phase]:
    allowed = [phase.value for phase in Phase]
    for name in names:
        if name not in allowed:
            raise UserError(f"--state: {name!r} is not one of {', '.join(allowed)}")
    return [Phase(name) for name in names]


def _range(option: str, text: str | None, kind: Callable[[str], N], most: N) -> tuple[N, N] | None:
    """`a:b`, either end open, or one value."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        if not colon:
            return kind(low), kind(low)
        return (kind(low) if low else -most), (kind(high) if high else most)
    except ValueError:
        raise UserError(f"{option}: {text!r} is neither a number nor a range a:b") from None


def _rows(reader: LedgerReader, found: Iterator[GroupRow | EvaluationRow], tokenizer: Tokenizer) -> Iterator[Row]:
    about: tuple[int | str, int | None, str, str | None, str]
    for row in found:
        if isinstance(row, GroupRow):
            about = row.group_id, row.step, str(row.phase.value), row.why, row.label
            yield from _samples(reader, row.handles["payload"], row.scores, *about, tokenizer)
        else:
            about = row.problem, row.step, "evaluated", None, row.label
            yield from _samples(reader, row.handle, row.scores, *about, tokenizer)


def _samples(
    reader: LedgerReader,
    handle: Handle,
    scores: Scores | None,
    group: int | str,
    step: int | None,
    state: str,
    why: str | None,
    label: str,
    tokenizer: Tokenizer,
) -> Iterator[Row]:
    try:
        payload = codec.decode(GroupPayload, reader.read(handle))
    except PayloadLost as error:
        print(f"group {group}: {error}", file=sys.stderr)
        return
    prompt = tokenizer.decode(payload.prompt, skip_special=False)
    for index, sample in enumerate(payload.samples):
        yield Row(
            group=group,
            sample=index,
            step=step,
            state=state,
            why=why,
            prompt=prompt,
            reply=tokenizer.decode(sample.tokens, skip_special=False),
            label=label,
            reward=None if scores is None else float(scores.rewards[index]),
            valid=None if scores is None else bool(scores.valid[index]),
            rules={} if scores is None else {name: _number(values[index]) for name, values in scores.rules.items()},
            finish=sample.finish_reason,
            tokens=len(sample.tokens),
            versions=tuple(str(PolicyVersion.unpack(int(pick(sample.versions)))) for pick in (np.min, np.max)),  # type: ignore[arg-type]
            logprob=float(sample.logprobs[sample.loss_mask.astype(bool)].mean()),
        )


def _number(value: np.float32) -> float | None:
    return None if np.isnan(value) else float(value)


def _table(rows: Iterator[Row]) -> Table:
    table = Table()
    for column in ("group", "step", "state", "prompt", "reply", "label", "reward", "versions", "finish"):
        wide = column in ("prompt", "reply")
        table.add_column(column, overflow="fold", no_wrap=not wide, min_width=12 if wide else None)
    for row in rows:
        oldest, newest = row.versions
        reward = "–" if row.reward is None else f"{row.reward:.2f}" if row.valid else "masked"
        cells = (
            f"{row.group}/{row.sample}",
            "–" if row.step is None else str(row.step),
            row.state if row.why is None else f"{row.state}: {row.why}",
            row.prompt,
            row.reply,
            row.label,
            reward,
            oldest if oldest == newest else f"{oldest}–{newest}",
            row.finish,
        )
        table.add_row(*map(Text, cells))
    return table
