"""DeviceSchedule on shared devices: no two have them at once, and no turn waits for ever, whoever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import booleans, data, integers, sampled_from

from runtime.commands import Level, Offload, Onload
from runtime.coordinator.device_schedule import (
    Action,
    Arrived,
    DeviceSchedule,
    Event,
    GenerationDone,
    MemberLost,
    ReferenceDone,
    ResidencyChanged,
    SetResidency,
    SetSleepLevel,
    SleepLevelReached,
    Trained,
    VersionPublished,
)
from runtime.coordinator.register import Member
from runtime.errors import InvariantViolated

ONE, TWO = Member("rollout-0"), Member("rollout-1")


def settle(turns: DeviceSchedule, *events: Event) -> list[Action]:
    """Feed `events`, and the answers to whatever they lead to; what was told, in order."""
    told: list[Action] = []
    for event in events:
        ahead = turns.handle(event)
        while ahead:
            action = ahead.pop(0)
            told.append(action)
            assert len(told) < 100, "one thing leads to another for ever"
            ahead += turns.handle(answer(action))
    return told


def answer(action: Action) -> Event:
    if isinstance(action, SetSleepLevel):
        return SleepLevelReached(action.member, action.level)
    return ResidencyChanged()


def moves(level: Level, *members: Member) -> list[Action]:
    return [SetSleepLevel(member, level) for member in members]


def test_a_whole_round() -> None:
    turns = DeviceSchedule([ONE, TWO])
    assert settle(turns, GenerationDone()) == [SetResidency("trainer", Onload())]  # they are asleep at first
    assert turns.phase == "train"
    assert settle(turns, Trained()) == moves(Level.WEIGHTS, ONE, TWO)
    assert turns.phase == "publish"
    assert settle(turns, VersionPublished()) == [SetResidency("trainer", Offload()), *moves(Level.AWAKE, ONE, TWO)]
    assert turns.phase == "generate"
    assert settle(turns, GenerationDone()) == [*moves(Level.ASLEEP, ONE, TWO), SetResidency("trainer", Onload())]
    # A turn without a step publishes nothing; and a reference has the devices between the others.
    assert settle(turns, Trained(publishes=False)) == [SetResidency("trainer", Offload()), *moves(Level.AWAKE, ONE, TWO)]
    assert turns.phase == "generate"
    assert settle(turns, GenerationDone(refers=True)) == [*moves(Level.ASLEEP, ONE, TWO), SetResidency("reference", Onload())]
    assert turns.phase == "refer"
    assert settle(turns, ReferenceDone()) == [SetResidency("reference", Offload()), SetResidency("trainer", Onload())]


def test_each_phase_waits_for_the_last_answer() -> None:
    turns = DeviceSchedule([ONE, TWO])
    settle(turns, GenerationDone(), Trained())
    turns.handle(VersionPublished())
    turns.handle(ResidencyChanged())
    assert turns.waiting_for == (ONE, TWO)
    turns.handle(SleepLevelReached(ONE, Level.AWAKE))
    assert (turns.phase, turns.waiting_for) == ("wake_kv", (TWO,))
    turns.handle(MemberLost(TWO))
    assert turns.phase == "generate"


def test_a_newcomer_comes_as_far_as_the_others_are() -> None:
    turns = DeviceSchedule([ONE])
    settle(turns, GenerationDone())
    assert settle(turns, Arrived(TWO)) == []
    assert settle(turns, Trained()) == moves(Level.WEIGHTS, ONE, TWO)
    again = Member("rollout-0", 1)
    assert settle(turns, Arrived(again)) == moves(Level.WEIGHTS, again)
    assert turns.members == {again, TWO}
    settle(turns, VersionPublished())
    late = Member("rollout-1", 1)
    assert settle(turns, Arrived(late)) == moves(Level.AWAKE, late)


def test_one_that_is_on_its_way_is_told_otherwise_when_it_has_come() -> None:
    turns = DeviceSchedule([ONE])
    settle(turns, GenerationDone(), Trained(), VersionPublished())
    assert turns.handle(Arrived(TWO)) == moves(Level.AWAKE, TWO)
    assert turns.handle(GenerationDone()) == moves(Level.ASLEEP, ONE)
    turns.handle(SleepLevelReached(ONE, Level.ASLEEP))
    assert turns.phase == "sleep"
    assert turns.handle(SleepLevelReached(TWO, Level.AWAKE)) == moves(Level.ASLEEP, TWO)
    assert turns.handle(SleepLevelReached(TWO, Level.ASLEEP)) == [SetResidency("trainer", Onload())]


def test_who_is_lost_is_forgotten_whether_it_was_told_or_known_or_not() -> None:
    turns = DeviceSchedule([ONE])
    settle(turns, GenerationDone(), Trained(), VersionPublished())
    turns.handle(GenerationDone())
    assert turns.handle(MemberLost(TWO)) == []
    assert turns.is_moving(ONE)
    assert turns.handle(MemberLost(ONE)) == [SetResidency("trainer", Onload())]
    assert not turns.is_moving(ONE)
    assert not turns.members


def test_an_answer_to_what_is_no_longer_asked_is_not_taken_for_one() -> None:
    turns = DeviceSchedule([ONE])
    settle(turns, GenerationDone(), Trained(), VersionPublished())
    turns.handle(GenerationDone())
    assert (turns.is_moving(ONE), turns.waiting_for) == (True, (ONE,))
    assert turns.handle(SleepLevelReached(ONE, Level.AWAKE)) == []
    assert turns.handle(SleepLevelReached(TWO, Level.ASLEEP)) == []  # nobody knows it
    assert (turns.phase, turns.is_moving(ONE), turns.members) == ("sleep", True, {ONE})
    assert turns.handle(SleepLevelReached(ONE, Level.ASLEEP)) == [SetResidency("trainer", Onload())]
    assert (turns.is_moving(ONE), turns.waiting_for) == (False, ())


@pytest.mark.parametrize("event", [Trained(), VersionPublished(), ReferenceDone(), ResidencyChanged()])
def test_what_cannot_happen_is_a_fault(event: Event) -> None:
    turns = DeviceSchedule([ONE])
    settle(turns, GenerationDone(), Trained(), VersionPublished())
    with pytest.raises(InvariantViolated, match="phase generate"):
        turns.handle(event)


def _onloads(order: Action) -> bool:
    return isinstance(order, SetResidency) and isinstance(order.command, Onload)


class Devices(RuleBasedStateMachine):
    """Processes that carry out what they are told in any order and after any time, and die and come back at any time."""

    @initialize(count=integers(0, 3))
    def begin(self, count: int) -> None:
        self.turns = DeviceSchedule([Member(f"rollout-{index}") for index in range(count)])
        self.rollouts = dict.fromkeys(self.turns.members, Level.ASLEEP)  # what each really has
        self.there: set[str] = set()  # of reference and trainer
        self.orders: list[Action] = []  # not carried out yet
        self.incarnations = 0

    def feed(self, event: Event) -> None:
        self.orders += self.turns.handle(event)

    @precondition(lambda self: self.orders)
    @rule(data=data())
    def carry_out(self, data) -> None:  # type: ignore[no-untyped-def]
        order = self.orders.pop(data.draw(integers(0, len(self.orders) - 1)))
        if isinstance(order, SetSleepLevel):
            if order.member not in self.rollouts:  # it died with the order
                return
            self.rollouts[order.member] = order.level
        elif isinstance(order.command, Onload):
            self.there.add(order.who)
        else:
            self.there.discard(order.who)
        self.feed(answer(order))

    @precondition(lambda self: self.rollouts)
    @rule(data=data())
    def die(self, data) -> None:  # type: ignore[no-untyped-def]
        member = data.draw(sampled_from(sorted(self.rollouts)))
        del self.rollouts[member]
        self.feed(MemberLost(member))

    @rule(index=integers(0, 2))
    def come(self, index: int) -> None:
        """Under the name of one that died, or perhaps is not known to have."""
        self.incarnations += 1
        member = Member(f"rollout-{index}", self.incarnations)
        for former in [one for one in self.rollouts if one.name == member.name]:
            del self.rollouts[former]
        self.rollouts[member] = Level.ASLEEP
        self.feed(Arrived(member))

    @precondition(lambda self: self.turns.phase in ("asleep", "generate"))
    @rule(refers=booleans())
    def generated(self, refers: bool) -> None:
        self.feed(GenerationDone(refers))

    @precondition(lambda self: self.turns.phase in ("refer", "train", "publish"))
    @rule(publishes=booleans())
    def done(self, publishes: bool) -> None:
        self.feed({"refer": ReferenceDone(), "train": Trained(publishes), "publish": VersionPublished()}[self.turns.phase])

    @invariant()
    def at_most_one_has_the_devices(self) -> None:
        if not hasattr(self, "turns"):
            return
        having = set(self.there) | {order.who for order in self.orders if _onloads(order)}
        waking = {order.member for order in self.orders if isinstance(order, SetSleepLevel) and order.level == Level.AWAKE}
        if self.rollouts.keys() & (waking | {one for one, level in self.rollouts.items() if level == Level.AWAKE}):
            having.add("rollouts")
        assert len(having) <= 1, having

    @invariant()
    def the_phase_is_what_it_says(self) -> None:
        if not hasattr(self, "turns"):
            return
        holder = {"refer": {"reference"}, "train": {"trainer"}, "publish": {"trainer"}, "generate": set()}
        if self.turns.phase in holder:
            assert self.there == holder[self.turns.phase]

    @invariant()
    def somebody_is_waited_for(self) -> None:
        """No deadlock: whenever the caller has nothing to say, an order is on its way whose answer leads on."""
        if not hasattr(self, "turns"):
            return
        if self.turns.phase not in ("asleep", "generate", "refer", "train", "publish"):
            assert any(not isinstance(order, SetSleepLevel) or order.member in self.rollouts for order in self.orders)


Devices.TestCase.settings = settings(stateful_step_count=60)
TestDevices = Devices.TestCase
