"""What one lineage of a run hands on to the next: where it goes on, and what the run has seen so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from runtime.telemetry.summary import Totals

log = logging.getLogger("sluice")


@dataclass
class History:
    """`folder` is the checkpoint that a lineage begins with, and the next would: the newest of this run's own, else the one
    that the run resumes, else "", its very beginning. What a former run has left in the folder is none of them.
    """

    folder: str
    lineages: int = 0  # that ended before the one that goes on
    totals: Totals = field(default_factory=Totals)
    accuracy: dict[int, float] = field(default_factory=dict)
    """What evaluations found, by step."""
    evaluated_before: bool = False  # or need not be
    accuracy_before: float | None = None
    skipped_evaluations: int = 0
    rl_began: float = 0.0  # when the first prompt was admitted, on the clock of time.monotonic
    rl_seconds: float = 0.0  # from then to the last step
    furthest: int = 0  # the last step of any lineage
    fruitless: int = 0  # lineages in a row that did not get further
    alarm: str = ""
    """The newest rollout whose log-probabilities were too far from the trainer's, and how far."""
    alarms: int = 0  # probes that were so
    _at_folder: Totals = field(default_factory=Totals)

    def saved(self, folder: Path, totals: Totals) -> None:
        """A checkpoint is complete; `totals` are those of its steps."""
        self.folder, self._at_folder = str(folder.absolute()), totals

    def is_at(self, folder: Path) -> bool:
        """Whether what comes next begins with the checkpoint `folder`."""
        return bool(self.folder) and Path(self.folder).resolve() == folder.resolve()

    def lost(self, step: int) -> None:
        """The lineage ended at `step`: what came after the checkpoint will be done again."""
        self.lineages += 1
        self.totals = self._at_folder.copy()
        self.fruitless = 0 if step > self.furthest else self.fruitless + 1
        self.furthest = max(self.furthest, step)

    def off(self, alarm: str) -> None:
        """A probe is over `mismatch.limit`. `alarm` says so; "" where it was so before of the same rollout."""
        self.alarms += 1
        if alarm:
            self.alarm = alarm
            log.warning("%s", alarm)

    def goes_on_at(self, step: int) -> None:
        """Another lineage begins at `step`."""
        for later in [known for known in self.accuracy if known > step]:
            del self.accuracy[later]
