"""A step's figures from their parts, the arithmetic of spans, and how idle the rollouts are told to be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime import timeouts
from runtime.coordinator import metrics_recorder
from runtime.coordinator.metrics_recorder import COUNTED, BusyMeter, Load
from runtime.errors import Unanswered
from runtime.status import Status
from runtime.telemetry import metrics
from runtime.telemetry.metrics import SpanClock, StepFigures, WeightSyncFigures, covered, ours, step_metrics, union
from runtime.types import GeneratedGroup, Outcomes, PolicyVersion, Scores, StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def generated(prompt: int, responses: list[int], truncated: int = 0) -> GeneratedGroup:
    told = {"prompt_tokens": prompt, "response_tokens": responses, "truncated": truncated, "payload": b""}
    return GeneratedGroup(group_id=1, oldest=PolicyVersion(), newest=PolicyVersion(), **told)  # type: ignore[arg-type]


def scored(rewards: list[float], valid: list[int], **rules: list[float]) -> Scores:
    return Scores(
        group_id=1,
        rewards=np.array(rewards, np.float32),
        valid=np.array(valid, np.uint8),
        rules={rule: np.array(values, np.float32) for rule, values in rules.items()},
    )


def figures(**changes: object) -> StepFigures:
    fields: dict[str, object] = {
        "generated": [generated(10, [4, 8], truncated=1), generated(20, [6, 2])],
        "scores": [scored([1.0, 0.5], [1, 1], accuracy=[1, 0], format=[0, 1]), scored([0.0, 9.0], [1, 0], accuracy=[0, 9])],
        "staleness": [0, 2, 2, 1],
        "timing": {"timing/all": 0.5, "timing/rollout": 0.4, "timing/update": 0.2},
        "trained": StepResult(metrics={"actor/pg_loss": -0.1, "actor/grad_norm": 0.3}, seconds=0.2),
        "world_size": 4,
        "queues": {"ready": 3},
        "idle": {"trainer": 0.25},
        "rollouts": {"rollout/serving": 2.0},
        "weight_sync": WeightSyncFigures(seconds=0.1, pause_seconds=0.01, bytes=1000, aborts=1, epoch=3),
    }
    return StepFigures(**(fields | changes))  # type: ignore[arg-type]


def test_a_step_has_every_name_that_applies() -> None:
    expected: dict[str, dict[str, Any]] = {
        "timing": {"all": 0.5, "rollout": 0.4, "update": 0.2},
        "prompt_length": {"mean": 15.0, "max": 20.0, "min": 10.0},
        "response_length": {"mean": 5.0, "max": 8.0, "min": 2.0, "clip_ratio": 0.25},
        "score": {"masked": 1.0, "mean": 0.5, "max": 1.0, "min": 0.0},
        "accuracy_rewards": {"mean": pytest.approx(1 / 3)},
        "format_rewards": {"mean": 0.5},
        "staleness": {"mean": 1.25, "max": 2.0, "histogram": {0: 1, 1: 1, 2: 2}},
        "actor": {"pg_loss": -0.1, "grad_norm": 0.3},
        "queue": {"ready": 3.0},
        "idle": {"trainer": 0.25},
        "weight_sync": {"seconds": 0.1, "pause_seconds": 0.01, "bytes": 1000.0, "aborts": 1.0, "epoch": 3.0}
        | {f"{phase}_seconds": 0.0 for phase in ("gather", "wait", "copy", "hash", "stage", "swap")},
        "rollout": {"serving": 2.0},
    }
    alone = {"e2e_tps": 40.0, "update_tps": pytest.approx(100.0), "rollout_tps": pytest.approx(50.0), "incarnation": 0.0}
    sizes = {"world_size": 4.0, "global_batch_size": 2.0, "n_samples_per_prompt": 2.0, "samples": 4.0, "tokens": 20.0}
    named = {f"{group}/{name}": value for group, values in expected.items() for name, value in values.items()}
    assert step_metrics(figures()) == named | alone | sizes


def test_throughput_follows_from_the_sizes_that_are_logged() -> None:
    groups = [generated(10, [1]), generated(40, [2, 3])]  # which weigh by sample
    assert metrics.size_metrics(groups, 8) == {"world_size": 8.0, "global_batch_size": 2.0, "n_samples_per_prompt": 1.5}
    found = step_metrics(figures(generated=groups, incarnation=2))
    assert (found["prompt_length/mean"], found["response_length/mean"], found["incarnation"]) == (30.0, 2.0, 2.0)
    assert found["e2e_tps"] == pytest.approx((30 + 2) * 2 * 1.5 / 4 / 0.5, rel=1e-12)


def test_points_of_0_2_are_read_under_the_names_of_today() -> None:
    found = step_metrics(figures())
    former = {name.replace("weight_sync/", "publication/"): value for name, value in found.items()}
    assert ours(former) == ours(found) == found != former


def test_samples_are_episodes_and_lengths_are_of_their_branches() -> None:
    played = structs.replace(
        generated(10, [4, 8, 6], truncated=1), rewards=[1.0, float("nan")]
    )  # two, of three branches in all
    found = step_metrics(figures(generated=[played, generated(20, [6, 2])], staleness=[1, 1, 0, 0]))
    assert (found["samples"], found["tokens"], found["n_samples_per_prompt"]) == (4.0, 26.0, 2.0)
    assert (found["response_length/mean"], found["response_length/clip_ratio"]) == (26 / 5, 1 / 5)
    # All rows' tokens with their prompts, by accelerator and second.
    assert found["e2e_tps"] == pytest.approx((26 + 3 * 10 + 2 * 20) / 4 / 0.5)


def test_masked_samples_are_counted_by_reason() -> None:
    one, other = scored([0.0, 1.0, 0.0], [0, 1, 0]), scored([0.0], [0])
    one.errors, other.errors = {"timeout": 1, "remote:UNAVAILABLE": 1}, {"timeout": 2}
    found = {name: value for name, value in metrics.score_metrics([one, other]).items() if "errors" in name}
    assert found == {"score/errors/timeout": 3.0, "score/errors/remote:UNAVAILABLE": 1.0}
    other.errors = {f"remote:{i}": 1 for i in range(100)}
    named = [name for name in metrics.score_metrics([one, one, other]) if "errors" in name]
    assert named[:2] == ["score/errors/timeout", "score/errors/remote:UNAVAILABLE"]
    assert len(named) == 8


def test_masked_samples_never_count_as_zero() -> None:
    assert metrics.score_metrics([scored([5.0, 5.0], [0, 0], accuracy=[5, 5])]) == {"score/masked": 2.0}
    assert metrics.score_metrics([scored([2.0, 7.0], [1, 0])])["score/mean"] == 2.0
    # A rule whose samples were all masked has no mean, even where another group's samples are valid.
    found = metrics.score_metrics([scored([1.0], [1], a=[1]), scored([1.0], [0], b=[1])])
    assert "b_rewards/mean" not in found and found["a_rewards/mean"] == 1.0


def test_what_was_not_measured_is_left_out() -> None:
    found = step_metrics(figures(generated=[], scores=[], staleness=[], timing={"timing/all": 1.0}, weight_sync=None))
    assert found["update_tps"] == found["rollout_tps"] == 0.0
    assert not {"staleness/mean", "score/mean", "weight_sync/seconds"} & found.keys()


@pytest.mark.parametrize(("busy", "seconds", "idle"), [(3.0, 4.0, 0.25), (5.0, 4.0, 0.0), (1.0, 0.0, 0.0)])
def test_idle_fraction(busy: float, seconds: float, idle: float) -> None:
    assert metrics.idle_fraction(busy, seconds) == idle


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def cells(found: Sequence[tuple[float, float]]) -> set[int]:
    """A span on integers, as the unit cells it covers."""
    return {cell for start, end in found for cell in range(int(start), int(end))}


@given(spans)
def test_spans_against_sets_of_cells(left: list[tuple[int, int]]) -> None:
    merged = union(left)
    assert cells(merged) == cells(left)
    assert all(merged[i][1] < merged[i + 1][0] for i in range(len(merged) - 1))
    assert covered(left) == len(cells(left))


def test_the_clock_accounts_phases_once_and_splits_them_at_steps() -> None:
    clock = Clock()
    spans = SpanClock(clock)
    with spans.span("rollout"):  # runs through both steps, in two replicas
        with spans.span("rollout"):
            clock.now = 101.0
            spans.add("rule_reward", 99.0, 100.5)  # began before the step
            spans.add("rule_reward", 100.25, 100.75)
            spans.add("update", 100.5, 101.0)
        clock.now = 102.0
        assert spans.close_step() == {
            "timing/all": 2.0,
            "timing/rollout": 2.0,
            "timing/rule_reward": 0.75,
            "timing/update": 0.5,
            "timing/non_overlap_rule_reward": 0.5,
        }
        clock.now = 105.0
    with pytest.raises(RuntimeError), spans.span("reward_model"):
        clock.now = 106.0
        raise RuntimeError
    assert spans.close_step() == {
        "timing/all": 4.0,
        "timing/rollout": 3.0,
        "timing/reward_model": 1.0,
        "timing/non_overlap_reward_model": 1.0,
    }
    clock.now = 107.0
    assert spans.close_step() == {"timing/all": 1.0}


# ---------------------------------------------------------------------------------------------------------- environments
def played(environment: str, reasons: list[str], turns: list[int], **rest: Any) -> GeneratedGroup:
    outcomes = Outcomes(environment=environment, reasons=reasons, turns=turns, **rest)
    return structs.replace(generated(10, [4, 8]), outcomes=outcomes)


def test_each_environment_has_figures_of_its_own() -> None:
    groups = [
        played("maze", ["completed", "max_turns"], [1, 4], log={"moves": (2, 6.0)}, repeated={"a": 1, "b": 2}),
        generated(10, [4, 8]),
        played("shop", ["completed", "completed"], [2, 2]),
        played("maze", ["completed", "left out: slow"], [3, 0], log={"moves": (1, 9.0), "walls": (1, 0.5)}),
        played("", ["completed"], [1]),  # which no environment plays
    ]
    rewards = ([1.0, 0.0], [9.0, 9.0], [0.5, 0.25], [0.5, 7.0], [1.0])
    scores = [scored(each, [1, 1][: len(each)] if each[-1] != 7.0 else [1, 0]) for each in rewards]
    maze = {"reward": 0.5, "episodes": 4.0, "turns": 2.0, "repeated": 3.0, "left_out": 1.0}
    maze |= {"ended/completed": 2.0, "ended/max_turns": 1.0, "log/moves": 5.0, "log/walls": 0.5}
    shop = {"reward": 0.375, "episodes": 2.0, "turns": 2.0, "repeated": 0.0, "left_out": 0.0, "ended/completed": 2.0}
    expected = {f"environment/maze/{name}": value for name, value in maze.items()}
    expected |= {f"environment/shop/{name}": value for name, value in shop.items()}
    assert metrics.environment_metrics(groups, scores) == expected
    assert "environment/shop/reward" in step_metrics(figures(generated=groups, scores=scores))
    untrained = metrics.environment_metrics([played("maze", ["left out: slow"], [1])], [scored([1.0], [0])])
    assert "environment/maze/reward" not in untrained and untrained["environment/maze/left_out"] == 1.0


# ---------------------------------------------------------------------------------------------- what rollouts and gateways tell
class Working:
    """A rollout that has worked for so many seconds at each question."""

    def __init__(self, *seconds: float):
        self._seconds = list(seconds)
        self.asked = asyncio.Event()

    async def status(self) -> Status:
        busy = self._seconds.pop(0)
        if not self._seconds:
            self.asked.set()
            self._seconds = [busy]
        of_a_second = {"busy_seconds": 1, "decode_steps": 10, "tokens": 40}
        gauges = {f"{name}_total": each * busy for name, each in of_a_second.items()}
        return Status(role="rollout", name="rollout-0", state="ready", gauges=gauges)


class Pool:
    def __init__(self, *rollouts: Working | Telling, gateways: tuple[Telling, ...] = ()):
        self.serving = rollouts
        self.gateways = gateways

    def units(self, role: str = "rollout") -> tuple[Working | Telling, ...]:
        return self.gateways if role == "gateway" else self.serving


async def looks(meter: BusyMeter, enough: asyncio.Event, tell: Callable[[Load], None] = lambda _: None) -> None:
    running = asyncio.create_task(meter.run(tell))
    await asyncio.wait_for(enough.wait(), 10)
    running.cancel()


def test_a_long_step_is_as_idle_as_all_of_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy at first, and idle when the step ends: the time before counts too."""
    clock: Any = iter(range(1_000))
    monkeypatch.setattr(metrics_recorder, "now", lambda: float(next(clock)))
    monkeypatch.setattr(timeouts, "STATUS_INTERVAL", 0.0)

    async def measured() -> tuple[dict[str, float], dict[str, float]]:
        rollout = Working(0.0, 2.0, 4.0, 4.0, 4.0)
        meter = BusyMeter(Pool(rollout), silence=1e9)  # type: ignore[arg-type]
        await looks(meter, rollout.asked)
        first = meter.close_step()
        return first, meter.close_step()

    first, again = asyncio.run(measured())
    assert 0 < first["idle/rollout"] < 1  # the last intervals alone would say 1
    assert first["rollout/batch"] == 4.0
    assert first["rollout/decode_seconds"] == pytest.approx(0.1)
    assert again == {"idle/rollout": first["idle/rollout"]}  # nothing was told since


