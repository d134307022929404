"""The buffer: every transition is journalled, takes and retirements follow the staleness rule, what waits has a name,
and what dynamic sampling drops is replaced."""

from __future__ import annotations

import random
import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.coordinator.buffer import NO_SIGNAL, Buffer, DynamicSampling, asked_of
from runtime.coordinator.failover import FailoverState
from runtime.coordinator.pools import RolloutLoads
from runtime.coordinator.register import Member
from runtime.coordinator.staleness import LATE, OpenGroup, PipelineDepth, select
from runtime.errors import InvariantViolated, ServiceFault
from runtime.ledger.journal import Change, Ticket
from runtime.ledger.states import Mark, Phase
from runtime.rewards.scorer import UnscoredSteps
from runtime.types import GeneratedGroup, Holder, PolicyVersion, Scores


class KeptChanges(list[Change]):
    """A journal in memory."""

    def record(self, change: Change) -> None:
        self.append(change)


class Harness:
    """A buffer with a list as its journal and a clock that the test moves."""

    def __init__(self, staleness: int = 1, per_step: int = 2, needs: Mark = Mark.SCORED, depth: PipelineDepth | None = None):
        self.journal = KeptChanges()
        self.now = 100.0
        rule = {"needs": needs, "groups_per_step": per_step, "staleness": staleness, "depth": depth}
        self.buffer = Buffer(journal=self.journal, clock=lambda: self.now, **rule)  # type: ignore[arg-type]

    def dispatch(self, *ids: int, replica: str = "rollout-0") -> None:
        for group_id in ids:
            if group_id not in self.buffer:
                self.buffer.admit(ticket(group_id))
            self.buffer.dispatch(group_id, replica)

    def finish(self, *ids: int, step: int = 0) -> None:
        for group_id in ids:
            self.buffer.generated(generated(group_id, step))
            self.buffer.scored(scores(group_id))

    def train(self, step: int) -> None:
        self.buffer.consume(step)
        self.buffer.commit(step + 1)

    def stamps(self, group_id: int) -> list[str]:
        return [change.stamp for change in self.journal if change.group_id == group_id]


def ticket(group_id: int) -> Ticket:
    return Ticket(group_id=group_id, problem=group_id + 50, source="gsm8k", label="4", seed=group_id * 7)


def generated(group_id: int, step: int) -> GeneratedGroup:
    version = PolicyVersion(0, step)
    payload = b"payload %d" % group_id
    return GeneratedGroup(
        group_id=group_id, prompt_tokens=5, response_tokens=[3, 4], truncated=0, oldest=version, newest=version, payload=payload
    )


def scores(group_id: int) -> Scores:
    return Scores(group_id=group_id, rewards=np.array([1, 0], np.float32), valid=np.array([1, 1], np.uint8))


def ids(groups: list) -> list[int]:
    return [group.group_id for group in groups]


def test_a_whole_life_is_journalled_in_order() -> None:
    h = Harness(needs=Mark.SCORED | Mark.REFERENCED, per_step=1)
    h.dispatch(3)
    h.buffer.generated(generated(3, 0))
    h.buffer.referenced(3, b"reference")
    h.buffer.scored(scores(3))
    group = h.buffer[3]
    assert (group.payload, group.reference, group.attempt) == (b"payload 3", b"reference", 1)
    assert ids(h.buffer.take(0)) == [3]
    h.buffer.consume(0)
    assert h.buffer.counts()["consumed"] == 1
    h.buffer.commit(1)
    assert len(h.buffer) == 0
    assert h.buffer.counts()["retired"] == 1
    assert h.stamps(3) == ["admitted", "generating", "generated", "referenced", "scored", "", "consumed", "retired"]
    assert [str(change.state) for change in h.journal][-3:] == ["ready", "consumed(0)", "retired(0)"]


def test_streaming_fills_a_step_in_parts_and_whole_waits_for_all() -> None:
    for whole in (False, True):
        h = Harness(per_step=3)
        h.dispatch(0, 1, 2, 3)
        h.finish(1, 3)
        first = ids(h.buffer.take(0, whole))
        h.finish(0)
        second = ids(h.buffer.take(0, whole))
        assert (first, second) == (([], [0, 1, 3]) if whole else ([1, 3], [0]))
        assert h.buffer.step == 1
        with pytest.raises(InvariantViolated, match="step 0 cannot take"):
            h.buffer.take(0)


