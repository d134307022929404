"""Score the episodes of a group: decode, decide simple cases in the service, send the rest to the pool, sum by weight."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct, structs

from runtime import config, types
from runtime.errors import ServiceFault, UserError
from runtime.rewards.catalogue import find_rule
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import NO_NUMBER, GroupContext, RuleContext, RuleOutcome, attempt
from runtime.rewards.worker import Task
from runtime.types import ENVIRONMENT_COLUMN, GroupPayload, Sample, ScoreRequest, Scores

# ---- Combination
# Combine the scores of one group from several scorers: rules, remote rewards, a reward model, and players. Pure.


def column(group_id: int, name: str, weight: float, outcomes: Sequence[RuleOutcome], blamed: str = "") -> Scores:
    """Return the scores of one scorer: the reward is `weight` times the value. A sample without a value has valid 0, reward 0
    and NaN, and is counted in `errors`. If `blamed` names a service, raises ServiceFault instead."""
    for index, outcome in enumerate(outcomes):
        if outcome.error and blamed:
            raise ServiceFault(blamed, f"score by {name}", f"{outcome.error} on sample {index} of group {group_id}")
    return _columns(group_id, [(name, weight, outcomes)])


def _columns(group_id: int, scored: Sequence[tuple[str, float, Sequence[RuleOutcome]]]) -> Scores:
    """Return the summed scores of several scorers, each with its name and weight."""
    size = len(scored[0][2])
    total, valid = np.zeros(size), np.ones(size, np.uint8)
    rules: dict[str, np.ndarray] = {}
    for name, weight, outcomes in scored:
        values = np.array([np.nan if outcome.value is None else float(outcome.value) for outcome in outcomes], np.float64)
        valid[[bool(outcome.error) for outcome in outcomes]] = 0
        total += weight * values
        rules[name] = values.astype(np.float32)
    errors = Counter(outcome.error for _, _, outcomes in scored for outcome in outcomes if outcome.error)
    rewards = np.where(valid == 1, total, 0.0).astype(np.float32)
    return Scores(group_id=group_id, rewards=rewards, valid=valid, rules=rules, errors=dict(errors))


NO_REWARD = f"{ENVIRONMENT_COLUMN}:no reward"


def played(group_id: int, weight: float, rewards: Sequence[float]) -> Scores:
    """Return the scores that the players of episodes gave. An episode without a reward (NaN) is masked and counted."""
    outcomes = [RuleOutcome(error=NO_REWARD) if math.isnan(reward) else RuleOutcome(reward) for reward in rewards]
    return column(group_id, ENVIRONMENT_COLUMN, weight, outcomes)


def combine(parts: Sequence[Scores]) -> Scores:
    """Sum the rewards. A sample is valid if it is valid in all parts. Other fields come from the first part."""
    if len(parts) == 1:
        return parts[0]
    valid = np.minimum.reduce([part.valid for part in parts])
    total = np.sum([part.rewards for part in parts], axis=0, dtype=np.float64)
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    return structs.replace(
        parts[0],
        rewards=np.where(valid == 1, total, 0.0).astype(np.float32),
        valid=valid,
        rules={name: values for part in parts for name, values in part.rules.items()},
        errors=dict(errors),
    )


# ---- Replies
# The parts of a group's episodes that rules, remote rewards and reward models read. Pure.
#
# An episode is judged by its last branch. Text of an environment may look like a final answer. Rules therefore get the model's
# last turn as text, and the whole conversation beside it. A plain reply is both at once.

_HEAD = 8  # last tokens of a prompt in which the mark that opens a thought may be
_OPENED = re.compile(r"<think>\s*\Z")


class ReplyDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Return the texts without special tokens."""


class ReadReply(Struct, frozen=True):
    """`text`: the model's last turn, with a `<think>` at the end of its prompt; "" without a turn. `conversation`: all text
    behind the group's prompt, by the model and its environment; "" if that is just `text`."""

    row: Sample
    text: str
    conversation: str

    @property
    def everything(self) -> str:
        return self.conversation or self.text


