"""The run's context and history, its supervisor, the recorder of the steps' metrics and load, and the probes of weights."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from runtime import timeouts, types
from runtime.chosen_algorithm import choose
from runtime.cluster.topology import devices_each, instances, settings_of, uses_reference
from runtime.commands import RolePort
from runtime.config import Computing, Config
from runtime.coordinator.buffer import Buffer, DynamicSampling, Group
from runtime.coordinator.pools import Roles, RolloutPool
from runtime.coordinator.register import Member, Register, UnitState, member_of
from runtime.data.prepared import Prompts
from runtime.data.prompts import group_seed
from runtime.errors import InvariantViolated, ServiceFault, SluiceError, UserError
from runtime.evaluation.results import HeldOut
from runtime.ledger.journal import LedgerWriter, Note
from runtime.ledger.states import Mark
from runtime.process import spans, waiting
from runtime.process.keys import GATEWAY, Keys
from runtime.process.waiting import now
from runtime.rewards.scorer import UnscoredSteps
from runtime.status import Loss, Progress, Status
from runtime.telemetry.metrics import Metrics, SpanClock, StepFigures, WeightSyncFigures, idle_fraction, step_metrics
from runtime.telemetry.startup import NOT_COUNTED, TOTAL, Startup
from runtime.telemetry.summary import Totals
from runtime.telemetry.trackers import Trackers
from runtime.types import GroupRequest, Holder, PolicyVersion, SamplingParams, StepResult, TextDecoder

COURSE = "course"  # the key of the ledger's note with a run's progress, for a coordinator that takes over

log = logging.getLogger("sluice")


# ---- Run context: what a run has been given, and its history over all attempts


class RunHistory(Struct):
    """The progress of a run over all attempts. `folder` is the checkpoint with which the next attempt begins: the newest one of
    this run, else the one that the run resumes, else "", the beginning. What a former run left in the folder does not count."""

    folder: str = ""
    version: PolicyVersion = PolicyVersion()
    """All steps up to this version are over: applied, copied into memory (`checkpoint.in_memory`), published and recorded."""
    attempts: int = 0  # attempts that have ended
    totals: Totals = msgspec.field(default_factory=Totals)
    accuracy: dict[int, float] = {}  # the results of evaluations, by step
    evaluating: int | None = None  # the step whose evaluation runs beside training
    evaluated_before: bool = False  # the evaluation before training is done, or not wanted
    accuracy_before: float | None = None
    skipped_evaluations: int = 0
    rl_began: float = 0.0  # when the first prompt was admitted, on the loop's clock
    rl_seconds: float = 0.0  # from `rl_began` to the end of the last step
    best_step: int = 0  # the last step of any attempt
    attempts_without_progress: int = 0  # in a row
    alarm: str = ""
    """The newest alarm: a rollout whose log-probabilities are too far from the trainer's, or a checkpoint without room."""
    alarms: int = 0  # probes over the limit
    at_folder: Totals = msgspec.field(default_factory=Totals)

    def saved(self, folder: Path, totals: Totals) -> None:
        """Record a complete checkpoint; `totals` are those of its steps."""
        self.folder, self.at_folder = str(folder.absolute()), totals

    def lost(self, step: int) -> None:
        """Record that the attempt ended at `step`."""
        self.attempts += 1
        self.attempts_without_progress = 0 if step > self.best_step else self.attempts_without_progress + 1
        self.best_step = max(self.best_step, step)

    def go_back(self) -> None:
        """Go back to the checkpoint: the steps after it will be done again."""
        self.totals, self.evaluating = self.at_folder.copy(), None

    def is_at(self, folder: Path) -> bool:
        """Return True if the next attempt would begin with the checkpoint `folder`."""
        return bool(self.folder) and Path(self.folder).resolve() == folder.resolve()

    @property
    def newest_accuracy(self) -> float | None:
        return self.accuracy[max(self.accuracy)] if self.accuracy else None


class RunState(Struct, kw_only=True):
    """The progress of the `run`, and the `models` that made its newest step. `rl_seconds`: since the first prompt was admitted,
    0 before that; a duration, because a machine may correct its time of day."""

    run: str
    models: list[Member]
    history: RunHistory
    rl_seconds: float = 0.0


