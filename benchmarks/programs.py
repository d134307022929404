"""What running a reply's program costs: the rule `code` through the pool, beside the bare start of the sandbox."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from runtime.config import Rewards, Sandbox
from runtime.errors import UserError
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RuleContext
from runtime.rewards.worker import Task
from runtime.sandbox import check, run
from runtime.telemetry.shown import LiteralTable

TESTS = 10  # of each program
SPUN = 0.5  # seconds after which a program that spins is to be ended
SPINS = 5
STARTS: dict[str, tuple[str, ...]] = {"true": ("true",), "an interpreter": (sys.executable, "-I", "-S", "-c", "pass")}


class Judging(Struct):
    """The rule `code` on distinct programs of TESTS tests each."""

    workers: int
    programs_per_second: float


class ProgramsReport(Struct):
    """`starts`: runs a second of a command in a sandbox of its own, one after the other. `late`: seconds beyond its limit until
    nothing was left of a program that spins, the longest of SPINS."""

    programs: int
    judged: list[Judging]
    starts: dict[str, float]
    late: float


async def measure(
    programs: int, workers: Sequence[int], rounds: int, show: Callable[[str], None] = lambda line: None
) -> ProgramsReport | None:
    """The best of some rounds each. None where this machine has no sandbox."""
    sandbox = Rewards().sandbox
    try:
        await check(sandbox, "rewards.sandbox")
    except UserError as error:
        show(f"programs are left out: {error}")
        return None
    report = ProgramsReport(programs, [], {}, 0.0)
    for name, command in STARTS.items():
        show(f"a sandbox of its own for {name}")
        report.starts[name] = max([await _starts(sandbox, command, programs) for _ in range(rounds)])
    for number in workers:
        show(f"code: {number} workers")
        report.judged.append(Judging(number, await _judge(programs, number, rounds)))
    for _ in range(SPINS):
        begun = time.perf_counter()
        await run(sandbox, ["spin"], source="while True: pass", timeout=SPUN)
        report.late = max(report.late, time.perf_counter() - begun - SPUN)
    return report


async def _starts(sandbox: Sandbox, command: Sequence[str], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        finished = await run(sandbox, command)
        assert not finished.code, finished
    return times / (time.perf_counter() - begun)


async def _judge(programs: int, workers: int, rounds: int) -> float:
    """Programs a second of the best round; each round's programs are new to the pool, which it does not keep anyhow."""
    defaults = Rewards()
    limits = Limits(defaults.timeout, defaults.timeout / 2, defaults.memory_bytes, defaults.sandbox)
    pool = KillablePool(["code"], workers, limits)
    label = json.dumps([{"input": f"{n} 1\n", "output": f"{n + 1}\n", "testtype": "stdin"} for n in range(TESTS)])
    source = "```python\na, b = map(int, input().split())\nprint(a + b)  # {}\n```"
    taken = []
    try:
        await pool.run([Task("code", source.format(f"start {n}"), label, RuleContext()) for n in range(4 * workers)])
        for number in range(rounds):
            tasks = [Task("code", source.format(f"{number} {n}"), label, RuleContext()) for n in range(programs)]
            begun = time.perf_counter()
            outcomes = await pool.run(tasks)
            taken.append(time.perf_counter() - begun)
            assert all(outcome.value is True for outcome in outcomes), outcomes
    finally:
        await pool.close()
    return programs / min(taken)


def render(report: ProgramsReport) -> LiteralTable:
    title = f"{report.programs} programs, each in a sandbox (bwrap) of its own"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    for name in ("", "workers", "programs/s"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for judging in report.judged:
        table.add_row(f"code, {TESTS} tests each", str(judging.workers), f"{judging.programs_per_second:,.1f}")
    for name, rate in report.starts.items():
        table.add_row(f"the start of {name} alone", "", f"{rate:,.1f}")
    table.caption = f"one that spins was gone {1000 * report.late:.0f} ms after its limit, at the latest of {SPINS}"
    table.caption_justify = "left"
    return table


if __name__ == "__main__":  # without any data
    from rich.console import Console

    found = asyncio.run(measure(100, (1, 2), 3, lambda line: print(line, file=sys.stderr)))
    if found is not None:
        Console().print(render(found))
