"""A short campaign of faults, whose kinds and moments are drawn by a seed; the long one is `python -m tests.system.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import chaos

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("namespaces")]

FAULTS = 20


@pytest.mark.long
def test_a_run_outlives_twenty_faults(tmp_path: Path) -> None:
    measured = chaos.play(FAULTS, 7, tmp_path)
    assert sum(map(len, measured.values())) == FAULTS


def test_tables_of_campaigns_add_up() -> None:
    first, second = {"kill": [(1.0, False, 0.5), (4.0, True, 3.0)]}, {"kill": [(2.0, False, 1.0)], "stop": [(9.0, False, 8.0)]}
    assert chaos.table([first, second]).splitlines()[2:] == [
        "| kill | 3 | 3 | 1 | 2.0 | 4.0 | 4.0 | 1.0 | 3.0 |",
        "| stop | 1 | 1 | 0 | 9.0 | 9.0 | 9.0 | 8.0 | 8.0 |",
        "| all | 4 | 4 | 1 | 4.0 | 9.0 | 9.0 | 3.0 | 8.0 |",
    ]
