"""The metrics of a training step. Pure, except for the clocks passed in.

Phases of one step overlap: while the trainer updates, rollouts generate for later steps. So `timing/all`, the wall time between
two updates, is less than the sum of the phases. `timing/non_overlap_X` is the part of phase X in which no update ran."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import numpy as np

from runtime.process import spans as spans_file
from runtime.types import SCORERS, GeneratedGroup, Scores, StepResult

SCORE_ERRORS = "score/errors/"  # prefix of a reason

_RENAMED = {"publication": "weight_sync", "tune": "sft"}  # prefixes of 0.2, by which runs of 0.2 are read


def ours(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that 0.2 may have logged under the names of today."""
    parts = [(*name.partition("/"), value) for name, value in metrics.items()]
    return {_RENAMED.get(prefix, prefix) + slash + rest: value for prefix, slash, rest, value in parts}


Histogram = dict[int, int]  # counts by value
Metrics = dict[str, float | Histogram]
Span = tuple[float, float]  # start, end in seconds

UPDATE, UPDATE_CRITIC = "update", "update_critic"
WITHIN_UPDATE = ("adv", "old_log_p")  # the trainer's phases within UPDATE
REASONS = 8  # logged by name in a step: a remote reward may have many reasons
NON_OVERLAP_PHASES = (*SCORERS.values(), "reference_model")


class WeightSyncFigures(msgspec.Struct, frozen=True):
    """One weight sync: seconds from its start to COMMIT, the longest pause of a rollout, the bytes sent once, the earlier
    aborts, and the epoch of the commit. Then the seconds of its phases: of the trainer, of the last rollout to receive it
    (`commands.WeightsReceived`), and from the swap command to the last answer."""

    seconds: float
    pause_seconds: float
    bytes: int
    aborts: int = 0
    epoch: int = 0
    gather_seconds: float = 0.0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    hash_seconds: float = 0.0
    stage_seconds: float = 0.0
    swap_seconds: float = 0.0


class StepFigures(msgspec.Struct, kw_only=True):
    """The inputs of one step's metrics. `generated` and `scores`: of the consumed groups, in the same order."""

    generated: Sequence[GeneratedGroup]
    scores: Sequence[Scores]
    staleness: Sequence[int]  # one value an episode: the consuming version minus the version of its group's oldest token
    timing: Mapping[str, float]  # of SpanClock.close_step
    trained: StepResult
    world_size: int  # all accelerators of the run
    incarnation: int = 0  # of the lineage that made the step
    queues: Mapping[str, int] = {}  # groups waiting, by stage
    idle: Mapping[str, float] = {}  # by role, of `idle_fraction`
    weight_sync: WeightSyncFigures | None = None
    dynamic_sampling: Mapping[str, float] = {}  # of DynamicSampling.close_step
    rollouts: Mapping[str, float] = {}  # of RolloutPool.close_step


def step_metrics(figures: StepFigures) -> Metrics:
    """Return all metrics of one step. Leaves out metrics that do not apply."""
    lengths = length_metrics(figures.generated)
    weight_sync = {} if figures.weight_sync is None else msgspec.structs.asdict(figures.weight_sync)
    return {
        **figures.timing,
        **lengths,
        **score_metrics(figures.scores),
        **environment_metrics(figures.generated, figures.scores),
        **staleness_metrics(figures.staleness),
        **_throughput(figures, lengths),
        **figures.trained.metrics,
        **figures.timing,  # again: the coordinator's own measurements replace the trainer's
        **figures.dynamic_sampling,
        **figures.rollouts,
        **{f"queue/{name}": float(depth) for name, depth in figures.queues.items()},
        **{f"idle/{role}": fraction for role, fraction in figures.idle.items()},
        **{f"weight_sync/{key}": float(value) for key, value in weight_sync.items()},
        **size_metrics(figures.generated, figures.world_size),
        "incarnation": float(figures.incarnation),
        "samples": float(sum(group.n for group in figures.generated)),
        "tokens": float(sum(sum(group.response_tokens) for group in figures.generated)),
    }


def _throughput(figures: StepFigures, lengths: Mapping[str, float]) -> dict[str, float]:
    """Compute tokens per second and accelerator of the step (e2e), update and generation; 0 for a phase without time."""
    rows, timing = sum(len(group.response_tokens) for group in figures.generated), figures.timing
    mean = lengths.get("prompt_length/mean", 0.0) + lengths.get("response_length/mean", 0.0)
    phases = {"e2e_tps": "timing/all", "update_tps": f"timing/{UPDATE}", "rollout_tps": "timing/rollout"}
    tokens = mean * rows / figures.world_size
    return {name: tokens / timing[phase] if timing.get(phase) else 0.0 for name, phase in phases.items()}


def size_metrics(groups: Sequence[GeneratedGroup], world_size: int) -> dict[str, float]:
    """Return the sizes for the throughput. The number of samples per prompt is the mean over the groups."""
    sizes = {"world_size": float(world_size), "global_batch_size": float(len(groups))}
    return sizes | ({"n_samples_per_prompt": sum(group.n for group in groups) / len(groups)} if groups else {})


def length_metrics(groups: Sequence[GeneratedGroup]) -> dict[str, float]:
    """Return lengths in tokens over all rows; `response_length/clip_ratio` is the fraction that ended by length."""
    if not groups:
        return {}
    responses = [length for group in groups for length in group.response_tokens]
    prompts = [group.prompt_tokens for group in groups for _ in group.response_tokens]
    clipped = {"response_length/clip_ratio": sum(group.truncated for group in groups) / len(responses)}
    return _distribution("prompt_length", prompts) | _distribution("response_length", responses) | clipped