def run_state(context: RunContext, roles: Roles) -> RunState:
    models, history = [member_of(model) for model in roles.models], context.history
    seconds = now() - history.rl_began if history.rl_began else 0.0
    return RunState(run=context.run, models=models, history=history, rl_seconds=seconds)


def save_run_state(context: RunContext, roles: Roles) -> None:
    context.ledger.record(Note(key=COURSE, value=types.encode(run_state(context, roles))))


@dataclass(kw_only=True)
class EvaluationContext:
    """The inputs of an evaluation besides its roles."""

    config: Config
    trackers: Trackers
    held_out: list[HeldOut]
    text: TextDecoder
    stop_token_ids: tuple[int, ...]
    supervisor: RunSupervisor
    keys: Keys | None = None  # the coordinator's

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


@dataclass(kw_only=True)
class RunContext(EvaluationContext):
    """The inputs of a training run besides its roles."""

    ledger: LedgerWriter
    train: Prompts
    epoch: float  # the seconds since the epoch when the loop's clock shows 0: the ledger's times do not jump
    launched: float  # when the user started the run, on the loop's clock
    history: RunHistory
    spans: SpanClock = field(default_factory=lambda: SpanClock(now))
    run: str = ""  # the id of this start of the run by its user
    term: int = 1  # one more with each coordinator of the ledger
    startup: Startup = field(default_factory=lambda: Startup(phases={}))  # so far
    holders: Callable[[], Awaitable[Collection[Holder]]] | None = None  # the agents that hold blobs now; None: none does

    def time(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self.epoch + now()

    @property
    def sampling(self) -> SamplingParams:
        sampling = self.config.sampling
        return SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            **sampling.filters,
            experts_from=0 if self.config.moe.router_replay == "routing" else -1,
            stop_token_ids=self.stop_token_ids,
        )


def needs(config: Config) -> Mark:
    """Return the marks that a group must have before training. Raises UserError if the advantage needs a missing critic."""
    wanted = Mark.SCORED
    if uses_reference(config):
        wanted |= Mark.REFERENCED
    if config.critic is not None:
        wanted |= Mark.VALUED
    elif choose(config).advantage.needs_values:
        raise UserError(f"critic: missing; algorithm.advantage {config.algorithm.advantage} needs one")
    return wanted


def accelerators(config: Config) -> int:
    """Count the devices of all computing processes that have their own."""
    roles = [settings_of(config, instance) for instance in instances(config)]
    own = [role for role in roles if isinstance(role, Computing) and not role.colocate]
    return sum(map(devices_each, own))


# ---- Supervisor: the process around the run


