"""A trace of Chrome's format: a slice for each span, threads without overlaps, and arrows by group."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from launcher.commands.trace import events
from runtime.process.spans import CALLS, EPISODES, TracedSpan
from runtime.telemetry.critical_path import TRAINER, PathPart, StepPath
from tests.unit.trace_cases import check_trace

STEPS = [
    StepPath(
        *(4, 100.0, 110.0, [1]),
        parts=[PathPart("generate", 100.0, 104.0, "rollout-0", 1), PathPart("train", 104.0, 110.0, TRAINER)],
    )
]
SPANS = {
    "rollout-0": [
        TracedSpan("decode", 101.0, 103.0, "engine"),
        TracedSpan("Generate", 100.5, 104.0, CALLS, 1),
        TracedSpan("Generate", 101.0, 105.0, CALLS, 2),
        TracedSpan("Generate", 104.5, 106.0, CALLS, 3),
        TracedSpan("decode", 90.0, 95.0, "engine"),
        TracedSpan("swap", 98.5, 100.5, "publication"),
    ],
    "gateway-0": [
        TracedSpan("Play", 100.0, 105.0, CALLS, 1),
        TracedSpan("run", 101.0, 103.0, EPISODES, 1, detail="0 environment game"),
        TracedSpan("policy", 101.5, 102.0, EPISODES, 1, detail="0 rollout-0"),
    ],
    "reward-0": [TracedSpan("Score", 104.0, 105.0, CALLS, 1)],
    TRAINER: [TracedSpan("command", 106.0, 109.0, "model", detail="Apply")],
}


def made() -> list[dict[str, Any]]:
    return list(events(STEPS, SPANS))


def test_every_span_of_these_steps_is_a_slice_and_no_other() -> None:
    slices = [one for one in made() if one["ph"] == "X" and one["pid"]]
    assert sorted((one["name"], one["ts"] - 1.5e6, one["dur"]) for one in slices) == [
        ("Generate", 0.5e6, 3.5e6),
        ("Generate", 1.0e6, 4.0e6),
        ("Generate", 4.5e6, 1.5e6),
        ("Play", 0.0, 5.0e6),
        ("Score", 4.0e6, 1.0e6),
        ("command", 6.0e6, 3.0e6),
        ("decode", 1.0e6, 2.0e6),
        ("policy", 1.5e6, 0.5e6),
        ("run", 1.0e6, 2.0e6),
        ("swap", -1.5e6, 2.0e6),  # which began before them
    ]
    path = [(one["name"], one["ts"] - 1.5e6, one["dur"]) for one in made() if one["ph"] == "X" and not one["pid"]]
    assert path == [("generate rollout-0", 0.0, 4.0e6), (f"train {TRAINER}", 4.0e6, 6.0e6)]


def test_no_two_slices_of_a_thread_overlap_and_each_thread_has_a_name() -> None:
    found = made()
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in found:
        if one["ph"] == "X":
            threads.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for slices in threads.values():
        assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(slices, 2))
    assert set(threads) == {(one["pid"], one["tid"]) for one in found if one["name"] == "thread_name"}
    names = {one["args"]["name"] for one in found if one["name"] == "process_name"}
    assert names == {"steps", *SPANS}


def test_arrows_lead_a_group_from_its_generation_to_the_step_that_trains_on_it() -> None:
    found = made()
    by_place = {(one["pid"], one["tid"]): one for one in found if one["ph"] == "X"}
    arrows = [one for one in found if one["ph"] in "stf"]
    assert [(one["ph"], one["id"], by_place[one["pid"], one["tid"]]["name"]) for one in arrows] == [
        ("s", 1, "Generate"),
        ("t", 1, "Play"),
        ("t", 1, "Score"),
        ("f", 1, "command"),
    ]
    check_trace(found)
