"""Score the episodes of a group: decode, decide simple cases in the service, send the rest to the pool, sum by weight."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence

import numpy as np
from msgspec import Struct, structs

from runtime import config, types
from runtime.errors import ServiceFault, UserError
from runtime.rewards.code import find_rule
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import NO_NUMBER, GroupContext, RuleContext, RuleOutcome, attempt
from runtime.rewards.worker import Task
from runtime.types import ENVIRONMENT_COLUMN, GroupPayload, Sample, ScoreRequest, Scores, TextDecoder

# ---- Combination
# Combine the scores of one group from several scorers: rules, remote rewards, a reward model, and players. Pure.


def column(group_id: int, name: str, weight: float, outcomes: Sequence[RuleOutcome], blamed: str = "") -> Scores:
    """Return the scores of one scorer: the reward is `weight` times the value. A sample without a value has valid 0, reward 0
    and NaN, and is counted in `errors`. If `blamed` names a service, raises ServiceFault instead."""
    for index, outcome in enumerate(outcomes):
        if outcome.error and blamed:
            raise ServiceFault(blamed, f"score by {name}", f"{outcome.error} on sample {index} of group {group_id}")
    values = np.array([np.nan if outcome.value is None else float(outcome.value) for outcome in outcomes], np.float64)
    valid = np.array([not outcome.error for outcome in outcomes], np.uint8)
    rewards = np.where(valid == 1, weight * values, 0.0).astype(np.float32)
    errors = dict(Counter(outcome.error for outcome in outcomes if outcome.error))
    return Scores(group_id=group_id, rewards=rewards, valid=valid, rules={name: values.astype(np.float32)}, errors=errors)


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
    rewards = np.where(valid == 1, total, 0.0).astype(np.float32)
    rules = {name: values for part in parts for name, values in part.rules.items()}
    errors = dict(sum((Counter(part.errors) for part in parts), Counter()))
    return structs.replace(parts[0], rewards=rewards, valid=valid, rules=rules, errors=errors)


# ---- Replies
# The parts of a group's episodes that rules, remote rewards and reward models read. Pure. An episode is judged by its last
# branch. Text of an environment may look like a final answer. Rules therefore get the model's last turn as text, and the whole
# conversation beside it. A plain reply is both at once.

_HEAD = 8  # last tokens of a prompt in which the mark that opens a thought may be
_OPENED = re.compile(r"<think>\s*\Z")


class ReadReply(Struct, frozen=True):
    """`text`: the model's last turn, with a `<think>` at the end of its prompt; "" without a turn. `conversation`: all text
    behind the group's prompt, by the model and its environment; "" if that is just `text`."""

    row: Sample
    text: str
    conversation: str


def read_replies(payload: GroupPayload, tokenizer: TextDecoder) -> list[ReadReply]:
    """Return the reply of each episode."""
    rows = payload.last_rows
    spans = [last_turn(row) for row in rows]
    turns = [row.tokens[span] for row, span in zip(rows, spans, strict=True)]
    wholes = [row.tokens if len(turn) < len(row.tokens) else turn[:0] for row, turn in zip(rows, turns, strict=True)]
    heads = [row.tokens[: span.start] if span.start else payload.prompt for row, span in zip(rows, spans, strict=True)]
    *texts, first = tokenizer.decode_batch([*turns, *wholes, *(each[-_HEAD:] for each in (*heads, payload.prompt))])
    said, conversations, before = (texts[place * len(rows) : (place + 1) * len(rows)] for place in range(3))
    return [
        ReadReply(row, _thought(text, head), _thought(conversation, first))
        for row, text, conversation, head in zip(rows, said, conversations, before, strict=True)
    ]


def _thought(text: str, before: str) -> str:
    """Return a reply with the mark that opens its thought, if the template wrote the mark before the reply."""
    found = _OPENED.search(before)
    return text if found is None or not text or text.lstrip().startswith("<think>") else found.group() + text


def last_turn(row: Sample) -> slice:
    """Return the place of the last run of trained tokens."""
    given, trained = np.flatnonzero(row.loss_mask == 0), np.flatnonzero(row.loss_mask)
    end = trained[-1] + 1 if len(trained) else 0
    before = given[given < end]
    return slice(before[-1] + 1 if len(before) else 0, end)


# ---- Unscored
# End a run whose replies get no score. It would train on nothing, and end as if it had learned.

UNSCORED_STEPS = 3  # in a row


