"""The register of who is alive, and who of them takes part in a weight sync: every state with every event, and whatever is said
of units in any order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of, moved
from runtime.coordinator.weight_sync_protocol import Epoch, Membership
from runtime.errors import InvariantViolated, UserError
from runtime.types import PolicyVersion

ALIVE = ("placed", "started", "registered", "connected", "joining", "serving")


class Port:
    """What stands for a connection. `breaks` is its end, `given_up` why nothing is asked any more."""

    def __init__(self, name: str, incarnation: int = 0):
        self.name, self.incarnation = name, incarnation
        self.given_up: list[str] = []
        self.breaks: Callable[[str], object] = lambda why: None

    def when_lost(self, tell: Callable[[str], object]) -> None:
        self.breaks = tell

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)


# ------------------------------------------------------------------------------------------ the table
GONE: dict[str, Any] = {"port": None, "reason": "why"}
MOVES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "started": ({"process": Member("rollout-0", 1)}, {"placed": "registered", "started": "registered"}),
    "connected": ({"port": "port", "reason": ""}, {"registered": "connected"}),
    "joining": ({}, {"connected": "joining"}),
    "serving": ({}, {"joining": "serving"}),
    "lost": (GONE, dict.fromkeys(ALIVE, "lost")),
    "dismissed": (GONE, dict.fromkeys((*ALIVE, "lost"), "dismissed")),
    "placed": ({"incarnation": 2}, {"lost": "placed", "dismissed": "placed"}),
}


@pytest.mark.parametrize("state", list(UnitState))
@pytest.mark.parametrize("to", MOVES)
def test_every_state_takes_the_events_that_it_may_and_no_other(state: UnitState, to: str) -> None:
    fields, follows = MOVES[to]
    port = "port" if state.connected else None
    unit = Unit(role="rollout", ranks=("rollout-0",), processes=(None,), incarnation=1, state=state, port=port)
    if state.value not in follows:
        with pytest.raises(InvariantViolated, match=rf"^rollout-0 \(incarnation 1\) is {state.value}, and cannot be {to}"):
            moved(unit, UnitState(to), **fields)
        return
    after = moved(unit, UnitState(to), **fields)
    assert after.state.value == follows[state.value]
    assert (after.port is not None) == after.state.connected
    assert after.incarnation == (2 if to == "placed" else 1)
    assert after.reason == ("why" if to in ("lost", "dismissed") else "")


@pytest.mark.parametrize(("role", "state"), [("rollout", "connected"), ("reward", "serving"), ("trainer", "serving")])
def test_only_a_rollout_has_to_join_before_it_serves(role: str, state: str) -> None:
    unit = Unit(role=role, ranks=(f"{role}-0",), processes=(None,), state=UnitState.REGISTERED, reason="of the one before")
    after = moved(unit, UnitState.CONNECTED, **MOVES["connected"][0])
    assert (after.state.value, after.reason, after.port) == (state, "", "port")
    assert (unit.name, unit.member) == (f"{role}-0", Member(f"{role}-0"))
    assert replace(unit, incarnation=2).member == Member(f"{role}-0", 2)


def test_why_it_was_lost_is_known_until_another_is_connected() -> None:
    unit = Unit(role="reward", ranks=("reward-0",), processes=(None,), state=UnitState.SERVING, port="port")
    unit = moved(unit, UnitState.LOST, port=None, reason="was killed")
    for to, fields in ((UnitState.PLACED, {"incarnation": 1}), (UnitState.STARTED, {"process": Member("reward-0", 1)})):
        unit = moved(unit, to, **fields)
        assert unit.reason == "was killed"
    assert moved(unit, UnitState.CONNECTED, **MOVES["connected"][0]).reason == ""


# ------------------------------------------------------------------------------------------ what is said of a unit
def placed(role: str = "trainer", ranks: int = 2) -> Register:
    register = Register()
    register.place(role, [f"{role}-{rank}" for rank in range(ranks)])
    return register


def state(register: Register, name: str = "trainer-0") -> tuple[str, int]:
    unit = register.find(name)
    assert unit is not None
    return unit.state.value, unit.incarnation


def why(register: Register, name: str) -> str:
    unit = register.find(name)
    assert unit is not None
    return unit.reason


def test_a_group_is_there_once_all_its_ranks_are_of_one_incarnation() -> None:
    register = placed()
    assert state(register, "trainer-1") == state(register) == ("placed", 0)
    register.admit(Member("trainer-1"))
    assert state(register) == ("started", 0)
    register.admit(Member("trainer-1", 1))  # the one before died while the other loads
    assert state(register) == ("started", 1)
    assert not register.admit(Member("trainer-0"))  # it is late, and about to be ended
    assert state(register) == ("started", 1)
    register.admit(Member("trainer-0", 1))
    assert state(register) == ("registered", 1)
    assert register.late == 1
    register.admit(Member("trainer-1", 2))
    assert state(register) == ("started", 2)  # with the other rank of the incarnation before
    assert not register.admit(Member("trainer-0"))  # nor is one that comes as late as this the user's mistake
    assert state(register) == ("started", 2)


def test_who_may_not_register_is_told() -> None:
    register = placed()
    register.admit(Member("trainer-0", 1))
    with pytest.raises(UserError, match=r"^trainer-2 \(incarnation 0\) is not in this run's topology$"):
        register.admit(Member("trainer-2"))
    with pytest.raises(UserError, match=r"^trainer-0: its incarnation 1 has registered already$"):
        register.admit(Member("trainer-0"))
    register.admit(Member("trainer-1", 1))
    another: Any = Port("trainer-1", 1)
    with pytest.raises(UserError, match=r"^trainer-1: its incarnation 1 has registered already$"):
        register.admit(another)
    assert not register.admit(Member("trainer-1", 1))  # it says so again
    register.dismiss("trainer-0", "is not wanted")
    with pytest.raises(UserError, match=r"^trainer-0 \(incarnation 2\) is not in this run's topology$"):
        register.admit(Member("trainer-0", 2))


def test_what_broke_is_given_up_once_and_whoever_notices_later_is_late() -> None:
    register, port = Register(), Port("reward-0")
    register.add("reward", port)
    assert register.port(port) is port
    port.breaks("connection lost")
    assert (port.given_up, register.port(port), why(register, "reward-0")) == (["connection lost"], None, "connection lost")
    assert not register.lose(port, "did not answer")
    assert (port.given_up, why(register, "reward-0"), register.late) == (["connection lost"], "connection lost", 1)
    register.add("reward", Port("reward-0", 1))
    port.breaks("is told once more")
    assert (state(register, "reward-0"), why(register, "reward-0"), register.late) == (("serving", 1), "", 2)
    with pytest.raises(UserError, match=r"^reward-0: its incarnation 1 has registered already$"):
        register.add("reward", port)
    assert state(register, "reward-0") == ("serving", 1)


def test_the_next_incarnation_is_the_end_of_the_one_before() -> None:
    register, port = Register(), Port("trainer-0")
    register.add("trainer", port)
    register.admit(Member("trainer-0", 1))
    assert port.given_up == ["incarnation 1 has come in its place"]
    assert state(register) == ("registered", 1)
    assert register.is_followed(port)
    assert not register.is_followed(Member("trainer-0", 1))
    assert register.port(port) is None
    follower = Port("trainer-0", 1)
    assert register.connect(follower)
    assert register.port(port) is None
    register.dismiss("trainer-0", "is not wanted")
    assert (follower.given_up, register.port(follower)) == (["is not wanted"], None)


def test_a_place_that_is_given_again_is_that_of_the_next_incarnation() -> None:
    register = placed()
    register.place("trainer", ["trainer-0", "trainer-1"])
    assert state(register) == ("placed", 0)  # it has not run yet
    register.admit(Member("trainer-1"))
    register.place("trainer", ["trainer-0", "trainer-1"])
    assert state(register) == ("placed", 1)
    register.dismiss("trainer-0", "is not wanted")
    register.dismiss("trainer-0", "nor now")
    assert why(register, "trainer-0") == "is not wanted"
    register.place("trainer", ["trainer-0", "trainer-1"])
    assert state(register) == ("placed", 2)
    assert register.lose(Member("trainer-1", 3), "died as it loaded")  # the death of what has not registered
    assert state(register) == ("lost", 3)


def test_others_of_a_role_are_those_that_are_there_or_come() -> None:
    register = Register()
    assert not register.lose(Member("reward-0"), "died")  # what is unknown is late
    assert (register.late, register.find("reward-0"), register.port(Member("reward-0"))) == (1, None, None)
    assert not register.is_followed(Member("reward-0"))
    assert not register.has_others(Member("reward-0"))
    for name in ("reward-0", "reward-1"):
        register.add("reward", Port(name))
    register.add("reference", Port("reference-0"))
    assert register.has_others(Member("reward-0"))
    register.lose(Member("reward-1"), "died")
    assert not register.has_others(Member("reward-0"))
    register.admit(Member("reward-1", 1))
    assert register.has_others(Member("reward-0"))
    register.dismiss("reward-1", "is not wanted")
    assert not register.has_others(Member("reward-0"))


def test_rows_are_found_by_role_and_state_in_the_order_of_their_names() -> None:
    register = Register()
    for name in ("reward-1", "reward-0"):
        register.add("reward", Port(name))
    register.place("rollout", ["rollout-0"])
    assert [unit.name for unit in register.units()] == ["reward-0", "reward-1", "rollout-0"]
    assert [unit.name for unit in register.units("reward")] == ["reward-0", "reward-1"]
    assert [unit.name for unit in register.units("", UnitState.PLACED)] == ["rollout-0"]
    register.lose(Member("reward-0"), "died")
    assert [unit.name for unit in register.units("reward", UnitState.SERVING)] == ["reward-1"]
    assert [unit.name for unit in register.units("", UnitState.PLACED, UnitState.LOST)] == ["reward-0", "rollout-0"]


# ------------------------------------------------------------------------------------------ who is told
def test_changes_are_told_in_their_order_also_those_that_a_watcher_makes() -> None:
    register, told = Register(), list[tuple[str, str | None, str]]()

    def first(change: UnitChange) -> None:
        if change.unit.state is UnitState.CONNECTED:
            register.join(change.unit)

    def second(change: UnitChange) -> None:
        told.append((change.unit.name, change.was and change.was.value, change.unit.state.value))

    register.subscribe(first)
    register.subscribe(second)
    register.add("rollout", Port("rollout-0"))
    course = [(None, "placed"), ("placed", "registered"), ("registered", "connected"), ("connected", "joining")]
    assert told == [("rollout-0", was, now) for was, now in course]
    register.unsubscribe(first)
    register.unsubscribe(second)
    register.unsubscribe(second)
    register.serve(Member("rollout-0"))
    assert len(told) == 4


def test_a_watcher_that_fails_does_not_silence_the_others() -> None:
    register, told = Register(), list[str]()

    def fails(change: UnitChange) -> None:
        raise InvariantViolated("by a reader")

    register.subscribe(fails)
    with pytest.raises(InvariantViolated, match="by a reader"):
        register.place("reward", ["reward-0"])
    register.unsubscribe(fails)
    register.subscribe(lambda change: told.append(change.unit.name))
    register.place("reward", ["reward-1"])
    assert told == ["reward-1"]


@pytest.mark.parametrize(
    ("was", "now", "lost"),
    [
        ("serving", "lost", True),
        ("connected", "dismissed", True),
        ("registered", "lost", False),
        ("lost", "dismissed", False),
        ("joining", "serving", False),
        (None, "placed", False),
    ],
)
def test_a_loss_is_of_one_that_was_connected(was: str | None, now: str, lost: bool) -> None:
    unit = Unit(role="rollout", ranks=("rollout-0",), processes=(None,), state=UnitState(now))
    assert UnitChange(unit, None if was is None else UnitState(was)).lost is lost


# ------------------------------------------------------------------------------------------ any order of words
NAMES = ("rollout-0", "trainer-0", "trainer-1")
NEXT = {  # what follows in most cases
    "placed": "admit",
    "started": "admit",
    "registered": "connect",
    "connected": "join",
    "joining": "serve",
    "serving": "lose",
    "lost": "place",
    "dismissed": "place",
}
WORDS = st.tuples(
    st.sampled_from(["place", "admit", "connect", "join", "serve", "lose", "dismiss", *["what follows"] * 14]),
    st.sampled_from(NAMES),
    st.sampled_from([0, 0, 0, 0, -1, 1]),  # beyond the incarnation that is there
)


def say(register: Register, ports: list[Port], word: str, name: str, beyond: int) -> None:
    """What a process, its agent or the coordinator may say, of an incarnation that may be any."""
    unit = register.find(name)
    assert unit is not None
    incarnation = max(0, unit.incarnation + beyond)
    who = Member(name, incarnation)
    if word == "what follows":
        word = NEXT[unit.state.value]
    if word == "place":
        register.place(unit.role, unit.ranks)
    elif word == "dismiss":
        register.dismiss(unit.name, "is not wanted")
    elif word == "connect":
        port = Port(unit.name, incarnation)
        if register.connect(port):
            ports.append(port)
    elif word == "admit":
        register.admit(who)
    elif word == "lose":
        register.lose(who, "died")
    else:
        getattr(register, word)(who)


@given(st.lists(WORDS, max_size=40))
def test_no_incarnation_comes_back_and_what_is_lost_is_given_up_once(words: list[tuple[str, str, int]]) -> None:
    register, ports, told = Register(), list[Port](), list[UnitChange]()
    register.place("rollout", ["rollout-0"])
    register.place("trainer", ["trainer-0", "trainer-1"])
    register.subscribe(told.append)
    seen = {unit.name: unit for unit in register.units()}
    for word in words:
        before = (register.units(), len(told), register.late)
        with suppress(UserError, InvariantViolated):  # what nobody may say of a unit in this state
            say(register, ports, *word)
        if register.late > before[2] and len(told) == before[1]:
            assert register.units() == before[0]  # what is late changes nothing
    for change in told:
        former, now = seen[change.unit.name], change.unit
        assert change.was == former.state
        assert now.incarnation >= former.incarnation
        if now.incarnation == former.incarnation:
            assert not former.state.over or now.state is UnitState.DISMISSED
        else:
            assert former.state.over  # an incarnation ends before the next one begins
        assert (now.port is not None) == now.state.connected
        assert not now.state.over or now.reason
        seen[now.name] = now
    assert seen == {unit.name: unit for unit in register.units()}
    for port in ports:
        assert len(port.given_up) == (register.port(port) is not port)
    for unit in register.units("", UnitState.REGISTERED):
        assert {member_of(one).incarnation for one in unit.processes} == {unit.incarnation}


def test_a_unit_that_an_earlier_coordinator_knew_is_connected_and_replaced_as_any_other() -> None:
    register = Register()
    known = Port("rollout-0", 3)
    register.take_up("rollout", ["rollout-0"], 3, [known])
    register.take_up("rollout", ["rollout-1"], 1, [])
    states = {unit.name: (unit.state, unit.incarnation) for unit in register.units()}
    assert states == {"rollout-0": (UnitState.REGISTERED, 3), "rollout-1": (UnitState.PLACED, 1)}
    assert not register.admit(known), "it says so again"
    for namesake in (Port("rollout-0", 3), Port("rollout-0", 2)):
        with pytest.raises(UserError, match="its incarnation 3 has registered already"):
            register.admit(namesake)
    assert register.connect(known)
    assert register.admit(Port("rollout-1", 1))
    assert register.admit(Port("rollout-0", 4))
    assert known.given_up == ["incarnation 4 has come in its place"]


# ---------------------------------------------------------------------------------------------- who takes part in a weight sync
A, B, C = Member("rollout-0"), Member("rollout-1"), Member("rollout-2")
FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)


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
    assert Membership(Register(), term=3).epoch == Epoch(20_000, ())
    _, membership = of()
    assert membership.stale  # what is published next waits for somebody
    with pytest.raises(InvariantViolated, match=r"^an epoch needs a living member$"):
        membership.open()
    rollouts, membership = of(A, B)
    assert (membership.stale, membership.newcomers, membership.serving) == (True, (A, B), ())
    assert membership.open() == Epoch(1, (A, B))
    assert not membership.stale
    membership.commit(1, FIRST, (A, B))
    assert (membership.committed, membership.newcomers, membership.serving) == (FIRST, (), (A, B))
    rollouts.arrive(C)  # late
    membership.commit(1, FIRST, (A, B))
    assert (membership.stale, membership.newcomers, membership.serving) == (True, (C,), (A, B))


def test_a_loss_makes_the_epoch_stale_and_the_next_is_without_it() -> None:
    rollouts, membership = begun(A, B)
    assert rollouts.gone(B)
    assert not rollouts.gone(B)
    assert (membership.stale, membership.serving) == (True, (A,))
    assert membership.open() == Epoch(2, (A,))
    again = Member(B.name, 1)  # what comes in its place serves from the next commit on
    assert rollouts.arrive(again)
    assert (membership.newcomers, membership.serving) == ((again,), (A,))
    epoch = membership.open()
    membership.commit(epoch.number, FIRST, epoch.members)
    assert membership.serving == (A, again)
    rollouts.arrive(Member(B.name, 2))  # a newer incarnation is the end of the one before
    assert membership.serving == (A,)
    assert not rollouts.gone(again)


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
