"""`sluice bench messages` and `coordinator`: that they measure what they say, on tiny settings; no speed is asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import coordinator, messages
from benchmarks.messages import PLAIN, STREAM, TLS, TOKEN, UNARY

pytestmark = pytest.mark.timeout(120)


SAMPLES = 4096  # some 400 ms of the coordinator's, which the system counts in ticks of 10 ms


def test_messages_are_answered_by_every_way() -> None:
    report = messages.run(messages.MessagesSettings(rounds=2, pings=5, calls=40, in_flight=(4, 16)))
    assert report.pings.keys() == {PLAIN, STREAM, TOKEN, TLS, UNARY}
    assert all(0 < each.p50 <= each.p90 for each in report.pings.values())
    assert report.rates.keys() == {4, 16}
    assert all(rates.keys() == {PLAIN, STREAM, TOKEN, TLS} for rates in report.rates.values())
    assert report.ratios.keys() == {4, 16} and report.ping_ratios.keys() == {STREAM, TOKEN, TLS, UNARY}
    assert len(messages.render(report)) == 2


def test_a_run_over_engines_that_compute_nothing_costs_the_coordinator_something(tmp_path: Path) -> None:
    settings = coordinator.CoordinatorBenchSettings(replicas=(1, 3), groups=2, samples=SAMPLES, warm=1, rounds=1)
    report = asyncio.run(coordinator.measure(tmp_path / "inputs", settings))
    assert [(cost.replicas, cost.samples >= SAMPLES) for cost in report.costs] == [(1, True), (3, True)]
    assert all(cost.cpu_seconds > 0 and cost.seconds > 0 for cost in report.costs)
    assert len(coordinator.render(report)) == 1