def test_what_waits_and_how_full_the_rooms_are_is_told_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STATUS_INTERVAL", 0.0)
    seen: list[Load] = []

    async def measured() -> dict[str, float]:
        own, shared, gateway = Telling("rollout", OWN), Telling("rollout", SHARED), Telling("gateway", GATEWAY)
        meter = BusyMeter(Pool(own, shared, gateways=(gateway,)), silence=1e9)  # type: ignore[arg-type]
        third = asyncio.Event()

        def told(load: Load) -> None:
            seen.append(load)
            if len(seen) == 3:
                third.set()

        await looks(meter, third, told)
        return meter.close_step()

    figures = asyncio.run(measured())
    assert seen[0]._replace(calls=0, preempted=0) == Load(
        slots=24, running=20, waiting=5, kv_use=0.3, preempted=0, calls=0, episodes=7, unasked=9
    ), "of shared room alone, and a mean over both rollouts"
    assert (seen[0].calls, seen[0].preempted) == (0, 0), "counters of before the first look are of nobody knows when"
    assert [(look.calls, look.preempted) for look in seen[1:]] == [(3, 2)] * 2
    assert figures["rollout/waiting"] == 5
    assert figures["rollout/kv_use"] == pytest.approx(0.7)
    assert figures["rollout/preemptions"] >= 2 * 2