def test_the_slow_group_that_is_due_keeps_its_place() -> None:
    h = Harness(staleness=1, per_step=2)
    h.dispatch(0, 1, 2, 3)
    h.finish(1, 2)
    assert ids(h.buffer.take(0)) == [1, 2]
    h.train(0)
    h.dispatch(4, 5)
    h.finish(4, 5, step=1)
    assert h.buffer.take(1) == [], "0 and 3 are due at step 1"
    wait = h.buffer.oldest_wait()
    assert wait is not None
    assert (wait.group_id, asked_of(wait), wait.state.phase.value, wait.deadline) == (0, "rollout-0", "generating", 1)
    h.finish(0, 3)
    assert ids(h.buffer.take(1)) == [0, 3]
    assert ids(h.buffer.take(2)) == [4, 5]


def test_capacity_counts_until_the_commit_and_stops_at_what_the_run_needs() -> None:
    h = Harness(staleness=1, per_step=2)
    assert h.buffer.capacity(max_in_flight=100, steps=3) == 4
    assert h.buffer.capacity(max_in_flight=3, steps=3) == 3
    h.dispatch(0, 1, 2, 3)
    h.finish(0, 1)
    h.buffer.take(0)
    h.buffer.consume(0)
    assert h.buffer.capacity(100, 3) == 0, "consumed groups hold their places until the version is committed"
    h.buffer.commit(1)
    assert h.buffer.capacity(100, 3) == 2
    assert h.buffer.capacity(100, 2) == 0, "the second step is the last, and its groups are under way"
    h.buffer.drop(2, "fault")
    assert h.buffer.capacity(100, 2) == 1
    h.dispatch(4)
    h.finish(4, step=1)
    assert ids(h.buffer.take(1)) == [4]
    assert h.buffer.capacity(100, 2) == 0, "a place that is taken is not missing"


def test_a_lost_replica_sends_its_groups_back_with_their_seeds() -> None:
    h = Harness()
    h.dispatch(0, 1)
    h.dispatch(2, replica="rollout-1")
    h.buffer.lose(0)
    assert h.buffer[0].ticket == ticket(0)
    assert ids(h.buffer.waiting()) == [0]
    h.dispatch(0, replica="rollout-1")
    assert (h.buffer[0].attempt, h.buffer[0].replica) == (2, "rollout-1")
    with pytest.raises(InvariantViolated, match="not live"):
        h.finish(9)


def test_a_payload_lost_while_it_is_taken_frees_its_place() -> None:
    h = Harness(per_step=2)
    h.dispatch(0, 1, 2)
    h.finish(0, 1, 2)
    h.buffer.take(0)
    h.buffer.lose(0)
    assert h.buffer.step == 0
    assert ids(h.buffer.take(0)) == [2]
    places = {change.group_id: change.place for change in h.journal if change.place is not None}
    assert (places[1], places[2]) == (1, 0), "no two groups of a batch have one place"
    h.dispatch(0, 3)
    h.finish(0, 3)
    h.buffer.take(1)
    with pytest.raises(InvariantViolated, match="lost while step 2"):
        h.buffer.lose(1)


def test_a_drop_names_the_prompt_and_is_refused_once_taken() -> None:
    h = Harness(per_step=1)
    h.dispatch(0, 1)
    assert h.buffer.drop(0, "rule failed") == ticket(0)
    assert h.journal[-1].state.why == "rule failed"
    assert h.buffer.counts()["dropped"] == 1
    h.finish(1)
    h.buffer.take(0)
    with pytest.raises(InvariantViolated, match="batch of step 0"):
        h.buffer.drop(1, "too late")


def test_a_step_is_consumed_whole_and_no_token_is_older_than_its_dispatch() -> None:
    h = Harness(per_step=2)
    h.dispatch(0, 1)
    h.finish(0)
    h.buffer.take(0)
    with pytest.raises(InvariantViolated, match="1 groups of 2"):
        h.buffer.consume(0)
    h = Harness()
    h.buffer.commit(3)
    h.dispatch(0)
    with pytest.raises(InvariantViolated, match="older than its dispatch"):
        h.buffer.generated(generated(0, 2))


