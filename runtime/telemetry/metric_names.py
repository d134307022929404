"""Names of metrics that differ from MindSpeed-RL's: the code and `metrics.jsonl` have ours, other trackers what
`metrics.names` says.

Sluice 0.1 logged its scores under `grpo/` whatever the algorithm, and the rest under MindSpeed-RL's names, to all trackers:
`ours` reads such points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from runtime.config import Config

Value = TypeVar("Value")

SCORE = ("mean", "max", "min")
MINDSPEED: Mapping[str, tuple[str, ...]] = {
    **{f"score/{part}": (f"grpo/score/{part}",) for part in SCORE},
    "score/masked": ("grpo/masked",),
    "score/length_penalty": ("grpo/length_penalty",),
    **{f"advantages/{part}": (f"critic/advantages/{part}",) for part in SCORE},
    "rollout_tps": ("vllm_tps",),
    "timing/weight_sync": ("timing/resharding_to_infer",),
    "timing/onload": ("timing/resharding_to_train",),
    "actor/grad_norm": ("actor/grad_norm", "grad_norm"),  # its code has the one, its documentation the other
}
"""Ours, and theirs for the same number. One that stands in no row is called the same there, or has no other name there."""
SCORE_ERRORS, _ERRORS = "score/errors/", "grpo/errors/"  # in front of a reason

_OURS = {theirs: ours for ours, names in MINDSPEED.items() for theirs in names}
_SCORE_PREFIXES = ("critic/score/", "dapo/score/")  # the same numbers as grpo/score, once more


def score_prefixes(config: Config) -> list[str]:
    """Under which names MindSpeed-RL's trainers of PPO and DAPO log the scores besides `grpo/score/`, as far as the run is
    like theirs."""
    applies = (config.critic is not None, config.algorithm.dynamic_sampling)
    return [prefix for prefix, does in zip(_SCORE_PREFIXES, applies, strict=True) if does]


def mindspeed(metrics: Mapping[str, Value], scores: Sequence[str] = ()) -> dict[str, Value]:
    """The metrics under MindSpeed-RL's names; the scores also under each prefix of `scores`."""
    named: dict[str, Value] = {}
    for name, value in metrics.items():
        if name.startswith(SCORE_ERRORS):
            named[_ERRORS + name.removeprefix(SCORE_ERRORS)] = value
        else:
            named |= dict.fromkeys(MINDSPEED.get(name, (name,)), value)
    for part in SCORE:
        named |= {prefix + part: metrics[f"score/{part}"] for prefix in scores if f"score/{part}" in metrics}
    return named


def ours(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """The metrics under our names, whichever of the two they have."""
    named: dict[str, Value] = {}
    for name, value in metrics.items():
        if name.startswith(_ERRORS):
            named[SCORE_ERRORS + name.removeprefix(_ERRORS)] = value
        elif not name.startswith(_SCORE_PREFIXES):
            named[_OURS.get(name, name)] = value
    return named
