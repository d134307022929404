"""The configured algorithm: its functions by name, with their options. Loads no torch unless a user's file does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.interfaces import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageOptions,
    Aggregation,
    AggregationOptions,
    CorrectionFunction,
    CorrectionOptions,
    KlEstimator,
    LossOptions,
    PolicyLoss,
    with_keywords,
    with_options,
)
from runtime.algorithms.losses import KlControl, masked_sample
from runtime.config import Algorithm, Config

NO_CORRECTION = "none"


@dataclass(frozen=True)
class ChosenAlgorithm:
    """The functions that the configuration chose, each with its settings in the schema. The options of
    `algorithm.loss_options` and `algorithm.advantage_options` are bound in the functions.

    `correction` is None if the loss is taken against the policy that sampled. `masked_sample`: see the aggregation."""

    advantage: AdvantageEstimator
    advantage_options: AdvantageOptions
    loss: PolicyLoss
    loss_options: LossOptions
    correction: CorrectionFunction | None
    correction_options: CorrectionOptions
    aggregation: Aggregation
    aggregation_options: AggregationOptions
    masked_sample: float
    kl: KlEstimator

    @property
    def streamable(self) -> bool:
        """Whether a step may be accumulated group by group; otherwise its whole batch is needed first."""
        return self.advantage.streams(self.advantage_options) and self.loss.chooses is None


def choose(config: Config) -> ChosenAlgorithm:
    """Look up the configured algorithm. Raises UserError for an unregistered name, a user's file that cannot be imported, or
    options that its function does not take."""
    algorithm = config.algorithm
    aggregation_options = AggregationOptions(norm=algorithm.aggregation_norm or config.sampling.max_new_tokens)
    advantage, loss = ADVANTAGES.find(algorithm.advantage), POLICY_LOSSES.find(algorithm.loss)
    streamable, given, key = advantage.streamable, algorithm.advantage_options, "algorithm.advantage_options"
    advantage = replace(
        advantage,
        compute=with_options(advantage.compute, given, key),
        streamable=streamable if isinstance(streamable, bool) else with_keywords(streamable, given, key),
    )
    chooses, given, key = loss.chooses, algorithm.loss_options, "algorithm.loss_options"
    loss = replace(
        loss,
        compute=with_options(loss.compute, given, key, chooses),
        chooses=None if chooses is None else with_keywords(chooses, given, key),
    )
    return ChosenAlgorithm(
        advantage=advantage,
        advantage_options=AdvantageOptions(
            group_std=algorithm.group_std,
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            turn_discount=algorithm.turn_discount,
        ),
        loss=loss,
        loss_options=LossOptions(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip),
        correction=None if algorithm.correction == NO_CORRECTION else CORRECTIONS.find(algorithm.correction),
        correction_options=CorrectionOptions(
            cap=algorithm.correction_cap, low=algorithm.correction_low, high=algorithm.correction_high
        ),
        aggregation=AGGREGATIONS.find(algorithm.aggregation),
        aggregation_options=aggregation_options,
        masked_sample=masked_sample(algorithm.aggregation, aggregation_options),
        kl=KL_ESTIMATORS.find(algorithm.kl),
    )


def groups_per_update(config: Config) -> int:
    """Return the size of a mini-batch; `TrainGroup.mini_batch` counts these from 0."""
    return config.training.mini_batch_size or config.training.groups_per_step


def updates_per_epoch(config: Config) -> int:
    return config.training.groups_per_step // groups_per_update(config)


def updates_per_step(config: Config) -> int:
    """Return the number of optimizer updates that make one version."""
    return config.training.epochs * updates_per_epoch(config)


def streams(config: Config) -> bool:
    """Return True if a step may be accumulated group by group. Its whole batch comes first if the advantages or the loss need
    it, or if the step makes several updates."""
    return choose(config).streamable and updates_per_step(config) == 1


def kl_control(algorithm: Algorithm, reached: float | None = None) -> KlControl:
    """Return the control of β, from the configured value or, if it adapts, from the value `reached` before a resume."""
    start = algorithm.kl_coefficient if reached is None or not algorithm.kl_target else reached
    return KlControl(start, algorithm.kl_target, algorithm.kl_horizon)
