"""The configuration: one YAML file decoded into typed, frozen Structs. Defaults and meanings live here and nowhere else.

Loading, overrides and checks are in `runtime.config.loading`; this package is the schema alone. The string under each field is
what `sluice schema` and docs/configuration-reference.md say of the key (`launcher.config_reference` reads it from these files).
"""

from runtime.config.algorithm import Algorithm
from runtime.config.base import UNIT, DType, NonNegative, Positive, Section
from runtime.config.generation import Evaluation, EvaluationSet, Sampling
from runtime.config.material import Curriculum, Data, Model, RowFormat, RowFormatChoice, Run, Source, Warmup
from runtime.config.operation import Checkpoint, Cluster, Deadlines, Ledger, Logs, Mismatch, Network, Node, Tracker
from runtime.config.publication import Publication
from runtime.config.rewards import RemoteReward, RewardModel, Rewards, Rule
from runtime.config.services import (
    Computing,
    Coordinator,
    Parallel,
    Placed,
    Process,
    ReferenceScorer,
    Restarts,
    Reward,
    Rollout,
    Scorer,
    Services,
    Spread,
    Trainer,
)
from runtime.config.training import Critic, CriticOptimizer, Lora, Optimizer, Reference, StopConditions, Training
from runtime.config.whole import Config

__all__ = [
    "UNIT",
    "Algorithm",
    "Checkpoint",
    "Cluster",
    "Computing",
    "Config",
    "Coordinator",
    "Critic",
    "CriticOptimizer",
    "Curriculum",
    "DType",
    "Data",
    "Deadlines",
    "Evaluation",
    "EvaluationSet",
    "Ledger",
    "Logs",
    "Lora",
    "Mismatch",
    "Model",
    "Network",
    "Node",
    "NonNegative",
    "Optimizer",
    "Parallel",
    "Placed",
    "Positive",
    "Process",
    "Publication",
    "Reference",
    "ReferenceScorer",
    "RemoteReward",
    "Restarts",
    "Reward",
    "RewardModel",
    "Rewards",
    "Rollout",
    "RowFormat",
    "RowFormatChoice",
    "Rule",
    "Run",
    "Sampling",
    "Scorer",
    "Section",
    "Services",
    "Source",
    "Spread",
    "StopConditions",
    "Tracker",
    "Trainer",
    "Training",
    "Warmup",
]
