"""The summary of a run: totals over its steps, its file, its table, and the memory of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher import cli
from launcher.node.local_node import LocalNode
from runtime.config import Config, Run
from runtime.errors import UserError
from runtime.telemetry.memory import Memory
from runtime.telemetry.summary import Summary, Totals, render

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
    },
    {
        "timing/all": 3.0,
        "timing/update": 0.6,
        "idle/trainer": 0.8,
        "idle/rollout": 0.4,
        "samples": 64.0,
        "tokens": 600.0,
        "staleness/histogram": {"1": 16, "2": 48},  # as JSON lines hold it
    },
]


def summary(more: dict[str, Any] | None = None, **changes: Any) -> Summary:
    """`more`: metrics of each step besides."""
    totals = Totals()
    for step in STEPS:
        totals.add(step | (more or {}))
    rest: dict[str, Any] = {
        "stop_reason": "steps",
        "accuracy_before": 0.45,
        "accuracy_after": 0.93,
        "total_seconds": 9.0,
        "startup": {"services": 2.0, "first step": 0.5, "to first step": 2.5},
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
    assert found.timing == pytest.approx({"all": 4.0, "update": 1.4, "rollout": 1.0, "non_overlap_adv": 0.1})


def test_a_run_without_a_step() -> None:
    found = Totals().summary(
        rl_seconds=0.0,
        stop_reason="interrupted",
        accuracy_before=None,
        accuracy_after=None,
        total_seconds=1.0,
        startup={},
        groups={},
        peak_pss_bytes=0,
    )
    assert (found.steps, found.samples_per_second, found.staleness_mean, found.idle_trainer) == (0, 0.0, 0.0, 0.0)
    assert "not measured" in text_of(found)


def test_the_file(tmp_path: Path) -> None:
    found = summary()
    found.write(tmp_path)
    found.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    data = json.loads((tmp_path / "summary.json").read_text())
    expected = {"accuracy_before", "accuracy_after", "steps", "rl_seconds", "total_seconds", "peak_pss_bytes"}
    expected |= {"samples_per_second", "tokens_per_second", "staleness_mean", "staleness_max", "staleness_histogram"}
    expected |= {"idle_trainer", "idle_rollout", "groups", "dropped", "timing", "startup", "startup_processes", "memory"}
    expected |= {"stop_reason", "masked", "score_errors", "mismatch", "mismatch_alarm", "mismatch_alarms"}
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
        "2.5 s to the first step: services 2.0, first step 0.5",
        "1.50 GiB",
        "Stopped: steps",
    ):
        assert said in shown
    assert "non_overlap" not in shown


def test_the_table_tells_the_memory_of_those_that_only_direct_others() -> None:
    held = {"trainer-0": Memory(9 << 30, 8 << 30), "launcher": Memory(66 << 20, 40 << 20), "coordinator": Memory(80 << 20)}
    shown = text_of(summary(memory=held))
    assert "coordinator 80 MiB resident, launcher 66 MiB resident" in shown
    assert "trainer-0" not in shown


def test_the_table_says_why_groups_were_dropped() -> None:
    shown = text_of(summary(groups={"retired": 16, "dropped": 1204}, dropped={"no signal": 1200, "run ended": 4}))
    assert "16 retired, 1,204 dropped (1,200 no signal, 4 run ended)" in shown


def test_samples_that_no_scorer_could_judge_are_told_with_the_reasons() -> None:
    found = summary({"score/masked": 4.0, "score/errors/timeout": 1.0, "score/errors/exception:ZeroDivisionError": 3.0})
    assert (found.masked, found.score_errors) == (8, {"exception:ZeroDivisionError": 6, "timeout": 2})
    assert "8 of 128 samples, left out of the loss (6 exception:ZeroDivisionError, 2 timeout; the first of" in text_of(found)
    assert "(8 timeout)" in text_of(summary({"score/masked": 4.0, "score/errors/timeout": 4.0}))  # which raises nothing
    assert "not scored" not in text_of(summary())


def test_the_gap_of_all_steps_is_weighted_by_tokens() -> None:
    steps = [
        {"abs_logprob": 0.1, "k1": -0.2, "k3": 0.01, "over_0.1": 0.5, "abs_logprob_p99": 0.3, "max": 0.4, "worst_rollout": 0.2},
        {"abs_logprob": 0.5, "k1": 0.1, "k3": 0.04, "over_0.1": 0.0, "abs_logprob_p99": 0.2, "max": 0.5, "worst_rollout": 0.1},
        {},  # nothing was compared
    ]
    totals = Totals()
    for step, tokens in zip(steps, (30, 10, 0), strict=True):
        counts = {"tokens": tokens, "tokens_of_other_versions": 7, "probes": 2, "unanswered": 1}
        totals.add(STEPS[1] | {f"mismatch/{name}": float(value) for name, value in (step | counts).items()})
    rest: dict[str, Any] = {"accuracy_before": None, "accuracy_after": None, "startup": {}, "groups": {}, "peak_pss_bytes": 0}
    found = totals.summary(rl_seconds=1.0, stop_reason="", total_seconds=1.0, **rest)
    expected = {"abs_logprob": (0.1 * 30 + 0.5 * 10) / 40, "k1": (-0.2 * 30 + 0.1 * 10) / 40, "k3": 0.0175, "over_0.1": 0.375}
    expected |= {
        "abs_logprob_p99": 0.3,
        "max": 0.5,
        "worst_rollout": 0.2,
        "steps": 2,
        "tokens": 40,
        "probes": 6,
        "unanswered": 3,
    }
    assert found.mismatch == pytest.approx(expected | {"tokens_of_other_versions": 21})
    assert "mean 2.0e-01, max 5.0e-01 nats, 37.50% over 0.1  (40 tokens in 2 of 3 steps)" in text_of(found)
    assert "rollouts and trainer were not compared" in text_of(summary())


def test_an_alarm_is_the_last_word_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = iter((summary(), summary(mismatch_alarm="rollout-1, version 0.3: 1 nats", mismatch_alarms=5)))

    async def trained(*_: Any) -> Summary:
        return next(told)

    monkeypatch.setattr("launcher.commands.train.train", trained)
    config: Any = Config(run=Run(name="test", dir="nowhere"))
    here = LocalNode.of(config)
    assert cli.run_training(config, here) == 0
    assert capsys.readouterr().err == ""
    assert cli.run_training(config, here) == 0
    assert capsys.readouterr().err == "alarm: rollout-1, version 0.3: 1 nats (5 probes were over the limit)\n"
