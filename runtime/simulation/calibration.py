"""The costs of a simulation: assumed from the model's size, or calibrated until the simulated run matches a real run.

Calibration needs a run's folder: the ledger has lengths and durations of groups, the metrics have durations of steps. A
simulation of the same configuration writes the same two files, and `observe` reads both. So no duration has to be split into
computing and waiting: costs are scaled until the simulated figures equal the measured figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from runtime.cluster.topology import fleets, is_group
from runtime.config import Config
from runtime.config.model_checks import policy_model
from runtime.errors import UserError
from runtime.ledger.reader import GroupRow
from runtime.simulation.engine import Costs, Fixed, LogNormal, ReplyLengths

LEAST = 5  # steps
ROUNDS = 16  # the first half keep the coordinator's costs: until then the other costs explain the difference
CLOSE = 0.01  # relative to each measured figure
_FLOPS = {"cpu": 4e10, "device": 1.5e14}  # assumed FLOP/s of a process
_BYTES = {"cpu": 8e9, "device": 1e12}  # assumed bytes/s of memory reads
_COPY = {"cpu": 2e9, "device": 1e10}  # assumed bytes/s of a rank's state into host memory
_LINK = {"cpu": 1e9, "device": 1e10}  # assumed bytes/s of weights

# By measured phase: the costs that are scaled until the simulated phase takes as long.
_SCALED: dict[str, tuple[str, ...]] = {
    "generation": ("decode_step", "decode_sequence", "prefill_token"),
    "score": ("score",),
    "reference": ("reference_token",),
    "values": ("reference_token",),
    "update": ("train_token", "update"),
    "weight sync": ("weights_bytes", "swap"),
    "keep": ("keep",),
}
_STEP_FIGURES = {"step": "timing/all", "update": "timing/update", "weight sync": "timing/weight_sync", "keep": "timing/keep"}
_GROUP_SPANS = {"generation": ("generating", "generated"), "score": ("generated", "scored")}
_GROUP_SPANS |= {"reference": ("generated", "referenced"), "values": ("generated", "valued")}


class Observed(Struct):
    """Figures of a run's steps, without the first steps. `seconds`: mean durations by phase, of a group or a step."""

    samples_per_second: float
    staleness: float
    idle: dict[str, float]
    seconds: dict[str, float]
    steps: int
    error: float  # standard error of the mean step, relative to the mean


class Calibration(Struct):
    costs: Costs
    measured: Observed | None = None  # None: the costs are assumed
    simulated: Observed | None = None


