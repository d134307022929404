"""The inputs of a run besides its roles, and values that follow from its configuration alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from runtime import types
from runtime.chosen_algorithm import choose
from runtime.cluster.topology import instances, settings_of, uses_reference
from runtime.config import Computing, Config, Rollout
from runtime.coordinator.pools import Roles
from runtime.coordinator.register import Member, member_of
from runtime.data.prompts import Prompts
from runtime.errors import UserError
from runtime.evaluation.results import HeldOut, TextDecoder
from runtime.ledger.journal import LedgerWriter, Note
from runtime.ledger.states import Mark
from runtime.process.aio import now
from runtime.process.keys import Keys
from runtime.status import Progress
from runtime.telemetry.startup import Startup
from runtime.telemetry.summary import Totals
from runtime.telemetry.trackers import Trackers
from runtime.types import PolicyVersion

# ---- History
#
# The progress and results of a run: in memory, and as a note in the ledger for a coordinator that takes over.

COURSE = "course"  # the key of the note

log = logging.getLogger("sluice")


class RunHistory(Struct):
    """The progress of a run over all attempts.

    `folder` is the checkpoint with which the next attempt begins: the newest one of this run, else the one that the run
    resumes, else "", the beginning. Checkpoints that a former run left in the same folder do not count.
    """

    folder: str
    version: PolicyVersion = PolicyVersion()
    """All steps up to this version are over: applied, published and recorded."""
    attempts: int = 0  # attempts that have ended
    totals: Totals = msgspec.field(default_factory=Totals)
    accuracy: dict[int, float] = {}
    """The results of evaluations, by step."""
    evaluating: int | None = None  # the step whose evaluation runs beside training
    evaluated_before: bool = False  # the evaluation before training is done, or not wanted
    accuracy_before: float | None = None
    skipped_evaluations: int = 0
    rl_began: float = 0.0  # when the first prompt was admitted, on the loop's clock
    rl_seconds: float = 0.0  # from `rl_began` to the end of the last step
    best_step: int = 0  # the last step of any attempt
    attempts_without_progress: int = 0  # in a row
    alarm: str = ""
    """The newest alarm: a rollout whose log-probabilities are too far from the trainer's, or a checkpoint without room."""
    alarms: int = 0  # probes over the limit
    at_folder: Totals = msgspec.field(default_factory=Totals)

    def saved(self, folder: Path, totals: Totals) -> None:
        """Record a complete checkpoint; `totals` are those of its steps."""
        self.folder, self.at_folder = str(folder.absolute()), totals

    def is_at(self, folder: Path) -> bool:
        """Return True if the next attempt would begin with the checkpoint `folder`."""
        return bool(self.folder) and Path(self.folder).resolve() == folder.resolve()

    def lost(self, step: int) -> None:
        """Record that the attempt ended at `step`: the steps after the checkpoint will be done again."""
        self.attempts += 1
        self.totals, self.evaluating = self.at_folder.copy(), None
        self.attempts_without_progress = 0 if step > self.best_step else self.attempts_without_progress + 1
        self.best_step = max(self.best_step, step)

    def off(self, alarm: str) -> None:
        """Count a probe over `mismatch.limit`. `alarm` describes it; "" if the same rollout's last probe was over it too."""
        self.alarms += 1
        if alarm:
            self.alarm = alarm
            log.warning("%s", alarm)

    def resumes_at(self, step: int) -> None:
        """Begin another attempt at `step`: forget the evaluations of later steps."""
        for later in [known for known in self.accuracy if known > step]:
            del self.accuracy[later]


class RunState(Struct, kw_only=True):
    """The progress of the `run`, and the `models` that made its newest step. `rl_seconds`: since the first prompt was admitted,
    0 before that. It is a duration because a machine may correct its time of day."""

    run: str
    models: list[Member]
    history: RunHistory
    rl_seconds: float = 0.0


def save_run_state(context: RunContext, roles: Roles, history: RunHistory) -> None:
    models = [member_of(model) for model in (roles.trainer, roles.critic) if model is not None]
    seconds = now() - history.rl_began if history.rl_began else 0.0
    course = RunState(run=context.run, models=models, history=history, rl_seconds=seconds)
    context.ledger.record(Note(key=COURSE, value=types.encode(course)))


class RunSupervisor(Protocol):
    """Runs the coordinator's logic in a process. Gets its progress, and starts lost processes again."""

    restarts: bool
    """Whether trainer and critic are started again after a loss; if not, a loss ends the run."""

    def report(self, progress: Progress) -> None: ...

    def vacated(self) -> None:
        """Note that trainer or critic is lost and its devices are free: another may begin there."""


@dataclass(kw_only=True)
class EvaluationContext:
    """The inputs of an evaluation besides its roles."""

    config: Config
    trackers: Trackers
    held_out: list[HeldOut]
    text: TextDecoder
    stop_token_ids: tuple[int, ...]
    supervisor: RunSupervisor
    keys: Keys | None = None  # the coordinator's

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)


@dataclass(kw_only=True)
class RunContext(EvaluationContext):
    """The inputs of a training run besides its roles."""

    ledger: LedgerWriter
    train: Prompts
    epoch: float  # the seconds since the epoch when the loop's clock shows 0: the ledger's times do not jump
    launched: float  # when the user started the run, on the loop's clock
    run: str = ""  # the id of this start of the run by its user
    term: int = 1  # one more with each coordinator of the ledger
    startup: Startup = field(default_factory=lambda: Startup(phases={}))  # so far


def needs(config: Config) -> Mark:
    """Return the marks that a group must have before training. Raises UserError if the advantage needs a missing critic."""
    wanted = Mark.SCORED
    if uses_reference(config):
        wanted |= Mark.REFERENCED
    if config.critic is not None:
        wanted |= Mark.VALUED
    elif choose(config).advantage.needs_values:
        raise UserError(f"critic: missing; algorithm.advantage {config.algorithm.advantage} needs one")
    return wanted


def accelerators(config: Config) -> int:
    """Count the devices of the run: a rollout's tensor-parallel size, and one for each other computing process. A process on
    another role's devices counts none."""
    roles = [settings_of(config, instance) for instance in instances(config)]
    own = [role for role in roles if isinstance(role, Computing) and not role.colocate]
    return sum(role.tensor_parallel if isinstance(role, Rollout) else 1 for role in own)
