"""The staleness arithmetic: against brute force, and in a simulated pipeline with long-tailed generation times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator.staleness import OpenGroup, admission_capacity, deadline, most_live, overdue, select
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


@dataclass
class Job:
    """A group of the simulation; `deadline` None while no replica has it."""

    deadline: int | None = None
    replica: int = -1
    attempt: int = 0
    oldest: int | None = None
    generating: bool = False
    ready: bool = False
    taken: int | None = None
    hurried: int = 0


EPISODE = 1e3  # the deadline of one that hangs


@dataclass
class Plant:
    """The parameters of a simulated pipeline; times in arbitrary units."""

    staleness: int
    per_step: int
    steps: int
    whole: bool
    replicas: int
    slots: int
    max_in_flight: int
    train: float
    publish: float
    drops: float
    deaths: float
    seed: int
    without_signal: float = 0.0  # of the scored groups
    shallow: bool = False  # as many groups as some policy or other wants, a step's at least
    slow: str = "wait"  # what becomes of groups that the trainer waits for alone, as `services.environment.NAME.slow`
    hangs: float = 0.0  # of the groups, those that end at the deadline of episodes


@dataclass
class Simulation:
    """Replicas generate, each group's first token at the replica's version of the moment; the trainer trains a step and has
    the next one prefetched; a version is committed some time after it is made, replicas having swapped shortly before."""

    plant: Plant
    now: float = 0.0
    committed: int = 0
    filling: int = 0
    filled: int = 0
    trained: int = 0
    admitted: int = 0
    dropped: int = 0
    consumed: int = 0
    training: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    events: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    worst: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.plant.seed)
        self.order = itertools.count()
        self.versions = [0] * self.plant.replicas
        self.queues: list[list[int]] = [[] for _ in range(self.plant.replicas)]
        self.publishing = 0.0

    def at(self, delay: float, what: str, a: int, b: int = 0) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), what, a, b))

    def run(self) -> None:
        self.pump()
        while self.events:
            self.now, _, what, a, b = heapq.heappop(self.events)
            getattr(self, what)(a, b)
            self.pump()
        assert self.trained == self.plant.steps, f"deadlock: step {self.filling} has {self.filled}, {self.jobs}"
        assert self.consumed == self.plant.steps * self.plant.per_step == self.admitted - self.dropped
        assert not self.jobs, "a group was starved"
        assert self.dropped == 0 or self.plant.drops + self.plant.without_signal > 0

    def pump(self) -> None:
        self.dispatch()
        self.fill()
        self.hurry()
        if not self.training and self.trained < self.filling:
            self.training = True
            self.at(self.plant.train * self.random.uniform(0.5, 1.5), "on_trained", self.trained)

    def hurry(self) -> None:
        """The trainer has nothing to do: the groups that are due are ended, left out in part, or played again in part."""
        if self.plant.slow == "wait" or self.training or self.trained < self.filling:
            return
        for group, job in self.jobs.items():
            if job.generating and job.oldest is not None and job.deadline is not None and job.deadline <= self.filling:
                if self.plant.slow == "retry" and job.hurried < 2:
                    if job.hurried == self.random.randrange(2):  # every member of the group
                        job.oldest = self.versions[job.replica]
                    self.at(self.random.paretovariate(0.9), "on_generated", group, job.attempt)
                elif job.hurried < 3:
                    self.at(self.random.random(), "on_generated", group, job.attempt)
                job.hurried += 1

    def depth(self) -> int:
        bound = most_live(self.plant.staleness, self.plant.per_step)
        return self.random.randint(self.plant.per_step, bound) if self.plant.shallow else bound

    def dispatch(self) -> None:
        plant = self.plant
        waiting = [i for i, job in self.jobs.items() if job.deadline is None]
        placed = [job for job in self.jobs.values() if job.deadline is not None]
        opened = sum(job.taken is None for job in placed)
        needed = (plant.steps - self.filling) * plant.per_step - self.filled - opened
        generating = sum(job.generating for job in placed)
        capacity = admission_capacity(len(placed), generating, plant.max_in_flight, self.depth(), needed)
        for _ in range(capacity):
            if waiting:
                group = waiting.pop(0)
            else:
                group, self.admitted = self.admitted, self.admitted + 1
                self.jobs[group] = Job()
            job = self.jobs[group]
            job.deadline, job.attempt, job.generating = deadline(self.committed, plant.staleness), job.attempt + 1, True
            job.replica = min(range(plant.replicas), key=lambda r: len(self.queues[r]))
            self.queues[job.replica].append(group)
            self.start(job.replica)
        live = len(self.jobs)
        assert live <= (plant.staleness + 1) * plant.per_step

    def start(self, replica: int) -> None:
        for group in self.queues[replica][: self.plant.slots]:
            job = self.jobs[group]
            if job.oldest is None:
                job.oldest = self.versions[replica]
                hangs = self.random.random() < self.plant.hangs
                self.at(EPISODE if hangs else self.random.paretovariate(0.9), "on_generated", group, job.attempt)

    def on_generated(self, group: int, attempt: int) -> None:
        job = self.jobs.get(group)
        if job is None or job.attempt != attempt or not job.generating:  # of a replica that died
            return
        replica = job.replica
        self.queues[replica].remove(group)
        job.generating = False
        if self.random.random() < self.plant.drops:
            del self.jobs[group]
            self.dropped += 1
        else:
            assert job.oldest is not None
            assert job.deadline is not None
            assert job.deadline <= deadline(job.oldest, self.plant.staleness), "a deadline only moves later"
            job.deadline = deadline(job.oldest, self.plant.staleness)
            self.at(self.random.expovariate(4), "on_scored", group)
        self.start(replica)
        if self.random.random() < self.plant.deaths:
            self.die(self.random.randrange(self.plant.replicas))

    def die(self, replica: int) -> None:
        for group in self.queues[replica]:
            self.jobs[group] = Job(attempt=self.jobs[group].attempt)
        self.queues[replica].clear()

    def on_scored(self, group: int, _: int) -> None:
        if self.random.random() < self.plant.without_signal:
            del self.jobs[group]
            self.dropped += 1
        else:
            self.jobs[group].ready = True

    def fill(self) -> None:
        plant = self.plant
        while self.filling < min(plant.steps, self.trained + 2):
            opened = [
                OpenGroup(job.deadline, i, job.ready)
                for i, job in self.jobs.items()
                if job.deadline is not None and job.taken is None
            ]
            slots = plant.per_step - self.filled
            taken = select(opened, self.filling, slots, plant.per_step, plant.whole)
            assert not plant.whole or len(taken) in (0, slots)
            for group in taken:
                job = self.jobs[group]
                assert job.oldest is not None
                assert self.filling - job.oldest <= plant.staleness, "over its bound"
                self.worst = max(self.worst, self.filling - job.oldest)
                job.taken = self.filling
            self.filled += len(taken)
            if self.filled < plant.per_step:
                return
            self.filling, self.filled = self.filling + 1, 0

    def on_trained(self, step: int, _: int) -> None:
        self.training = False
        self.trained = step + 1
        self.consumed += sum(job.taken == step for job in self.jobs.values())
        duration = self.plant.publish * self.random.uniform(0.5, 1.5)
        self.publishing = max(self.publishing, self.now) + duration
        for replica in range(self.plant.replicas):
            self.at(self.publishing - self.now - duration * self.random.random() / 2, "on_swap", replica, step + 1)
        self.at(self.publishing - self.now, "on_committed", step + 1)

    def on_swap(self, replica: int, version: int) -> None:
        self.versions[replica] = version

    def on_committed(self, version: int, _: int) -> None:
        self.committed = version
        for group in [i for i, job in self.jobs.items() if job.taken is not None and job.taken < version]:
            del self.jobs[group]


@st.composite
def plants(draw: st.DrawFn, faults: bool) -> Plant:
    times = st.sampled_from([0.0, 0.1, 1.0, 10.0])
    return Plant(
        staleness=draw(st.integers(0, 8)),
        per_step=draw(st.integers(1, 8)),
        steps=draw(st.integers(1, 20)),
        whole=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 8)),
        max_in_flight=draw(st.sampled_from([1, 3, 8, 1000])),
        train=draw(times),
        publish=draw(times),
        drops=draw(st.sampled_from([0.05, 0.5])) if faults else 0.0,
        deaths=draw(st.sampled_from([0.0, 0.05, 0.2])) if faults else 0.0,
        seed=draw(st.integers(0, 2**32)),
        without_signal=draw(st.sampled_from([0.0, 0.3, 0.9])) if faults else 0.0,
        shallow=draw(st.booleans()),
        slow=(slow := draw(st.sampled_from(["wait", "truncate", "shrink", "retry"]))),
        hangs=0.0 if slow == "wait" else draw(st.sampled_from([0.0, 0.1, 0.5])),
    )


@given(plant=plants(faults=False))
def test_no_deadlock_no_starvation_no_drop_and_never_over_the_bound(plant: Plant) -> None:
    Simulation(plant).run()


@given(plant=plants(faults=True))
def test_the_same_with_groups_that_are_dropped_before_or_after_their_scores_and_dying_replicas(plant: Plant) -> None:
    Simulation(plant).run()


@pytest.mark.parametrize("whole", [False, True])
def test_the_bound_is_used_and_zero_is_strictly_on_policy(whole: bool) -> None:
    for staleness in (0, 1, 3):
        simulation = Simulation(Plant(staleness, 4, 40, whole, 2, 8, 1000, 1.0, 0.1, 0.0, 0.0, seed=5))
        simulation.run()
        assert simulation.worst == staleness