class RunSupervisor:
    """Runs the coordinator's logic in a process: shows its progress, and starts lost processes again."""

    restarts = True  # of trainer and critic after a loss; if not, a loss ends the run

    def __init__(self, register: Register, progress: Progress):
        self._register, self._progress = register, progress
        self.interrupted = False  # the run is to end: a later loss ends it, and no evaluation begins
        self._watchers: set[asyncio.Event] = set()

    def step_over(self) -> None:
        """Note that a step is over: an elastic group may grow now."""

    def vacated(self) -> None:
        """Note that trainer or critic is lost and its devices are free: another may begin there."""

    def report(self, progress: Progress) -> None:
        lost = self._register.units("", UnitState.LOST)
        losses = [Loss(name=unit.name, incarnation=unit.incarnation, reason=unit.reason) for unit in lost]
        self._progress = replace(progress, lost=losses, stopping=self.interrupted)
        for watcher in self._watchers:
            watcher.set()

    async def watch(self, _: None) -> AsyncGenerator[Progress, None]:
        """Yield the progress at each change. Changes that come together yield once."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                progress = self._progress
                yield progress
                if progress.phase in ("finished", "failed"):
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)


# ---- Recorder: the metrics of each step, and the rollouts' load


class TrainedStep(Struct, kw_only=True):
    """One step, applied and published."""

    step: int
    groups: list[Group]
    result: StepResult
    weight_sync: WeightSyncFigures | None  # None: without weight sync


COUNTED = ("busy_seconds_total", "decode_steps_total", "tokens_total")
_OF_GATEWAYS = ("episodes", "calls", "forks", "overridden", "malformed_calls")


class Load(NamedTuple):
    """The gauges of all rollouts and gateways at one sample, summed."""

    slots: int
    running: float  # sequences with a slot
    waiting: float  # sequences without a slot or room
    kv_use: float  # share of the room that sequences share, 0 to 1, a mean over the rollouts
    preempted: float  # sequences, since the sample before
    calls: float  # of the policy, since the sample before
    episodes: float  # that programs play
    unasked: float  # tasks that wait for a program


def load_of(before: Mapping[Any, Mapping[str, float]], now: Mapping[Any, Mapping[str, float]]) -> Load | None:
    """Sum the gauges `now`, of counters the growth since `before`. Return None if no rollout reported."""
    rollouts = [gauges for gauges in now.values() if "slots" in gauges]
    gateways = [gauges for gauges in now.values() if "episodes" in gauges]
    if not rollouts:
        return None

    def grown(counter: str) -> float:
        return sum(gauges[counter] - before[key][counter] for key, gauges in now.items() if key in before and counter in gauges)

    return Load(
        slots=int(sum(gauges["slots"] for gauges in rollouts)),
        running=sum(gauges["running"] for gauges in rollouts),
        waiting=sum(gauges["waiting"] for gauges in rollouts),
        kv_use=sum(gauges["kv_use"] * gauges["kv_shared"] for gauges in rollouts) / len(rollouts),
        preempted=grown("preemptions_total"),
        calls=grown("calls_total"),
        episodes=sum(gauges["episodes"] for gauges in gateways),
        unasked=sum(gauges["waiting"] for gauges in gateways),
    )


class BusyMeter:
    """Measures the rollouts' busy time and decode steps. A rollout without a status for `silence` seconds is lost."""

    def __init__(self, pool: RolloutPool, silence: float):
        self._pool, self._silence = pool, silence
        self._heard: dict[RolePort, float] = {}  # time of the newest status, or of the first request
        self._counts: dict[RolePort, dict[str, float]] = {}
        self._idle = 0.0
        self._grown = defaultdict[str, float](float)  # growth since the last step, over all rollouts; `there`: seconds

    def close_step(self) -> dict[str, float]:
        """Return the metrics since the last step: the rollouts' idle fraction and decode steps, and the gateways' figures.
        Without any status since then, return the last idle fraction alone."""
        grown, self._grown = self._grown, defaultdict(float)
        if grown["there"]:
            self._idle = idle_fraction(grown["busy_seconds_total"], grown["there"])
        figures = {"idle/rollout": self._idle}
        if steps := grown["decode_steps_total"]:
            figures["rollout/batch"] = grown["tokens_total"] / steps
            figures["rollout/decode_seconds"] = grown["busy_seconds_total"] / steps
        if looks := grown["looks"]:
            figures["rollout/waiting"] = grown["waiting"] / looks
            figures["rollout/kv_use"] = grown["kv_use"] / looks
            figures["rollout/preemptions"] = grown["preempted"]
        if grown["gateways"]:
            figures |= {f"gateway/{name}": grown[f"{name}_total"] for name in _OF_GATEWAYS}
            figures["gateway/loop_lag_p99"] = grown["loop_lag_p99"]
        return figures

    async def run(self, on_load: Callable[[Load], None]) -> None:
        """Measure until cancelled, over what answered at both ends of an interval. Call `on_load` with each sample."""
        then = now()
        while True:
            before, self._counts = self._counts, await self._ask()
            asked = now()
            for role in before.keys() & self._counts.keys():
                self._add(before[role], self._counts[role], asked - then)
            then = asked
            if (load := load_of(before, self._counts)) is not None:
                uses = [counts["kv_use"] for counts in self._counts.values() if "kv_use" in counts]
                sums = {"looks": 1, "waiting": load.waiting, "kv_use": sum(uses) / len(uses), "preempted": load.preempted}
                for name, value in sums.items():
                    self._grown[name] += value
                on_load(load)
            await asyncio.sleep(timeouts.STATUS_INTERVAL)

    def _add(self, before: dict[str, float], counts: dict[str, float], seconds: float) -> None:
        if "loop_lag_p99" in counts:
            self._grown["gateways"] += 1
            self._grown["loop_lag_p99"] = max(self._grown["loop_lag_p99"], counts["loop_lag_p99"])
            counted: Sequence[str] = [f"{name}_total" for name in _OF_GATEWAYS]
        else:
            self._grown["there"] += seconds
            counted = COUNTED
        for name in counted:
            self._grown[name] += counts[name] - before[name]

    async def _ask(self) -> dict[RolePort, dict[str, float]]:
        asked = [*self._pool.units(), *self._pool.units(GATEWAY)]
        found: dict[RolePort, dict[str, float]] = {}
        self._heard = {each: self._heard.get(each, now()) for each in asked}
        answers = await asyncio.gather(*(each.status() for each in asked), return_exceptions=True)
        for each, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Status):
                found[each], self._heard[each] = answer.gauges, now()
            elif not isinstance(answer, ServiceFault):
                raise answer
            elif now() - self._heard[each] >= self._silence:
                self._pool.register.lose(each, f"no status for {self._silence:g} s (deadlines.keepalive)")
        return found


