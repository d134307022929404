"""One way of judging replies, in a process of its own on one core: `python -m benchmarks.rewards_trial WAY FILE CORE`.

It takes lines `FIRST LAST`, judges the cases of the file from one to the other, and answers each with a JSON `Judged`.
Between two orders it waits and takes no processor time, so that two ways can be measured in turn.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.rewards.code import find_rule
from runtime.rewards.rules import RuleContext, attempt

OURS, PLAIN = "Sluice", "plain math-verify"
KINDS = ("gsm8k", "boxed", "expr")  # what math-verify is for; the kind `format` is not

Way = Callable[["RewardCase"], bool]


class RewardCase(Struct):
    kind: str
    prediction: str
    truth: str
    expected: bool


class JudgedCases(Struct):
    cases: int
    agreed: int
    seconds: float


def load(path: Path) -> list[RewardCase]:
    """The cases that both ways can judge."""
    cases = [msgspec.json.decode(line, type=RewardCase) for line in path.read_bytes().splitlines()]
    return [case for case in cases if case.kind in KINDS]


def ours(case: RewardCase) -> bool:
    """The verifier of the case's kind, as the reward service runs it: its screen, then what the screen leaves open."""
    entry = find_rule(case.kind)
    context = RuleContext()
    if entry.screen is not None:
        outcome = attempt(entry.screen, case.prediction, case.truth, context)
        if not outcome.unresolved:
            return outcome.value is True
    return attempt(entry.evaluate, case.prediction, case.truth, context).value is True  # type: ignore[arg-type]


def plain() -> Way:
    """`verify(parse(truth), parse(prediction))`, as math-verify's README has it, with LaTeX in dollars as it wants it."""
    import math_verify

    logging.disable(logging.CRITICAL)  # it reports each timeout

    def judge(case: RewardCase) -> bool:
        prediction = _in_dollars(case.prediction) if case.kind == "expr" else case.prediction
        return bool(math_verify.verify(math_verify.parse(_in_dollars(case.truth)), math_verify.parse(prediction)))

    return judge


def _in_dollars(answer: str) -> str:
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def main() -> None:
    way, file, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    cases = load(Path(file))
    judge = ours if way == OURS else plain()
    for case in (
        RewardCase("expr", "\\frac{\\sqrt{8}}{2}", "\\sqrt{2}", True),
        RewardCase("boxed", "\\boxed{x+1}", "1+x", True),
    ):
        judge(case)  # whatever is imported when it is needed first
    print(json.dumps(len(cases)), flush=True)
    for line in sys.stdin:
        first, last = map(int, line.split())
        start = time.perf_counter()
        right = [judge(case) is case.expected for case in cases[first:last]]
        judged = JudgedCases(len(right), sum(right), time.perf_counter() - start)
        print(msgspec.json.encode(judged).decode(), flush=True)


if __name__ == "__main__":
    main()
