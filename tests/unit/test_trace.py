"""A run's spans for other programs: a trace of Chrome's format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from launcher.commands.why import events
from runtime.process.spans import CALLS, EPISODES, TracedSpan
from runtime.telemetry.critical_path import TRAINER, PathPart, StepPath

Event = dict[str, Any]
FIELDS = {
    "X": {"ts", "dur", "cat", "args"},
    "M": {"args"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def check_trace(events: Sequence[Event]) -> None:
    """Each event has the fields of its phase; each process and thread is named once; slices of a thread lie in one another or
    apart; and each flow begins once, ends once, goes forward in time, and touches slices."""
    for event in events:
        assert {"ph", "name", "pid", "tid", *FIELDS[event["ph"]]} == event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    slices = _by_thread([event for event in events if event["ph"] == "X"])
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert len(set(threads)) == len(threads) and slices.keys() <= set(threads)
    assert len(set(processes)) == len(processes) and {pid for pid, _ in threads} <= set(processes)
    for found in slices.values():
        _check_nested(found)
    flows: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            within = slices[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in within), event
    for arrows in flows.values():
        assert "".join(arrow["ph"] for arrow in arrows) == "s" + "t" * (len(arrows) - 2) + "f"
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(arrows))


def _by_thread(slices: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    found: dict[tuple[int, int], list[Event]] = {}
    for one in slices:
        found.setdefault((one["pid"], one["tid"]), []).append(one)
    return found


def _check_nested(slices: Sequence[Event]) -> None:
    """To the tenth of a microsecond in which times are written, twice."""
    open_until: list[float] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_until and open_until[-1] <= one["ts"] + 0.2:
            open_until.pop()
        assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 0.2, one
        open_until.append(one["ts"] + one["dur"])


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
        TracedSpan("swap", 98.5, 100.5, "weight_sync"),
    ],
    "gateway-0": [
        TracedSpan("RunEpisodes", 100.0, 105.0, CALLS, 1),
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
    assert sorted((one["name"], one["ts"] / 1e6 - 1.5, one["dur"] / 1e6) for one in slices) == [
        *(
            ("Generate", 0.5, 3.5),
            ("Generate", 1.0, 4.0),
            ("Generate", 4.5, 1.5),
            ("RunEpisodes", 0.0, 5.0),
            ("Score", 4.0, 1.0),
        ),
        *(("command", 6.0, 3.0), ("decode", 1.0, 2.0), ("policy", 1.5, 0.5), ("run", 1.0, 2.0)),
        ("swap", -1.5, 2.0),  # which began before them
    ]
    path = [(one["name"], one["ts"] - 1.5e6, one["dur"]) for one in made() if one["ph"] == "X" and not one["pid"]]
    assert path == [("generate rollout-0", 0.0, 4.0e6), (f"train {TRAINER}", 4.0e6, 6.0e6)]


def test_arrows_lead_a_group_from_its_generation_to_the_step_that_trains_on_it() -> None:
    found = made()
    by_place = {(one["pid"], one["tid"]): one for one in found if one["ph"] == "X"}
    arrows = [one for one in found if one["ph"] in "stf"]
    assert [(one["ph"], one["id"], by_place[one["pid"], one["tid"]]["name"]) for one in arrows] == [
        ("s", 1, "Generate"),
        ("t", 1, "RunEpisodes"),
        ("t", 1, "Score"),
        ("f", 1, "command"),
    ]
    check_trace(found)
