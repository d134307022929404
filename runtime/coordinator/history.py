"""How far a run is, and what it has come to: in memory, and as a note in the ledger for a coordinator that takes over."""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec import Struct, field

from runtime import codec
from runtime.coordinator.register import Member, member_of
from runtime.coordinator.roles import Roles
from runtime.coordinator.run_context import RunContext
from runtime.ledger.records import Note
from runtime.process.aio import now
from runtime.telemetry.summary import Totals
from runtime.types import PolicyVersion

COURSE = "course"  # the note

log = logging.getLogger("sluice")


class RunHistory(Struct):
    """`folder` is the checkpoint with which the next attempt begins: the newest one of this run, else the one that the run
    resumes, else "", the beginning. Checkpoints that a former run left in the same folder do not count.
    """

    folder: str
    version: PolicyVersion = PolicyVersion()
    """As many steps of its incarnation are over: applied, published and told of."""
    attempts: int = 0  # attempts that have ended
    totals: Totals = field(default_factory=Totals)
    accuracy: dict[int, float] = {}
    """What evaluations found, by step."""
    evaluating: int | None = None  # the step whose evaluation goes on beside training
    evaluated_before: bool = False  # the evaluation before training is done, or not wanted
    accuracy_before: float | None = None
    skipped_evaluations: int = 0
    rl_began: float = 0.0  # when the first prompt was admitted, on the loop's clock
    rl_seconds: float = 0.0  # from then to the last step
    best_step: int = 0  # the last step of any attempt
    attempts_without_progress: int = 0  # in a row
    alarm: str = ""
    """The newest rollout whose log-probabilities were too far from the trainer's, and how far."""
    alarms: int = 0  # probes over the limit
    at_folder: Totals = field(default_factory=Totals)

    def saved(self, folder: Path, totals: Totals) -> None:
        """A checkpoint is complete; `totals` are those of its steps."""
        self.folder, self.at_folder = str(folder.absolute()), totals

    def is_at(self, folder: Path) -> bool:
        """Whether the next attempt would begin with the checkpoint `folder`."""
        return bool(self.folder) and Path(self.folder).resolve() == folder.resolve()

    def lost(self, step: int) -> None:
        """The attempt ended at `step`: what came after the checkpoint will be done again."""
        self.attempts += 1
        self.totals, self.evaluating = self.at_folder.copy(), None
        self.attempts_without_progress = 0 if step > self.best_step else self.attempts_without_progress + 1
        self.best_step = max(self.best_step, step)

    def off(self, alarm: str) -> None:
        """A probe is over `mismatch.limit`. `alarm` says so; "" if the same rollout's last probe was over it too."""
        self.alarms += 1
        if alarm:
            self.alarm = alarm
            log.warning("%s", alarm)

    def goes_on_at(self, step: int) -> None:
        """Another attempt begins at `step`."""
        for later in [known for known in self.accuracy if known > step]:
            del self.accuracy[later]


class Course(Struct, kw_only=True):
    """How far the `run` is, with the `models` that its newest step was made by. `rl_seconds`: since the first prompt was
    admitted, 0 before that; not the time of day, which a machine may correct."""

    run: str
    models: list[Member]
    history: RunHistory
    rl_seconds: float = 0.0


def write_course(context: RunContext, roles: Roles, history: RunHistory) -> None:
    models = [member_of(model) for model in (roles.trainer, roles.critic) if model is not None]
    seconds = now() - history.rl_began if history.rl_began else 0.0
    course = Course(run=context.run, models=models, history=history, rl_seconds=seconds)
    context.ledger.record(Note(key=COURSE, value=codec.encode(course)))
