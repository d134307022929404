"""`sluice bench concurrency` with short rounds: real processes, every way measured, and what fails is told."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from benchmarks import concurrency
from benchmarks.concurrency import (
    GROUP,
    QUICK,
    RULE,
    SLOTS,
    ConcurrencyReport,
    ConcurrencySettings,
    PaceReport,
    ToolPace,
    Way,
    render,
)
from runtime.errors import ServiceFault

pytest.importorskip("torch", reason="needs torch: make install")

SHORT = ToolPace(0.0, (1,), 1.0, 1.0, 2.0)


def shown(report: ConcurrencyReport) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    for table in render(report):
        console.print(table)
    return console.export_text()


def test_the_rule_and_fixed_numbers_are_given_the_same_programs() -> None:
    told: list[str] = []
    report = concurrency.run(ConcurrencySettings(rounds=1, paces=(SHORT,)), told.append)
    (pace,) = report.paces
    assert [way.name for way in pace.ways] == ["1", RULE]
    fixed, rule = pace.ways
    for way in pace.ways:
        assert len(way.tokens_per_second) == 1 and way.tokens_per_second[0] > 0
        assert 0 < way.running[0] <= SLOTS
    assert 0 < fixed.episodes[0] <= SLOTS // GROUP * GROUP < rule.episodes[0]
    assert report.ratios == [pace.ratios] == [[rule.tokens_per_second[0] / fixed.tokens_per_second[0]]]
    assert told[0] == "tools of 0 s: the rule finds its number" and told[-1] == "tools of 0 s, round 1 of 1: 1"


def test_programs_that_fail_fail_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their conversations has room for a second turn."""
    monkeypatch.setattr(concurrency, "CONTEXT", concurrency.REPLY + 64)
    with pytest.raises(ServiceFault, match=r'programs: play: failed: \{"400":'):
        concurrency.run(ConcurrencySettings(rounds=1, paces=(replace(SHORT, measure=10.0),)))  # a busy machine's first turn


def test_the_ratio_is_to_the_best_of_each_round() -> None:
    ways = [Way("2", [100.0, 50.0], [8.0], [8.0], [0.0]), Way("4", [80.0, 60.0], [16.0], [16.0], [2.0])]
    pace = PaceReport(1.0, [*ways, Way(RULE, [90.0, 66.0], [12.0], [12.0], [1.0])])
    assert pace.ratios == [0.9, 1.1]
    text = shown(ConcurrencyReport(SLOTS, [pace], [pace.ratios]))
    assert "1 s: 0.90, 1.10" in text and "measured" in text and "75" in text


def test_the_short_form_is_of_the_same_kind() -> None:
    for pace in (*QUICK.paces, *ConcurrencySettings().paces):
        assert pace.fixed == tuple(sorted(pace.fixed)) and pace.settle > 0
