"""The pool against rules that hang, die, throw and print; its limits, queues and cache: each task costs its own sample."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import uvloop

from runtime import config
from runtime.errors import Cancelled, ServiceFault
from runtime.process import spans
from runtime.process.spans import TracedSpan
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RuleContext, RuleOutcome
from runtime.rewards.scorer import RewardScorer
from runtime.rewards.worker import Task, Verdict
from runtime.types import ScoreRequest, Scores
from tests.unit.test_rewards_scorer import Bytes, request

T = TypeVar("T")

COUNTER = itertools.count()
MEMORY = 384 << 20
RULES = """
import asyncio, os, subprocess, sys, time
from runtime.rewards.rules import rule

@rule("NAME")
def hostile(text, label, context):
    if text == "hang":
        while True:
            pass
    if text == "exit":
        os._exit(0)
    if text == "abort":
        os.abort()
    if text == "hog":
        held = []
        while True:
            held.append(bytearray(1 << 20))
            if len(held) > 200:
                held.clear()
    if text == "raise":
        raise KeyError(text)
    if text == "escape":
        raise ValueError(chr(27) + "]0;")
    if text == "none":
        return None
    if text == "print":
        print("noise")
        return bool(sys.stdin.read() == "")
    if text == "child":
        child = subprocess.Popen(["sleep", "600"])
        with open(label, "w") as file:
            file.write(str(child.pid))
        while True:
            pass
    if text == "environment":
        with open(label, "w") as file:
            file.write("\\n".join(os.environ))
        return True
    if text == "meet":
        open(os.path.join(label, str(os.getpid())), "w").close()
        while len(os.listdir(label)) < 3:
            pass
        return True
    return text == label

@rule("NAME_limited")
async def limited(text, label, context):
    with open(os.path.join(label, "calls"), "a") as file:
        file.write(text[:20] + "\\n")
    if text == "spin":
        while True:
            pass
    if text == "power":
        return 3 ** 10 ** 9  # one call that no handler of Python's own interrupts
    if text == "sleep":
        await asyncio.sleep(0.4)
    if text == "wait":
        while not os.path.exists(os.path.join(label, "go")):
            await asyncio.sleep(0.01)
    if text == "hoard":
        return len([bytes(1 << 20) for _ in range(1000)])
    if text == "block":
        return len(bytes(1 << 30))
    if text == "forge":
        os.write(4, b"\\x01\\0\\0\\0?")  # behind standard input, output and error, and the requests' pipe
    if text == "leave":
        sys.exit(0)
    return len(text)
"""


@pytest.fixture(autouse=True)
def loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """The reward service runs on uvloop, `sluice score` on asyncio's own loop."""
    asyncio.set_event_loop_policy(getattr(request, "param", uvloop.EventLoopPolicy)())
    yield
    asyncio.set_event_loop_policy(None)


