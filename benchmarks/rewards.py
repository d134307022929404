"""`sluice bench rewards`: cases/s of the answer verifiers beside plain math-verify, GSM8K's test through the pool, and
programs/s of the rule `code`."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks import programs
from benchmarks.compared import Compared
from benchmarks.programs import ProgramsReport
from benchmarks.rewards_trial import OURS, PLAIN, JudgedCases
from runtime.config import Rewards
from runtime.errors import ServiceFault, UserError
from runtime.rewards.code import find_rule
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RuleContext, attempt
from runtime.rewards.worker import Task
from runtime.telemetry.shown import LiteralTable
from sluice import start

CASES = Path("cases") / "verifier_open.jsonl"
GSM8K = Path("data") / "gsm8k" / "example_model_solutions.jsonl"
MODEL = "175b_verification"  # of the four whose replies are in that file
CHUNK = 100  # cases that one way judges before it is the other's turn
DEADLINE = 600.0  # seconds that a process may take for a chunk, or to start

_LAST_LINE = re.compile(r"A: (.*)\Z")


class RewardsBenchSettings(Struct, frozen=True):
    verifiers: tuple[str, ...] = ("gsm8k", "math")
    workers: tuple[int, ...] = (1, 2)
    rounds: int = 3
    programs: int = 100
    """0: none."""


QUICK = RewardsBenchSettings(rounds=1)


class JudgingSide(Struct):
    """One way of judging the open cases."""

    cases_per_second: float
    agreement: float
    slowest_chunk: float  # seconds a case


class Scored(Struct):
    """GSM8K's test through a pool: once as in training, with what the screen settles; once all of it by workers."""

    verifier: str
    workers: int
    screened_seconds: float
    pooled_seconds: float
    start_seconds: float  # from no worker to the first verdict of each; in neither of the two
    agreement: float  # with the labels that came with the replies


class RewardsBenchReport(Struct):
    cases: int
    sides: dict[str, JudgingSide]
    ratio: float  # ours over plain
    replies: int
    scored: list[Scored]
    programs: ProgramsReport | None = None  # where there is a sandbox


async def measure(
    folder: Path, settings: RewardsBenchSettings, show: Callable[[str], None] = lambda line: None
) -> RewardsBenchReport:
    """Measure on what lies in `folder` (`cases/`, `data/gsm8k/`). Raises UserError when there is neither, ServiceFault."""
    cases, replies = folder / CASES, folder / GSM8K
    if not cases.is_file() and not replies.is_file():
        raise UserError(f"--data: neither {cases} nor {replies} is there")
    report = RewardsBenchReport(0, {}, 0.0, 0, [])
    if cases.is_file():
        report.cases, report.sides = await _compare(cases, show)
        report.ratio = report.sides[OURS].cases_per_second / report.sides[PLAIN].cases_per_second
    if replies.is_file():
        tasks, labels = _gsm8k(replies)
        report.replies = len(tasks)
        for verifier in settings.verifiers:
            for workers in settings.workers:
                show(f"GSM8K's test: {verifier}, {workers} workers")
                report.scored.append(await _score(verifier, workers, tasks, labels, settings.rounds))
    if settings.programs:
        report.programs = await programs.measure(settings.programs, settings.workers, settings.rounds, show)
    return report


async def _compare(path: Path, show: Callable[[str], None]) -> tuple[int, dict[str, JudgingSide]]:
    """Both ways on every case, chunk by chunk in turn, each in a process on the same core."""
    core = str(min(os.sched_getaffinity(0)))
    async with _trial(OURS, path, core) as ours, _trial(PLAIN, path, core) as plain:
        processes = {OURS: ours, PLAIN: plain}
        total = 0
        for process in processes.values():
            total = int(await _line(process))
        judged: dict[str, list[JudgedCases]] = {way: [] for way in processes}
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            for way, process in processes.items():
                show(f"case {first} of {total}: {way}")
                assert process.stdin is not None
                process.stdin.write(f"{first} {last}\n".encode())
                judged[way].append(msgspec.json.decode(await _line(process), type=JudgedCases))
    return total, {way: _side(parts, total) for way, parts in judged.items()}