class UnscoredSteps:
    """Counts consecutive steps in which no reply has a score."""

    _any_scored = False
    _in_a_row = 0

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


class RewardScorer:
    """The reward service's engine. `score` may be called concurrently, from one event loop."""

    def __init__(self, settings: config.Rewards, tokenizer: TextDecoder, variables: Container[str] = ()):
        """Find the rules. `variables`: as in `KillablePool`. Raises UserError without rules, or for an unknown or equal one."""
        if not settings.rules:
            raise UserError("rewards.rules: at least one rule is needed")
        rules = [find_rule(entry.name, f"rewards.rules.{index}.name") for index, entry in enumerate(settings.rules)]
        self._rules = list(zip(settings.rules, rules, strict=True))
        for name, count in Counter(rule.name for rule in rules).items():
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
        replies = read_replies(payload, self._tokenizer)
        texts, contexts = [reply.text for reply in replies], [_context(request, reply) for reply in replies]
        scores = self._sum(payload.group_id, await self._evaluate(texts, request.label, contexts))
        if request.answers:
            self._name_answers(scores, texts)
        return scores

    def _name_answers(self, scores: Scores, texts: Sequence[str]) -> None:
        """Add the first rule's `answer` of each reply. If it raises, count the error; the score stays valid."""
        answer = self._rules[0][1].answer
        if answer is None:
            return
        for text in texts:
            try:
                named = answer(text)
                if named is not None and not isinstance(named, str):
                    raise TypeError(f"{type(named).__name__} is not text")
                scores.answers.append(named)
            except Exception as error:  # noqa: BLE001 - code of a user may raise any error; counted by type
                scores.answers.append(None)
                reason = f"answer:{type(error).__name__}"
                scores.errors[reason] = scores.errors.get(reason, 0) + 1

    async def _evaluate(self, texts: list[str], label: str, contexts: list[RuleContext]) -> list[list[RuleOutcome]]:
        """Return the outcome of every rule (outer list) on every reply. An undecided screen leaves a reply to the pool."""
        tasks: list[Task] = []
        targets: list[tuple[list[RuleOutcome], slice]] = []  # of each task: the rule's outcomes, and the replies
        outcomes: list[list[RuleOutcome]] = []
        for entry, rule in self._rules:
            found = [RuleOutcome() for _ in texts]
            if rule.screen is not None:
                found = [attempt(rule.screen, text, label, context) for text, context in zip(texts, contexts, strict=True)]
            outcomes.append(found)
            if rule.grouped:
                tasks.append(Task(entry.name, texts, label, _group_context(contexts)))
                targets.append((found, slice(None)))
                continue
            left = [at for at, outcome in enumerate(found) if outcome.unresolved]
            tasks += [Task(entry.name, texts[at], label, contexts[at]) for at in left]
            targets += [(found, slice(at, at + 1)) for at in left]
        if tasks:
            for (found, rows), outcome in zip(targets, await self.pool.run(tasks), strict=True):
                size = len(found[rows])
                found[rows] = [outcome] * size if outcome.values is None else list(map(RuleOutcome, outcome.values))
        return outcomes

    def _sum(self, group_id: int, outcomes: list[list[RuleOutcome]]) -> Scores:
        parts = []
        for (entry, rule), found in zip(self._rules, outcomes, strict=True):
            for index, outcome in enumerate(found):
                if outcome.error.startswith(NO_NUMBER):
                    given = outcome.error.removeprefix(NO_NUMBER)
                    raise UserError(f"rewards.rules: rule {rule.name} gave a value of type {given}; must be a bool or a number")
                if outcome.error and self._fail:
                    raise ServiceFault("reward", f"rule {rule.name}", f"{outcome.error} on sample {index} of group {group_id}")
                if isinstance(outcome.value, bool):
                    found[index] = RuleOutcome(entry.correct if outcome.value else entry.wrong)
            parts.append(column(group_id, rule.name, entry.weight, found))
        return combine(parts)


def _context(request: ScoreRequest, reply: ReadReply) -> RuleContext:
    row = reply.row
    return RuleContext(request.source, len(row.tokens), row.finish_reason, request.messages, request.extra, reply.conversation)


def _group_context(contexts: Sequence[RuleContext]) -> GroupContext:
    first, conversations = contexts[0], [one.conversation for one in contexts]
    tokens, reasons = [one.tokens for one in contexts], [one.finish_reason for one in contexts]
    return GroupContext(first.source, tokens, reasons, first.prompt, first.extra, conversations if any(conversations) else [])
