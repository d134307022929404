"""One weight sync as a pure state machine: TRANSFER → VERIFY → COMMIT → done, or ABORT → aborted.

The caller feeds answers, each with the time, and carries out the returned orders. Members are the receivers.

- transfer: members were asked to receive and the sender to send, in any order: the sender announces itself first.
- verify: the sender is done, and the members' checksums are awaited. They may come earlier.
- commit: every member verified, so the version counts. A member that fails now is lost to the epoch; the others go on.
- abort: members and sender leave the epoch's group. A failed collective fails for all of its members, so a failure does not
  show which member is lost. Only a member that cannot be reached, or does not confirm the abort, counts as lost.

Every phase has a deadline: at `next_deadline` the caller lets time pass, without an answer. Only this ends a late phase, so an
answer that has arrived counts even if the caller reads it late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from runtime.coordinator.register import LIVING, ROLLOUT, Member, Register, UnitState
from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion


class Epoch(Struct, frozen=True):
    number: int
    members: tuple[Member, ...]


EPOCHS_OF_A_TERM = 10_000


class Membership:
    """The epochs of a run's sync group. `epoch` is the newest; `committed` is the version in use, None before the first.

    An epoch is stale when its members are not exactly the living rollouts (joining or serving), or when its group is broken;
    then the next one must be opened. A member serves from the first commit of an epoch with this member, so all serving
    rollouts have the committed version."""

    def __init__(self, register: Register, term: int = 1):
        """Begin before the first epoch of `term`, the coordinator's. No earlier term has the epoch numbers of this one."""
        self.epoch = Epoch((term - 1) * EPOCHS_OF_A_TERM, ())
        self.committed: PolicyVersion | None = None
        self._register = register
        self._broken = False

    @property
    def living(self) -> tuple[Member, ...]:
        return self._register.members(ROLLOUT, *LIVING)

    @property
    def serving(self) -> tuple[Member, ...]:
        return self._register.members(ROLLOUT, UnitState.SERVING)

    @property
    def newcomers(self) -> tuple[Member, ...]:
        return self._register.members(ROLLOUT, UnitState.JOINING)

    @property
    def stale(self) -> bool:
        """Whether the next weight sync needs a new epoch. True also when no rollout lives."""
        return self._broken or not self.epoch.members or self.epoch.members != self.living

    def open(self, members: tuple[Member, ...] = ()) -> Epoch:
        """Begin the next epoch, of all living rollouts, or of `members` alone: then it is stale if other rollouts live."""
        if not self.living:
            raise InvariantViolated("an epoch needs a living member")
        self.epoch, self._broken = Epoch(self.epoch.number + 1, members or self.living), False
        return self.epoch

    def break_up(self, epoch: int) -> None:
        self._broken = self._broken or epoch == self.epoch.number

    def commit(self, epoch: int, version: PolicyVersion, swapped: Iterable[Member]) -> None:
        """Commit `version`, which the members `swapped` have. Raises InvariantViolated for a former epoch, a version that goes
        back, or a member that lives without the version."""
        members = set(swapped)
        if epoch != self.epoch.number or not members <= set(self.epoch.members):
            raise InvariantViolated(f"a commit of epoch {epoch} by {sorted(members)} in {self.epoch}")
        if self.committed is not None and version < self.committed:
            raise InvariantViolated(f"version {version} is committed after {self.committed}")
        if behind := (set(self.living) & set(self.epoch.members)) - members:
            raise InvariantViolated(f"version {version} is committed, and {sorted(behind)} live without it")
        self.take_up(version, members)

    def take_up(self, version: PolicyVersion, having: Collection[Member]) -> None:
        """Set the committed version. Newcomers among `having` serve from now on."""
        self.committed = version
        for member in self.newcomers:
            if member in having:
                self._register.serve(member)


Phase = Literal["transfer", "verify", "commit", "abort", "done", "aborted"]


class Answer(Struct, frozen=True):
    """`member`, or the sender, has done what `phase` waits for, or failed with `error`. `gone`: it cannot be reached."""

    phase: Phase
    member: str
    error: str | None = None
    gone: bool = False


