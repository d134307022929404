"""The tables of `sluice status`."""

from __future__ import annotations

import io

from rich.console import Console

from launcher.commands.status import UNREACHABLE, render
from runtime.status import CallStats, Status
from runtime.types import PolicyVersion

COORDINATOR = Status(role="coordinator", name="coordinator", state="ready", detail="training: step 12 of 200", pid=4000)
ROLLOUT = Status(
    role="rollout",
    name="rollout-0",
    state="generating",
    version=PolicyVersion(2, 1234),
    calls=CallStats(open=17, answered=123456, failed=2, seconds=0.25),
    rates={"tokens": 123456.0, "samples": 312.0, "steps": 0.25, "swaps": 0.0, "busy_seconds": 0.633, "idle_seconds": 0.1},
    pid=1234567,
    address="10.20.30.41:40001",
)
LOST = Status(role="trainer", name="trainer-0", state=UNREACHABLE, detail="no [answer] within 5 s", pid=7, address="10.0.0.1:1")


def printed(*statuses: Status) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(render(statuses, [0, 3, 0]))
    return out.getvalue().splitlines()


def test_nothing_is_cut_off_at_80_columns() -> None:
    lines = printed(COORDINATOR, ROLLOUT, LOST)
    cells = [cell.strip() for line in lines if line.startswith("│") for cell in line.split("│")]
    for text in ("rollout-0", "generating", "2.1234", "3", "1234567", "10.20.30.41:40001", "17", "123456", "2"):
        assert text in cells
    told = " ".join(" ".join(cells).split())
    assert "busy 63%, samples 312/s, steps 0.25/s," in told  # by name
    assert "tokens 123,456/s" in told
    assert "swaps" not in told  # what was not done is left out
    assert not any("…" in line for line in lines)
    assert lines[0].strip() == "training: step 12 of 200"


def test_a_process_that_does_not_answer_is_named_with_the_reason() -> None:
    lines = printed(COORDINATOR, ROLLOUT, LOST)
    assert sum(line.startswith("│ trainer-0") for line in lines) == 1  # nothing is known of its work
    assert lines[-1].strip() == "trainer-0: no [answer] within 5 s"
