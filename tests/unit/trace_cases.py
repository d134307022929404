"""What the documented rules of the Trace Event Format ask of a trace, so that any viewer of it shows all there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

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
