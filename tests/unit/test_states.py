"""The table of a group's life: what is legal, what is final, and what a restart makes of each state."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import InvariantViolated
from runtime.ledger import states
from runtime.ledger.states import (
    Consumed,
    Covered,
    Dispatched,
    Dropped,
    Event,
    Generated,
    GroupState,
    Lost,
    Mark,
    Marked,
    Phase,
    Retired,
    Rewound,
    apply,
)

ALL_MARKS = (Mark.SCORED, Mark.REFERENCED, Mark.VALUED)
NEEDS = [Mark(bits) for bits in range(8)]
EVENTS = st.one_of(
    st.sampled_from([Dispatched(), Generated(), Retired(), Lost(), Dropped("fault"), Covered(3)]),
    st.sampled_from(ALL_MARKS).map(Marked),
    st.integers(0, 5).map(Consumed),
)


def run(state: GroupState, *events: Event) -> GroupState:
    for event in events:
        state = apply(state, event)
    return state


def in_phase(phase: Phase, needs: Mark = Mark.SCORED | Mark.REFERENCED) -> GroupState:
    marks = [Marked(mark) for mark in ALL_MARKS if mark & needs]
    path: list[Event] = [Dispatched(), Generated(), *marks, Consumed(7), Retired()]
    state = GroupState(needs)
    if phase == Phase.DROPPED:
        return apply(state, Dropped("fault"))
    while state.phase != phase:
        state = apply(state, path.pop(0))
    return state


@pytest.mark.parametrize("needs", NEEDS)
def test_flags_in_any_order_give_the_same_group(needs: Mark) -> None:
    needed = [mark for mark in ALL_MARKS if mark & needs]
    outcomes = set()
    for order in permutations(needed):
        state = run(GroupState(needs), Dispatched(), Generated())
        for mark in order:
            assert state.phase == Phase.GENERATED
            state = apply(state, Marked(mark))
        outcomes.add((state.phase, state.marks))
    assert outcomes == {(Phase.READY, needs)}


@pytest.mark.parametrize("mark", ALL_MARKS)
def test_a_mark_comes_once_and_only_when_it_is_needed(mark: Mark) -> None:
    generated = run(GroupState(mark | Mark.VALUED | Mark.SCORED), Dispatched(), Generated())
    with pytest.raises(InvariantViolated, match="has"):
        run(generated, Marked(mark), Marked(mark))
    with pytest.raises(InvariantViolated, match="needs"):
        apply(run(GroupState(Mark(7) & ~mark), Dispatched(), Generated()), Marked(mark))


def test_the_legal_transitions_are_those_of_the_design() -> None:
    legal = set()
    for phase in Phase:
        for event in (Dispatched(), Generated(), Marked(Mark.SCORED), Consumed(1), Retired(), Dropped("x"), Lost(), Rewound()):
            try:
                legal.add((phase.value, type(event).__name__, apply(in_phase(phase), event).phase.value))
            except InvariantViolated as refused:
                assert phase.value in str(refused)
    assert legal == {
        ("admitted", "Dispatched", "generating"),
        ("generating", "Generated", "generated"),
        ("generated", "Marked", "generated"),
        ("ready", "Consumed", "consumed"),
        ("consumed", "Retired", "retired"),
        *((phase, "Dropped", "dropped") for phase in ("admitted", "generating", "generated", "ready")),
        *((phase, "Lost", "admitted") for phase in ("generating", "generated", "ready")),
        ("consumed", "Rewound", "ready"),
        ("retired", "Rewound", "ready"),
    }


@pytest.mark.parametrize(
    ("phase", "told"), [(Phase.READY, "ready"), (Phase.CONSUMED, "consumed(7)"), (Phase.DROPPED, "dropped(fault)")]
)
def test_a_message_tells_the_phase_with_its_step_or_reason(phase: Phase, told: str) -> None:
    state = in_phase(phase)
    assert str(state) == told
    with pytest.raises(InvariantViolated, match=rf"^a group that is {re.escape(told)} cannot take Dispatched\(\)$"):
        apply(state, Dispatched())


class Life(RuleBasedStateMachine):
    """Any events in any order: the table lets a group through to at most one final state, and never out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = GroupState(Mark.SCORED | Mark.REFERENCED)
        self.ended: list[Phase] = []
        self.trained: list[int] = []  # by which steps, in this lineage

    @rule(event=EVENTS)
    def event(self, event: Event) -> None:
        before = self.state
        try:
            self.state = apply(before, event)
        except InvariantViolated:
            return
        assert not before.phase.final
        if self.state.phase.final:
            self.ended.append(self.state.phase)
        if self.state.phase in (Phase.CONSUMED, Phase.RETIRED) and before.step is None:
            self.trained.append(self.state.step or 0)

    @precondition(lambda self: self.state.phase in (Phase.CONSUMED, Phase.RETIRED))
    @rule()
    def new_lineage(self) -> None:
        self.state = apply(self.state, Rewound())
        self.ended.clear()
        self.trained.clear()

    @invariant()
    def at_most_one_end(self) -> None:
        assert len(self.ended) <= 1
        assert len(self.trained) <= 1

    @invariant()
    def fields_agree_with_the_phase(self) -> None:
        state = self.state
        assert (state.why is not None) == (state.phase == Phase.DROPPED)
        assert (state.step is not None) == (state.phase in (Phase.CONSUMED, Phase.RETIRED))
        if state.phase in (Phase.GENERATED, Phase.READY):
            assert (state.phase == Phase.READY) == (state.marks == state.needs)
        if state.phase in (Phase.ADMITTED, Phase.GENERATING):
            assert not state.marks


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=30)


@given(needs=st.sampled_from(NEEDS), events=st.lists(EVENTS, max_size=12), trained=st.booleans(), intact=st.booleans())
def test_a_restart_leaves_no_group_under_way(needs: Mark, events: list[Event], trained: bool, intact: bool) -> None:
    state = GroupState(needs)
    for event in events:
        try:
            state = apply(state, event)
        except InvariantViolated:
            continue
    if trained and state.phase == Phase.DROPPED:
        with pytest.raises(InvariantViolated):
            states.restore(state, 9, trained, intact)
        return
    after = states.restore(state, 9, trained, intact)
    if trained:
        assert after.phase == Phase.RETIRED
        assert after.step == (9 if state.step is None else state.step)
    elif state.phase == Phase.DROPPED:
        assert after == state
    else:
        made = state.phase not in (Phase.ADMITTED, Phase.GENERATING)
        kept = Phase.READY if state.marks == needs else Phase.GENERATED
        # a group that a checkpoint once covered without its marks being recorded goes back to wherever its marks allow
        assert after.phase == (kept if made and intact else Phase.ADMITTED)
        assert after.step is None


def test_a_run_that_needs_more_than_before_goes_on_where_the_marks_are_missing() -> None:
    ready = in_phase(Phase.READY, Mark.SCORED)
    wider = GroupState(Mark.SCORED | Mark.REFERENCED, ready.phase, ready.marks)
    after = states.restore(wider, 0, trained=False, intact=True)
    assert after.phase == Phase.GENERATED
    assert apply(after, Marked(Mark.REFERENCED)).phase == Phase.READY
