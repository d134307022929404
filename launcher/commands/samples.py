"""`sluice samples`: the prompts of a run, the model's replies and their rewards."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice

import msgspec
import numpy as np
from msgspec import Struct, structs
from rich.console import Console
from rich.text import Text

from launcher.commands.why import MOST_STEPS, range_of
from runtime import run_files, types
from runtime.config import loading
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import Generation
from runtime.ledger.reader import GroupRow, LedgerReader, PayloadLost
from runtime.ledger.states import Phase
from runtime.telemetry.shown import LiteralTable, literal, shown
from runtime.types import GroupPayload, Sample

GIVEN = "⟦⟧"  # around text that is not trained: terminals without colours show it too


class Part(Struct):
    """A stretch of a branch. `trained`: the model wrote it, and this branch trains it. `reward`: the reward of a turn."""

    text: str
    trained: bool
    reward: float | None = None


class SampleRow(Struct, kw_only=True):
    """A reply, or a branch of an episode. `parts`: the reply in parts, if not all of it is trained or a turn has a reward."""

    group: int | str
    sample: int  # the episode
    branch: int = 0  # of the episode
    step: int | None
    state: str
    why: str | None  # why it was dropped
    task: int | None = None  # the index of its prompt in the training data
    source: str = ""  # of its prompt
    prompt: str
    reply: str
    earlier: list[str] = []  # in an evaluation: the episode's branches before this last one
    parts: list[Part] = []
    label: str
    reward: float | None
    valid: bool | None
    rules: dict[str, float | None]  # None: the rule failed
    finish: str
    outcome: str = ""  # of an episode: its stop reason, or why it was left out
    malformed: int = 0  # of an episode: replies with tool calls that could not be read
    tokens: int
    versions: tuple[str, str]
    logprob: float | None  # mean over the trained tokens; None if there are none


def run(options: argparse.Namespace) -> None:
    """Print a table for each group, or JSON lines. Raises UserError for no run, no evaluation or a malformed filter."""
    if options.limit < 0:
        raise UserError(f"--limit: {options.limit} is negative; must be a number of groups, or 0 for all")
    if options.eval:
        _print(_evaluated(options), options.jsonl)
        return
    if not (options.run / run_files.CONFIG).is_file():
        raise UserError(f"{options.run}: not a run's folder: {run_files.CONFIG} is not in it")
    config = loading.load_recorded(options.run)
    tokenizer = Tokenizer(config.model.path, config.model.chat_template)
    with LedgerReader(options.run / run_files.LEDGER) as reader:
        rows = (row for group in _selected(reader, options) for row in samples_of(reader, group, tokenizer))
        _print(rows, options.jsonl)


def _print(rows: Iterator[SampleRow], jsonl: bool) -> None:
    console = Console()
    group = None
    for _, group in groupby(rows, lambda row: (row.step, row.group)):
        if jsonl:
            sys.stdout.writelines(json.dumps(msgspec.to_builtins(row)) + "\n" for row in group)
        else:
            console.print(_table(list(group)))
    if group is None:
        print("no samples here, or none that the options select; steps are counted from 0", file=sys.stderr)


def _selected(reader: LedgerReader, options: argparse.Namespace) -> Iterator[GroupRow]:
    steps, reward = _ranges(options)
    for name in options.state:
        if name not in set(Phase):
            raise UserError(f"--state: {name!r} is not one of {', '.join(Phase)}")
    groups = reader.groups(group_id=options.group, steps=steps, states=list(map(Phase, options.state)), reward=reward)
    return islice((group for group in groups if "payload" in group.handles), options.limit or None)


def _ranges(options: argparse.Namespace) -> tuple[tuple[int, int] | None, tuple[float, float] | None]:
    return range_of("--step", options.step, int, MOST_STEPS), range_of("--reward", options.reward, float, math.inf)


def _evaluated(options: argparse.Namespace) -> Iterator[SampleRow]:
    """Yield the replies of evaluations; replies to one problem come together."""
    steps, reward = _ranges(options)
    folders = evaluation.folders(options.run)
    if not folders:
        raise UserError(f"{options.run}: no evaluation of this run is here")
    problems = (
        (step, list(replies))
        for step, folder in folders
        if steps is None or steps[0] <= step <= steps[1]
        for path in sorted(folder.glob(f"*{evaluation.SUFFIX}"))
        for _, replies in groupby(evaluation.read_replies(path), lambda each: each.problem)
    )
    chosen = ((step, replies) for step, replies in problems if reward is None or _earned(replies, reward))
    for step, replies in islice(chosen, options.limit or None):
        yield from (_evaluated_row(step, reply) for reply in replies)


def _earned(replies: list[Generation], bounds: tuple[float, float]) -> bool:
    """Return whether the mean of the rewards, where there are any, is within `bounds`."""
    rewards = [each.reward for each in replies if each.reward is not None]
    return bool(rewards) and bounds[0] <= sum(rewards) / len(rewards) <= bounds[1]


def _evaluated_row(step: int, each: Generation) -> SampleRow:
    return SampleRow(
        **{name: value for name, value in structs.asdict(each).items() if name in SampleRow.__struct_fields__},
        group=each.problem,
        branch=len(each.earlier),
        step=step,
        state="evaluated",
        why=None,
        valid=each.reward is not None,
    )


def samples_of(reader: LedgerReader, group: GroupRow, tokenizer: Tokenizer) -> Iterator[SampleRow]:
    try:
        payload = types.decode(GroupPayload, reader.read(group.handles["payload"]))
    except PayloadLost as error:
        print(shown(f"group {group.group_id}: {error}"), file=sys.stderr)
        return
    scores = group.scores
    prompt = tokenizer.decode(payload.prompt, skip_special=False)
    places = [(episode, branch) for episode, rows in enumerate(payload.rows) for branch in range(rows)]
    for number, ((index, branch), sample) in enumerate(zip(places, payload.samples, strict=True)):
        turns = {turn.token: turn.value for turn in payload.turn_rewards if turn.row == number}
        yield SampleRow(
            group=group.group_id,
            sample=index,
            branch=branch,
            step=group.step,
            state=str(group.phase.value),
            why=group.why,
            task=group.problem,
            source=group.source,
            prompt=prompt,
            reply=tokenizer.decode(sample.tokens, skip_special=False),
            parts=_parts(sample, turns, tokenizer),
            label=group.label,
            reward=None if scores is None else float(scores.rewards[index]),
            valid=None if scores is None else bool(scores.valid[index]),
            rules={} if scores is None else evaluation.values_at(scores, index),
            finish=sample.finish_reason,
            outcome=group.outcomes.reasons[index] if group.outcomes else "",
            malformed=group.outcomes.malformed[index] if group.outcomes and group.outcomes.malformed else 0,
            tokens=len(sample.tokens),
            versions=evaluation.versions_of(sample),
            logprob=evaluation.mean_logprob(sample),
        )


def _parts(row: Sample, turns: Mapping[int, float], tokenizer: Tokenizer) -> list[Part]:
    """Return the stretches of trained and of other tokens. `turns`: rewards of turns, by the turn's last token."""
    if row.loss_mask.all() and not turns:
        return []
    ends = [*(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.tokens)]
    parts, begin = [], 0
    for end in ends:
        rewards = [value for token, value in turns.items() if begin <= token < end]
        text = tokenizer.decode(row.tokens[begin:end], skip_special=False)
        parts.append(Part(text, bool(row.loss_mask[begin:end].any()), sum(rewards) if rewards else None))
        begin = end
    return parts


