from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator.weight_sync_protocol import Answer, Phase, SyncAttempt, SyncOrder
from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion

VERSION = PolicyVersion(1, 7)
SECONDS: dict[Phase, float] = {"transfer": 20, "verify": 30, "commit": 40, "abort": 5}
MEMBERS = ("rollout-0", "rollout-1")
SENT = Answer("transfer", "trainer")


def start(now: float = 100.0) -> SyncAttempt:
    return SyncAttempt(VERSION, MEMBERS, "trainer", SECONDS, now)


def feed(weight_sync: SyncAttempt, *events: Answer | None, now: float = 100.0) -> list[SyncOrder]:
    return [action for event in events for action in weight_sync.handle(event, now)]


def answers(phase: Literal["verify", "commit"], members: tuple[str, ...] = MEMBERS) -> list[Answer]:
    return [Answer(phase, member) for member in members]


def failed(member: str, error: str) -> Answer:
    return Answer("transfer", member, error)


def gone(member: str, error: str) -> Answer:
    return Answer("transfer", member, error, gone=True)


def up_to_commit() -> SyncAttempt:
    weight_sync = start()
    feed(weight_sync, SENT, *answers("verify"))
    return weight_sync


def test_the_good_way() -> None:
    weight_sync = start()
    assert weight_sync.phase == "transfer"
    assert weight_sync.waiting_for == ("trainer",)
    assert feed(weight_sync, Answer("verify", "rollout-0"), SENT) == []
    assert (weight_sync.phase, weight_sync.waiting_for) == ("verify", ("rollout-1",))
    assert feed(weight_sync, Answer("verify", "rollout-1")) == [SyncOrder("commit", MEMBERS)]
    assert feed(weight_sync, *answers("commit")) == []
    assert (weight_sync.phase, weight_sync.reason, weight_sync.lost) == ("done", "", set())
    assert weight_sync.next_deadline is None


def test_each_phase_has_its_own_deadline() -> None:
    weight_sync = start(now=0.0)
    assert weight_sync.next_deadline == 20
    feed(weight_sync, SENT, now=4.0)
    assert weight_sync.next_deadline == 34
    feed(weight_sync, *answers("verify"), now=5.0)
    assert weight_sync.next_deadline == 45


def test_a_silent_member_is_named_and_lost_and_the_others_are_not() -> None:
    weight_sync = start()
    everyone = (*MEMBERS, "trainer")
    assert feed(weight_sync, failed("trainer", "bucket 1 was not taken"), now=105.0) == [SyncOrder("abort", everyone)]
    feed(
        weight_sync,
        failed("rollout-0", "connection closed"),
        Answer("abort", "rollout-0"),
        Answer("abort", "trainer"),
        now=105.0,
    )
    assert (weight_sync.phase, weight_sync.next_deadline) == ("abort", 110)
    feed(weight_sync, None, now=110.0)
    assert (weight_sync.phase, weight_sync.lost) == ("aborted", {"rollout-1"})
    assert weight_sync.reason == (
        "version 1.7: transfer: trainer: bucket 1 was not taken; abort: rollout-1: no answer within 5 s"
    )


def test_a_member_lost_before_the_commit_aborts_without_being_told() -> None:
    weight_sync = start()
    assert feed(weight_sync, gone("rollout-0", "gone")) == [SyncOrder("abort", ("rollout-1", "trainer"))]
    feed(weight_sync, Answer("abort", "rollout-1"), Answer("abort", "trainer"))
    assert (weight_sync.phase, weight_sync.lost) == ("aborted", {"rollout-0"})


def test_who_is_lost_is_told_also_when_the_failure_of_another_was_heard_first() -> None:
    weight_sync = start()
    feed(weight_sync, failed("rollout-0", "connection closed"), failed("trainer", "bucket 1 was not taken"))
    feed(weight_sync, gone("rollout-1", "gone"), gone("rollout-1", "gone"))
    feed(weight_sync, Answer("abort", "rollout-0"), Answer("abort", "trainer"))
    assert (weight_sync.phase, weight_sync.lost) == ("aborted", {"rollout-1"})
    assert weight_sync.reason == (
        "version 1.7: transfer: rollout-0: connection closed; abort: trainer: bucket 1 was not taken; abort: rollout-1: gone"
    )