on_both_loops = pytest.mark.parametrize(
    "loop", [asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"], indirect=True
)


@pytest.fixture
def rule(tmp_path: Path) -> str:
    """The hostile rule under a name of its own: a process registers a name once."""
    name = f"test_hostile_{next(COUNTER)}"
    (tmp_path / "hostile.py").write_text(RULES.replace("NAME", name))
    return f"{tmp_path}/hostile.py:{name}"


@pytest.fixture
def limited(rule: str) -> str:
    return f"{rule}_limited"


def with_pool(
    rule: str,
    use: Callable[[KillablePool], Awaitable[T]],
    workers: int = 2,
    timeout: float = 2.0,
    limits: Limits | None = None,
    **settings: Any,
) -> T:
    async def run() -> T:
        pool = KillablePool([rule], workers, limits or Limits(timeout, 30.0, MEMORY), **settings)
        try:
            return await asyncio.wait_for(use(pool), 100)
        finally:
            await pool.close()

    before = set(psutil.Process().children(recursive=True))
    try:
        return asyncio.run(run())
    finally:
        assert set(psutil.Process().children(recursive=True)) <= before


def ended(pid: int) -> bool:
    """Whether the process ends within a minute; one that waits to be reaped by a stranger has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if select.select([handle], [], [], 60)[0]:
            return True
        os.kill(pid, signal.SIGKILL)  # the test fails, and still leaves nothing behind
        return False
    finally:
        os.close(handle)


def tasks(rule: str, *texts: str, label: str = "ok") -> list[Task]:
    """No two of them are equal."""
    return [Task(rule, text, label, RuleContext(tokens=index)) for index, text in enumerate(texts)]


def test_the_first_failure_of_each_type_is_told_with_its_place(rule: str, capfd: pytest.CaptureFixture[str]) -> None:
    with_pool(rule, lambda pool: pool.run(tasks(rule, "raise", "raise", "escape")), workers=1)
    told = capfd.readouterr().err
    assert told.count("KeyError: 'raise'") == 1  # of two
    assert "hostile.py" in told and "in hostile" in told
    assert r"ValueError: \x1b]0;" in told and "\x1b" not in told  # no order to a terminal


@on_both_loops
def test_each_failure_costs_its_own_sample(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kill reaches what a rule started; a span says how long each rule took."""
    told: list[TracedSpan] = []
    monkeypatch.setattr(spans.log, "add", lambda *span: told.append(TracedSpan(*span)))
    texts = ["ok", "hang", "ok", "exit", "no", "abort", "raise", "hog", "none", "ok", "print", "\x00\U0001f642"]
    pid_file = tmp_path / "pid"
    work = [*tasks(rule, "child", label=str(pid_file)), *tasks(rule, *texts)]
    (child, *outcomes), lost = with_pool(rule, lambda pool: _outcomes(pool, work))
    assert dict(zip(texts, outcomes, strict=True)) == {
        "ok": RuleOutcome(True),
        "hang": RuleOutcome(error="timeout"),
        "exit": RuleOutcome(error="crash"),
        "no": RuleOutcome(False),
        "abort": RuleOutcome(error="crash"),
        "raise": RuleOutcome(error="exception:KeyError"),
        "hog": RuleOutcome(error="timeout"),
        "none": RuleOutcome(error="no number: NoneType"),
        "print": RuleOutcome(True),
        "\x00\U0001f642": RuleOutcome(False),
    }
    assert child == RuleOutcome(error="timeout") and ended(int(pid_file.read_text()))
    assert lost == 5
    assert {span.name for span in told} == {f"rule {rule.rpartition(':')[2]}"}
    assert all(span.line.startswith("worker ") for span in told)
    assert sum(span.end - span.start for span in told) >= 3 * 2.0  # the limit of each of those that end at it


def test_a_rule_sees_no_variable_that_it_was_not_given(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("WANDB_API_KEY", "HTTPS_PROXY", "JUDGE_KEY", "SLUICE_KEY", "SLUICE_SECRET")
    for name in (*secrets, "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, "C")
    work, given = tasks(rule, "environment", label=str(tmp_path / "seen")), ("JUDGE_KEY", "SLUICE_KEY", "NOT_SET")
    assert with_pool(rule, lambda pool: pool.run(work), workers=1, timeout=60.0, variables=given) == [RuleOutcome(True)]
    seen = set((tmp_path / "seen").read_text().splitlines())
    assert seen & set(secrets) == {"JUDGE_KEY"}
    assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL"} <= seen


async def _outcomes(pool: KillablePool, work: list[Task]) -> tuple[list[RuleOutcome], int]:
    return await pool.run(work), pool.lost


def test_the_pool_refills_to_its_full_width(rule: str, tmp_path: Path) -> None:
    async def use(pool: KillablePool) -> None:
        assert await pool.run(tasks(rule, *["exit"] * 6)) == [RuleOutcome(error="crash")] * 6
        (tmp_path / "meeting").mkdir()
        meeting = await pool.run(tasks(rule, *["meet"] * 3, label=str(tmp_path / "meeting")))
        assert meeting == [RuleOutcome(True)] * 3  # none returns before three workers run at the same time

    with_pool(rule, use, workers=3, timeout=60)


def test_results_keep_their_order_under_concurrent_callers(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        batches = [[f"{caller}.{i}" for i in range(40)] for caller in range(8)]
        found = await asyncio.gather(*(pool.run(tasks(rule, *batch, label=batch[7])) for batch in batches))
        for outcomes in found:
            assert [i for i, outcome in enumerate(outcomes) if outcome.value] == [7]
        outcomes = await pool.run(tasks(rule, *["ok"] * 3072))
        assert outcomes == [RuleOutcome(True)] * 3072

    with_pool(rule, use, timeout=60)


@on_both_loops
def test_close_ends_every_call_under_way(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        calls = [asyncio.ensure_future(pool.run(tasks(rule, *["hang"] * count))) for count in (1, 2, 2048)]
        await asyncio.wait(calls, timeout=0.2)
        await pool.close()
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(ended, Cancelled)
        with pytest.raises(Cancelled):
            await pool.run(tasks(rule, "ok"))

    with_pool(rule, use, timeout=30)


@on_both_loops
def test_a_cancelled_call_leaves_no_work_behind(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.run(tasks(rule, *["hang"] * 500)), 0.3)
        assert await pool.run(tasks(rule, "ok")) == [RuleOutcome(True)]

    with_pool(rule, use)


def test_a_worker_that_cannot_start_is_a_fault_of_the_service(tmp_path: Path) -> None:
    missing = f"{tmp_path}/absent.py:rule"
    with pytest.raises(ServiceFault, match="reward: start a worker"):
        with_pool(missing, lambda pool: pool.run(tasks(missing, "ok")))


def test_no_worker_outlives_a_killed_parent(rule: str) -> None:
    program = f"""
import asyncio, psutil
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RuleContext
from runtime.rewards.worker import Task
async def main():
    pool = KillablePool([{rule!r}], 2, Limits(600.0, 600.0, 384 << 20))
    task = lambda text: Task({rule!r}, text, "ok", RuleContext())
    await pool.run([task("ok")] * 40)
    hanging = asyncio.ensure_future(pool.run([task("hang")] * 2))
    await asyncio.wait([hanging], timeout=0.5)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    await hanging
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        readable, _, _ = select.select([parent.stdout], [], [], 60)
        assert readable
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
    assert all(ended(worker) for worker in workers)


def test_the_scorer_masks_what_the_pool_lost(rule: str) -> None:
    async def run(asked: ScoreRequest, **settings: Any) -> Scores:
        scorer = RewardScorer(config.Rewards(**settings), Bytes())
        scorer.start()
        try:
            return await asyncio.wait_for(scorer.score(asked), 60)
        finally:
            await scorer.close()

    rules = [config.Rule(name=rule, weight=2.0, wrong=-1.0), config.Rule(name="format_answer")]
    scores = asyncio.run(run(request(3, "ok", "ok", "hang", "bad", "exit", "raise"), rules=rules, timeout=2.0))
    assert scores.valid.tolist() == [1, 0, 1, 0, 0]
    assert scores.rewards.tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]
    np.testing.assert_array_equal(scores.rules[rule.rpartition(":")[2]], [1.0, np.nan, -1.0, np.nan, np.nan])
    assert scores.rules["format_answer"].tolist() == [0.0] * 5
    assert scores.errors == {"timeout": 1, "crash": 1, "exception:KeyError": 1}
    with pytest.raises(ServiceFault, match=r"reward: rule test_hostile_\d+: crash on sample 1 of group 3"):
        asyncio.run(run(request(3, "ok", "ok", "exit"), rules=[config.Rule(name=rule)], on_error="fail"))


def children() -> set[psutil.Process]:
    return {*psutil.Process().children()}


def test_a_reply_too_long_for_the_service_is_scored_by_a_worker() -> None:
    async def run() -> None:
        scorer, before = RewardScorer(config.Rewards(rules=[config.Rule(name="gsm8k")]), Bytes()), children()
        scorer.start()
        assert children() == before  # screened rules start no worker before one is needed
        try:
            long = "thinking " * 8_000
            scores = await asyncio.wait_for(scorer.score(request(3, "5", f"{long}#### 5", f"{long}#### 6")), 60)
            assert len(children() - before) == 1
        finally:
            await scorer.close()
        assert scores.rewards.tolist() == [1.0, 0.0]

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------ limits

MIB = 1 << 20
LIMITS = Limits(seconds=600.0, cpu_seconds=0.3, memory_bytes=128 * MIB)


def task(rule: str, tmp_path: Path, text: str, tokens: int = 0) -> Task:
    return Task(rule, text, str(tmp_path), RuleContext(tokens=tokens))


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().split()


async def verdicts(pool: KillablePool, tasks: list[Task]) -> list[Verdict]:
    return list(await asyncio.gather(*map(pool.submit, tasks)))


@pytest.mark.parametrize("text", ["spin", "power"])
def test_a_task_has_so_much_cpu_time_and_no_more(limited: str, tmp_path: Path, text: str) -> None:
    work = [task(limited, tmp_path, text), task(limited, tmp_path, "ok")]
    killed, after = with_pool(limited, lambda pool: verdicts(pool, work), workers=1, limits=LIMITS)
    assert killed.outcome == RuleOutcome(error="timeout")
    assert killed.seconds > 0.25  # and it was not the clock's limit, which is longer than the test may take
    assert after.outcome == RuleOutcome(2.0)


def test_waiting_is_no_cpu_time_and_costs_nobody_behind_it(limited: str, tmp_path: Path) -> None:
    """Tasks of one batch wait for longer, together, than one of them may: each has the limit to itself."""
    work = [task(limited, tmp_path, "sleep", tokens) for tokens in range(6)]
    limits = Limits(seconds=2.0, cpu_seconds=0.3, memory_bytes=128 * MIB)
    found = with_pool(limited, lambda pool: verdicts(pool, work), workers=1, limits=limits)
    assert [verdict.outcome for verdict in found] == [RuleOutcome(5.0)] * 6
    assert all(verdict.seconds > 0.39 for verdict in found)


def test_memory_beyond_the_limit_fails_the_task_and_replaces_the_worker(limited: str, tmp_path: Path) -> None:
    """A text too long for the worker fails alone."""
    texts = ("one", "hoard", "three", "block", "four", "x" * 140 * MIB, "five")

    async def use(pool: KillablePool) -> None:
        found = await pool.run([task(limited, tmp_path, each) for each in texts])
        assert [outcome.value for outcome in found] == [3.0, None, 5.0, None, 4.0, None, 4.0]
        assert {outcome.error for outcome in found} == {"", "memory"}
        assert pool.lost == 3

    with_pool(limited, use, workers=1, limits=Limits(60.0, 10.0, 128 * MIB))


def test_a_rule_that_writes_into_the_pipe_or_ends_its_process_loses_its_worker(limited: str, tmp_path: Path) -> None:
    work = [task(limited, tmp_path, text) for text in ("forge", "two", "leave", "\ud800 and \udfff")]
    outcomes = with_pool(limited, lambda pool: pool.run(work), workers=1, limits=LIMITS)
    crash = RuleOutcome(error="crash")
    assert outcomes == [crash, RuleOutcome(3.0), crash, RuleOutcome(7.0)]  # half a surrogate pair is like any text


def test_what_a_rules_file_imports_counts_against_no_task(limited: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.py"
    file.write_text(f"import time\ntime.sleep(1.5)\n{file.read_text()}")
    limits = Limits(seconds=1.0, cpu_seconds=0.3, memory_bytes=128 * MIB)  # its file alone takes longer
    assert with_pool(limited, lambda pool: pool.run([task(limited, tmp_path, "ok")]), limits=limits) == [RuleOutcome(2.0)]


def test_equal_tasks_that_wait_together_are_evaluated_once(limited: str, tmp_path: Path) -> None:
    async def use(pool: KillablePool) -> None:
        gone, *others = [asyncio.ensure_future(pool.run([task(limited, tmp_path, "sleep")] * 2)) for _ in range(3)]
        await asyncio.wait([gone], timeout=0.05)
        gone.cancel()  # those who still wait get the verdict all the same
        assert await asyncio.gather(*others) == [[RuleOutcome(5.0)] * 2] * 2
        assert calls(tmp_path) == ["sleep"]
        assert await pool.run([task(limited, tmp_path, "sleep")]) == [RuleOutcome(5.0)]
        assert calls(tmp_path) == ["sleep"] * 2  # this pool keeps nothing

    with_pool(limited, use, limits=LIMITS)


def test_values_are_kept_up_to_the_bound_and_errors_never(limited: str, tmp_path: Path) -> None:
    async def use(pool: KillablePool) -> None:
        for text in ("a", "bb", "a", "ccc", "a", "bb", "leave", "leave"):  # "bb" is the older of two when "ccc" comes
            await pool.run([task(limited, tmp_path, text)])

    with_pool(limited, use, workers=1, limits=LIMITS, cache_entries=2)
    assert calls(tmp_path) == ["a", "bb", "ccc", "bb", "leave", "leave"]
