"""A short campaign of faults, whose kinds and moments are drawn by a seed; the long one is `python -m tests.system.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import chaos

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("namespaces")]

FAULTS = 30


def test_a_run_outlives_thirty_faults(tmp_path: Path) -> None:
    seconds = chaos.play(FAULTS, 7, tmp_path)
    assert sum(map(len, seconds.values())) == FAULTS


def test_tables_of_campaigns_add_up() -> None:
    assert chaos.table([{"kill": [1.0, 4.0]}, {"kill": [2.0], "stop": [9.0]}]).splitlines()[2:] == [
        "| kill | 3 | 2.0 | 4.0 | 4.0 |",
        "| stop | 1 | 9.0 | 9.0 | 9.0 |",
        "| all | 4 | 2.0 | 9.0 | 9.0 |",
    ]
