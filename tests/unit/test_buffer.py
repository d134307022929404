"""The buffer: every transition is journalled, takes and retirements follow the staleness rule, and what waits has a name."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from runtime.coordinator import staleness
from runtime.coordinator.admission.depth import LATE, PipelineDepth
from runtime.coordinator.buffer import Buffer
from runtime.errors import InvariantViolated
from runtime.ledger.records import Change, Ticket
from runtime.ledger.states import Mark, Phase
from runtime.types import GeneratedGroup, PolicyVersion, Scores


class KeptChanges(list[Change]):
    """A journal in memory."""

    def record(self, change: Change) -> None:
        self.append(change)


class Harness:
    """A buffer with a list as its journal and a clock that the test moves."""

    def __init__(self, staleness: int = 1, per_step: int = 2, needs: Mark = Mark.SCORED, depth: PipelineDepth | None = None):
        self.journal = KeptChanges()
        self.now = 100.0
        self.buffer = Buffer(
            needs=needs,
            groups_per_step=per_step,
            staleness=staleness,
            journal=self.journal,
            clock=lambda: self.now,
            depth=depth,
        )

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
    assert (wait.group_id, wait.service, wait.phase, wait.deadline) == (0, "rollout-0", "generating", 1)
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


def test_a_token_older_than_its_dispatch_is_refused() -> None:
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


def test_a_step_is_consumed_whole() -> None:
    h = Harness(per_step=2)
    h.dispatch(0, 1)
    h.finish(0)
    h.buffer.take(0)
    with pytest.raises(InvariantViolated, match="1 groups of 2"):
        h.buffer.consume(0)


def test_oldest_wait_names_the_service_of_the_missing_mark() -> None:
    h = Harness(needs=Mark.SCORED | Mark.REFERENCED | Mark.VALUED)
    assert h.buffer.oldest_wait() is None
    h.buffer.admit(ticket(0))
    steps = [
        (lambda: h.buffer.dispatch(0, "rollout-1"), "rollout", "admitted"),
        (lambda: h.buffer.generated(generated(0, 0)), "rollout-1", "generating"),
        (lambda: h.buffer.scored(scores(0)), "reward", "generated"),
        (lambda: h.buffer.referenced(0, b""), "reference", "generated"),
        (lambda: h.buffer.valued(0, b""), "critic", "generated"),
    ]
    for advance, service, phase in steps:
        h.now += 2.5
        wait = h.buffer.oldest_wait()
        assert wait is not None
        assert (wait.service, wait.phase, wait.seconds) == (service, phase, 2.5)
        advance()
    assert h.buffer.oldest_wait() is None


def test_oldest_wait_names_who_has_not_scored_yet() -> None:
    h = Harness(needs=Mark.SCORED)
    h.buffer.admit(ticket(0))
    h.buffer.dispatch(0, "rollout-1")
    h.buffer.generated(generated(0, 0))
    group = h.buffer[0]
    for asked, service in (({"reward_model-1", "reward-0"}, "reward-0 and reward_model-1"), ({"reward-0"}, "reward-0")):
        group.asked = asked
        wait = h.buffer.oldest_wait()
        assert wait is not None
        assert wait.service == service


def test_events_wake_the_stages() -> None:
    async def scenario() -> list[int]:
        h = Harness(per_step=1)
        h.dispatch(0)

        async def stage() -> list[int]:
            while True:
                h.buffer.ready_changed.clear()
                if taken := h.buffer.take(0):
                    return ids(taken)
                await h.buffer.ready_changed.wait()

        task = asyncio.create_task(stage())
        await asyncio.sleep(0)
        h.finish(0)
        return await asyncio.wait_for(task, 60)

    assert asyncio.run(scenario()) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_is_what_is_there(seed: int) -> None:
    """After any changes, in any order: the counts that are kept are those that a look at every group gives."""
    chance, h, admitted = random.Random(seed), Harness(staleness=2, per_step=2), 0
    buffer = h.buffer
    for _ in range(800):
        in_phase = {phase: [group for group in buffer if group.state.phase == phase] for phase in Phase}
        choice = chance.choice(("dispatch", "dispatch", "generated", "scored", "scored", "lose", "drop", "take", "train"))
        if choice == "dispatch" and buffer.capacity(99, 999):
            waiting = buffer.waiting()
            group_id = waiting[0].group_id if waiting else admitted
            admitted += not waiting
            h.dispatch(group_id)
        elif choice == "generated" and in_phase[Phase.GENERATING]:
            group = chance.choice(in_phase[Phase.GENERATING])
            buffer.generated(generated(group.group_id, buffer.committed))
        elif choice == "scored" and in_phase[Phase.GENERATED]:
            buffer.scored(scores(chance.choice(in_phase[Phase.GENERATED]).group_id))
        elif choice in ("lose", "drop") and (found := [group for group in buffer if group.taken is None and group.deadline]):
            group = chance.choice(found)
            buffer.lose(group.group_id) if choice == "lose" else buffer.drop(group.group_id, "by chance")
        elif choice == "take":
            buffer.take(buffer.step, whole=chance.random() < 0.5)
        elif choice == "train" and buffer.step > buffer.committed:
            h.train(buffer.committed)
        ready = [group for group in buffer if group.state.phase == Phase.READY and group.taken is None]
        generating = [group for group in buffer if group.state.phase == Phase.GENERATING]
        opened = [group for group in buffer if group.deadline is not None and group.taken is None]
        holding = sum(group.state.phase != Phase.ADMITTED for group in buffer)
        filled = sum(group.taken == buffer.step for group in buffer)
        of_step = [staleness.OpenGroup(g.deadline, g.group_id, g in ready) for g in opened if g.deadline is not None]
        assert buffer.takeable == len(staleness.select(of_step, buffer.step, buffer.places, 2))
        assert buffer.generating == len(generating)
        assert ids(buffer.waiting()) == sorted(group.group_id for group in buffer if group.state.phase == Phase.ADMITTED)
        missing = (9 - buffer.step) * 2 - filled - len(opened)
        assert buffer.capacity(99, 9) == max(0, min(99 - len(generating), 3 * 2 - holding, missing))
        counts = buffer.counts()
        assert all(counts[phase.value] == sum(group.state.phase == phase for group in buffer) for phase in list(Phase)[:5])
    assert buffer.committed > 2


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


def test_what_need_not_be_ready_for_this_step_is_not_late() -> None:
    depth = PipelineDepth(groups_per_step=2, bound=4)
    h = Harness(staleness=1, depth=depth)
    h.dispatch(0, 1)
    h.finish(0)
    depth.became_ready(1.0)
    h.buffer.trainer_waits = True
    h.now += 1000.0
    assert not list(h.buffer.late())  # another may take its place until step 1


def test_nobody_is_late_before_it_is_known_how_long_groups_take() -> None:
    for depth in (None, PipelineDepth(groups_per_step=2, bound=2)):
        h = Harness(staleness=0, depth=depth)
        h.dispatch(0, 1)
        h.buffer.trainer_waits = True
        h.now += 1000.0
        assert not list(h.buffer.late())