def read_replies(payload: GroupPayload, tokenizer: ReplyDecoder) -> list[ReadReply]:
    """Return the reply of each episode."""
    rows = payload.last_rows
    spans = [last_turn(row) for row in rows]
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
    """Return a reply with the mark that opens its thought, if the template wrote the mark before the reply."""
    found = _OPENED.search(before)
    return text if found is None or not text or text.lstrip().startswith("<think>") else found.group() + text


def last_turn(row: Sample) -> slice:
    """Return the place of the last run of trained tokens."""
    given = np.flatnonzero(row.loss_mask == 0)
    trained = np.flatnonzero(row.loss_mask)
    if not len(given) or not len(trained):
        return slice(0, len(trained))
    before = given[given < trained[-1]]
    return slice(before[-1] + 1 if len(before) else 0, trained[-1] + 1)


# ---- Unscored
# End a run whose replies get no score. It would train on nothing, and end as if it had learned.

UNSCORED_STEPS = 3  # in a row


class UnscoredSteps:
    """Counts consecutive steps in which no reply has a score."""

    def __init__(self) -> None:
        self._any_scored = False
        self._in_a_row = 0

    def step(self, scores: Sequence[Scores], last: bool) -> None:
        """Count a step. Raises ServiceFault at the third such step in a row, or at the `last` step if all were such steps."""
        if not scores or any(group.valid.any() for group in scores):
            self._any_scored, self._in_a_row = True, 0
            return
        self._in_a_row += 1
        if self._in_a_row >= UNSCORED_STEPS or (last and not self._any_scored):
            raise unscored(scores, f"{self._in_a_row} steps in a row")


def unscored(scores: Sequence[Scores], of: str) -> ServiceFault:
    """Return the fault of replies without a score. It names the rules that gave no value, and the last cause."""
    rules = sorted({name for group in scores for name, values in group.rules.items() if np.isnan(values).any()})
    causes = [reason for group in scores for reason in group.errors]
    cause = f"; the last cause is {causes[-1]}" if causes else ""
    return ServiceFault("reward", ", ".join(rules) or "score", f"no reply of {of} has a score{cause} (logs/reward-*.log)")


async def score_all(scorers: Sequence[Callable[[ScoreRequest], Awaitable[Scores]]], request: ScoreRequest) -> Scores:
    """Score a group by all scorers at once."""
    return combine(await asyncio.gather(*(score(request) for score in scorers)))


class _Reply(Struct):
    """One episode as the rules see it."""

    text: str
    label: str
    context: RuleContext