ROLLOUT = {"slots": 8, "running": 8, "waiting": 2, "kv_use": 0.8, "kv_shared": 0.0, "preemptions_total": 0}
OWN = {**ROLLOUT, **dict.fromkeys(COUNTED, 0.0)}
SHARED = {**OWN, "slots": 16, "running": 12, "waiting": 3, "kv_use": 0.6, "kv_shared": 1.0, "preemptions_total": 50}
GATEWAY = dict.fromkeys(("episodes_total", "forks_total", "overridden_total", "malformed_calls_total", "loop_lag_p99"), 0.0)
GATEWAY |= {"episodes": 7, "waiting": 9, "calls_total": 100}
GROWTH = {"preemptions_total": 2, "calls_total": 3}  # of those that have any


class Telling:
    """A process whose counters grow from look to look; from then on `silent`, it answers nothing."""

    name, silent = "", False

    def __init__(self, role: str, gauges: dict[str, float]):
        self._role, self._gauges = role, dict(gauges)

    async def status(self) -> Status:
        if self.silent:
            raise Unanswered(self.name, "Status", "did not answer", 0.0)
        told = dict(self._gauges)
        for name, more in GROWTH.items():
            if told.get(name):
                self._gauges[name] += more
        return Status(role=self._role, name=self._role, gauges=told)