class SyncOrder(Struct, frozen=True):
    """Ask `members` to swap to the version, or to drop it and leave the epoch's group. Only the latter is also the sender's."""

    phase: Literal["commit", "abort"]
    members: tuple[str, ...]


_NEXT: dict[Phase, Phase] = {"transfer": "verify", "verify": "commit", "commit": "done", "abort": "aborted"}


class SyncAttempt:
    """One version over one epoch's members.

    `phase` and `next_deadline` (None once done or aborted) are the state. Members in `lost` must not be in the next epoch;
    members in `failed` live and reported a failure. `reason` is one line for the user with phase and members, or ""."""

    def __init__(self, version: PolicyVersion, members: Iterable[str], sender: str, seconds: Mapping[Phase, float], now: float):
        """Begin in TRANSFER at time `now`, with the requests sent. `seconds`: the deadline of each phase, from its start."""
        self.version, self.members, self.sender = version, tuple(members), sender
        self.lost: set[str] = set()
        self.failed: set[str] = set()
        self.reason = ""
        self._seconds = seconds
        # The members whose answer each phase still needs. An answer costs O(1), however many members there are.
        self._missing: dict[Phase, set[str]] = {phase: set(self.members) for phase in _NEXT}
        self._missing["transfer"] = {sender}
        self._missing["abort"].add(sender)
        if not self.members or len({*self.members, sender}) != len(self.members) + 1:
            raise InvariantViolated(f"a weight sync from {sender} to the members {self.members}")
        self._enter("transfer", now)

    @property
    def final(self) -> bool:
        return self.phase in ("done", "aborted")

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The members whose answers the phase still needs."""
        missing = self._missing.get(self.phase, ())
        return tuple(name for name in (*self.members, self.sender) if name in missing)

    def handle(self, answer: Answer | None, now: float) -> list[SyncOrder]:
        """Apply `answer` at time `now`; None: time has passed. Return the orders to carry out."""
        if self.final:
            return []
        orders: list[SyncOrder] = []
        if answer is not None and answer.error is not None:
            orders += self._fail(answer, answer.error, now)
        elif answer is not None and (answer.phase == self.phase or (self.phase, answer.phase) == ("transfer", "verify")):
            self._missing[answer.phase].discard(answer.member)  # no effect if late or repeated
        orders += self._advance(now)
        if answer is None and self.next_deadline is not None and now >= self.next_deadline:
            orders += self._expire(now)
        return orders

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase: Phase = phase
        self.next_deadline: float | None = None if self.final else now + self._seconds[phase]

    def _advance(self, now: float) -> list[SyncOrder]:
        orders: list[SyncOrder] = []
        while not self.final and not self._missing[self.phase]:
            self._enter(_NEXT[self.phase], now)
            if self.phase == "commit":
                orders.append(SyncOrder("commit", self.members))
        return orders

    def _fail(self, answer: Answer, error: str, now: float) -> list[SyncOrder]:
        member = answer.member
        if member not in (*self.members, self.sender):
            return []
        if self.phase == "commit" and member == self.sender:
            return []  # the sender has finished its part
        if not answer.gone:
            self.failed.add(member)
        known = member in self.lost
        if answer.gone or self.phase == "commit":
            self._lose(member)
        if self.phase == "abort" and (known or (not answer.gone and member != self.sender)):
            # While aborting, failures of the sender and lost members are still recorded, even if another failure came first.
            # A failed collective fails for all members, so their failures say nothing more.
            return []
        return self._give_up(f"{member}: {error}", now)

    def _expire(self, now: float) -> list[SyncOrder]:
        silent = self.waiting_for
        if self.phase in ("commit", "abort"):
            self._lose(*silent)
        missed = f"{', '.join(silent)}: no answer within {self._seconds[self.phase]:g} s"
        return self._give_up(missed, now) + self._advance(now)

    def _lose(self, *names: str) -> None:
        self.lost.update(names)
        for missing in self._missing.values():
            missing.difference_update(names)

    def _give_up(self, what: str, now: float) -> list[SyncOrder]:
        line = f"{self.phase}: {what}"
        self.reason = f"{self.reason}; {line}" if self.reason else f"version {self.version}: {line}"
        if self.phase in ("commit", "abort"):
            return []
        self._enter("abort", now)
        return [SyncOrder("abort", self.waiting_for)]
