"""How many groups hold a place at once: as many as keep the trainer busy, where that is fewer than the staleness bound allows.
By measured times; no I/O.

A step of the trainer takes S seconds and B groups. While it goes on, B groups have to become ready for the next one; they were
dispatched with the newest weights when the step before it was committed. What the trainer needs beside the groups that it
trains on is therefore B · max(1, L / S), where L are the seconds from a group's dispatch until it is ready (Little's law: what
is under way is the rate B / S times the time that it takes).

L is above the mean m of those seconds, as they have a spread s. A batch that is sent whole waits for its slowest group: of B
numbers from a normal distribution the largest is at most m + s √(2 ln B) on average (Boucheron, Lugosi, Massart: Concentration
Inequalities, 2013, theorem 2.5). A trainer that is given parts of a batch begins with those that are ready, and slower groups
have until the step's end: L = m + s, which five of six groups keep.

Where rollouts are slower than the trainer, L grows with the groups under way, and the bound holds, as without this.
"""

from __future__ import annotations

import math

from runtime.chosen_algorithm import streams
from runtime.cluster.topology import takes_turns
from runtime.config import Config
from runtime.coordinator.staleness import most_live

FIRST = 3  # steps whose groups hold a place before anything is measured
STEPS = 4  # over which the measured times are averaged
LATE = 4.0  # times as long as the slowest group of a step takes: one that the trainer waits for longer is late


class MovingMoments:
    """Mean and variance of numbers, each of which counts exponentially less with those that follow."""

    def __init__(self, memory: float):
        """`memory`: numbers that count."""
        self._share = 1 / max(1.0, memory)
        self.count = 0
        self.mean = self.variance = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        share = max(self._share, 1 / self.count)  # the plain mean, until there are more numbers than count
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1 - share) * (self.variance + share * gap * gap)


def depth_of(config: Config) -> PipelineDepth:
    """The bound says how many where it is to, and where rollouts and trainer have the devices in turn, as all that it allows is
    generated before the trainer has them."""
    training = config.training
    measured = training.depth == "auto" and not takes_turns(config)
    bound = most_live(training.staleness, training.groups_per_step)
    return PipelineDepth(training.groups_per_step, bound, measured, streams(config))


class PipelineDepth:
    """The groups that may hold a place. `bound`: that staleness allows, (η + 1) · B."""

    def __init__(self, groups_per_step: int, bound: int, measured: bool = True, streams: bool = True):
        """`measured`: False for as many as the bound allows. `streams`: the trainer is given parts of a batch."""
        self._size, self._bound, self._measured, self._streams = groups_per_step, bound, measured, streams
        self._ready = MovingMoments(STEPS * groups_per_step)  # seconds
        self._step = MovingMoments(STEPS)  # seconds
        self._spent = 0.0  # seconds on groups that were dropped, since one became ready

    def became_ready(self, seconds: float) -> None:
        """A group, so long after its dispatch."""
        self._ready.add(seconds + self._spent)
        self._spent = 0.0

    def dropped(self, seconds: float) -> None:
        """A group, whose place another takes: so much later is the next one ready."""
        self._spent += seconds

    def stepped(self, seconds: float) -> None:
        """The trainer has worked so long on a step, waits aside."""
        self._step.add(seconds)

    @property
    def target(self) -> int:
        """A few steps' groups until both times are known."""
        needed = self._ready_within(1.0) if self._streams else self.slowest
        if not self._measured:
            return self._bound
        if not self._step.mean or needed is None:
            return min(self._bound, FIRST * self._size)
        return min(self._bound, round(self._size * (1 + max(1.0, needed / self._step.mean))))

    @property
    def slowest(self) -> float | None:
        """Seconds that the slowest of a step's groups takes to be ready; None: not known yet."""
        return self._ready_within(math.sqrt(2 * math.log(self._size)))

    def _ready_within(self, deviations: float) -> float | None:
        if self._ready.count < self._size:
            return None
        return self._ready.mean + deviations * math.sqrt(self._ready.variance)