def observe(points: Sequence[Mapping[str, Any]], groups: Iterable[GroupRow]) -> Observed:
    """Compute the figures of a run from its steps' metrics, without the first tenth. Raises UserError for too few steps."""
    steps = [point for point in points if "timing/all" in point]
    if len(steps) < LEAST:
        raise UserError(f"{len(steps)} steps are too few to measure anything: at least {LEAST} are needed")
    first = max(1, len(steps) // 10)
    warm, durations = steps[first:], [float(point["timing/all"]) for point in steps[first:]]
    seconds = {phase: _mean(warm, name) for phase, name in _STEP_FIGURES.items()}
    seconds |= _spans([group for group in groups if group.step is not None and group.step >= first])
    return Observed(
        samples_per_second=sum(float(point["samples"]) for point in warm) / sum(durations),
        staleness=_mean(warm, "staleness/mean"),
        idle={role: _mean(warm, f"idle/{role}") for role in ("trainer", "rollout")},
        seconds={phase: value for phase, value in seconds.items() if value > 0},
        steps=len(warm),
        error=stdev(durations) / len(durations) ** 0.5 / fmean(durations),
    )


def _mean(points: Sequence[Mapping[str, Any]], name: str) -> float:
    found = [float(point[name]) for point in points if name in point]
    return fmean(found) if found else 0.0


def _spans(groups: Sequence[GroupRow]) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase, (start, end) in _GROUP_SPANS.items():
        spans = [group.times[end] - group.times[start] for group in groups if start in group.times and end in group.times]
        if spans:
            found[phase] = max(1e-6, fmean(spans))
    return found


def assumed(config: Config, device: str, cores: int, parameters: float = 0.0) -> Costs:
    """Estimate costs from the number of parameters; 0: the configuration's model. `device`: `cpu` or `device`."""
    parameters, trainer = parameters or _parameters(config), config.services.trainer.processes
    fleet = next(iter(fleets(config).values()))
    reference = config.services.reference.processes if is_group(config, "reference") else 1
    width = 4 if device == "cpu" else 2
    token = 2 * parameters / _FLOPS[device]
    return Costs(
        prompt_tokens=config.data.max_prompt_tokens // 2 or 1,
        reply_tokens=LogNormal(max(1.0, config.sampling.max_new_tokens / 4), 0.7),
        decode_step=width * parameters / _BYTES[device] / fleet.parallel.tensor,
        decode_sequence=token / fleet.parallel.devices,
        prefill_token=token / fleet.parallel.devices,
        reference_token=token / reference,
        train_token=3 * token / trainer,
        update=12 * parameters / _BYTES[device] / trainer,
        keep=12 * parameters / _COPY[device] / trainer,
        weights_bytes=float(width * parameters),
        bandwidth=_LINK[device],
        memory=_BYTES["cpu"],
        coordinator_message=2e-4,
        coordinator_byte=3e-9,
        cores=cores,
    )


def _parameters(config: Config) -> float:
    """Estimate the policy's parameters from its matrices. Returns a billion for an unknown model."""
    model = policy_model(config)
    if model is None:
        return 1e9
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    inner = model.get("intermediate_size") or 4 * hidden
    return float(layers * (4 * hidden**2 + 3 * hidden * inner) + 2 * model.get("vocab_size", 1000) * hidden)


def calibrate(
    start: Costs, points: Sequence[Mapping[str, Any]], groups: Sequence[GroupRow], simulate: Callable[[Costs], Observed]
) -> Calibration:
    """Calibrate on the run with `points` and `groups`. `simulate`: simulates its configuration with given costs, equally long.
    Each round scales every cost by measured / simulated of its phase. The coordinator gets what no phase of a step explains."""
    measured = observe(points, groups)
    trained = [group for group in groups if group.step is not None and group.response_tokens and group.prompt_tokens]
    step, sequence = _decode_line(points, start)
    costs = replace(
        start,
        reply_tokens=ReplyLengths([group.response_tokens or [] for group in trained]),
        prompt_tokens=max(1, round(fmean(group.prompt_tokens or 0 for group in trained))),
        decode_step=step,
        decode_sequence=sequence,
        prefill_token=0.0,  # the measured decode steps include the prefill
        score=Fixed(measured.seconds.get("score", 1e-6)),
    )
    simulated = simulate(costs)
    for number in range(ROUNDS):
        if all(abs(simulated.seconds.get(phase, 0.0) / value - 1) < CLOSE for phase, value in measured.seconds.items()):
            break
        costs = _scaled(costs, measured, simulated)
        if 2 * number >= ROUNDS:
            missing = measured.seconds["step"] - simulated.seconds["step"]
            messages = 4 * len(trained) / measured.steps  # of a step: each group is generated, scored, annotated and trained
            costs = replace(costs, coordinator_message=max(0.0, costs.coordinator_message + 0.2 * missing / messages))
        simulated = simulate(costs)
    return Calibration(costs, measured, simulated)


def _scaled(costs: Costs, measured: Observed, simulated: Observed) -> Costs:
    changed: dict[str, Any] = {}
    for phase, names in _SCALED.items():
        if phase not in measured.seconds or phase not in simulated.seconds:
            continue
        factor = min(4.0, max(0.25, measured.seconds[phase] / simulated.seconds[phase]))
        for name in names:
            old = getattr(costs, name)
            changed[name] = Fixed(old.value * factor) if isinstance(old, Fixed) else old * factor
    return replace(costs, **changed)


def _decode_line(points: Sequence[Mapping[str, Any]], start: Costs) -> tuple[float, float]:
    """Fit a decode step's seconds as a line over its sequences, by least squares. Returns intercept and slope. If all batches
    are similar, the line goes through their mean with the slope of `start`."""
    steps = [point for point in points if "rollout/batch" in point]
    found = [(float(step["rollout/batch"]), float(step["rollout/decode_seconds"])) for step in steps]
    if not found:
        return start.decode_step, start.decode_sequence
    x, y = fmean(batch for batch, _ in found), fmean(seconds for _, seconds in found)
    spread = sum((batch - x) ** 2 for batch, _ in found)
    slope = sum((batch - x) * (seconds - y) for batch, seconds in found) / spread if spread > (0.1 * x) ** 2 else -1.0
    if not 0 <= slope * x <= y:
        slope = y / x * start.decode_sequence * x / (start.decode_step + start.decode_sequence * x)
    return y - slope * x, slope