def test_the_true_oldest_token_moves_the_deadline_later() -> None:
    h = Harness(staleness=1)
    h.dispatch(0, 1)
    h.buffer.commit(1)  # before a slot was free for the group
    h.finish(0, step=1)
    assert (h.buffer[0].deadline, h.buffer[1].deadline) == (2, 1)


def test_oldest_wait_names_the_service_of_the_missing_mark() -> None:
    h = Harness(needs=Mark.SCORED | Mark.REFERENCED | Mark.VALUED)
    assert h.buffer.oldest_wait() is None
    h.buffer.admit(ticket(0))
    steps = [
        (lambda: h.buffer.dispatch(0, "rollout-1"), "rollout", "admitted"),
        (lambda: h.buffer.generated(generated(0, 0)), "rollout-1", "generating"),
        (lambda: h.buffer[0].asked.update({"reward_model-1", "reward-0"}), "reward", "generated"),
        (lambda: h.buffer[0].asked.discard("reward_model-1"), "reward-0 and reward_model-1", "generated"),
        (lambda: h.buffer.scored(scores(0)), "reward-0", "generated"),
        (lambda: h.buffer.referenced(0, b""), "reference", "generated"),
        (lambda: h.buffer.valued(0, b""), "critic", "generated"),
    ]
    for advance, service, phase in steps:
        wait = h.buffer.oldest_wait()
        assert wait is not None
        assert (asked_of(wait), wait.state.phase.value) == (service, phase)
        h.now += 2.5
        advance()
    assert h.buffer.oldest_wait() is None


# ------------------------------------------------------------------------------------------------------ who is waited for
def test_a_group_that_the_trainer_waits_for_alone_is_late_once_that_is_out_of_the_ordinary() -> None:
    depth = PipelineDepth(groups_per_step=2, bound=2)
    h = Harness(staleness=0, depth=depth)
    h.dispatch(0, 1)
    h.now += 4.0
    h.finish(0)
    depth.became_ready(4.0)
    assert ids(h.buffer.take(0)) == [0]
    assert not list(h.buffer.late())  # the trainer has something to do
    h.buffer.trainer_waits = True
    ((group, seconds),) = h.buffer.late()
    assert (group.group_id, seconds) == (1, LATE * depth.slowest - 4.0)
    h.now += seconds
    ((group, seconds),) = h.buffer.late()
    assert (group.group_id, seconds) == (1, 0.0)
    h.finish(1)
    assert not list(h.buffer.late())


@pytest.mark.parametrize(
    ("staleness", "depth", "told"),
    [
        (1, PipelineDepth(groups_per_step=2, bound=4), True),  # another may take its place until step 1
        (0, PipelineDepth(groups_per_step=2, bound=2), False),  # it is not known how long groups take
        (0, None, False),
    ],
)
def test_what_need_not_be_ready_for_this_step_is_not_late(staleness: int, depth: PipelineDepth | None, told: bool) -> None:
    h = Harness(staleness=staleness, depth=depth)
    h.dispatch(0, 1)
    if told and depth is not None:
        h.finish(0)
        depth.became_ready(1.0)
    h.buffer.trainer_waits = True
    h.now += 1000.0
    assert not list(h.buffer.late())


# ------------------------------------------------------------------------------------------------------------- dynamic sampling
class Sieve:
    """A buffer whose groups are judged; the buffer's `stop_reason` is why the run would end."""

    def __init__(self, limit: int = 1000, staleness: int = 1, per_step: int = 2):
        self.harness = Harness(staleness, per_step)
        self.buffer = self.harness.buffer
        self.sampling = DynamicSampling(self.buffer, limit)

    def dispatch(self, count: int) -> list[int]:
        first = max((change.group_id for change in self.harness.journal), default=-1) + 1
        self.harness.dispatch(*range(first, first + count))
        return list(range(first, first + count))

    def judge(self, group_id: int, rewards: list[float], valid: list[int] | None = None, oldest: int = 0) -> bool:
        self.buffer.generated(generated(group_id, oldest))
        mask = np.array(valid or [1] * len(rewards), np.uint8)
        self.buffer.scored(Scores(group_id=group_id, rewards=np.array(rewards, np.float32), valid=mask))
        self.sampling.judge(self.buffer[group_id])
        return group_id in self.buffer

    def score(self, group_id: int, good: bool, oldest: int = 0) -> bool:
        return self.judge(group_id, [0.0, 1.0] if good else [1.0, 1.0], oldest=oldest)