def test_a_rollout_that_tells_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look that comes so many seconds after its last word."""
    clock = itertools.count()
    monkeypatch.setattr(metrics_recorder, "now", lambda: float(next(clock)))
    monkeypatch.setattr(timeouts, "STATUS_INTERVAL", 0.0)
    good, stopped, lost = Telling("rollout", OWN), Telling("rollout", OWN), asyncio.Event()
    stopped.silent, said = True, list[tuple[object, str]]()

    class Lossy:
        def lose(self, rollout: object, reason: str) -> None:
            said.append((rollout, reason))
            pool.serving = (good,)
            lost.set()

    pool: Any = Pool(good, stopped)
    pool.register = Lossy()

    asyncio.run(looks(BusyMeter(pool, silence=20.0), lost))
    assert said == [(stopped, "no status for 20 s (deadlines.keepalive)")]
    assert next(clock) > 20


def test_a_step_whose_samples_could_not_be_scored_says_so_while_it_runs() -> None:
    assert "not scored 5 of 20" in metrics_recorder.line({"score/masked": 5.0, "samples": 20.0})
    assert "not scored" not in metrics_recorder.line({"score/masked": 0.0, "samples": 20.0})
    assert metrics_recorder.line({"score/mean": 0.5, "trackers/dropped": 2.0}) == "reward 0.50  trackers miss 2"