def score_metrics(scores: Sequence[Scores]) -> dict[str, float]:
    """Return `score/*` and `RULE_rewards/mean` over the samples whose rules all ran. `score/masked` counts the other samples.
    `score/errors/REASON` counts the most frequent reasons, one for each scorer that failed on a sample."""
    if not scores:
        return {}
    masks = [group.valid.astype(bool) for group in scores]
    figures = {"score/masked": float(sum((~mask).sum() for mask in masks))}
    errors = sum((Counter(group.errors) for group in scores), Counter[str]())
    figures |= {f"{SCORE_ERRORS}{reason}": float(count) for reason, count in errors.most_common(REASONS)}
    valid = np.concatenate([group.rewards[mask] for group, mask in zip(scores, masks, strict=True)])
    if valid.size:
        figures |= _distribution("score", valid)
    for rule in sorted({rule for group in scores for rule in group.rules}):
        of = [group.rules[rule][mask] for group, mask in zip(scores, masks, strict=True) if rule in group.rules]
        held = np.concatenate(of)
        if held.size:
            figures[f"{rule}_rewards/mean"] = float(held.mean(dtype=np.float64))
    return figures


LEFT_OUT = "left out: "  # prefix of the outcome of an episode that is not trained on


def environment_metrics(groups: Sequence[GeneratedGroup], scores: Sequence[Scores]) -> dict[str, float]:
    """Return `environment/NAME/*` for each environment: the mean reward of trained samples, episodes, policy calls per episode,
    counts of repeated and left-out episodes, counts by end, and the means of figures that agents logged."""
    figures: dict[str, float] = {}
    for name in sorted({group.outcomes.environment for group in groups if group.outcomes is not None} - {""}):
        pairs = ((group.outcomes, score) for group, score in zip(groups, scores, strict=True))
        own = [(outcomes, score) for outcomes, score in pairs if outcomes is not None and outcomes.environment == name]
        rewards = np.concatenate([score.rewards[score.valid.astype(bool)] for _, score in own])
        turns = [each for outcomes, _ in own for each in outcomes.turns]
        reasons = Counter(reason for outcomes, _ in own for reason in outcomes.reasons)
        log: dict[str, list[tuple[int, float]]] = {}
        for outcomes, _ in own:
            for figure, logged in outcomes.log.items():
                log.setdefault(figure, []).append(logged)
        named = {
            **({"reward": float(rewards.mean(dtype=np.float64))} if rewards.size else {}),
            "episodes": float(len(turns)),
            "turns": sum(turns) / len(turns),
            "repeated": float(sum(sum(outcomes.repeated.values()) for outcomes, _ in own)),
            "left_out": float(sum(count for reason, count in reasons.items() if reason.startswith(LEFT_OUT))),
            **{f"ended/{reason}": float(count) for reason, count in reasons.items() if not reason.startswith(LEFT_OUT)},
            **{f"log/{figure}": sum(total for _, total in sums) / sum(n for n, _ in sums) for figure, sums in log.items()},
        }
        figures |= {f"environment/{name}/{figure}": value for figure, value in named.items()}
    return figures


def staleness_metrics(staleness: Sequence[int]) -> Metrics:
    if not staleness:
        return {}
    histogram = dict(sorted(Counter(staleness).items()))
    mean, largest = sum(staleness) / len(staleness), float(max(staleness))
    return {"staleness/mean": mean, "staleness/max": largest, "staleness/histogram": histogram}


def idle_fraction(busy_seconds: float, wall_seconds: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy_seconds / wall_seconds)) if wall_seconds > 0 else 0.0


def _distribution(prefix: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    array = np.asarray(values, np.float64)
    return {f"{prefix}/mean": float(array.mean()), f"{prefix}/max": float(array.max()), f"{prefix}/min": float(array.min())}


def union(spans: Sequence[Span]) -> list[Span]:
    """Return the same points as disjoint spans in order, without empty spans."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one span runs."""
    return sum(end - start for start, end in union(spans))


class SpanClock:
    """Accounts wall time to phases, step by step. A phase counts while at least one of its spans runs. A step is the time from
    one `close_step` to the next, which splits a span that runs across it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._step_start = clock()
        self._ended: dict[str, list[Span]] = {}
        self._running: dict[int, tuple[str, float]] = {}
        self._ids = count()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Account the time inside the block, also if the block raises."""
        key, start = next(self._ids), self._clock()
        self._running[key] = (phase, start)
        try:
            yield
        finally:
            del self._running[key]
            self._ended.setdefault(phase, []).append((start, self._clock()))

    def add(self, phase: str, start: float, end: float) -> None:
        """Add a span measured elsewhere, on the same clock. Time before the current step is not counted."""
        self._ended.setdefault(phase, []).append((start, end))

    def close_step(self) -> dict[str, float]:
        """End the step now. Returns its `timing/all`, `timing/PHASE` and `timing/non_overlap_PHASE` in seconds."""
        begin, now = self._step_start, self._clock()
        inside = {phase: [(max(start, begin), min(end, now)) for start, end in ended] for phase, ended in self._ended.items()}
        for phase, start in self._running.values():
            inside.setdefault(phase, []).append((max(start, begin), now))
        timing = {"timing/all": now - begin}
        for phase, found in inside.items():
            timing[f"timing/{phase}"] = covered(found)
            for start, end in union(found):
                spans_file.log.add(phase, start, end, phase)
        update = inside.get(UPDATE, [])
        for phase in NON_OVERLAP_PHASES:
            if phase in inside:
                timing[f"timing/non_overlap_{phase}"] = covered(inside[phase] + update) - covered(update)
        self._step_start, self._ended = now, {}
        return timing
