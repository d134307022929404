"""Bugs that are planted, one in each process: the swarm finds them."""

from __future__ import annotations

import pytest

from tests.swarm.planted import BUGS, hunt

SEEDS = 600
BEHIND = {"phase"}  # behind each of these deadlines stands a command's own: see docs/simulation.md

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", sorted(BUGS.keys() - BEHIND))
def test_a_planted_bug_is_found(name: str) -> None:
    assert hunt(name, SEEDS, seconds=400.0, first=BUGS[name].first).startswith("after ")
