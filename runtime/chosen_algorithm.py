"""The configured algorithm: its functions by name, with their options. Loads no torch unless a user's file does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.algorithms import interfaces  # the package registers the functions by name
from runtime.algorithms.losses import AdaptiveKl, FixedKl, masked_sample
from runtime.config import Algorithm, Config


@dataclass(frozen=True)
class ChosenAlgorithm:
    """The functions that the configuration chose, each with its settings in the schema. The options of
    `algorithm.loss_options` and `algorithm.advantage_options` are bound in the functions.

    `correction` is None if the loss is taken against the policy that sampled. `masked_sample`: see the aggregation."""

    advantage: interfaces.AdvantageEstimator
    advantage_options: interfaces.AdvantageOptions
    loss: interfaces.PolicyLoss
    loss_options: interfaces.LossOptions
    correction: interfaces.CorrectionFunction | None
    correction_options: interfaces.CorrectionOptions
    aggregation: interfaces.Aggregation
    aggregation_options: interfaces.AggregationOptions
    masked_sample: float
    kl: interfaces.KlEstimator

    @property
    def streamable(self) -> bool:
        """Whether a step may be accumulated group by group; otherwise its whole batch is needed first."""
        return self.advantage.streams(self.advantage_options) and self.loss.chooses is None


def choose(config: Config) -> ChosenAlgorithm:
    """Look up the configured algorithm. Raises UserError for an unregistered name, a user's file that cannot be imported, or
    options that its function does not take."""
    algorithm = config.algorithm
    aggregation_options = interfaces.AggregationOptions(norm=algorithm.aggregation_norm or config.sampling.max_new_tokens)
    advantage, loss = interfaces.ADVANTAGES.find(algorithm.advantage), interfaces.POLICY_LOSSES.find(algorithm.loss)
    streamable, given, key = advantage.streamable, algorithm.advantage_options, "algorithm.advantage_options"
    advantage = replace(
        advantage,
        compute=interfaces.with_options(advantage.compute, given, key),
        streamable=streamable if isinstance(streamable, bool) else interfaces.with_keywords(streamable, given, key),
    )
    chooses, given, key = loss.chooses, algorithm.loss_options, "algorithm.loss_options"
    loss = replace(
        loss,
        compute=interfaces.with_options(loss.compute, given, key, chooses),
        chooses=None if chooses is None else interfaces.with_keywords(chooses, given, key),
    )
    return ChosenAlgorithm(
        advantage=advantage,
        advantage_options=interfaces.AdvantageOptions(
            algorithm.group_std, algorithm.gamma, algorithm.gae_lambda, algorithm.turn_discount
        ),
        loss=loss,
        loss_options=interfaces.LossOptions(
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip
        ),
        correction=None if algorithm.correction == "none" else interfaces.CORRECTIONS.find(algorithm.correction),
        correction_options=interfaces.CorrectionOptions(
            cap=algorithm.correction_cap, low=algorithm.correction_low, high=algorithm.correction_high
        ),
        aggregation=interfaces.AGGREGATIONS.find(algorithm.aggregation),
        aggregation_options=aggregation_options,
        masked_sample=masked_sample(algorithm.aggregation, aggregation_options),
        kl=interfaces.KL_ESTIMATORS.find(algorithm.kl),
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


def kl_control(algorithm: Algorithm, reached: float | None = None) -> FixedKl | AdaptiveKl:
    """Return the control of β, from the configured value or, if it adapts, from the value `reached` before a resume."""
    if not algorithm.kl_target:
        return FixedKl(algorithm.kl_coefficient)
    start = algorithm.kl_coefficient if reached is None else reached
    return AdaptiveKl(start, algorithm.kl_target, algorithm.kl_horizon)
