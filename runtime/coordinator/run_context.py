"""What a run is given, besides its roles; and what follows from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from runtime.chosen_algorithm import choose
from runtime.cluster.topology import instances, settings_of, uses_reference
from runtime.config import Computing, Config, Rollout
from runtime.data.prompts import Prompts
from runtime.errors import UserError
from runtime.evaluation.generations import TextDecoder
from runtime.evaluation.held_out import HeldOut
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.states import Mark
from runtime.process.keys import Keys
from runtime.status import Progress
from runtime.telemetry.startup import Startup
from runtime.telemetry.trackers import Trackers


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