class MetricsRecorder:
    """Collects and logs the metrics of the steps."""

    def __init__(
        self,
        context: RunContext,
        roles: Roles,
        pool: RolloutPool,
        buffer: Buffer,
        dynamic_sampling: DynamicSampling | None,
        evaluate: Callable[[int], Awaitable[None]] | None,
    ):
        """Begin with an attempt. `evaluate`: begins an evaluation beside training, of the version after so many steps."""
        self._context, self._roles, self._pool, self._buffer = context, roles, pool, buffer
        self._dynamic_sampling, self._evaluate, self._world_size = dynamic_sampling, evaluate, accelerators(context.config)
        self._unscored = UnscoredSteps()
        self.meter = BusyMeter(pool, context.config.deadlines.keepalive)
        self.probes = Probes(context, pool, buffer.ready_changed)
        self.newest: Metrics = {}
        self.evaluated: Metrics = {}  # the metrics of the newest evaluation
        self.stepped = 0.0  # when the newest step was recorded, on the loop's clock
        self.first_applied = 0.0  # when all of the first step was submitted, on the loop's clock

    async def finished(self, trained: TrainedStep) -> None:
        """Record a step: its metrics, an evaluation if one is due, and the stop conditions. Call it for each step, in order."""
        context, history, step = self._context, self._context.history, trained.step + 1
        config, alarms = context.config, history.alarms
        history.version = self._buffer.version(step)
        await self.step(trained)
        if TOTAL not in (phases := context.startup.phases):  # start-up ended when the trainer had the first step's whole batch
            phases["first step"] = self.first_applied - history.rl_began
            phases[TOTAL] = self.first_applied - context.launched - phases.get(NOT_COUNTED, 0.0)
            await waiting.done(lambda: context.startup.write(context.folder), context.folder)
        if config.stop.hours and now() - history.rl_began >= config.stop.hours * 3600:
            self._buffer.stop(f"{config.stop.hours:g} hours are over")
        if config.mismatch.action == "stop" and history.alarms > alarms:
            self._buffer.stop(f"mismatch.action is stop: {history.alarm}")
        if self._evaluate is not None and self.evaluates(step):
            await self._evaluate(step)
        save_run_state(context, self._roles)
        self.report("training")

    def evaluates(self, step: int) -> bool:
        """Return True if version `step` is to be evaluated beside training."""
        every = self._context.config.evaluation.every
        return self._evaluate is not None and every > 0 and step % every == 0 and step < self._buffer.last_step

    def report(self, phase: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        figures, history = self.figures, self._context.history
        if (newest := history.newest_accuracy) is not None:
            figures["eval/accuracy"] = newest
        step, steps = self._buffer.committed, self._context.config.training.steps
        if phase == "training":
            done, total = step, steps
        shown, alarm = detail or line(figures), history.alarm
        progress = Progress(phase=phase, step=step, steps=steps, done=done, total=total, detail=shown, alarm=alarm)
        self._context.supervisor.report(progress)

    async def step(self, trained: TrainedStep) -> None:
        """Log the step's metrics. Then raises ServiceFault if replies get no score (`UnscoredSteps`)."""
        timing = self._context.spans.close_step()
        generated = [group.generated for group in trained.groups if group.generated is not None]
        scores = [group.scores for group in trained.groups if group.scores is not None]
        probed = self.probes.close_step(self._buffer.version(trained.step), trained.result.probes)
        counts = self._buffer.counts()
        queues = {name: counts[name] for name in ("admitted", "generating", "generated", "ready")}
        metrics = step_metrics(
            StepFigures(
                generated=generated,
                scores=scores,
                staleness=[trained.step - group.oldest.step for group in generated for _ in range(group.n)],
                timing=timing,
                trained=trained.result,
                world_size=self._world_size,
                incarnation=self._buffer.incarnation,
                queues=queues | {"limit": self._buffer.limit, "depth": self._buffer.depth},
                idle={"trainer": idle_fraction(trained.result.seconds, timing["timing/all"])},
                weight_sync=trained.weight_sync,
                rollouts=self._pool.close_step() | self.meter.close_step() | probed,
                dynamic_sampling=self._dynamic_sampling.close_step() if self._dynamic_sampling else {},
            )
        )
        trackers = self._context.trackers
        if trackers.dropped:
            metrics["trackers/dropped"] = float(trackers.dropped)
        self._context.history.totals.add(metrics)
        self.newest, self.stepped = metrics, now()
        await trackers.log(trained.step + 1, metrics)
        self._unscored.step(scores, last=trained.step + 1 >= self._buffer.last_step)

    @property
    def figures(self) -> dict[str, float]:
        """The metrics of the newest step, without histograms."""
        return {name: value for name, value in self.newest.items() if isinstance(value, float)}

    async def evaluation(self, step: int, metrics: Metrics) -> None:
        self.evaluated = metrics | {"eval/skipped": float(self._context.history.skipped_evaluations)}
        await self._context.trackers.log(step, self.evaluated)


def gap(figures: dict[str, float]) -> str:
    """Format the difference between rollouts and trainer; "" if nothing was compared."""
    shown = (("abs_logprob", "mean"), ("abs_logprob_p99", "p99"), ("max", "max"), ("worst_rollout", "worst rollout"))
    parts = [f"{what} {figures[f'mismatch/{name}']:.1e}" for name, what in shown if f"mismatch/{name}" in figures]
    return f"|Δ log p| {', '.join(parts)}" if parts else ""


def line(figures: dict[str, float]) -> str:
    """Format the figures for which a progress bar has room."""
    shown = (
        ("eval/accuracy", "accuracy {:.1%}", 1),
        ("score/mean", "reward {:.2f}", 1),
        ("timing/all", "{:.0f} ms/step", 1000),
        ("staleness/mean", "staleness {:.1f}", 1),
        ("mismatch/abs_logprob_p99", "log p gap {:.0e}", 1),
        ("trackers/dropped", "trackers miss {:.0f}", 1),
    )
    parts = [form.format(figures[name] * scale) for name, form, scale in shown if name in figures]
    if masked := figures.get("score/masked"):
        parts.append(f"not scored {masked:.0f} of {figures['samples']:.0f}")
    return "  ".join(parts)


# ---- Probes of the rollouts' weights
#
# Each rollout must sample with the trainer's weights. Once a version is committed, every serving rollout continues the same
# short prompt with it. The trainer computes the log-probabilities of the same tokens before its next update. So every version
# is measured, whatever the staleness, and a rollout that reports a swap but kept its old weights is detected.


PROMPT_TOKENS = 64  # at most: the last tokens of a training prompt, another prompt for each version
NEW_TOKENS = 8  # at most
FIRST_ID = -(1 << 62)  # one group id a version: far from the ids of training, which count up from 0, and of evaluations


class Probes:
    """Probes each rollout that reaches the committed version. A probe without an answer is counted, and fails nothing."""

    def __init__(self, context: RunContext, pool: RolloutPool, answered: asyncio.Event):
        """Subscribe to the pool. `answered` is set after each answer or missed deadline."""
        config = context.config
        self._prompts, self._seed = context.train.tokens, config.run.seed
        self._limit, self._seconds = config.mismatch.limit, config.weight_sync.commit_timeout
        sampling = context.sampling
        self._sampling = replace(sampling, max_new_tokens=min(NEW_TOKENS, sampling.max_new_tokens))
        self._pool, self._answered = pool, answered
        self._history, self._spans = context.history, context.spans
        self._version: PolicyVersion | None = None
        self._asked: dict[Member, asyncio.Task[bytes | None]] = {}
        self._compared: list[str] = []  # the rollouts of the probes that the trainer got last
        self.given_before = False
        """An earlier coordinator has given the trainer the probes of the next step: their rollouts are not known."""
        self._unanswered = 0
        self._off: set[str] = set()  # the rollouts whose newest probe was over the limit
        pool.subscribe(self._look)

    def close(self) -> None:
        """Stop probing and cancel all open probes. Idempotent."""
        self._pool.unsubscribe(self._look)
        self._drop()

    @property
    def pending(self) -> bool:
        return not all(asked.done() for asked in self._asked.values())

    async def answers(self, version: PolicyVersion) -> list[bytes]:
        """Return the rollouts' answers for `version`, once each has answered or run out of time. `close_step` must follow."""
        self._compared, self._unanswered = [], 0
        if version != self._version or self.given_before:
            return []
        while self.pending:
            with self._spans.span("probe"):
                await asyncio.wait(self._asked.values())
        found = [(member.name, asked.result()) for member, asked in self._asked.items()]
        answers = [(name, answer) for name, answer in found if answer is not None]
        self._compared, self._unanswered = [name for name, _ in answers], len(found) - len(answers)
        return [answer for _, answer in answers]

    def close_step(self, version: PolicyVersion, gaps: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the step that trained `version`, and raise an alarm for each gap over the limit. `gaps`: the
        trainer's mean |Δ log p| of each probe, in nats."""
        for name, gap in zip(self._compared, gaps, strict=not self.given_before):
            if not self._limit or gap <= self._limit:
                self._off.discard(name)
                continue
            message = (
                f"{name}, version {version}: its log-probabilities are {gap:.3g} nats from the trainer's on average, more than "
                f"mismatch.limit {self._limit:g}; it has other weights or computes in another dtype (sluice validate)"
            )
            self._history.alarms += 1
            if name not in self._off:
                self._history.alarm = message
                log.warning("%s", message)
            self._off.add(name)
        self.given_before = False
        figures = {"mismatch/probes": float(len(gaps)), "mismatch/unanswered": float(self._unanswered)}
        finite = [gap for gap in gaps if math.isfinite(gap)]
        return figures | ({"mismatch/worst_rollout": max(finite)} if finite else {})

    def _look(self) -> None:
        """Probe each rollout that has reached the committed version since the last look."""
        version = self._pool.membership.committed
        if version != self._version:
            self._drop()
            self._version = version
        if version is None:
            return
        for rollout in self._pool.admitting:
            member = member_of(rollout)
            if member not in self._asked:
                self._asked[member] = asyncio.ensure_future(self._ask(rollout, version))
                self._asked[member].add_done_callback(lambda _: self._answered.set())

    def _drop(self) -> None:
        for asked in self._asked.values():
            asked.cancel()
        self._asked = {}

    async def _ask(self, rollout: RolePort, version: PolicyVersion) -> bytes | None:
        """Return the encoded group, or None if there is no answer."""
        prompt = self._prompts[version.step % len(self._prompts)][-PROMPT_TOKENS:]
        request = GroupRequest(
            group_id=FIRST_ID + version.pack(),
            prompt=prompt if len(prompt) else np.zeros(1, np.int32),  # any will do
            n=1,
            seed=group_seed(self._seed, version.step),
            sampling=self._sampling,
            purpose="probe",
        )
        began = now()
        try:
            return (await asyncio.wait_for(self._pool.generate(rollout, request), self._seconds)).payload
        except InvariantViolated:
            raise
        except (TimeoutError, SluiceError) as error:
            why = str(error) or f"no answer within {self._seconds:g} s (weight_sync.commit_timeout)"
            log.warning("%s did not answer the probe of version %s: %s", rollout.name, version, why)
            return None
        finally:
            spans.log.add("probe", began, now(), spans.CALLS, detail=rollout.name)
