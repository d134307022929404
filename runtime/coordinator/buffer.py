"""The buffer: an index in memory over the groups that are neither retired nor dropped. No I/O.

Every transition goes through the state table and is handed to the journal. The buffer knows which step is being filled and
which version is committed, so the arithmetic of `staleness` always sees one consistent picture. Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct, field, structs

from runtime.algorithms.advantages import has_signal
from runtime.coordinator import staleness
from runtime.coordinator.staleness import LATE, PipelineDepth, most_live
from runtime.errors import InvariantViolated
from runtime.ledger import states
from runtime.ledger.payloads import Handle
from runtime.ledger.reader import PARTS, GroupRow
from runtime.ledger.records import Change, Ticket
from runtime.ledger.states import Event, GroupState, Mark, Phase
from runtime.rewards.scorer import unscored
from runtime.types import GeneratedGroup, Scores

# ---- Group
#
# A group under training, as the coordinator has it in memory.

Part = bytes | Handle  # in memory, or on disk since before a restart


class Group(Struct, eq=False, kw_only=True):
    """A live group. `deadline` (the last step that may take it) is known from the dispatch on."""

    ticket: Ticket
    state: GroupState
    since: float  # of the last transition, seconds since the epoch
    dispatched: float = 0.0  # the same; 0.0: not by this coordinator
    replica: str = ""
    attempt: int = 0
    hurried: int = 0  # the attempt that the trainer waited for too long
    deadline: int | None = None
    generated: GeneratedGroup | None = None  # its payload moved to `payload`
    payload: Part | None = None
    asked: set[str] = field(default_factory=set)  # who is scoring it now
    scores: Scores | None = None
    reference: Part | None = None
    values: Part | None = None
    taken: int | None = None  # the step whose batch it is in
    place: int | None = None  # in that batch

    @property
    def group_id(self) -> int:
        return self.ticket.group_id

    @property
    def tokens(self) -> int:
        """Of all its rows, prompts included. 0 until it is generated."""
        if self.generated is None:
            return 0
        lengths = self.generated.response_tokens
        return self.generated.prompt_tokens * len(lengths) + sum(lengths)


def restored(row: GroupRow, needs: Mark, now: float, bound: int) -> Group:
    """What the ledger knows of a group. `bound`: of the staleness."""
    group = Group(
        ticket=Ticket(**{name: getattr(row, name) for name in Ticket.__struct_fields__}),
        state=GroupState(needs, row.phase, row.marks, row.step, row.why),
        since=now,
        attempt=row.attempt,
    )
    if row.oldest is None or row.newest is None:
        return group
    group.generated = GeneratedGroup(
        group_id=row.group_id,
        prompt_tokens=row.prompt_tokens or 0,
        response_tokens=row.response_tokens or [],
        truncated=row.truncated or 0,
        rewards=row.rewards or [],
        outcomes=row.outcomes,
        oldest=row.oldest,
        newest=row.newest,
        payload=b"",
    )
    group.deadline = staleness.deadline(row.oldest.step, bound)
    group.replica, group.scores = row.replica or "", row.scores
    group.payload, group.reference, group.values = (row.handles.get(part) for part in PARTS)
    return group


def asked_of(group: Group) -> str:
    """The service that has it."""
    if group.state.phase != Phase.GENERATED:
        return group.replica or "rollout"
    missing = group.state.needs & ~group.state.marks
    if missing & Mark.SCORED:
        return " and ".join(sorted(group.asked)) or "reward"
    return "reference" if missing & Mark.REFERENCED else "critic"


class Wait(Struct, frozen=True):
    """What a step waits for: the group, the service that has it, and the phase it is in."""

    group_id: int
    service: str
    phase: str
    seconds: float
    deadline: int | None


class ChangeJournal(Protocol):
    """Where every change of a group is kept."""

    def record(self, change: Change) -> None: ...


class Buffer:
    """`step`: the next to be filled, which is also the committed version when the run (re)starts. `clock`: seconds since the
    epoch. `depth`: None for as many groups at once as the bound on staleness allows."""

    def __init__(
        self,
        *,
        needs: Mark,
        groups_per_step: int,
        staleness: int,
        journal: ChangeJournal,
        clock: Callable[[], float],
        step: int = 0,
        depth: PipelineDepth | None = None,
    ):
        self.needs = needs
        self.groups_per_step = groups_per_step
        self.staleness = staleness
        self.step = step
        self.committed = step
        self.last_step = step
        """The run ends before this step."""
        self.stop_reason = ""
        self.ready_changed = asyncio.Event()
        """Set when `take` may have become possible, or a group is generated, scored, referenced or dropped. Clear it, call
        `take`, then wait."""
        self.room_changed = asyncio.Event()
        """Set when `capacity` may have grown, a group came back to be dispatched again, or the trainer has nothing to do."""
        self.trainer_waits = False
        """Nothing can be taken, and the trainer has nothing else to do."""
        self.limit = 0
        """How many groups rollouts may have, as it was said last."""
        self._depth = depth or PipelineDepth(groups_per_step, most_live(staleness, groups_per_step), measured=False)
        self._journal = journal
        self._clock = clock
        self._filled = 0
        self._groups: dict[int, Group] = {}
        # Counts of them, as `capacity` and `take` are asked after every change: O(1), however many groups there are.
        self._phases = dict.fromkeys(Phase, 0)
        self._due: dict[int, list[int]] = {}  # by deadline: those that are in no batch, and how many of these are ready
        self._waiting: dict[int, Group] = {}  # admitted, and with no replica
        self._finished = {Phase.RETIRED: 0, Phase.DROPPED: 0}

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def stop(self, reason: str) -> None:
        """End the run after the step whose batch was completed last; one that is still being filled is given up. The first
        reason counts."""
        self.stop_reason = self.stop_reason or reason
        self.last_step = min(self.last_step, self.step)
        self.ready_changed.set()

    # ------------------------------------------------------------------------------------------ what happens to a group

    def admit(self, ticket: Ticket) -> Group:
        if ticket.group_id in self._groups:
            raise InvariantViolated(f"group {ticket.group_id} was admitted twice")
        group = Group(ticket=ticket, state=GroupState(self.needs), since=self._clock())
        self._groups[ticket.group_id] = group
        self._count(group, 1)
        self._record(group, "admitted", ticket=ticket)
        return group

    def dispatch(self, group_id: int, replica: str) -> None:
        """`replica` is asked to generate the group. Its oldest token will be of the committed version or a later one."""
        due = staleness.deadline(self.committed, self.staleness)
        group = self._apply(group_id, states.Dispatched(), replica=replica, deadline=due)
        group.attempt += 1
        group.dispatched = group.since
        self._record(group, "generating", replica=replica, attempt=group.attempt, due=due)

    def generated(self, result: GeneratedGroup) -> None:
        group = self._apply(result.group_id, states.Generated())
        due = staleness.deadline(result.oldest.step, self.staleness)
        if group.deadline is None or due < group.deadline:
            raise InvariantViolated(f"group {group.group_id} has a token of {result.oldest}, older than its dispatch allows")
        self._set(group, deadline=due)
        group.payload = result.payload
        group.generated = structs.replace(result, payload=b"")
        self._record(group, "generated", generated=result)
        self.ready_changed.set()
        self.room_changed.set()

    def scored(self, scores: Scores) -> None:
        self._mark(scores.group_id, Mark.SCORED, "scored", scores=scores)

    def referenced(self, group_id: int, logprobs: bytes) -> None:
        self._mark(group_id, Mark.REFERENCED, "referenced", reference=logprobs)

    def valued(self, group_id: int, values: bytes) -> None:
        self._mark(group_id, Mark.VALUED, "valued", values=values)

    def lose(self, group_id: int) -> None:
        """Its replica or payload is gone: back to `admitted`, to be dispatched again. A group that was taken can be lost
        only until a later step takes one (read the payloads as they are taken)."""
        group = self._apply(group_id, states.Lost())
        if group.taken is not None:
            self._reopen(group)
        gone = ("deadline", "taken", "place", "generated", "payload", "scores", "reference", "values")
        self._set(group, replica="", **dict.fromkeys(gone))
        self._record(group, "lost")
        self.ready_changed.set()
        self.room_changed.set()

    def drop(self, group_id: int, why: str) -> Ticket:
        """Give the group up; its ticket says which prompt to give back. One that was taken can be dropped only while its
        step is still being filled: a step that will never be applied."""
        group = self._groups[group_id]
        if group.taken is not None:
            if group.taken != self.step:
                raise InvariantViolated(f"group {group_id} is in the batch of step {group.taken}")
            self._filled -= 1
        group = self._apply(group_id, states.Dropped(why))
        if group.dispatched:
            self._depth.dropped(group.since - group.dispatched)
        self._record(group, "dropped")
        self._leave(group)
        self.ready_changed.set()
        return group.ticket

    # ------------------------------------------------------------------------------------------ what the steps do

    def take(self, step: int, whole: bool = False) -> list[Group]:
        """The groups that go into the batch of `step` now, in training order; with `whole`, all that are missing, or none.

        Steps are filled one after the other: when this returns the last group of `step`, `self.step` moves on. Raises
        InvariantViolated for another step than the one being filled, and when a deadline can no longer be met.
        """
        if step != self.step:
            raise InvariantViolated(f"step {step} cannot take groups while step {self.step} is being filled")
        found = self.takeable
        if not found or (whole and found < self.places):
            return []
        taken = [self[i] for i in staleness.select(self._opened(), step, self.places, self.groups_per_step, whole)]
        occupied = {group.place for group in self if group.taken == step}
        free = (place for place in range(self.groups_per_step) if place not in occupied)
        for group, place in zip(taken, free, strict=False):
            self._set(group, taken=step, place=place)
            self._record(group, "", taken=step, place=place)
        self._filled += len(taken)
        if self._filled == self.groups_per_step:
            self.step, self._filled = step + 1, 0
            self.room_changed.set()
        return taken

    def consume(self, step: int, seconds: float = 0.0) -> None:
        """`step` has been applied, on which the trainer worked so long. Raises InvariantViolated when a token it trained on is
        older than the bound allows."""
        self._depth.stepped(seconds)
        batch = [group for group in self if group.taken == step and group.state.phase == Phase.READY]
        if len(batch) != self.groups_per_step:
            raise InvariantViolated(f"step {step} was applied with {len(batch)} groups of {self.groups_per_step}")
        for group in batch:
            if group.deadline is None or step > group.deadline:
                raise InvariantViolated(f"step {step} trained on group {group.group_id}, which was due by {group.deadline}")
            self._apply(group.group_id, states.Consumed(step))
            self._record(group, "consumed")
        self.commit(self.committed)

    def commit(self, version_step: int) -> None:
        """The version `version_step` counts from now on; the groups that it trained on retire."""
        self.committed = version_step
        for group in [one for one in self if one.state.step is not None and one.state.step < version_step]:
            self._apply(group.group_id, states.Retired())
            self._record(group, "retired")
            self._leave(group)

    def load(self, rows: Sequence[GroupRow]) -> list[int]:
        """Take over what the ledger restored. Returns the groups that have to be generated again although they are intact,
        because `groups_per_step` or `staleness` became smaller and their deadlines could no longer be met."""
        for row in rows:
            self._groups[row.group_id] = group = restored(row, self.needs, self._clock(), self.staleness)
            self._count(group, 1)
        late = staleness.overdue(self._opened(), self.step, self.groups_per_step)
        for group_id in late:
            self.lose(group_id)
        return late

    def take_up(self, rows: Sequence[GroupRow]) -> None:
        """Go on with what an earlier coordinator left. What was taken for steps from `step` on is ready again, in the batch
        that it was in: see `taken`. What was being generated still is."""
        first = self.step
        for row in rows:
            self._groups[row.group_id] = group = restored(row, self.needs, self._clock(), self.staleness)
            if row.taken is not None and row.taken >= first:
                group.state, group.taken, group.place = GroupState(self.needs, Phase.READY, row.marks), row.taken, row.place
            elif row.phase == Phase.GENERATING:
                group.replica, group.deadline = row.replica or "", row.due
            self._count(group, 1)
        while len(self.taken(self.step)) == self.groups_per_step:
            self.step += 1
        self._filled = len(self.taken(self.step))

    # ------------------------------------------------------------------------------------------ what can be asked

    def taken(self, step: int) -> list[Group]:
        """The batch of `step` as far as it is taken, in training order."""
        return sorted((group for group in self if group.taken == step), key=lambda group: group.place or 0)

    def capacity(self, max_in_flight: int, steps: int) -> int:
        """How many groups may be dispatched now in a run of `steps` steps: `waiting()` ones first, then new ones."""
        self.limit = max_in_flight
        holding = len(self._groups) - len(self._waiting)
        missing = (steps - self.step) * self.groups_per_step - self._filled - sum(opened for opened, _ in self._due.values())
        return staleness.admission_capacity(holding, self.generating, max_in_flight, self.depth, missing)

    @property
    def depth(self) -> int:
        """How many groups may hold a place now."""
        return self._depth.target

    def late(self) -> Iterator[tuple[Group, float]]:
        """The groups under way that the trainer waits for alone, and for how many seconds more that is nothing out of the
        ordinary: `LATE` times what the slowest of a step takes."""
        usual = LATE * (self._depth.slowest or 0.0) if self.trainer_waits else 0.0
        for group in self if usual else ():
            if group.state.phase == Phase.GENERATING and group.deadline is not None and group.deadline <= self.step:
                yield group, max(0.0, usual - (self._clock() - group.since))

    @property
    def generating(self) -> int:
        """How many groups rollouts have."""
        return self._phases[Phase.GENERATING]

    @property
    def takeable(self) -> int:
        """How many groups the step that is being filled can take now."""
        return staleness.takeable(self._due, self.step, self.places, self.groups_per_step)

    @property
    def fills(self) -> bool:
        """Whether the step that is being filled has its batch once those that are generated are ready."""
        due = {last: [opened, 0] for last, (opened, _) in self._due.items()}
        for group in self:
            if group.deadline is not None and group.taken is None and group.generated is not None:
                due[group.deadline][1] += 1
        return staleness.takeable(due, self.step, self.places, self.groups_per_step) >= self.places

    @property
    def places(self) -> int:
        """How many places of the step being filled no group has taken yet."""
        return self.groups_per_step - self._filled

    def waiting(self) -> list[Group]:
        """Admitted groups that no replica has, oldest first."""
        return [self._waiting[group_id] for group_id in sorted(self._waiting)]

    def counts(self) -> dict[str, int]:
        """Groups by phase: those here, and those that retired or were dropped since the (re)start."""
        return {phase.value: number for phase, number in (self._phases | self._finished).items()}

    def oldest_wait(self) -> Wait | None:
        """The unready group with the earliest deadline: what the step being filled waits for. None: nothing is under way."""
        phases = (Phase.ADMITTED, Phase.GENERATING, Phase.GENERATED)
        waiting = [group for group in self if group.state.phase in phases]
        if not waiting:
            return None
        group = min(waiting, key=lambda g: (g.deadline is None, g.deadline or 0, g.since, g.group_id))
        return Wait(group.group_id, asked_of(group), group.state.phase.value, self._clock() - group.since, group.deadline)

    # ------------------------------------------------------------------------------------------ inside

    def _opened(self) -> list[staleness.OpenGroup]:
        return [
            staleness.OpenGroup(group.deadline, group.group_id, group.state.phase == Phase.READY)
            for group in self
            if group.deadline is not None and group.taken is None
        ]

    def _reopen(self, group: Group) -> None:
        """Free the place of `group` in the batch that is being filled, or was just filled."""
        if group.taken == self.step - 1 and not self._filled:
            self.step, self._filled = self.step - 1, self.groups_per_step
        if group.taken != self.step:
            raise InvariantViolated(f"group {group.group_id} of step {group.taken} was lost while step {self.step} is filled")
        self._filled -= 1

    def _mark(self, group_id: int, mark: Mark, stamp: str, **what: object) -> None:
        group = self._apply(group_id, states.Marked(mark), **what)
        self._record(group, stamp, **what)
        if group.state.phase == Phase.READY and group.dispatched:
            self._depth.became_ready(group.since - group.dispatched)
        self.ready_changed.set()

    def _apply(self, group_id: int, event: Event, **fields: object) -> Group:
        """`fields` are what changes with its state."""
        group = self._groups.get(group_id)
        if group is None:
            raise InvariantViolated(f"group {group_id} is not live and cannot take {event!r}")
        self._set(group, state=states.apply(group.state, event), since=self._clock(), **fields)
        return group

    def _set(self, group: Group, **fields: object) -> None:
        """Every change of what `_count` counts."""
        self._count(group, -1)
        for name, value in fields.items():
            setattr(group, name, value)
        self._count(group, 1)

    def _count(self, group: Group, number: int) -> None:
        phase = group.state.phase
        self._phases[phase] += number
        if group.deadline is not None and group.taken is None:
            due = self._due.setdefault(group.deadline, [0, 0])
            due[0] += number
            due[1] += number * (phase == Phase.READY)
            if not due[0]:
                del self._due[group.deadline]
        if phase == Phase.ADMITTED and number > 0:
            self._waiting[group.group_id] = group
        elif phase == Phase.ADMITTED:
            del self._waiting[group.group_id]

    def _record(self, group: Group, stamp: str, **what: object) -> None:
        self._journal.record(Change(group_id=group.group_id, state=group.state, stamp=stamp, at=group.since, **what))  # type: ignore[arg-type]

    def _leave(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._count(group, -1)
        self._finished[group.state.phase] += 1
        self.room_changed.set()


NO_SIGNAL = "no signal"  # why such groups are dropped


class DynamicSampling:
    """Judges scored groups. Stops the run when a step cannot be filled: `limit` groups were dropped since the batch before
    it was complete, and it still lacks groups."""

    def __init__(self, buffer: Buffer, limit: int):
        self._buffer = buffer
        self._limit = limit
        self._step = buffer.step
        self._dropped_for_step = 0
        self._any_scored = False  # of those dropped for the step
        self._kept = self._dropped = 0  # since `close_step`

    def judge(self, group: Group) -> None:
        """Drop `group`, which was just scored, unless it has signal. Raises ServiceFault in place of a stop where none of the
        groups that were dropped has a score."""
        if _has_signal(group):
            self._kept += 1
            return
        self._buffer.drop(group.group_id, NO_SIGNAL)
        self._dropped += 1
        if self._step != self._buffer.step:
            self._step, self._dropped_for_step, self._any_scored = self._buffer.step, 0, False
        self._dropped_for_step += 1
        assert group.scores is not None
        self._any_scored = self._any_scored or bool(group.scores.valid.any())
        if self._dropped_for_step >= self._limit and not self._step_has_enough():
            if not self._any_scored:
                raise unscored([group.scores], f"{self._dropped_for_step} groups")
            self._buffer.stop(f"too little signal: {self._dropped_for_step} groups with equal rewards dropped for one step")

    def judge_restored(self) -> None:
        """Drop what a run that took every group has left in the buffer. It says nothing of the prompts to come: not counted."""
        for group in list(self._buffer):
            if group.scores is not None and not _has_signal(group):
                self._buffer.drop(group.group_id, NO_SIGNAL)

    def close_step(self) -> dict[str, float]:
        """The metrics of the groups scored since the last call; the fraction is left out when there were none. MindSpeed-RL
        generates whole batches until one is full, and counts them; here it is how many batches the groups would make up."""
        kept, dropped = self._kept, self._dropped
        self._kept = self._dropped = 0
        batches = (kept + dropped) / self._buffer.groups_per_step
        figures = {"dynamic_sampling/dropped": float(dropped), "train/num_gen_batches": batches}
        if kept + dropped:
            figures["dynamic_sampling/kept"] = kept / (kept + dropped)
        return figures

    def _step_has_enough(self) -> bool:
        """A step whose groups are there only waits for the trainer; what is dropped meanwhile is dropped for later steps."""
        found = sum(group.taken is None and bool(group.state.marks & Mark.SCORED) for group in self._buffer)
        return found >= self._buffer.places


def _has_signal(group: Group) -> bool:
    assert group.scores is not None
    return has_signal(group.scores.rewards, group.scores.valid)
