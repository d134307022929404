"""Who may go on with a group that an earlier coordinator has asked for."""

from __future__ import annotations

from runtime.coordinator.register import Member
from runtime.coordinator.takeover import TakenUp
from runtime.types import PolicyVersion

COMMITTED = PolicyVersion(1, 7)
LIVED, BEHIND, ANEW = Member("rollout-0", 0), Member("rollout-1", 0), Member("rollout-2", 1)
FOUND = TakenUp(COMMITTED, {LIVED: COMMITTED, BEHIND: PolicyVersion(1, 6), ANEW: PolicyVersion()}, ahead=False)


def test_a_rollout_that_was_started_again_has_not_what_the_one_before_was_asked_for() -> None:
    assert FOUND.has_since(LIVED, 7)
    assert FOUND.has_since(BEHIND, 6)  # the commit has not reached it: what it has under way may go on
    assert not FOUND.has_since(BEHIND, 7)
    assert not FOUND.has_since(ANEW, 6)
    assert not FOUND.has_since(Member("rollout-0", 1), 7)  # it came after it was asked for its version


def test_those_generate_that_have_the_version() -> None:
    assert FOUND.having == [LIVED]