@pytest.mark.parametrize(
    ("rewards", "valid", "kept"),
    [
        ([0.0, 1.0], None, True),
        ([0.3, 0.3, 0.4], None, True),
        ([0.0, 0.0], None, False),
        ([1.0, 1.0, 1.0], None, False),
        ([0.0, 1.0, 1.0], [0, 1, 1], False),
        ([0.0, 1.0], [1, 0], False),
        ([0.0, 0.0], [0, 0], False),
    ],
)
def test_a_group_is_kept_when_its_valid_rewards_differ(rewards: list[float], valid: list[int] | None, kept: bool) -> None:
    sieve = Sieve()
    sieve.dispatch(1)
    assert sieve.judge(0, rewards, valid) is kept
    last = sieve.harness.journal[-1]
    assert (last.state.phase, last.state.why) == ((Phase.READY, None) if kept else (Phase.DROPPED, NO_SIGNAL))


def test_the_place_of_a_dropped_group_is_free_again_in_the_last_step_too() -> None:
    sieve = Sieve(staleness=1, per_step=2)
    first, second = sieve.dispatch(2)
    assert sieve.buffer.capacity(100, 1) == 0
    assert not sieve.score(first, good=False)
    assert sieve.buffer.capacity(100, 1) == 1
    assert sieve.buffer.room_changed.is_set()
    assert sieve.score(second, good=True)
    sieve.buffer.take(0)
    assert sieve.buffer.capacity(100, 1) == 1


@pytest.mark.parametrize(
    ("course", "staleness", "reason"),
    [
        ("+---", 1, "too little signal: 3 groups with equal rewards dropped for one step"),  # one of two that the step needs
        ("+--", 1, ""),
        ("--++ --++ --++", 3, ""),  # the count begins anew with each step
        ("++--------", 4, ""),  # the groups of the step wait for the trainer
    ],
)
def test_a_step_that_is_not_filled_is_told_at_the_limit(course: str, staleness: int, reason: str) -> None:
    sieve = Sieve(limit=3, staleness=staleness)
    steps = course.split()
    for step, goods in enumerate(steps):
        for group, good in zip(sieve.dispatch(len(goods)), goods, strict=True):
            sieve.score(group, good == "+")
        assert len(steps) == 1 or len(sieve.buffer.take(step)) == 2
    assert sieve.buffer.stop_reason == reason


def test_a_run_ends_where_no_reply_gets_a_score() -> None:
    """Three steps in a row; the last where none was scored before; and groups that dynamic sampling drops."""
    told = "reward: judged: no reply of {} has a score; the last cause is exception:KeyError (logs/reward-*.log)"
    nan = np.full(2, np.nan, np.float32)
    lost, found = (
        Scores(
            group_id=0, rewards=nan, valid=np.array(valid, np.uint8), rules={"judged": nan}, errors={"exception:KeyError": 2}
        )
        for valid in ([0, 0], [0, 1])
    )

    def course(steps: str, last: int = 99) -> str:
        counted = UnscoredSteps()
        for step, kind in enumerate(steps):
            counted.step([lost, found if kind == "+" else lost], last=step == last)
        return steps

    for steps, last in (("--+--+", 99), ("-+-", 2), ("--", 99)):
        assert course(steps, last) == steps
    for steps, last, of in (("+---", 99, 3), ("-", 0, 1), ("--", 1, 2)):
        with pytest.raises(ServiceFault, match=re.escape(told.format(f"{of} steps in a row"))):
            course(steps, last)
    sieve = Sieve(limit=2)
    first, second = sieve.dispatch(2)
    assert not sieve.judge(first, [0.0, 0.0], [0, 0])
    with pytest.raises(ServiceFault, match="reward: score: no reply of 2 groups has a score"):
        sieve.judge(second, [0.0, 0.0], [0, 0])
    assert not sieve.buffer.stop_reason


