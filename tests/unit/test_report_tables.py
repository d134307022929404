"""A report's figures and tables, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.telemetry.report import published, tables
from runtime.telemetry.report.lineages import history
from runtime.telemetry.report.published import PublishedFigure
from runtime.telemetry.report.record import Ended, RecordedSettings, RunRecord
from tests.unit.model_dimensions import CONFIGS

SETTINGS = {
    "training": {"steps": 9, "groups_per_step": 32, "staleness": 2},
    "sampling": {"group_size": 8, "max_new_tokens": 2048},
    "data": {"max_prompt_tokens": 1024},
    "algorithm": {"advantage": "group_norm"},
}


def record(**changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "folder": Path("runs/a"),
        "configuration": "",
        "settings": msgspec.convert(SETTINGS, RecordedSettings),
        "points": [],
        "torn": False,
        "ended": None,
        "startup": "",
        "evaluations": [],
        "groups": None,
        "dropped": None,
        "described": None,
    }
    return RunRecord(**(fields | changes))


def step(number: int, seconds: float, **metrics: float) -> dict[str, Any]:
    return {"step": number, "timing/all": seconds, **metrics}


TWO = [
    step(1, 1.0, samples=64.0, e2e_tps=300.0, **{"idle/trainer": 0.5, "staleness/mean": 0.0, "staleness/max": 0.0}),
    step(2, 3.0, samples=32.0, e2e_tps=100.0, **{"idle/trainer": 0.1, "staleness/mean": 1.5, "staleness/max": 2.0}),
]


class TestFacts:
    def told(self, points: list[dict[str, Any]], **changes: Any) -> dict[str, tuple[str, str]]:
        found = tables.facts(record(**changes), history(points))
        return {fact.name: (fact.value, fact.detail) for fact in found}

    def test_rates_are_over_all_steps_together(self) -> None:
        found = self.told([{"step": 0, "eval/accuracy": 0.25}, *TWO, {"step": 2, "eval/accuracy": 0.5}])
        assert found["Steps"] == ("2", "of 9")
        assert found["Samples a second"] == ("24", "4.0 s in 2 steps")  # 96 in 4 s, not the mean of 64 and 10.7
        assert found["Tokens/s and accelerator"][0] == "150"  # 300 for one second, 100 for three
        assert found["Trainer idle"][0] == "20.0%"
        assert found["Staleness, mean"] == ("0.5", "max 2, bound 2")  # by sample
        assert found["Held-out accuracy"] == ("50.0%", "after step 2; 25.0% after 0, best 50.0%")

    def test_what_was_not_measured_says_so(self) -> None:
        found = self.told([], settings=RecordedSettings())
        assert found.pop("Steps") == ("0", "")
        assert {value for value, _ in found.values()} == {"not measured"}


class TestPublished:
    def names(self, described: dict[str, Any] | None, path: str = "") -> list[str]:
        return sorted({row.model for row in published.matching(published.load(), described, path)})

    @pytest.mark.parametrize(
        ("preset", "model"), [("qwen25_7b", "Qwen2.5-7B"), ("qwen25_32b", "Qwen2.5-32B"), ("qwen3_32b", "Qwen3-32B")]
    )
    def test_a_model_is_known_by_its_sizes(self, preset: str, model: str) -> None:
        assert self.names(CONFIGS[preset], "/models/our-own") == [model]

    def test_a_name_does_not_make_another_model_of_it(self) -> None:
        assert self.names(CONFIGS["qwen25_1.5b"], "/models/Qwen2.5-7B") == []

    @pytest.mark.parametrize(
        ("path", "models"),
        [
            ("/models/Qwen2.5-7B", ["Qwen2.5-7B"]),
            ("/models/qwen2.5-7b-instruct", ["Qwen2.5-7B"]),
            ("hub/Qwen2.5-7B/snapshots/abc", ["Qwen2.5-7B"]),
            ("/models/Qwen2.5-72B", []),
            ("/models/Qwen2.5-7B.old", []),
            ("runs/.cache/warmup/model", []),
        ],
    )
    def test_the_folder_names_a_model_that_describes_itself_nowhere(self, path: str, models: list[str]) -> None:
        assert self.names(None, path) == models
        assert self.names({"architectures": ["X"]}, path) == models

    def test_rows_are_whole(self) -> None:
        rows = published.load()
        assert len(rows) >= 4 and len({row.name for row in rows}) == len(rows)
        for row in rows:
            assert row.source and row.hardware and row.e2e_tps_per_device and row.algorithm in ("grpo", "ppo", "dapo")

    def test_both_stand_side_by_side(self) -> None:
        row = PublishedFigure(
            name="Theirs", algorithm="grpo", model="M", hardware="A3", global_batch=64, e2e_tps_per_device=220.0
        )
        points = [
            step(1, 1.0, samples=10.0, e2e_tps=300.0, world_size=16.0, **{"prompt_length/mean": 100.0}),
            step(2, 3.0, samples=30.0, e2e_tps=100.0, world_size=16.0, **{"prompt_length/mean": 200.0}),
        ]
        found = tables.comparison([row], record(), history(points))
        assert found is not None and found.head == ["", "this run", "Theirs"]
        cells = {name: (own, theirs) for name, own, theirs in found.rows}
        assert cells["Algorithm"] == ("grpo", "grpo")
        assert cells["Accelerators"] == ("16", "not published")
        assert cells["Prompts a step"] == ("32", "64")
        assert cells["Samples a prompt"] == ("8", "not published")
        assert cells["Prompt tokens, mean"] == ("175", "not published")
        assert cells["Reply tokens, mean"] == ("not measured", "not published")
        assert cells["Tokens/s and device, end to end"] == ("150", "220")
        assert tables.comparison([], record(), history(points)) is None

    def test_rows_of_the_same_algorithm_come_first(self) -> None:
        rows = [
            PublishedFigure(name=f"their {kind}", algorithm=kind, model="M", hardware="A3") for kind in ("ppo", "dapo", "grpo")
        ]
        found = tables.comparison(rows, record(), history([]))
        assert found is not None and found.head[1:] == ["this run", "their grpo", "their ppo", "their dapo"]

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({}, "grpo"),
            ({"critic": {}}, "ppo"),
            ({"algorithm": {"advantage": "group_norm", "dynamic_sampling": True}}, "dapo"),
            ({"algorithm": {"advantage": "rloo"}}, "rloo"),
        ],
    )
    def test_an_algorithm_is_called_as_others_call_it(self, changes: dict[str, Any], name: str) -> None:
        assert tables.algorithm(msgspec.convert(SETTINGS | changes, RecordedSettings)) == name


def test_lineages_tell_what_counts() -> None:
    points = [step(n, 1.0, time=0.0) for n in (1, 2, 3, 4)] + [step(n, 1.0, time=60.0) for n in (3, 4, 5)]
    found = tables.lineages(history(points))
    assert found is not None
    assert [row[:4] for row in found.rows] == [["0", "1 to 4", "1 to 2", "3 to 4"], ["1", "3 to 5", "3 to 5", "none"]]
    assert found.rows[1][4] == "1970-01-01 00:01:00 UTC"
    assert tables.lineages(history(points[:4])) is None


def test_groups_are_told_with_the_reasons() -> None:
    rows = tables.groups(record(groups={"ready": 0, "retired": 7, "dropped": 3}, dropped={"no signal": 2, "run ended": 1})).rows
    assert rows == [["retired", "7"], ["dropped", "3"], ["dropped: no signal", "2"], ["dropped: run ended", "1"]]
    assert tables.groups(record()).rows == [["all", "not measured"]]
    told = Ended("done", {"retired": 5, "dropped": 1}, {"run ended": 1})
    assert tables.groups(record(ended=told)).rows == [["retired", "5"], ["dropped", "1"], ["dropped: run ended", "1"]]


def test_failures_add_up_over_steps() -> None:
    points = [
        step(1, 1.0, **{"score/errors/timeout": 2.0}),
        step(2, 1.0, **{"score/errors/timeout": 3.0, "score/errors/x": 1.0}),
    ]
    found = tables.failures(history(points))
    assert found is not None and found.rows == [["timeout", "5"], ["x", "1"]]
    assert tables.failures(history(TWO)) is None