def _side(parts: Sequence[JudgedCases], total: int) -> JudgingSide:
    return JudgingSide(
        cases_per_second=total / sum(part.seconds for part in parts),
        agreement=sum(part.agreed for part in parts) / total,
        slowest_chunk=max(part.seconds / part.cases for part in parts),
    )


@asynccontextmanager
async def _trial(way: str, path: Path, core: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.rewards_trial", way, str(path), core),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
    except TimeoutError:
        raise ServiceFault("bench", "judge", "a trial does not answer", DEADLINE) from None
    if not line:
        raise ServiceFault("bench", "judge", "a trial ended early; its standard error says why")
    return line


def _gsm8k(path: Path) -> tuple[list[tuple[str, str]], list[bool]]:
    """Each reply of MODEL with its problem's answer, its last line in GSM8K's own form; and whether it was found right."""
    tasks, labels = [], []
    for line in path.read_bytes().splitlines():
        row = msgspec.json.decode(line)
        truth = _LAST_LINE.search(row["ground_truth"])
        assert truth is not None
        tasks.append((_LAST_LINE.sub(r"#### \1", row[MODEL]["solution"]), truth.group(1)))
        labels.append(bool(row[MODEL]["is_correct"]))
    return tasks, labels


async def _score(
    verifier: str, workers: int, replies: Sequence[tuple[str, str]], labels: Sequence[bool], rounds: int
) -> Scored:
    """The best of some rounds: a round that another process disturbed says nothing."""
    defaults = Rewards()
    pool = KillablePool([verifier], workers, Limits(defaults.timeout, defaults.timeout / 2, defaults.memory_bytes))
    tasks = [Task(verifier, text, label, RuleContext()) for text, label in replies]
    screen = find_rule(verifier).screen
    assert screen is not None
    try:
        start = time.perf_counter()
        await pool.run([Task(verifier, f"\\boxed{{{number}}}", "5", RuleContext()) for number in range(64 * workers)])
        started = time.perf_counter() - start
        screened, pooled = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            outcomes = [attempt(screen, task.text, task.label, task.context) for task in tasks]
            left = [index for index, outcome in enumerate(outcomes) if outcome.unresolved]
            for index, outcome in zip(left, await pool.run([tasks[index] for index in left]), strict=True):
                outcomes[index] = outcome
            screened.append(time.perf_counter() - start)
            start = time.perf_counter()
            again = await pool.run(tasks)
            pooled.append(time.perf_counter() - start)
            assert again == outcomes
    finally:
        await pool.close()
    agreed = sum(outcome.value is label for outcome, label in zip(outcomes, labels, strict=True))
    return Scored(verifier, workers, min(screened), min(pooled), started, agreed / len(labels))


def compared(report: RewardsBenchReport) -> list[Compared]:
    return [Compared.of("open cases a second, ours / plain", [report.ratio or None])]


def render(report: RewardsBenchReport) -> list[LiteralTable]:
    return [
        *([_render_cases(report)] if report.cases else []),
        *([_render_replies(report)] if report.replies else []),
        *([programs.render(report.programs)] if report.programs is not None else []),
    ]


def _render_cases(report: RewardsBenchReport) -> LiteralTable:
    table = LiteralTable(title=f"{report.cases:,} open cases, one core", title_justify="left", title_style="bold")
    for name in ("", "cases/s", "agreement", "slowest hundred"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for way, side in report.sides.items():
        slowest = f"{side.slowest_chunk * 1000:.1f} ms a case"
        table.add_row(way, f"{side.cases_per_second:,.0f}", f"{side.agreement:.2%}", slowest)
    table.caption = f"× {report.ratio:.1f}; a hundred cases in turn each, imports excluded"
    table.caption_justify = "left"
    return table


def _render_replies(report: RewardsBenchReport) -> LiteralTable:
    table = LiteralTable(title=f"GSM8K's test, {report.replies:,} replies", title_justify="left", title_style="bold")
    for name in ("", "workers", "screened first", "all by workers", "start-up", "agreement"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for scored in report.scored:
        table.add_row(
            scored.verifier,
            str(scored.workers),
            f"{scored.screened_seconds:.3f} s",
            f"{scored.pooled_seconds:.3f} s",
            f"{scored.start_seconds:.2f} s",
            f"{scored.agreement:.2%}",
        )
    table.caption = "replies of a fine-tuned model; start-up, in neither time, is until every worker has judged"
    table.caption_justify = "left"
    return table
