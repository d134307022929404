"""The rules `code` and `code_share` with real programs, and where they are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Rewards, Sandbox
from runtime.errors import UserError
from runtime.rewards.code import use, verdicts
from runtime.rewards.pool import KillablePool
from runtime.rewards.rules import RuleContext, RuleOutcome
from runtime.rewards.scorer import RewardScorer
from runtime.rewards.worker import Task
from runtime.rewards.worker_process import Limits
from tests.sandboxes import needs_bwrap

ENOUGH = 20.0
SUMS = json.dumps([{"input": f"{n} 1\n", "output": str(n + 1), "testtype": "stdin"} for n in range(3)])


RUNTIMES: dict[str, dict[str, Any]] = {"bwrap": {}, "subprocess": {"runtime": "subprocess", "network": "open"}}


@pytest.fixture(autouse=True, params=RUNTIMES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "bwrap":
        needs_bwrap()
    chosen = Sandbox(timeout=ENOUGH, cpu_seconds=ENOUGH, **RUNTIMES[request.param])
    use(chosen)
    yield chosen
    use(Sandbox())


def judged(program: str, label: str = SUMS, **extra: Any) -> list[bool]:
    return asyncio.run(verdicts(f"```python\n{program}\n```", label, RuleContext(extra=extra)))


def test_what_a_program_prints() -> None:
    assert judged("a, b = map(int, input().split())\nprint(a + b)") == [True] * 3
    assert judged("a, b = map(int, input().split())\nprint(a * 2 + 1)") == [True, False, False]


@pytest.mark.parametrize(
    "program",
    [
        "import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__': main()",
        "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
        "import atexit\natexit.register(lambda: print(total))\ntotal = sum(map(int, input().split()))",
        "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())\nraise SystemExit",
        "import subprocess, sys\nprint(sum(map(int, subprocess.run(['cat'], capture_output=True).stdout.split())))",
    ],
    ids=["main", "thread", "atexit", "descriptors", "subprocess"],
)
def test_ways_of_reading_and_printing(program: str) -> None:
    assert judged(program) == [True] * 3


def test_what_fails_fails_alone() -> None:
    program = "n = int(input().split()[0])\n{}\nprint(n + 1)"
    assert judged(program.format("if n == 1: raise ValueError")) == [True, False, True]
    assert judged(program.format("import os\nif n == 1: os.kill(os.getpid(), 11)")) == [True, False, True]
    assert judged(program.format("if n == 1:\n    print(2)\n    raise SystemExit(1)")) == [True, False, True]


def test_no_test_sees_another() -> None:
    """Neither what an earlier one left in memory, nor a process that it left."""
    program = "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nprint(int(input().split()[0]) + sys.seen)"
    assert judged(program) == [True] * 3


def test_functions() -> None:
    label = json.dumps({"fn_name": "total", "inputs": [[[1, 2]], [[3]]], "outputs": [3, [3]]})
    method = "class Solution:\n    def total(self, x: List[int]) -> int:\n        print('aside')\n        return sum(x)"
    assert judged(method, label) == [True, True]
    assert judged("def total(x): return sum(x)", label) == [True, True]
    assert judged("def total(x): return x[0]", label) == [False, True]
    assert judged("def total(x): return {1, 2}", label) == [False, False]
    assert judged("def other(x): return sum(x)", label) == [False, False]
    tests = json.dumps([{"input": "[1, 2]\n3", "output": "[[1, 2], 3]", "testtype": "functional"}])
    assert judged("def both(x, y): return x, y", tests, fn_name="both") == [True]


def test_what_is_no_program() -> None:
    assert judged("(") == [False] * 3
    assert judged("") == [False] * 3


def test_expected_outputs_are_nowhere_in_the_sandbox() -> None:
    label = json.dumps([{"input": "x", "output": "expected-0123456789", "testtype": "stdin"}])
    search = "import gc, re\nfor held in gc.get_objects(): print(*re.findall('expected-[0-9]{10}', repr(held)), end='')"
    assert judged(search, label) == [False]


def test_tests_that_a_limit_leaves_out_are_not_passed(sandbox: Sandbox) -> None:
    use(msgspec.structs.replace(sandbox, timeout=0.5))
    assert judged("n = int(input().split()[0])\nprint(n + 1, flush=True)\nwhile n == 1: pass") == [True, False, False]


# ------------------------------------------------------------------------------------------------ in the pool


def test_in_the_pool(sandbox: Sandbox) -> None:
    replies = [f"```python\n{code}\n```" for code in ("a, b = map(int, input().split())\nprint(a + b)", "print(1)", "def")]

    async def scored() -> list[RuleOutcome]:
        pool = KillablePool(["code", "code_share"], 1, Limits(2 * ENOUGH, ENOUGH, 384 << 20, sandbox))
        try:
            tasks = [Task(rule, reply, SUMS, RuleContext()) for rule in ("code", "code_share") for reply in replies]
            return await pool.run([*tasks, Task("code", replies[0], "5", RuleContext())])
        finally:
            await pool.close()

    outcomes = asyncio.run(scored())
    assert [outcome.value for outcome in outcomes] == [True, False, False, 1.0, 1 / 3, 0.0, None]
    assert outcomes[-1].error == "exception:ValueError"  # a label without tests is nobody's fault


class NoTokenizer:
    def decode_batch(self, batch: Any) -> list[str]:
        return []


def test_a_service_without_its_sandbox_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def check(rules: list[dict[str, str]]) -> None:
        await RewardScorer(msgspec.convert({"rules": rules}, Rewards), NoTokenizer()).check()

    asyncio.run(check([{"name": "gsm8k"}]))
    with pytest.raises(UserError, match=r"rewards.sandbox.runtime: 'bwrap' is not installed: apt-get install bubblewrap"):
        asyncio.run(check([{"name": "gsm8k"}, {"name": "code_share"}]))