def _table(group: list[SampleRow]) -> LiteralTable:
    """Return a table of one group's samples: shared values above, differing values below."""
    first = group[0]
    step = "" if first.step is None else f", step {first.step}"
    state = first.state if first.why is None else f"{first.state}: {first.why}"
    task = "" if first.task is None else f"; task {first.task} of {first.source}"
    of = f"; label {first.label}" if first.label else task
    title = f"group {first.group}{step}, {state}{of}\n{first.prompt}"
    notes = [f"{GIVEN[0]} {GIVEN[1]}: not trained in this branch"] if any(row.parts for row in group) else []
    ended = {row.sample: row.outcome for row in group if row.outcome not in ("", "completed")}
    notes += [f"episode {number}: {outcome}" for number, outcome in ended.items()]
    malformed = {row.sample: row.malformed for row in group if row.malformed}
    notes += [f"episode {number}: {count} replies with malformed tool calls" for number, count in malformed.items()]
    table = LiteralTable(title=title, title_justify="left", title_style="", caption="\n".join(notes), caption_justify="left")
    branches = bool(ended) or any(row.branch for row in group)
    if branches:
        table.add_column("episode")
    rules = sorted({name for row in group for name in row.rules})
    table.add_column("reply", overflow="fold", min_width=16)
    columns = ("reward", *rules, "versions", "finish")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in group:
        for branch, reply in enumerate(row.earlier):
            table.add_row(f"{row.sample}.{branch}", reply, *("" for _ in columns))
        values = [row.rules.get(name) for name in rules]
        table.add_row(
            *([f"{row.sample}.{row.branch}"] if branches else []),
            _conversation(row.parts) if row.parts else row.reply,
            "–" if row.reward is None else f"{row.reward:.2f}" if row.valid else "masked",
            *("failed" if value is None else f"{value:g}" for value in values),
            "–".join(dict.fromkeys(row.versions)),
            row.finish,
        )
    return table


def _conversation(parts: Sequence[Part]) -> Text:
    text = Text()
    for part in parts:
        text += literal(part.text) if part.trained else literal(f"{GIVEN[0]}{part.text}{GIVEN[1]}", "dim")
        if part.reward is not None:
            text += literal(f" {GIVEN[0]}reward {part.reward:g}{GIVEN[1]}", "dim")
    return text
