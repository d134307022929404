"""The configured algorithm: its functions by name, with their options. Loads no torch unless a user's file does."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec

from runtime.algorithms import interfaces  # the package registers the functions by name
from runtime.algorithms.losses import KlControl, masked_sample
from runtime.config import Algorithm, Config
from runtime.errors import UserError

# ---- Options


def with_options(
    compute: Callable[..., Any], options: Mapping[str, Any], key: str, helper: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return `compute` with the `options` that the configuration gives it at `key`, as keyword arguments.

    The signature of `compute` decides what is allowed: the parameters behind the first two that may be given by name, and
    their annotations where these are types of YAML. `helper` is a function of the same entry, whose keyword-only parameters
    are allowed too (`with_keywords`). Raises UserError, naming the option, the value and what is allowed."""
    helped = _keywords(helper) if helper is not None else {}
    parameters = list(inspect.signature(compute).parameters.values())
    first = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:2]
    own = [one for one in parameters if one not in first]
    taken = {one.name for one in first if one.kind is one.POSITIONAL_OR_KEYWORD}
    known = {one.name: one for one in own if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    name = getattr(compute, "__name__", "the function")
    if len(first) < 2 and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise UserError(
            f"{key.removesuffix('_options')}: {name} takes {len(first)} arguments, and gets two: inputs and options"
        )
    for option, value in options.items():
        if option in taken:
            raise UserError(f"{key}.{option}: {value!r}: {name} takes it as an argument already")
        if option not in known | helped and not any(one.kind is one.VAR_KEYWORD for one in own):
            allowed = f"allowed: {', '.join(known | helped)}" if known or helped else "it takes none"
            raise UserError(f"{key}.{option}: {value!r}: {name} takes no such option; {allowed}")
    for option, one in known.items():
        if one.default is one.empty and option not in options:
            raise UserError(f"{key}.{option}: is missing, and {name} needs it")
    own_options = {option: value for option, value in options.items() if option in known or option not in helped}
    return _bound(compute, known, own_options, key)


def with_keywords(helper: Callable[..., Any], options: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return `helper` with those of the `options` at `key` that it takes as keyword-only arguments."""
    own = _keywords(helper)
    return _bound(helper, own, {option: value for option, value in options.items() if option in own}, key)


def _bound(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], key: str
) -> Callable[..., Any]:
    typed = {name: _of_type(each, _annotation(function, parameters.get(name)), f"{key}.{name}") for name, each in given.items()}
    return partial(function, **typed) if typed else function


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def _annotation(compute: Callable[..., Any], parameter: inspect.Parameter | None) -> Any:
    if parameter is not None and parameter.annotation is not parameter.empty:
        with suppress(Exception):  # it is no type here, such as one that is imported for type checking alone
            written = SimpleNamespace(__annotations__={"it": parameter.annotation})
            return typing.get_type_hints(written, getattr(compute, "__globals__", {}), include_extras=True)["it"]
    return Any


def _of_type(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise UserError(f"{path}: {value!r} is not {_in_words(kind)}") from None
    except TypeError:  # not a type of YAML: the function's own to check
        return value


def _in_words(kind: Any) -> str:
    base, *bounds = typing.get_args(kind) if typing.get_origin(kind) is Annotated else (kind,)
    words = base.__name__ if isinstance(base, type) else str(base).replace("typing.", "")
    limits = [(sign, getattr(each, name)) for each in bounds for sign, name in ((">", "gt"), (">=", "ge"), ("<=", "le"))]
    return " ".join([words, *(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)])


# ---- The algorithm


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
    """Return the configured algorithm. Raises UserError for an unknown name, a file that fails to import, or a wrong option."""
    algorithm = config.algorithm
    aggregation_options = interfaces.AggregationOptions(norm=algorithm.aggregation_norm or config.sampling.max_new_tokens)
    advantage, loss = interfaces.ADVANTAGES.find(algorithm.advantage), interfaces.POLICY_LOSSES.find(algorithm.loss)
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
        advantage_options=msgspec.convert(algorithm, interfaces.AdvantageOptions, from_attributes=True),
        loss=loss,
        loss_options=msgspec.convert(algorithm, interfaces.LossOptions, from_attributes=True),
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
    """Return True if a step may be accumulated group by group: no function, nor several updates, need its whole batch."""
    return choose(config).streamable and updates_per_step(config) == 1


def kl_control(algorithm: Algorithm, reached: float | None = None) -> KlControl:
    """Return the control of β, from the configured value or, if it adapts, from the value `reached` before a resume."""
    start = algorithm.kl_coefficient if reached is None or not algorithm.kl_target else reached
    return KlControl(start, algorithm.kl_target, algorithm.kl_horizon)
