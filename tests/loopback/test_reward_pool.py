"""The pool against rules that hang, die, throw and print: each costs its own sample, and nothing stays behind."""

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
from typing import TypeVar

import numpy as np
import psutil
import pytest
import uvloop

from runtime import config
from runtime.errors import Cancelled, ServiceFault
from runtime.process import spans
from runtime.process.spans import TracedSpan
from runtime.rewards.pool import CAPACITY, KillablePool
from runtime.rewards.rules import RuleContext, RuleOutcome
from runtime.rewards.scorer import RewardScorer
from runtime.rewards.worker import Task
from runtime.rewards.worker_process import Limits
from tests.unit.test_rewards_scorer import Bytes, request

T = TypeVar("T")

COUNTER = itertools.count()
MEMORY = 384 << 20
RULES = """
import os, subprocess, sys
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
"""


@pytest.fixture(autouse=True, params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """The reward service runs on uvloop, `sluice score` on asyncio's own loop."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.fixture
def rule(tmp_path: Path) -> str:
    """The hostile rule under a name of its own: a process registers a name once."""
    name = f"test_hostile_{next(COUNTER)}"
    (tmp_path / "hostile.py").write_text(RULES.replace("NAME", name))
    return f"{tmp_path}/hostile.py:{name}"


def with_pool(
    rule: str,
    use: Callable[[KillablePool], Awaitable[T]],
    workers: int = 2,
    timeout: float = 2.0,
    limits: Limits | None = None,
) -> T:
    async def run() -> T:
        pool = KillablePool([rule], workers, limits or Limits(timeout, 30.0, MEMORY))
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


def test_a_rule_sees_no_variable_that_it_was_not_given(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("WANDB_API_KEY", "HTTPS_PROXY", "JUDGE_KEY", "SLUICE_KEY", "SLUICE_SECRET")
    for name in (*secrets, "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, "C")

    async def use() -> list[RuleOutcome]:
        pool = KillablePool([rule], 1, Limits(60.0, 30.0, MEMORY), variables=("JUDGE_KEY", "SLUICE_KEY", "NOT_SET"))
        try:
            return await asyncio.wait_for(pool.run(tasks(rule, "environment", label=str(tmp_path / "seen"))), 100)
        finally:
            await pool.close()

    assert asyncio.run(use()) == [RuleOutcome(True)]
    seen = set((tmp_path / "seen").read_text().splitlines())
    assert seen & set(secrets) == {"JUDGE_KEY"}
    assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL"} <= seen


def test_a_span_says_how_long_each_rule_took(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[TracedSpan] = []
    monkeypatch.setattr(spans.log, "add", lambda *span: told.append(TracedSpan(*span)))
    with_pool(rule, lambda pool: pool.run(tasks(rule, "ok", "hang")), workers=1)
    assert {span.name for span in told} == {f"rule {rule.rpartition(':')[2]}"}
    assert all(span.line.startswith("worker ") for span in told)
    assert sum(span.end - span.start for span in told) >= 2.0  # the limit of the one that hangs


def test_the_log_says_what_a_rule_raised_once_for_each_type(rule: str, capfd: pytest.CaptureFixture[str]) -> None:
    failed = tasks(rule, "raise", "raise", "raise", "ok")
    with_pool(rule, lambda pool: pool.run(failed), workers=1)
    said = capfd.readouterr().err
    assert (said.count(f"rule {rule} failed on a reply:\n"), said.count("\nKeyError: 'raise'\n")) == (1, 1)
    assert "in hostile\n" in said


def tasks(rule: str, *texts: str, label: str = "ok") -> list[Task]:
    """No two of them are equal."""
    return [Task(rule, text, label, RuleContext(tokens=index)) for index, text in enumerate(texts)]


def test_each_failure_costs_its_own_sample(rule: str) -> None:
    texts = ["ok", "hang", "ok", "exit", "no", "abort", "raise", "hog", "none", "ok", "print", "\x00\U0001f642"]
    outcomes, lost = with_pool(rule, lambda pool: _outcomes(pool, tasks(rule, *texts)))
    assert dict(zip(texts, outcomes, strict=True)) == {
        "ok": RuleOutcome(True),
        "hang": RuleOutcome(error="timeout"),
        "exit": RuleOutcome(error="crash"),
        "no": RuleOutcome(False),
        "abort": RuleOutcome(error="crash"),
        "raise": RuleOutcome(error="exception:KeyError"),
        "hog": RuleOutcome(error="timeout"),
        "none": RuleOutcome(error="exception:TypeError"),
        "print": RuleOutcome(True),
        "\x00\U0001f642": RuleOutcome(False),
    }
    assert lost == 4


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

    with_pool(rule, use, timeout=60)


def test_more_than_the_queue_holds_waits_for_room(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        outcomes = await pool.run(tasks(rule, *["ok"] * (3 * CAPACITY)))
        assert outcomes == [RuleOutcome(True)] * (3 * CAPACITY)

    with_pool(rule, use, timeout=60)


def test_close_ends_every_call_under_way(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        calls = [asyncio.ensure_future(pool.run(tasks(rule, *["hang"] * count))) for count in (1, 2, 2 * CAPACITY)]
        await asyncio.wait(calls, timeout=0.2)
        await pool.close()
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(ended, Cancelled)
        with pytest.raises(Cancelled):
            await pool.run(tasks(rule, "ok"))

    with_pool(rule, use, timeout=30)


def test_a_cancelled_call_leaves_no_work_behind(rule: str) -> None:
    async def use(pool: KillablePool) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.run(tasks(rule, *["hang"] * 500)), 0.7)
        assert await pool.run(tasks(rule, "ok")) == [RuleOutcome(True)]

    with_pool(rule, use)


def test_the_kill_reaches_what_a_rule_started(rule: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    outcomes = with_pool(rule, lambda pool: pool.run(tasks(rule, "child", label=str(pid_file))), timeout=4.0)
    assert outcomes == [RuleOutcome(error="timeout")]
    assert ended(int(pid_file.read_text()))


def test_a_worker_that_cannot_start_is_a_fault_of_the_service(tmp_path: Path) -> None:
    missing = f"{tmp_path}/absent.py:rule"
    with pytest.raises(ServiceFault, match="reward: start a worker"):
        with_pool(missing, lambda pool: pool.run(tasks(missing, "ok")))


def test_no_worker_outlives_a_killed_parent(rule: str) -> None:
    program = f"""
import asyncio, psutil
from runtime.rewards.pool import KillablePool
from runtime.rewards.rules import RuleContext
from runtime.rewards.worker import Task
from runtime.rewards.worker_process import Limits
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
    async def run() -> None:
        settings = config.Rewards(
            rules=[config.Rule(name=rule, weight=2.0, wrong=-1.0), config.Rule(name="format_answer")], timeout=2.0
        )
        scorer = RewardScorer(settings, Bytes())
        scorer.start()
        try:
            scores = await asyncio.wait_for(scorer.score(request(3, "ok", "ok", "hang", "bad", "exit", "raise")), 60)
        finally:
            await scorer.close()
        assert scores.valid.tolist() == [1, 0, 1, 0, 0]
        assert scores.rewards.tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]
        np.testing.assert_array_equal(scores.rules[rule.rpartition(":")[2]], [1.0, np.nan, -1.0, np.nan, np.nan])
        assert scores.rules["format_answer"].tolist() == [0.0] * 5
        assert scores.errors == {"timeout": 1, "crash": 1, "exception:KeyError": 1}

    asyncio.run(run())


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


def test_on_error_fail_names_rule_and_reason(rule: str) -> None:
    async def run() -> None:
        settings = config.Rewards(rules=[config.Rule(name=rule)], timeout=2.0, on_error="fail")
        scorer = RewardScorer(settings, Bytes())
        try:
            with pytest.raises(ServiceFault, match=r"reward: rule test_hostile_\d+: timeout on sample 1 of group 3"):
                await asyncio.wait_for(scorer.score(request(3, "ok", "ok", "hang")), 60)
        finally:
            await scorer.close()

    asyncio.run(run())
