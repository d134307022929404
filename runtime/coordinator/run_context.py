"""What a run is given, besides its roles; and what follows from its configuration alone."""

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
from runtime.evaluation.generations import HeldOut, TextDecoder
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.records import Note
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
# How far a run is, and what it has come to: in memory, and as a note in the ledger for a coordinator that takes over.

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
    totals: Totals = msgspec.field(default_factory=Totals)
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
    at_folder: Totals = msgspec.field(default_factory=Totals)

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

    def resumes_at(self, step: int) -> None:
        """Another attempt begins at `step`."""
        for later in [known for known in self.accuracy if known > step]:
            del self.accuracy[later]


class RunState(Struct, kw_only=True):
    """How far the `run` is, with the `models` that its newest step was made by. `rl_seconds`: since the first prompt was
    admitted, 0 before that; not the time of day, which a machine may correct."""

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
    """Who runs the coordinator's logic in a process: is told how far the run is, and has lost processes started again."""

    restarts: bool
    """Whether trainer and critic are started again after a loss; where they are not, a loss ends the run."""

    def report(self, progress: Progress) -> None: ...

    def vacated(self) -> None:
        """Trainer or critic is lost, and nobody else has its devices now: another may begin there."""


@dataclass(kw_only=True)
class EvaluationContext:
    """What an evaluation is made of, besides its roles."""

    config: Config
    trackers: Trackers
    held_out: list[HeldOut]
    text: TextDecoder
    stop_token_ids: tuple[int, ...]
    supervisor: RunSupervisor
    keys: Keys | None = None  # the coordinator's

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(self.config.run.dir)


@dataclass(kw_only=True)
class RunContext(EvaluationContext):
    """What a run that trains is made of, besides its roles."""

    ledger: LedgerWriter
    train: Prompts
    epoch: float  # what the loop's clock showing 0 is in seconds since the epoch: the ledger's times do not jump
    launched: float  # when the run was asked for, on the loop's clock
    run: str = ""  # another for each start of the run by its user
    term: int = 1  # one more with each coordinator of the ledger
    startup: Startup = field(default_factory=lambda: Startup(phases={}))  # so far


def needs(config: Config) -> Mark:
    """What a group must have before it is trained on. Raises UserError for an advantage whose critic is missing."""
    wanted = Mark.SCORED
    if uses_reference(config):
        wanted |= Mark.REFERENCED
    if config.critic is not None:
        wanted |= Mark.VALUED
    elif choose(config).advantage.needs_values:
        raise UserError(f"critic: missing; algorithm.advantage {config.algorithm.advantage} needs one")
    return wanted


def accelerators(config: Config) -> int:
    """All devices of the run: of a rollout those that its tensors are spread over, one of each other process that computes.
    What lies on another role's devices has none of its own."""
    roles = [settings_of(config, instance) for instance in instances(config)]
    own = [role for role in roles if isinstance(role, Computing) and not role.colocate]
    return sum(role.tensor_parallel if isinstance(role, Rollout) else 1 for role in own)
