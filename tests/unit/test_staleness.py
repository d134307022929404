"""The staleness arithmetic against brute force; test_buffer.py has it under a run in which anything comes next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator.staleness import OpenGroup, admission_capacity, most_live, overdue, select
from runtime.errors import InvariantViolated


def feasible(groups: Sequence[OpenGroup], step: int, slots: int, per_step: int) -> bool:
    """Condition (1), word for word."""
    last = max([step, *(g.deadline for g in groups)])
    return all(g.deadline >= step for g in groups) and all(
        sum(g.deadline <= d for g in groups) <= slots + (d - step) * per_step for d in range(step, last + 1)
    )


@st.composite
def open_groups(draw: st.DrawFn, most: int = 8) -> list[OpenGroup]:
    rows = draw(st.lists(st.tuples(st.integers(3, 7), st.booleans()), max_size=most))
    ids = draw(st.permutations(range(len(rows))))
    return [OpenGroup(last, i, ready) for i, (last, ready) in zip(ids, rows, strict=True)]


@given(groups=open_groups(), slots=st.integers(1, 4), extra=st.integers(0, 3), whole=st.booleans())
def test_select_takes_as_many_as_any_choice_could(groups: list[OpenGroup], slots: int, extra: int, whole: bool) -> None:
    step, per_step = 3, slots + extra
    if not feasible(groups, step, slots, per_step):
        with pytest.raises(InvariantViolated):
            select(groups, step, slots, per_step, whole)
        return
    ready = [g for g in groups if g.ready]
    most = max(
        count
        for count in range(min(slots, len(ready)) + 1)
        for chosen in itertools.combinations(ready, count)
        if feasible([g for g in groups if g not in chosen], step, slots - count, per_step)
    )
    taken = select(groups, step, slots, per_step, whole)
    assert taken == [g.group_id for g in sorted(ready)[: len(taken)]], "by deadline, then id"
    assert len(taken) == (0 if whole and most < slots else most)


@given(groups=open_groups(7), per_step=st.integers(1, 3))
def test_overdue_gives_up_as_few_as_possible(groups: list[OpenGroup], per_step: int) -> None:
    late = set(overdue(groups, 4, per_step))
    assert feasible([g for g in groups if g.group_id not in late], 4, per_step, per_step)
    fewest = min(
        count
        for count in range(len(groups) + 1)
        for gone in itertools.combinations(groups, count)
        if feasible([g for g in groups if g not in gone], 4, per_step, per_step)
    )
    assert len(late) == fewest


@pytest.mark.parametrize(
    ("live", "generating", "remaining", "expected"),
    [(0, 0, 100, 10), (0, 6, 100, 4), (20, 0, 100, 4), (24, 0, 100, 0), (30, 0, 100, 0), (0, 12, 100, 0), (0, 0, 3, 3)],
)
def test_admission_capacity_is_the_least_of_three(live: int, generating: int, remaining: int, expected: int) -> None:
    assert admission_capacity(live, generating, 10, most_live(2, 8), remaining) == expected


def test_a_step_waits_for_a_slow_group_that_is_due() -> None:
    slow = OpenGroup(5, 0, False)
    fast = [OpenGroup(6, i, True) for i in range(1, 9)]
    assert select([slow, *fast], 4, 4, 4) == [1, 2, 3, 4], "a step ahead there is still room for the slow one"
    assert select([slow, *fast[4:]], 5, 4, 4) == [5, 6, 7], "in its last step a place is kept for it"
    assert select([slow, *fast[4:]], 5, 4, 4, whole=True) == []
    assert select([OpenGroup(5, 0, True), fast[7]], 5, 1, 4) == [0]


@pytest.mark.parametrize(
    ("deadlines", "step", "told"),
    [
        ((5, 6, 6, 6), 5, "4 groups are due by step 6, but from step 5 on only 3 fit"),
        ((4, 9), 5, "1 groups are due by step 4, but from step 5 on only 0 fit"),
        ((2, 9), 5, "1 groups are due by step 2, but from step 5 on only 0 fit"),
    ],
)
def test_a_broken_bound_is_told_with_its_numbers(deadlines: tuple[int, ...], step: int, told: str) -> None:
    with pytest.raises(InvariantViolated, match=told):
        select([OpenGroup(last, index, True) for index, last in enumerate(deadlines)], step, 1, 2)
