"""`sluice score FILE`: judges each reply in a file of JSON lines with a verifier, in the order of the lines, as in training.
Cases pass a screen, then a pool of workers with a configuration's default limits. docs/guides/rewards.md has the lines'
fields."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from msgspec import Struct, structs

from runtime.config import Rewards
from runtime.errors import UserError
from runtime.rewards.code import find_rule
from runtime.rewards.pool import KillablePool, Limits, withdraw
from runtime.rewards.rules import RULES, RewardRule, RuleContext, RuleOutcome, attempt
from runtime.rewards.worker import Task, Verdict
from runtime.sandbox import check
from runtime.telemetry.shown import shown

FORMATS = ("think_answer", "think_prefix")  # allowed truths of a case of kind `format`
RIGHT = 1.0  # the value from which on a reply is right
SANDBOX_SHARE = 0.8  # of a case's time, the most that its program may take
WINDOW = 4096  # cases held because an earlier case is not judged yet
WINDOW_BYTES = 64 << 20  # bytes of their lines
TURN = 64  # cases after which the pool gets a turn
NAMED = 10  # lines named in messages, of all that cannot be judged


class ScoreCase(Struct):
    """One line of the file. `fault`: why it cannot be judged."""

    number: int  # of the line, from 1
    size: int  # bytes
    id: Any = None
    kind: str = ""
    expected: bool | None = None
    task: Task | None = None
    fault: str = ""


class ScoreCounts(Struct):
    cases: Counter[str]  # by kind, including bad lines
    labelled: Counter[str]
    agreed: Counter[str]
    errors: Counter[str]  # by reason
    faults: list[str]
    bad_lines: int = 0

    def add(self, case: ScoreCase, outcome: RuleOutcome) -> None:
        self.cases[case.kind] += 1
        if case.expected is not None:
            self.labelled[case.kind] += 1
            self.agreed[case.kind] += _equal(outcome) is case.expected
        if case.fault:
            self.bad_lines += 1
            if len(self.faults) < NAMED:
                self.faults.append(f"line {case.number}: {case.fault}")
        elif outcome.error:
            self.errors[outcome.error] += 1


def run(options: argparse.Namespace) -> None:
    score(options.file, options.verifier, options.workers, options.timeout, options.output)


def score(path: Path, verifier: str | None, workers: int | None, timeout: float | None, output: Path | None) -> None:
    """Score the file and print a summary to standard error. Raises UserError for what cannot be used, and after all others are
    scored for lines that cannot be judged; ServiceFault if no worker can be started."""
    rules = _rules(verifier)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise UserError(f"--workers: {workers}; must be at least 1")
    if timeout is not None and timeout <= 0:
        raise UserError(f"--timeout: {timeout}; must be more than 0 seconds")
    if output is not None and output.exists() and path.exists() and output.samefile(path):
        raise UserError(f"--output: {output} is the file that is scored")
    defaults = Rewards()
    seconds = defaults.timeout if timeout is None else timeout
    sandbox = structs.replace(defaults.sandbox, timeout=min(defaults.sandbox.timeout, SANDBOX_SHARE * seconds))
    if verifier is not None and rules[verifier].sandboxed:
        asyncio.run(check(sandbox, "--verifier"))
    limits = Limits(seconds, seconds / 2, defaults.memory_bytes, sandbox)
    start = time.perf_counter()
    with contextlib.ExitStack() as files:
        source = files.enter_context(_opened(path, "rb"))
        sink = sys.stdout if output is None else files.enter_context(_opened(output, "w"))
        tally = asyncio.run(_score(_cases(source, verifier), rules, workers, limits, defaults.cache_entries, sink))
    for line in _summary(tally, time.perf_counter() - start):
        print(shown(line), file=sys.stderr)
    if tally.bad_lines:
        more = [f"and {tally.bad_lines - NAMED} more lines"] if tally.bad_lines > NAMED else []
        raise UserError("\n".join(f"{path}: {fault}" for fault in (*tally.faults, *more)))


def _rules(verifier: str | None) -> dict[str, RewardRule]:
    """Return the verifiers that may be needed, by the names that tasks use."""
    names = list(RULES) if verifier is None else [*FORMATS, verifier] if verifier == "format" else [verifier]
    rules = {name: find_rule(name, "--verifier") for name in names}
    single = {name: rule for name, rule in rules.items() if not rule.grouped}
    if verifier is not None and verifier not in single:
        raise UserError(f"--verifier: {verifier!r} is a rule over groups; must be one over single replies")
    return single


def _opened(path: Path, mode: str) -> IO[Any]:
    try:
        return path.open(mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _cases(source: IO[bytes], verifier: str | None) -> Iterator[ScoreCase]:
    for number, line in enumerate(source, 1):
        if not line.isspace():
            yield _case(number, line, verifier)


def _case(number: int, line: bytes, verifier: str | None) -> ScoreCase:
    """Return the case of a line. Bytes that are not UTF-8 are replaced, as a tokenizer would."""
    case = ScoreCase(number, len(line))
    try:
        fields = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        case.fault = f"not JSON: {error}"
        return case
    if not isinstance(fields, dict):
        case.fault = f"not a JSON object but {type(fields).__name__}"
        return case
    case.id = fields.get("id")
    case.kind = str(fields.get("kind", ""))
    expected = fields.get("expected")
    case.expected = expected if isinstance(expected, bool) else None
    texts = {}
    for name in ("prediction", "truth"):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            what = f"{name!r} is {type(value).__name__}, not text" if name in fields else f"no {name!r}"
            case.fault = f"{what}; needed are 'prediction' and 'truth'"
            return case
        texts[name] = str(value)
    extra = fields.get("extra", {})
    if not isinstance(extra, dict):
        case.fault = f"'extra' is {type(extra).__name__}, not an object"
        return case
    rule = case.kind if verifier is None else verifier
    if rule == "format" and texts["truth"] in FORMATS:
        rule = texts["truth"]
    if verifier is None and rule not in RULES:
        case.fault = f"its kind {case.kind!r} names no verifier; give --verifier, or one of {', '.join(RULES)}"
    else:
        case.task = Task(rule, texts["prediction"], texts["truth"], RuleContext(extra=extra))
    return case


async def _score(
    cases: Iterator[ScoreCase], rules: dict[str, RewardRule], workers: int, limits: Limits, cache_entries: int, sink: IO[str]
) -> ScoreCounts:
    """Judge the cases and write a line for each, in order. WINDOW and WINDOW_BYTES bound the cases held meanwhile."""
    tally = ScoreCounts(Counter(), Counter(), Counter(), Counter(), [])
    pool = KillablePool(list(rules), workers, limits, cache_entries)
    window: deque[tuple[ScoreCase, asyncio.Future[Verdict]]] = deque()
    held = 0
    try:
        for case in cases:
            window.append((case, _judged(case, rules, pool)))
            held += case.size
            if case.number % TURN == 0:
                await asyncio.sleep(0)  # lets the pool's tasks run
            # Write the judged cases at the front. A full window waits for its first case: a worker's verdict ends the wait.
            while window and (window[0][1].done() or len(window) >= WINDOW or held >= WINDOW_BYTES):
                held -= window[0][0].size
                await _write(window, sink, tally)
        while window:
            await _write(window, sink, tally)
    finally:
        withdraw(verdict for _, verdict in window)
        await pool.close()
    return tally


def _judged(case: ScoreCase, rules: dict[str, RewardRule], pool: KillablePool) -> asyncio.Future[Verdict]:
    """Return the verdict's future: done if the verifier's screen decides, else done later by the pool."""
    known: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    task, case.task = case.task, None  # the pool keeps the text as long as needed
    if task is None:
        known.set_result(Verdict(RuleOutcome(error=case.fault)))
        return known
    screen = rules[task.rule].screen
    if screen is not None:
        start = time.perf_counter()
        outcome = attempt(screen, task.text, task.label, task.context)
        if not outcome.unresolved:
            known.set_result(Verdict(outcome, time.perf_counter() - start))
            return known
    return pool.submit(task)


async def _write(window: deque[tuple[ScoreCase, asyncio.Future[Verdict]]], sink: IO[str], tally: ScoreCounts) -> None:
    """Write the first case of the window once it is judged, and drop it."""
    case, judged = window[0]
    verdict = await judged
    window.popleft()
    outcome = verdict.outcome
    tally.add(case, outcome)
    line = {
        "id": case.id,
        "score": None if outcome.value is None else float(outcome.value),
        "equal": _equal(outcome),
        "error": outcome.error or None,
        "seconds": round(verdict.seconds, 6),
    }
    sink.write(json.dumps(line) + "\n")


def _equal(outcome: RuleOutcome) -> bool | None:
    return None if outcome.value is None else outcome.value >= RIGHT


def _summary(tally: ScoreCounts, seconds: float) -> Iterator[str]:
    total = sum(tally.cases.values())
    reasons = "; ".join(f"{reason} {count}" for reason, count in sorted(tally.errors.items())) or "none"
    unread = f"; lines that cannot be judged: {tally.bad_lines}" if tally.bad_lines else ""
    yield f"{total} cases in {seconds:.2f} s, {total / seconds:.0f} cases/s; errors: {reasons}{unread}"
    labelled, agreed = sum(tally.labelled.values()), sum(tally.agreed.values())
    if labelled:
        kinds = ", ".join(f"{kind or 'no kind'} {tally.agreed[kind]}/{count}" for kind, count in sorted(tally.labelled.items()))
        yield f"agreement with `expected`: {agreed / labelled:.2%} ({kinds})"
