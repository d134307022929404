"""The summary of a run: totals over its steps, its file, its table, and the memory of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runtime.errors import UserError
from runtime.summary import PeakMemory, Summary, Totals, pss_of, render

STEPS: list[dict[str, Any]] = [
    {
        "timing/all": 1.0,
        "timing/update": 0.8,
        "timing/rollout": 1.0,
        "timing/non_overlap_adv": 0.1,
        "idle/trainer": 0.2,
        "idle/rollout": 0.0,
        "samples": 64.0,
        "tokens": 1000.0,
        "staleness/mean": 0.5,
        "staleness/histogram": {0: 32, 1: 32},
        "mismatch/tokens": 300.0,
        "mismatch/abs_logprob": 2e-6,
        "mismatch/abs_logprob_p99": 9e-6,
    },
    {
        "timing/all": 3.0,
        "timing/update": 0.6,
        "idle/trainer": 0.8,
        "idle/rollout": 0.4,
        "samples": 64.0,
        "tokens": 600.0,
        "staleness/histogram": {"1": 16, "2": 48},  # as JSON lines hold it
        "mismatch/tokens": 100.0,
        "mismatch/abs_logprob": 6e-6,
        "mismatch/abs_logprob_p99": 8e-6,
    },
]


def summary(**changes: Any) -> Summary:
    totals = Totals()
    for step in STEPS:
        totals.add(step)
    rest: dict[str, Any] = {
        "stop_reason": "steps",
        "accuracy_before": 0.45,
        "accuracy_after": 0.93,
        "total_seconds": 9.0,
        "startup": {"imports": 2.0, "register": 0.5},
        "groups": {"retired": 16, "dropped": 1},
        "peak_pss_bytes": 3 << 29,
    }
    return totals.summary(rl_seconds=4.0, **(rest | changes))


def test_totals_over_the_steps() -> None:
    found = summary()
    assert (found.steps, found.samples_per_second, found.tokens_per_second) == (2, 32.0, 400.0)
    assert found.staleness_histogram == {0: 32, 1: 48, 2: 48}
    assert (found.staleness_mean, found.staleness_max) == ((48 + 2 * 48) / 128, 2)
    assert found.idle_trainer == pytest.approx((0.2 * 1 + 0.8 * 3) / 4)  # weighted by the steps' durations
    assert found.idle_rollout == pytest.approx(0.4 * 3 / 4)
    assert found.mismatch_mean == pytest.approx((300 * 2e-6 + 100 * 6e-6) / 400)
    assert found.mismatch_p99 == 9e-6
    assert "log p differs by 3.0e-06 in the mean; p99 9.0e-06 at most" in text_of(found)
    assert found.timing == pytest.approx({"all": 4.0, "update": 1.4, "rollout": 1.0, "non_overlap_adv": 0.1})


def test_a_run_that_compared_nothing() -> None:
    totals = Totals()
    totals.add({"timing/all": 0.0, "mismatch/tokens": 0.0})  # all tokens were of older versions
    found = totals.summary(
        rl_seconds=0.0,
        stop_reason="interrupted",
        accuracy_before=None,
        accuracy_after=None,
        total_seconds=1.0,
        startup={},
        groups={},
        peak_pss_bytes=0,
    )
    assert (found.steps, found.samples_per_second, found.staleness_mean, found.idle_trainer) == (1, 0.0, 0.0, 0.0)
    assert (found.mismatch_mean, found.mismatch_p99) == (None, None)
    assert "not measured" in text_of(found) and "log p" not in text_of(found)


def test_the_file(tmp_path: Path) -> None:
    found = summary()
    found.write(tmp_path)
    found.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    data = json.loads((tmp_path / "summary.json").read_text())
    expected = {"accuracy_before", "accuracy_after", "steps", "rl_seconds", "total_seconds", "peak_pss_bytes"}
    expected |= {"samples_per_second", "tokens_per_second", "staleness_mean", "staleness_max", "staleness_histogram"}
    expected |= {"idle_trainer", "idle_rollout", "groups", "dropped", "timing", "startup", "stop_reason"}
    expected |= {"mismatch_mean", "mismatch_p99", "lost"}
    assert data.keys() == expected
    assert data["staleness_histogram"] == {"0": 32, "1": 48, "2": 48}
    assert Summary.read(tmp_path) == found


def test_reading_what_is_not_a_summary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary\.json: no such file"):
        Summary.read(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    with pytest.raises(UserError, match=r"summary\.json: not a summary: .*missing required field"):
        Summary.read(tmp_path)


def text_of(found: Summary) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


def test_the_table() -> None:
    shown = text_of(summary())
    for said in (
        "45.0% → 93.0%",
        "2 in 4.0 s; 9.0 s in all",
        "32 samples/s, 400 tokens/s",
        "mean 1.12, max 2",
        "0: 32, 1: 48, 2: 48",
        "trainer 65%, rollouts 30%",
        "16 retired, 1 dropped",
        "update 1.4 s, rollout 1.0 s",
        "imports 2.0 s, register 0.5 s",
        "1.50 GiB",
        "Stopped: steps",
    ):
        assert said in shown
    assert "non_overlap" not in shown


def test_the_table_says_why_groups_were_dropped() -> None:
    shown = text_of(summary(groups={"retired": 16, "dropped": 1204}, dropped={"no signal": 1200, "run ended": 4}))
    assert "16 retired, 1,204 dropped (1,200 no signal, 4 run ended)" in shown


CHILD = "import sys; held = b'x' * (48 << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")
def test_peak_memory_covers_children_and_outlives_them() -> None:
    memory = PeakMemory()
    before = memory.sample()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert 48 << 20 <= pss_of([child.pid]) < 96 << 20
        assert memory.sample() >= before + (48 << 20)
    assert pss_of([child.pid]) == 0
    assert memory.sample() < memory.peak_bytes
    assert memory.peak_bytes >= before + (48 << 20)


SHARER = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
SHARER += "sum(m[i] for i in range(0, len(m), 4096)); print('ready', flush=True); sys.stdin.read()"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")
def test_shared_pages_count_once(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "shared").write_bytes(bytes(size))
    command = [sys.executable, "-c", SHARER, str(tmp_path / "shared")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    with children[0], children[1]:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert size <= pss_of([child.pid for child in children]) < size * 3 // 2