class RewardScorer:
    """The reward service's engine. `score` may be called concurrently, from one event loop."""

    def __init__(self, settings: config.Rewards, tokenizer: ReplyDecoder, variables: Container[str] = ()):
        """Find the rules. `variables`: as in `KillablePool`. Raises UserError if no rule is configured, or a rule is unknown or
        named twice."""
        if not settings.rules:
            raise UserError("rewards.rules: at least one rule is needed")
        self._rules = [
            (entry, find_rule(entry.name, f"rewards.rules.{index}.name")) for index, entry in enumerate(settings.rules)
        ]
        for name, count in Counter(rule.name for _, rule in self._rules).items():
            if count > 1:
                raise UserError(f"rewards.rules: {name!r} is named {count} times")
        self._tokenizer = tokenizer
        self._fail = settings.on_error == "fail"
        self._limits = Limits(settings.timeout, settings.timeout / 2, settings.memory_bytes, settings.sandbox)
        names = [entry.name for entry in settings.rules]
        self.pool = KillablePool(names, settings.workers, self._limits, settings.cache_entries, variables)

    async def check(self) -> None:
        """Check the sandbox if a rule runs programs. Raises UserError if `rewards.sandbox` does not work on this machine."""
        if any(rule.sandboxed for _, rule in self._rules):
            from runtime.sandbox import check  # loaded only where programs run

            await check(self._limits.sandbox, "rewards.sandbox")

    def start(self) -> None:
        """Start the pool in the background if a rule always needs it; otherwise its first use starts it."""
        if any(rule.screen is None for _, rule in self._rules):
            self.pool.start()

    async def close(self) -> None:
        await self.pool.close()

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of a group; a rule's failure is as in `column`. Raises InvalidMessage if the payload is unreadable,
        UserError if a rule returns no number, ServiceFault if no worker starts or, with `on_error: fail`, if a rule failed."""
        payload = types.decode(GroupPayload, request.payload)
        found = read_replies(payload, self._tokenizer)
        replies = [_Reply(each.text, request.label, _context(request, each)) for each in found]
        scores = self._sum(payload.group_id, await self._evaluate(replies))
        if request.answers:
            self._name_answers(scores, replies)
        return scores

    def _name_answers(self, scores: Scores, replies: list[_Reply]) -> None:
        """Add the first rule's `answer` of each reply. If it raises, count the error; the score stays valid."""
        answer = self._rules[0][1].answer
        if answer is None:
            return
        for reply in replies:
            try:
                named = answer(reply.text)
                if named is not None and not isinstance(named, str):
                    raise TypeError(f"{type(named).__name__} is not text")
                scores.answers.append(named)
            except Exception as error:  # noqa: BLE001 - code of a user may raise any error; counted by type
                scores.answers.append(None)
                reason = f"answer:{type(error).__name__}"
                scores.errors[reason] = scores.errors.get(reason, 0) + 1

    async def _evaluate(self, replies: list[_Reply]) -> list[list[RuleOutcome]]:
        """Return the outcome of every rule (outer list) on every reply (inner list). A screen's empty outcome is left to the
        pool."""
        outcomes = [
            [attempt(rule.screen, one.text, one.label, one.context) if rule.screen else RuleOutcome() for one in replies]
            for _, rule in self._rules
        ]
        tasks: list[Task] = []
        targets: list[tuple[int, slice]] = []  # of each task: the index of the rule, and the replies
        for column, ((entry, rule), found) in enumerate(zip(self._rules, outcomes, strict=True)):
            name, every = entry.name, slice(0, len(replies))
            rows = [every] if rule.grouped else [slice(at, at + 1) for at, one in enumerate(found) if one.unresolved]
            tasks += [_task(name, replies[each], rule.grouped) for each in rows]
            targets += [(column, each) for each in rows]
        if tasks:
            for (column, rows_of), outcome in zip(targets, await self.pool.run(tasks), strict=True):
                outcomes[column][rows_of] = _each(outcome, len(replies[rows_of]))
        return outcomes

    def _sum(self, group_id: int, outcomes: list[list[RuleOutcome]]) -> Scores:
        scored = []
        for (entry, rule), found in zip(self._rules, outcomes, strict=True):
            for index, outcome in enumerate(found):
                if outcome.error.startswith(NO_NUMBER):
                    given = outcome.error.removeprefix(NO_NUMBER)
                    raise UserError(f"rewards.rules: rule {rule.name} gave a value of type {given}; must be a bool or a number")
                if outcome.error and self._fail:
                    raise ServiceFault("reward", f"rule {rule.name}", f"{outcome.error} on sample {index} of group {group_id}")
            scored.append((rule.name, entry.weight, [_valued(outcome, entry) for outcome in found]))
        return _columns(group_id, scored)


def _context(request: ScoreRequest, reply: ReadReply) -> RuleContext:
    row = reply.row
    return RuleContext(request.source, len(row.tokens), row.finish_reason, request.messages, request.extra, reply.conversation)


def _task(rule: str, replies: Sequence[_Reply], grouped: bool) -> Task:
    """Return the task of one reply, or, for a rule over groups, of all replies."""
    first = replies[0]
    if not grouped:
        return Task(rule, first.text, first.label, first.context)
    contexts = [reply.context for reply in replies]
    tokens, reasons = [one.tokens for one in contexts], [one.finish_reason for one in contexts]
    said = [one.conversation for one in contexts] if any(one.conversation for one in contexts) else []
    context = GroupContext(first.context.source, tokens, reasons, first.context.prompt, first.context.extra, said)
    return Task(rule, [reply.text for reply in replies], first.label, context)


def _each(outcome: RuleOutcome, replies: int) -> list[RuleOutcome]:
    """Return one outcome for each reply. If a whole group failed, every reply gets this outcome."""
    return [outcome] * replies if outcome.values is None else [RuleOutcome(value) for value in outcome.values]


def _valued(outcome: RuleOutcome, settings: config.Rule) -> RuleOutcome:
    """Replace a bool by the value that it earns."""
    return RuleOutcome(settings.correct if outcome.value else settings.wrong) if isinstance(outcome.value, bool) else outcome
