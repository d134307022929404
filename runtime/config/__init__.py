"""The configuration: one YAML file decoded into typed, frozen Structs. Defaults and meanings live here and nowhere else.

`from runtime.config import X` gives every section and `Config`, the whole file; `runtime.config.loading` reads a file. The
string under each field is what `sluice schema` and docs/configuration-reference.md say of the key: see
`launcher.config_reference`.
"""

from typing import Literal

from msgspec import field
from msgspec.structs import replace

from runtime.config.algorithm import Algorithm
from runtime.config.base import UNIT, DType, FromEnvironment, NonNegative, Positive, RemoteServer, Section
from runtime.config.cluster import Cluster, Deadlines, Network, Node, Tls
from runtime.config.data import Curriculum, Data, Evaluation, EvaluationSet, RowFormat, RowFormatChoice, Sampling, Source
from runtime.config.model import Lora, Model, Warmup
from runtime.config.rewards import RemoteReward, RewardModel, Rewards, Rule
from runtime.config.run import (
    Checkpoint,
    Exposure,
    Ledger,
    LivePage,
    Logs,
    Mismatch,
    Prometheus,
    Run,
    StopConditions,
    Tracker,
)
from runtime.config.sandbox import Sandbox
from runtime.config.services import (
    Budgets,
    Computing,
    Coordinator,
    Environment,
    Gateway,
    Gateways,
    Parallel,
    Placed,
    Process,
    ReferenceScorer,
    Reward,
    Rollout,
    Scorer,
    Services,
    Spread,
    Trainer,
    WeightSyncConfig,
)
from runtime.config.training import Critic, Moe, Optimizer, Reference, Sft, Training


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
    gateway: Gateway | None = None
    """Null: the policy answers each prompt with one reply; `{}`: episodes of agents, with the defaults below."""
    algorithm: Algorithm = Algorithm()
    training: Training = Training()
    moe: Moe = Moe()
    sft: Sft = Sft()
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
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    mismatch: Mismatch = Mismatch()
    checkpoint: Checkpoint = Checkpoint()
    ledger: Ledger = Ledger()
    logs: Logs = Logs()
    network: Network = Network()
    deadlines: Deadlines = Deadlines()
    metrics: Exposure = Exposure()
    page: LivePage | None = None
    """Null: none; `{}`: one with the defaults below."""
    trackers: list[Tracker] = field(default_factory=lambda: [Tracker(name="jsonl"), Tracker(name="tensorboard")])
    """Where metrics go."""

    def optimizer_of(self, role: Literal["trainer", "critic", "sft"]) -> Optimizer:
        """Return the optimizer's settings for a role: `training.optimizer`, at the learning rate of the role."""
        policys = self.training.optimizer
        rate = {
            "trainer": policys.learning_rate,
            "critic": (self.critic or Critic()).learning_rate,
            "sft": self.sft.learning_rate,
        }[role]
        scale = rate / policys.learning_rate if policys.learning_rate else 0.0
        return replace(policys, learning_rate=rate, min_learning_rate=scale * policys.min_learning_rate)