def test_the_metrics_are_of_the_groups_scored_since_the_step_before() -> None:
    sieve = Sieve(staleness=9)
    for group, good in zip(sieve.dispatch(4), (True, False, False, False), strict=True):
        sieve.score(group, good)

    def closed() -> tuple[float | None, ...]:
        found = sieve.sampling.close_step()
        return tuple(map(found.get, ("dynamic_sampling/dropped", "dynamic_sampling/kept", "train/num_gen_batches")))

    assert closed() == (3.0, 0.25, 2.0)  # four groups, with two to a step
    assert closed() == (0.0, None, 0.0)
    sieve.score(*sieve.dispatch(1), good=True)
    assert closed() == (0.0, 1.0, 0.5)


@given(
    staleness=st.integers(0, 8),
    per_step=st.integers(1, 6),
    steps=st.integers(1, 9),
    max_in_flight=st.sampled_from([1, 3, 100]),
    signal=st.sampled_from([0.3, 1.0]),
    lost=st.sampled_from([0.0, 0.01, 0.05]),
    whole=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_step_is_filled_within_the_bound_whatever_is_slow_lost_or_dropped(
    staleness: int, per_step: int, steps: int, max_in_flight: int, signal: float, lost: float, whole: bool, seed: int
) -> None:
    """Whatever happens next is drawn; nothing but `capacity` and `take` says what may be dispatched and taken. No order is a
    deadlock, none starves a group, and only what the test drops is dropped."""
    sieve, random = Sieve(staleness=staleness, per_step=per_step), Random(seed)
    buffer, trained, admitted = sieve.buffer, 0, 0
    begun: dict[int, int] = {}  # the version that its replica has at each running group's first token, or had before

    def dispatch() -> None:
        nonlocal admitted
        for _ in range(buffer.capacity(random.choice((1, max_in_flight)), steps)):
            waiting = buffer.waiting()
            group = waiting[0].group_id if waiting else admitted
            if not waiting:
                buffer.admit(ticket(admitted))
                admitted += 1
            buffer.dispatch(group, "rollout-0")
            begun[group] = buffer.committed
        assert len(buffer) - len(buffer.waiting()) <= (staleness + 1) * per_step

    def finish() -> None:
        if begun:
            group = random.choice(list(begun))
            if group % 4 == 0 and random.random() < 0.95:  # it is slow
                return
            oldest = random.randint(begun.pop(group), buffer.committed)
            sieve.score(group, random.random() < signal, oldest)

    def lose() -> None:
        found = [group.group_id for group in buffer if group.taken is None and group.deadline is not None]
        if found and random.random() < lost / 4:
            group = random.choice(found)
            begun.pop(group, None)
            buffer.lose(group) if random.random() < 0.5 else buffer.drop(group, "by chance")

    def take() -> None:
        if buffer.step < min(steps, trained + 2):
            taken = buffer.take(buffer.step, whole)
            assert not whole or len(taken) in (0, per_step)

    def train() -> None:
        nonlocal trained
        if trained < buffer.step:
            buffer.consume(trained)
            for group in buffer.taken(trained):
                assert group.generated is not None
                assert trained - group.generated.oldest.step <= staleness
            trained += 1
            buffer.commit(trained)

    def check() -> None:
        """The counts that are kept are those that a look at every group gives."""
        groups = list(buffer)
        ready = [group for group in groups if group.state.phase == Phase.READY and group.taken is None]
        opened = [group for group in groups if group.deadline is not None and group.taken is None]
        of_step = [OpenGroup(group.deadline, group.group_id, group in ready) for group in opened if group.deadline is not None]
        assert buffer.takeable == len(select(of_step, buffer.step, buffer.places, per_step))
        counts = Counter(group.state.phase for group in groups)
        assert buffer.generating == counts[Phase.GENERATING]
        assert ids(buffer.waiting()) == sorted(group.group_id for group in groups if group.state.phase == Phase.ADMITTED)
        missing = (steps - buffer.step) * per_step - sum(group.taken == buffer.step for group in groups) - len(opened)
        room = (staleness + 1) * per_step - (len(groups) - counts[Phase.ADMITTED])
        assert buffer.capacity(99, steps) == max(0, min(99 - counts[Phase.GENERATING], room, missing))
        assert all(buffer.counts()[phase.value] == counts[phase] for phase in list(Phase)[:5])

    for number in range(100_000):
        if trained == steps:
            break
        random.choice((dispatch, finish, lose, take, train))()
        if number % 8 == 0:
            check()
    counts = buffer.counts()
    assert (counts["retired"], len(buffer)) == (steps * per_step, 0)
    assert counts["dropped"] == admitted - steps * per_step


# ------------------------------------------------------------------------------------------------------------ whom groups go to
def test_the_least_loaded_is_the_one_that_a_search_finds() -> None:
    chance = random.Random(3)
    members = tuple(Member(f"rollout-{index}", 0) for index in range(9))
    slots = {member.name: chance.choice((2, 8, 16)) for member in members}
    loads = RolloutLoads(slots)
    under_way: list[tuple[Member, int]] = []
    among = members
    for _ in range(3000):
        if chance.random() < 0.02:  # somebody comes or is lost
            among = tuple(member for member in members if chance.random() < 0.7) or members
        if under_way and chance.random() < 0.5:
            member, samples = under_way.pop(chance.randrange(len(under_way)))
            loads.add(member, -samples)
        else:
            expected = min(among, key=lambda one: loads.samples[one] / slots[one.name])
            member, samples = loads.least(among), chance.randint(1, 9)
            assert member == expected
            loads.add(member, samples)
            under_way.append((member, samples))
    assert len(loads._heap) < 200  # outdated entries do not pile up


# -----------------------------------------------------------------------------------------------------------------------------
COMMITTED = PolicyVersion(1, 7)
LIVED, BEHIND, ANEW = Member("rollout-0", 0), Member("rollout-1", 0), Member("rollout-2", 1)
HELD = {LIVED: COMMITTED, BEHIND: PolicyVersion(1, 6), ANEW: PolicyVersion()}
FOUND = FailoverState((), COMMITTED, HELD, ahead=False, lives=True)


def test_a_rollout_that_was_started_again_has_not_what_the_one_before_was_asked_for() -> None:
    assert FOUND.has_since(LIVED, 7)
    assert FOUND.has_since(BEHIND, 6)  # the commit has not reached it: what it has under way may go on
    assert not FOUND.has_since(BEHIND, 7)
    assert not FOUND.has_since(ANEW, 6)
    assert not FOUND.has_since(Member("rollout-0", 1), 7)  # it came after it was asked for its version


def test_those_generate_that_have_the_version() -> None:
    assert FOUND.having == [LIVED]


def test_groups_whose_blobs_no_agent_holds_are_lost_and_with_them_the_batches_after_theirs() -> None:
    here, gone = Holder("a", "a:1"), Holder("b", "b:1")
    held = {0: [here, gone], 1: [here], 2: [here], 3: [gone], 4: [gone], 5: [], 6: [here], 7: [gone]}
    harness = Harness(staleness=4)
    buffer = harness.buffer
    harness.dispatch(*range(8))
    for group_id, holders in held.items():
        buffer.generated(structs.replace(generated(group_id, 0), holders=holders))
        if group_id != 7:
            buffer.scored(scores(group_id))
    assert [ids(buffer.take(step)) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert buffer.lose_blobs({here}, made=3) == [7]
    harness.dispatch(7)
    buffer.generated(structs.replace(generated(7, 0), holders=[gone]))
    assert buffer.lose_blobs({here}, made=0) == [4, 5, 3, 7]  # 5 has no blob, but is of the batch after that of 3
    assert (buffer.step, ids(buffer.taken(1)), buffer.places) == (1, [2], 1)
    assert {each.group_id for each in buffer.waiting()} == {3, 4, 5, 7}
    assert ids(buffer.take(1)) == [6]
    assert buffer.lose_blobs({here}, made=0, since=5) == [2, 6, 0, 1]  # their deadline is step 4
    assert buffer.lose_blobs(set(), made=0) == []