def test_answers_that_are_read_late_count() -> None:
    weight_sync = start()
    feed(weight_sync, *answers("verify"), now=300.0)
    assert feed(weight_sync, SENT, None, now=300.0) == [SyncOrder("commit", MEMBERS)]
    assert feed(weight_sync, None, now=340.0) == []
    assert (weight_sync.phase, weight_sync.lost) == ("done", set(MEMBERS))
    assert weight_sync.reason == "version 1.7: commit: rollout-0, rollout-1: no answer within 40 s"


def test_the_commit_stands_when_a_member_fails_in_it() -> None:
    weight_sync = up_to_commit()
    assert feed(weight_sync, failed("rollout-0", "out of memory"), gone("trainer", "gone")) == []
    feed(weight_sync, Answer("commit", "rollout-1"))
    assert (weight_sync.phase, weight_sync.lost, weight_sync.failed) == ("done", {"rollout-0"}, {"rollout-0"})
    assert weight_sync.reason == "version 1.7: commit: rollout-0: out of memory"


def test_what_comes_after_the_end_changes_nothing() -> None:
    weight_sync = up_to_commit()
    feed(weight_sync, *answers("commit"))
    assert feed(weight_sync, failed("rollout-0", "late"), gone("rollout-1", "late"), None, now=1e9) == []
    assert (weight_sync.phase, weight_sync.waiting_for, weight_sync.next_deadline) == ("done", (), None)
    assert (weight_sync.failed, weight_sync.lost, weight_sync.reason) == (set(), set(), "")


@pytest.mark.parametrize("members", [(), ("a", "a"), ("trainer",)])
def test_members_are_distinct_and_some(members: tuple[str, ...]) -> None:
    with pytest.raises(InvariantViolated, match="a weight sync from trainer to the members"):
        SyncAttempt(VERSION, members, "trainer", SECONDS, 0.0)


names = st.sampled_from(("rollout-0", "rollout-1", "rollout-2", "trainer", "stranger"))
events = st.one_of(
    st.just(SENT),
    st.builds(Answer, st.sampled_from(("verify", "commit", "abort")), names),
    st.builds(Answer, st.just("transfer"), names, st.just("x"), st.booleans()),
    st.just(None),
)


@given(st.lists(st.tuples(events, st.floats(0, 12)), max_size=40), st.booleans())
def test_any_order_loss_and_repetition_is_safe_and_ends(steps: list[tuple[Answer | None, float]], orderly: bool) -> None:
    members = ("rollout-0", "rollout-1", "rollout-2")
    weight_sync = SyncAttempt(VERSION, members, "trainer", SECONDS, 0.0)
    now = 0.0
    actions: list[SyncOrder] = []
    verified: set[str] = set()
    if orderly:  # so that the later phases are reached often
        for event in (SENT, *answers("verify", members[:2])):
            actions += weight_sync.handle(event, now)
        verified |= {*members[:2]}
    for event, seconds in steps:
        now += seconds
        if event is not None and event.error is None and event.phase == "verify":
            verified.add(event.member)
        was_final, before = weight_sync.final, len(actions)
        actions += weight_sync.handle(event, now)
        assert not was_final or len(actions) == before
        assert (weight_sync.next_deadline is None) == weight_sync.final
        assert weight_sync.final or weight_sync.waiting_for
        assert weight_sync.final or event is not None or weight_sync.next_deadline > now
    for _ in range(5):
        if not weight_sync.final:
            now = weight_sync.next_deadline
            actions += weight_sync.handle(None, now)
    assert weight_sync.final

    kinds = [order.phase for order in actions]
    assert kinds in (["commit"], ["abort"])
    assert ("commit" in kinds) == (weight_sync.phase == "done")
    if "commit" in kinds:
        assert actions[-1].members == members
        assert verified >= set(members)
    assert weight_sync.reason or weight_sync.phase == "done"
    assert weight_sync.lost <= {*members, "trainer"}
