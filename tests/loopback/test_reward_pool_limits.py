"""The pool's limits: CPU time and memory of a task, its own time alone, queues, equal tasks, rules that are `async`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from runtime.rewards import pool as pool_module
from runtime.rewards.pool import KillablePool, OutcomeCache
from runtime.rewards.rules import RuleContext, RuleOutcome
from runtime.rewards.worker import Task, Verdict
from runtime.rewards.worker_process import Limits
from tests.loopback.test_reward_pool import with_pool

COUNTER = itertools.count()
MIB = 1 << 20
LIMITS = Limits(seconds=600.0, cpu_seconds=0.3, memory_bytes=128 * MIB)
RULES = """
import asyncio, os, sys, time
from runtime.rewards.rules import rule

time.sleep(IMPORT)  # one that takes long

@rule("NAME")
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
def loops() -> Iterator[None]:
    """The loop of the reward service."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.fixture
def rule(tmp_path: Path) -> str:
    name = f"test_limited_{next(COUNTER)}"
    (tmp_path / "limited.py").write_text(RULES.replace("NAME", name).replace("IMPORT", "0.5"))
    return f"{tmp_path}/limited.py:{name}"


def task(rule: str, tmp_path: Path, text: str, tokens: int = 0) -> Task:
    return Task(rule, text, str(tmp_path), RuleContext(tokens=tokens))


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().split()


async def verdicts(pool: KillablePool, tasks: list[Task]) -> list[Verdict]:
    return list(await asyncio.gather(*[await pool.submit(each) for each in tasks]))


@pytest.mark.parametrize("text", ["spin", "power"])
def test_a_task_has_so_much_cpu_time_and_no_more(rule: str, tmp_path: Path, text: str) -> None:
    work = [task(rule, tmp_path, text), task(rule, tmp_path, "ok")]
    killed, after = with_pool(rule, lambda pool: verdicts(pool, work), workers=1, limits=LIMITS)
    assert killed.outcome == RuleOutcome(error="timeout")
    assert killed.seconds > 0.25  # and it was not the clock's limit, which is longer than the test may take
    assert after.outcome == RuleOutcome(2.0)


def test_waiting_is_no_cpu_time_and_costs_nobody_behind_it(rule: str, tmp_path: Path) -> None:
    """Tasks of one batch wait for longer, together, than one of them may: each has the limit to itself."""
    work = [task(rule, tmp_path, "sleep", tokens) for tokens in range(14)]
    limits = Limits(seconds=5.0, cpu_seconds=0.3, memory_bytes=128 * MIB)
    found = with_pool(rule, lambda pool: verdicts(pool, work), workers=1, limits=limits)
    assert [verdict.outcome for verdict in found] == [RuleOutcome(5.0)] * 14
    assert all(verdict.seconds > 0.39 for verdict in found)


@pytest.mark.parametrize("text", ["hoard", "block"])
def test_memory_beyond_the_limit_fails_the_task_and_replaces_the_worker(rule: str, tmp_path: Path, text: str) -> None:
    async def use(pool: KillablePool) -> None:
        work = [task(rule, tmp_path, each) for each in ("one", text, "three", "four")]
        assert await pool.run(work) == [RuleOutcome(3.0), RuleOutcome(error="memory"), RuleOutcome(5.0), RuleOutcome(4.0)]
        assert pool.lost == 1

    with_pool(rule, use, workers=1, limits=Limits(60.0, 10.0, 128 * MIB))


def test_a_text_beyond_the_limit_fails_alone(rule: str, tmp_path: Path) -> None:
    work = [task(rule, tmp_path, text) for text in ("one", "x" * 200 * MIB, "three")]
    outcomes = with_pool(rule, lambda pool: pool.run(work), workers=1, limits=Limits(60.0, 10.0, 128 * MIB))
    assert outcomes == [RuleOutcome(3.0), RuleOutcome(error="memory"), RuleOutcome(5.0)]


def test_a_rule_that_writes_into_the_pipe_loses_its_worker(rule: str, tmp_path: Path) -> None:
    work = [task(rule, tmp_path, text) for text in ("forge", "two")]
    outcomes = with_pool(rule, lambda pool: pool.run(work), workers=1, limits=LIMITS)
    assert outcomes == [RuleOutcome(error="crash"), RuleOutcome(3.0)]


def test_a_rule_that_ends_its_process_is_a_crash(rule: str, tmp_path: Path) -> None:
    outcomes = with_pool(rule, lambda pool: pool.run([task(rule, tmp_path, "leave")]), limits=LIMITS)
    assert outcomes == [RuleOutcome(error="crash")]


def test_what_a_rules_file_imports_counts_against_no_task(rule: str, tmp_path: Path) -> None:
    file = tmp_path / "limited.py"
    file.write_text(file.read_text().replace("time.sleep(0.5)", "time.sleep(2.5)"))
    limits = Limits(seconds=2.0, cpu_seconds=0.3, memory_bytes=128 * MIB)  # its file alone takes longer
    assert with_pool(rule, lambda pool: pool.run([task(rule, tmp_path, "ok")]), limits=limits) == [RuleOutcome(2.0)]


def test_half_a_surrogate_pair_is_scored_like_any_text(rule: str, tmp_path: Path) -> None:
    outcomes = with_pool(rule, lambda pool: pool.run([task(rule, tmp_path, "\ud800 and \udfff")]), limits=LIMITS)
    assert outcomes == [RuleOutcome(7.0)]


def test_equal_tasks_that_wait_together_are_evaluated_once(rule: str, tmp_path: Path) -> None:
    async def use(pool: KillablePool) -> None:
        gone, *others = [asyncio.ensure_future(pool.run([task(rule, tmp_path, "sleep")] * 2)) for _ in range(3)]
        await asyncio.wait([gone], timeout=0.05)
        gone.cancel()  # those who still wait get the verdict all the same
        assert await asyncio.gather(*others) == [[RuleOutcome(5.0)] * 2] * 2
        assert calls(tmp_path) == ["sleep"]
        assert await pool.run([task(rule, tmp_path, "sleep")]) == [RuleOutcome(5.0)]
        assert calls(tmp_path) == ["sleep"] * 2  # this pool keeps nothing

    with_pool(rule, use, limits=LIMITS)


def test_values_are_kept_up_to_the_bound_and_errors_never(rule: str, tmp_path: Path) -> None:
    async def run() -> None:
        pool = KillablePool([rule], 1, LIMITS, cache_entries=2)
        try:
            for text in ("a", "bb", "a", "ccc", "a", "bb", "leave", "leave"):  # "bb" is the older of two when "ccc" comes
                await asyncio.wait_for(pool.run([task(rule, tmp_path, text)]), 60)
        finally:
            await pool.close()

    asyncio.run(run())
    assert calls(tmp_path) == ["a", "bb", "ccc", "bb", "leave", "leave"]


def test_the_cache_forgets_what_was_not_used_longest() -> None:
    cache = OutcomeCache(2)
    cache.put(b"a", 1.0)
    cache.put(b"b", False)
    assert cache.get(b"a") == 1.0
    cache.put(b"c", 3.0)
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (1.0, None, 3.0)
    assert len(cache) == 2


def test_long_texts_wait_outside_the_queue(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CAPACITY_BYTES", 4 * MIB)

    async def use(pool: KillablePool) -> None:
        texts = [str(index) + "x" * MIB for index in range(10)]
        calls = [asyncio.ensure_future(pool.run([task(rule, tmp_path, text)])) for text in texts]
        most = 0
        deadline = time.monotonic() + 60
        while not all(call.done() for call in calls) and time.monotonic() < deadline:
            most = max(most, pool._waiting_bytes)
            await asyncio.sleep(0)
        assert await asyncio.gather(*calls) == [[RuleOutcome(float(MIB + 1))]] * 10
        assert 3 * MIB < most < 6 * MIB
        assert pool._waiting_bytes == 0

    with_pool(rule, use, workers=1, limits=Limits(60.0, 10.0, 256 * MIB))


def test_verdicts_come_as_they_are_known(rule: str, tmp_path: Path) -> None:
    """A long task holds up nothing that another worker can do."""

    async def use(pool: KillablePool) -> None:
        slow = await pool.submit(task(rule, tmp_path, "wait"))
        quick = [await pool.submit(task(rule, tmp_path, "quick", tokens)) for tokens in range(200)]
        await asyncio.gather(*quick)
        assert not slow.done()
        (tmp_path / "go").touch()
        assert (await slow).outcome == RuleOutcome(4.0)

    with_pool(rule, use, workers=2, limits=LIMITS)
