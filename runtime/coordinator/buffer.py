"""The buffer: an index in memory over the groups that are neither retired nor dropped. No I/O.

Every transition goes through the state table and to the journal. The buffer knows the step being filled and the committed
version, so the arithmetic of `staleness` always sees one consistent state. Use it from one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec import Struct, field, structs

from runtime.algorithms.advantages import has_signal
from runtime.coordinator import staleness
from runtime.coordinator.staleness import LATE, PipelineDepth, most_live
from runtime.errors import InvariantViolated
from runtime.ledger import states
from runtime.ledger.journal import Change, LedgerWriter, Ticket
from runtime.ledger.reader import PARTS, GroupRow, Handle
from runtime.ledger.states import Event, GroupState, Mark, Phase
from runtime.rewards.scorer import unscored
from runtime.types import GeneratedGroup, Holder, PolicyVersion, Scores

Part = bytes | Handle  # in memory; or on disk, if written before a restart


class Group(Struct, eq=False, kw_only=True):
    """A live group. `deadline` (the last step that may take it) is known from the dispatch on."""

    ticket: Ticket
    state: GroupState
    since: float  # of the last transition, seconds since the epoch
    dispatched: float = 0.0  # time of the dispatch; 0.0: not by this coordinator
    replica: str = ""
    attempt: int = 0
    hurried: int = 0  # the attempt for which the gateway got FinishGroup
    deadline: int | None = None
    generated: GeneratedGroup | None = None  # without its payload, which is in `payload`
    payload: Part | None = None
    asked: set[str] = field(default_factory=set)  # the services that score it now
    scores: Scores | None = None
    reference: Part | None = None
    values: Part | None = None
    taken: int | None = None  # the step of its batch
    place: int | None = None  # the index in this batch

    @property
    def group_id(self) -> int:
        return self.ticket.group_id

    @property
    def is_open(self) -> bool:
        """Whether a step has yet to take it, by its deadline."""
        return self.deadline is not None and self.taken is None and self.state.step is None

    @property
    def tokens(self) -> int:
        """Tokens of all rows, prompts included. 0 until the group is generated."""
        if self.generated is None:
            return 0
        lengths = self.generated.response_tokens
        return self.generated.prompt_tokens * len(lengths) + sum(lengths)


def restored(row: GroupRow, needs: Mark, now: float, bound: int) -> Group:
    """Build a group from its row in the ledger. `bound`: the staleness bound."""
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
        holders=row.holders or [],
        oldest=row.oldest,
        newest=row.newest,
        payload=b"",
    )
    group.deadline = staleness.deadline(row.oldest.step, bound)
    group.replica, group.scores = row.replica or "", row.scores
    group.payload, group.reference, group.values = (row.handles.get(part) for part in PARTS)
    return group


def asked_of(group: Group) -> str:
    """Return the name of the service that works on the group."""
    if group.state.phase != Phase.GENERATED:
        return group.replica or "rollout"
    missing = group.state.needs & ~group.state.marks
    if missing & Mark.SCORED:
        return " and ".join(sorted(group.asked)) or "reward"
    return "reference" if missing & Mark.REFERENCED else "critic"


class Buffer:
    """The live groups. `step`: the next step to fill; at a (re)start also the committed version. `clock`: seconds since the
    epoch. `depth`: None for as many groups as the staleness bound allows."""

    def __init__(
        self,
        *,
        needs: Mark,
        groups_per_step: int,
        staleness: int,
        journal: LedgerWriter,
        clock: Callable[[], float],
        step: int = 0,
        depth: PipelineDepth | None = None,
    ):
        self.needs, self.groups_per_step, self.staleness = needs, groups_per_step, staleness
        self.step = self.committed = step
        self.incarnation = 0  # of the attempt
        self.last_step = step  # the run ends before this step
        self.stop_reason = ""
        self.ready_changed = asyncio.Event()
        """Set when `take` may have become possible, or a group changed its state. Clear it, call `take`, then wait."""
        self.room_changed = asyncio.Event()
        """Set when `capacity` may have grown, a group must be dispatched again, or the trainer has nothing to do."""
        self.trainer_waits = False  # no group can be taken, and the trainer has nothing else to do
        self.limit = 0  # the most groups that rollouts may have, from the last call of `capacity`
        self._depth = depth or PipelineDepth(groups_per_step, most_live(staleness, groups_per_step), measured=False)
        self._journal, self._clock = journal, clock
        self._filled = 0
        self._groups: dict[int, Group] = {}
        # Counters, because `capacity` and `take` are called after every change: O(1), however many groups there are.
        self._phases = dict.fromkeys(Phase, 0)
        self._due: dict[int, list[int]] = {}  # by deadline: [open groups, ready groups among them]
        self._waiting: dict[int, Group] = {}  # admitted groups without a replica
        self._finished = {Phase.RETIRED: 0, Phase.DROPPED: 0}

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def version(self, step: int) -> PolicyVersion:
        """Return the version that this attempt has after `step` steps."""
        return PolicyVersion(self.incarnation, step)

    def stop(self, reason: str) -> None:
        """End the run after the last complete batch; give up the batch that is being filled. Only the first reason is kept."""
        self.stop_reason = self.stop_reason or reason
        self.last_step = min(self.last_step, self.step)
        self.ready_changed.set()

    # ------------------------------------------------------------------------------------------ transitions of a group

    def admit(self, ticket: Ticket) -> Group:
        if ticket.group_id in self._groups:
            raise InvariantViolated(f"group {ticket.group_id} was admitted twice")
        group = Group(ticket=ticket, state=GroupState(self.needs), since=self._clock())
        self._groups[ticket.group_id] = group
        self._count(group, 1)
        self._record(group, "admitted", ticket=ticket)
        return group

    def dispatch(self, group_id: int, replica: str) -> None:
        """Record that `replica` generates the group. Its oldest token will be of the committed version or a later one."""
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
        """Return the group to `admitted` after the loss of its replica or payload, to be dispatched again. A taken group can be
        lost only until a later step takes a group, so read the payloads when they are taken."""
        group = self._apply(group_id, states.Lost())
        if group.taken is not None:
            self._reopen(group)
        gone = ("deadline", "taken", "place", "generated", "payload", "scores", "reference", "values")
        self._set(group, replica="", **dict.fromkeys(gone))
        self._record(group, "lost")
        self.ready_changed.set()
        self.room_changed.set()

    def lose_blobs(self, holders: Collection[Holder], made: int, since: int = 0) -> list[int]:
        """Lose the groups whose blobs no agent of `holders` has, or whose deadlines are before step `since`: agents have
        forgotten these. Groups of later batches than theirs are lost, too. The trainer has made the steps before `made`, and
        needs no blobs of theirs. Return the groups."""
        gone = {
            group
            for group in self
            if group.state.phase in (Phase.GENERATED, Phase.READY)
            and group.generated is not None
            and group.generated.holders
            and (group.taken is None or group.taken >= made)
            and ((group.deadline or 0) < since or not any(each in holders for each in group.generated.holders))
        }
        first = min((group.taken for group in gone if group.taken is not None), default=math.inf)
        gone |= {group for group in self if group.taken is not None and group.taken > first}
        lost = sorted(gone, key=lambda group: (-1 if group.taken is None else -group.taken, group.group_id))
        for group in lost:
            self.lose(group.group_id)
        return [group.group_id for group in lost]

    def drop(self, group_id: int, why: str) -> Ticket:
        """Drop the group. Return its ticket, which names the prompt to give back. A taken group's step must be being filled."""
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

    # ------------------------------------------------------------------------------------------ steps

    def take(self, step: int, whole: bool = False) -> list[Group]:
        """Take groups for the batch of `step` and return them in training order. With `whole`, take all missing groups or none.
        Raises InvariantViolated if `step` is not the step being filled, or if a deadline can no longer be met."""
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
        """Record that `step` took the trainer `seconds`. Raises InvariantViolated if a token is older than the bound allows."""
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
        """Set the committed version to `version_step` and retire the groups of earlier steps."""
        self.committed = version_step
        for group in [one for one in self if one.state.step is not None and one.state.step < version_step]:
            self._apply(group.group_id, states.Retired())
            self._record(group, "retired")
            self._leave(group)

    def load(self, rows: Sequence[GroupRow]) -> list[int]:
        """Load the groups that the ledger restored. Return the intact groups that must be generated again: their deadlines
        cannot be met because `groups_per_step` or `staleness` became smaller."""
        self.take_up(rows)
        late = staleness.overdue(self._opened(), self.step, self.groups_per_step)
        for group_id in late:
            self.lose(group_id)
        return late

    def take_up(self, rows: Sequence[GroupRow]) -> None:
        """Continue the work of an earlier coordinator. Groups taken for `step` or later are ready again, in their old batch."""
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

    # ------------------------------------------------------------------------------------------ queries

    def taken(self, step: int) -> list[Group]:
        """Return the groups taken for `step` so far, in training order."""
        return sorted((group for group in self if group.taken == step), key=lambda group: group.place or 0)

    def capacity(self, max_in_flight: int, steps: int) -> int:
        """Return how many groups may be dispatched now in a run of `steps` steps: `waiting()` groups first, then new groups."""
        self.limit = max_in_flight
        holding = len(self._groups) - len(self._waiting)
        missing = (steps - self.step) * self.groups_per_step - self._filled - sum(opened for opened, _ in self._due.values())
        return staleness.admission_capacity(holding, self.generating, max_in_flight, self.depth, missing)

    @property
    def depth(self) -> int:
        """How many groups may hold a place now."""
        return self._depth.target

    def late(self) -> Iterator[tuple[Group, float]]:
        """Yield the groups in generation that alone hold up the trainer, each with the seconds until it is late (`LATE`)."""
        usual = LATE * (self._depth.slowest or 0.0) if self.trainer_waits else 0.0
        for group in self if usual else ():
            if group.state.phase == Phase.GENERATING and group.deadline is not None and group.deadline <= self.step:
                yield group, max(0.0, usual - (self._clock() - group.since))

    @property
    def generating(self) -> int:
        return self._phases[Phase.GENERATING]

    @property
    def takeable(self) -> int:
        """How many groups the step that is being filled can take now."""
        return staleness.takeable(self._due, self.step, self.places, self.groups_per_step)

    @property
    def fills(self) -> bool:
        """Whether the batch of the step being filled is complete once all generated groups are ready."""
        due = {last: [opened, 0] for last, (opened, _) in self._due.items()}
        for group in self:
            if group.is_open and group.deadline is not None and group.generated is not None:
                due[group.deadline][1] += 1
        return staleness.takeable(due, self.step, self.places, self.groups_per_step) >= self.places

    @property
    def places(self) -> int:
        """The open places in the batch of the step being filled."""
        return self.groups_per_step - self._filled

    def waiting(self) -> list[Group]:
        """Return the admitted groups without a replica, oldest first."""
        return [self._waiting[group_id] for group_id in sorted(self._waiting)]

    def counts(self) -> dict[str, int]:
        """Return the number of groups by phase: live groups, and groups retired or dropped since the (re)start."""
        return {phase.value: number for phase, number in (self._phases | self._finished).items()}

    def oldest_wait(self) -> Group | None:
        """Return the unready group with the earliest deadline, or None if no group is under way."""
        phases = (Phase.ADMITTED, Phase.GENERATING, Phase.GENERATED)
        waiting = (group for group in self if group.state.phase in phases)
        return min(waiting, key=lambda g: (g.deadline is None, g.deadline or 0, g.since, g.group_id), default=None)

    def _opened(self) -> list[staleness.OpenGroup]:
        return [
            staleness.OpenGroup(group.deadline, group.group_id, group.state.phase == Phase.READY)
            for group in self
            if group.is_open and group.deadline is not None
        ]

    def _reopen(self, group: Group) -> None:
        """Free the place of `group` in the batch that is being filled, or that was just filled."""
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
        """Apply `event` to the group's state, and set `fields` with it."""
        group = self._groups.get(group_id)
        if group is None:
            raise InvariantViolated(f"group {group_id} is not live and cannot take {event!r}")
        self._set(group, state=states.apply(group.state, event), since=self._clock(), **fields)
        return group

    def _set(self, group: Group, **fields: object) -> None:
        """Set fields of the group and keep the counters right."""
        self._count(group, -1)
        for name, value in fields.items():
            setattr(group, name, value)
        self._count(group, 1)

    def _count(self, group: Group, number: int) -> None:
        phase = group.state.phase
        self._phases[phase] += number
        if group.is_open and group.deadline is not None:
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
    """Drops scored groups without signal: the advantages of equal rewards are all 0 (DAPO, arXiv:2503.14476, section 3.2). A
    dropped group's prompt is used up, since the policy solves it always or never, and admission draws another prompt. Stops the
    run if `limit` groups were dropped since the last complete batch, and the step still lacks groups.

    The rewards are judged as the rules gave them: length penalties and a KL would tell apart replies that are all right."""

    def __init__(self, buffer: Buffer, limit: int):
        self._buffer, self._limit, self._step = buffer, limit, buffer.step
        self._dropped_for_step = 0
        self._any_scored = False  # any valid score among the groups dropped for the step
        self._kept = self._dropped = 0  # since `close_step`

    def judge(self, group: Group) -> None:
        """Drop `group` unless it has signal. At the limit, stop the run; raises ServiceFault if no dropped group is scored."""
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
        if self._dropped_for_step < self._limit:
            return
        # With enough scored groups only the trainer is late, and drops count for later steps.
        if sum(one.is_open and bool(one.state.marks & Mark.SCORED) for one in self._buffer) < self._buffer.places:
            if not self._any_scored:
                raise unscored([group.scores], f"{self._dropped_for_step} groups")
            self._buffer.stop(f"too little signal: {self._dropped_for_step} groups with equal rewards dropped for one step")

    def judge_restored(self) -> None:
        """Drop restored groups without signal, from a run that took every group. They are not counted for the limit."""
        for group in list(self._buffer):
            if group.scores is not None and not _has_signal(group):
                self._buffer.drop(group.group_id, NO_SIGNAL)

    def close_step(self) -> dict[str, float]:
        """Return the metrics of the groups scored since the last call. `num_gen_batches` counts parts of batches."""
        kept, dropped = self._kept, self._dropped
        self._kept = self._dropped = 0
        batches = (kept + dropped) / self._buffer.groups_per_step
        figures = {"dynamic_sampling/dropped": float(dropped), "train/num_gen_batches": batches}
        if kept + dropped:
            figures["dynamic_sampling/kept"] = kept / (kept + dropped)
        return figures


def _has_signal(group: Group) -> bool:
    assert group.scores is not None
    return has_signal(group.scores.rewards, group.scores.valid)
