from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator.register import ROLLOUT, Member, Register
from runtime.coordinator.weight_sync_protocol import (
    Abort,
    Action,
    Commit,
    Epoch,
    Event,
    Failed,
    Membership,
    MemberUnreachable,
    PhaseAnswered,
    PhaseSeconds,
    SyncAttempt,
    Tick,
)
from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion

A, B, C = Member("rollout-0"), Member("rollout-1"), Member("rollout-2")
FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)
SECONDS = PhaseSeconds(transfer=20, verify=20, commit=10, abort=5)


class Rollout(Member, frozen=True):
    """What stands for its process, which is lost when the register is told so."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """It tells nothing itself."""

    def give_up(self, reason: str) -> None:
        """Nobody asks it anything."""


class Rollouts(Register):
    def arrive(self, member: Member) -> bool:
        """It is connected, and joins; False when it is late."""
        if self.is_followed(member) or self.port(member) is not None:
            return False
        self.add(ROLLOUT, Rollout(member.name, member.incarnation))
        return self.join(member)

    def gone(self, member: Member) -> bool:
        return self.lose(member, "is gone")


def of(*members: Member) -> tuple[Rollouts, Membership]:
    rollouts = Rollouts()
    for member in members:
        assert rollouts.arrive(member)
    return rollouts, Membership(rollouts)


def begun(*members: Member) -> tuple[Rollouts, Membership]:
    rollouts, membership = of(*members)
    membership.commit(membership.open().number, FIRST, members)
    return rollouts, membership


def test_nobody_serves_before_a_commit() -> None:
    _, membership = of(A, B)
    assert (membership.stale, membership.newcomers, membership.serving) == (True, (A, B), ())
    assert membership.open() == Epoch(1, (A, B))
    assert not membership.stale
    membership.commit(1, FIRST, (A, B))
    assert (membership.committed, membership.newcomers, membership.serving) == (FIRST, (), (A, B))


def test_a_loss_makes_the_epoch_stale_and_the_next_is_without_it() -> None:
    rollouts, membership = begun(A, B)
    assert rollouts.gone(B)
    assert not rollouts.gone(B)
    assert (membership.stale, membership.serving) == (True, (A,))
    assert membership.open() == Epoch(2, (A,))


def test_what_came_in_the_place_of_a_lost_one_serves_from_the_next_commit_on() -> None:
    rollouts, membership = begun(A, B)
    again = Member(B.name, 1)
    rollouts.gone(B)
    assert rollouts.arrive(again)
    assert (membership.newcomers, membership.serving) == ((again,), (A,))
    epoch = membership.open()
    membership.commit(epoch.number, FIRST, epoch.members)
    assert membership.serving == (A, again)


def test_a_newer_incarnation_is_the_end_of_the_one_before() -> None:
    rollouts, membership = begun(A, B)
    rollouts.arrive(Member(B.name, 1))
    assert membership.serving == (A,)
    assert not rollouts.gone(B)


def test_a_late_member_makes_the_epoch_stale() -> None:
    rollouts, membership = begun(A)
    rollouts.arrive(C)
    assert (membership.stale, membership.serving) == (True, (A,))


def test_a_broken_group_is_opened_anew_with_the_same_members() -> None:
    _, membership = begun(A)
    membership.break_up(0)  # of an epoch before
    assert not membership.stale
    membership.break_up(1)
    assert membership.stale
    assert membership.open() == Epoch(2, (A,))
    assert not membership.stale


def test_a_commit_is_of_this_epoch_goes_on_and_leaves_nobody_behind() -> None:
    rollouts, membership = begun(A, B)
    with pytest.raises(InvariantViolated, match="live without it"):
        membership.commit(1, SECOND, (A,))
    with pytest.raises(InvariantViolated, match="after"):
        membership.commit(1, PolicyVersion(0, 0), (A, B))
    rollouts.gone(B)
    membership.open()
    for epoch, members in ((1, (A,)), (2, (A, B))):
        with pytest.raises(InvariantViolated, match="in Epoch"):
            membership.commit(epoch, SECOND, members)


def test_an_epoch_needs_somebody() -> None:
    _, membership = of()
    assert membership.stale  # what is published next waits for somebody
    with pytest.raises(InvariantViolated, match=r"^an epoch needs a living member$"):
        membership.open()


# ------------------------------------------------------------------------------------------ any order of what happens


class World:
    """Rollouts, a sender and a coordinator that publishes version after version, by the machines' own word alone.

    Messages wait in `mail` and are delivered in any order, twice or never; processes die, fall silent and come back. `versions`
    is what each rollout has really swapped to.
    """

    def __init__(self) -> None:
        self.rollouts, self.membership = of(A, B)
        self.now = 0.0
        self.version = PolicyVersion(0, 1)
        self.machine: SyncAttempt | None = None
        self.epoch = Epoch(0, ())
        self.versions: dict[Member, PolicyVersion] = {}
        self.dead: set[Member] = set()
        self.incarnations = {"rollout-0": 0, "rollout-1": 0, "rollout-2": -1}
        self.mail: list[tuple[int, Event]] = []  # and the attempt that it belongs to
        self.attempt = 0
        self.attempts = 0

    # what happens to the processes

    def die(self, name: str, told: bool) -> None:
        """`told`: the connection breaks too; otherwise it is only silent."""
        member = Member(name, self.incarnations[name])
        if member.incarnation >= 0 and member not in self.dead:
            self.dead.add(member)
        if told and member in self.dead:
            self.rollouts.gone(member)
            if self.machine is not None and member in self.epoch.members:
                self.feed(MemberUnreachable(name, "gone"))

    def come(self, name: str) -> None:
        """Started again, or for the first time."""
        member = Member(name, self.incarnations[name])
        if member.incarnation < 0 or member in self.dead:
            self.incarnations[name] += 1
            assert self.rollouts.arrive(Member(name, self.incarnations[name]))

    # what the coordinator does

    def turn(self) -> None:
        """Begin what there is to do, when nothing is under way."""
        if self.machine is not None:
            return
        membership = self.membership
        if not membership.living:
            return
        if membership.stale:
            membership.open()
            if not membership.newcomers and membership.committed == self.version:
                return
        elif membership.committed == self.version:
            self.version = PolicyVersion(0, self.version.step + 1)
        self.attempt += 1
        self.epoch = membership.epoch
        names = [member.name for member in self.epoch.members]
        self.machine = SyncAttempt(self.version, names, "trainer", SECONDS, self.now)
        self.post(
            PhaseAnswered("transfer", "trainer"),
            *(PhaseAnswered("verify", member.name) for member in self.epoch.members if member not in self.dead),
        )

    def post(self, *events: Event) -> None:
        self.mail += [(self.attempt, event) for event in events]

    def deliver(self, index: int, keep: bool) -> None:
        if self.mail:
            attempt, event = self.mail[index % len(self.mail)]
            if not keep:
                del self.mail[index % len(self.mail)]
            if attempt == self.attempt:  # answers belong to calls: one of a former attempt goes nowhere
                self.feed(event)

    def feed(self, event: Event) -> None:
        if self.machine is not None:
            self.act(self.machine.handle(event, self.now))
        if self.machine is not None and self.machine.final:
            self.conclude(self.machine)

    def act(self, actions: list[Action]) -> None:
        by_name = {member.name: member for member in self.epoch.members}
        for action in actions:
            if isinstance(action, Commit):
                for name in action.members:
                    if by_name[name] not in self.dead:
                        self.versions[by_name[name]] = self.version
                        self.post(PhaseAnswered("commit", name))
            elif isinstance(action, Abort):
                self.post(*(PhaseAnswered("abort", name) for name in action.members if by_name.get(name) not in self.dead))

    def conclude(self, machine: SyncAttempt) -> None:
        self.machine = None
        for member in self.epoch.members:
            if member.name in machine.lost:
                self.rollouts.gone(member)
                self.dead.add(member)  # whoever is given up is ended
        if machine.phase == "done":
            swapped = [member for member in self.epoch.members if member.name not in machine.lost]
            self.membership.commit(self.epoch.number, self.version, swapped)
        else:
            self.attempts += 1
            self.membership.break_up(self.epoch.number)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def check(self) -> None:
        membership = self.membership
        serving = set(membership.serving)
        assert serving <= set(membership.living)
        # Between COMMIT and the last swap the version is not committed yet; afterwards everyone who serves has it.
        if self.machine is None or self.machine.phase != "commit":
            assert {self.versions[member] for member in serving} <= {membership.committed}
        assert self.machine is None or self.machine.next_deadline is not None


NAMES = st.sampled_from(("rollout-0", "rollout-1", "rollout-2"))
STEPS = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("go on"), st.integers(1, 8)),  # most of the time nothing is wrong
    st.tuples(st.just("turn")),
    st.tuples(st.just("die"), NAMES, st.booleans()),
    st.tuples(st.just("come"), NAMES),
    st.tuples(st.just("fail"), NAMES | st.just("trainer")),
    st.tuples(st.just("time"), st.floats(0, 12)),
)


@given(st.lists(STEPS, max_size=40))
def test_all_who_serve_have_the_committed_version_and_nothing_waits_for_ever(steps: list[tuple[object, ...]]) -> None:
    world = World()
    for kind, *rest in steps:
        if kind == "deliver":
            world.deliver(*rest)  # type: ignore[arg-type]
        elif kind == "go on":
            world.turn()
            for _ in range(int(str(rest[0]))):
                world.deliver(0, keep=False)
                world.check()
        elif kind == "turn":
            world.turn()
        elif kind == "die":
            world.die(*rest)  # type: ignore[arg-type]
        elif kind == "come":
            world.come(*rest)  # type: ignore[arg-type]
        elif kind == "fail":
            world.feed(Failed(str(rest[0]), "x"))
        else:
            world.pass_time(*rest)  # type: ignore[arg-type]
        world.check()

    # From here on nothing goes wrong any more: whoever is dead is known to be, and one rollout at least is there.
    for member in list(world.dead):
        world.rollouts.gone(member)
    if not world.membership.living:
        world.come("rollout-0")
    target = world.version
    for _ in range(60):
        membership = world.membership
        at_rest = world.machine is None and not membership.stale and not membership.newcomers
        if at_rest and membership.committed is not None and membership.committed >= target:
            break
        world.turn()
        if world.mail:
            world.deliver(0, keep=False)
        else:
            world.pass_time(30.0)
        world.check()
    else:
        raise AssertionError(f"still waiting: {world.machine and world.machine.phase}, {world.membership.epoch}")
    assert world.membership.serving == world.membership.living
    assert {world.versions[member] for member in world.membership.serving} == {world.membership.committed}
