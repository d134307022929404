"""A group under training, as the coordinator has it in memory."""

from __future__ import annotations

from msgspec import Struct, field

from runtime.coordinator import staleness
from runtime.ledger.payloads import Handle
from runtime.ledger.reader import PARTS, GroupRow
from runtime.ledger.records import Ticket
from runtime.ledger.states import GroupState, Mark, Phase
from runtime.types import GeneratedGroup, Scores

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
