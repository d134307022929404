"""The whole file: one field a section."""

from __future__ import annotations

from msgspec import field

from runtime.config.algorithm import Algorithm
from runtime.config.base import Section
from runtime.config.generation import Evaluation, Sampling
from runtime.config.material import Data, Model, Run, Warmup
from runtime.config.operation import Checkpoint, Cluster, Deadlines, Ledger, Logs, Mismatch, Network, Tracker
from runtime.config.publication import Publication
from runtime.config.rewards import Rewards
from runtime.config.services import Services
from runtime.config.training import Critic, Lora, Reference, StopConditions, Training


class Config(Section, frozen=True):
    """A run's configuration. Only `run.name` has no default."""

    run: Run
    model: Model = Model()
    """A section; or `tiny:FAMILY`, a tiny random model of that family in the place of every role's."""
    warmup: Warmup | None = None
    """Null: none; `{}`: one with the defaults below."""
    data: Data = Data()
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()
    rewards: Rewards = Rewards()
    algorithm: Algorithm = Algorithm()
    training: Training = Training()
    critic: Critic | None = None
    """Null: none; `{}`: one with the defaults below. For `algorithm.advantage: gae` alone."""
    reference: Reference = Reference()
    lora: Lora | None = None
    """Null: the weights themselves are trained; `{}`: adapters with the defaults below. Needs `pip install 'sluice-rl[lora]'`
    where the trainer runs."""
    stop: StopConditions = StopConditions()
    services: Services = Services()
    """A section; or a name, which is that of `services.preset`."""
    cluster: Cluster = Cluster()
    publication: Publication = Publication()
    mismatch: Mismatch = Mismatch()
    checkpoint: Checkpoint = Checkpoint()
    ledger: Ledger = Ledger()
    logs: Logs = Logs()
    network: Network = Network()
    deadlines: Deadlines = Deadlines()
    trackers: list[Tracker] = field(default_factory=lambda: [Tracker(name="jsonl"), Tracker(name="tensorboard")])
    """Where metrics go."""
