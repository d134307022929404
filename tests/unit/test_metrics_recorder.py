"""How idle the rollouts are told to be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime import timeouts
from runtime.coordinator import metrics_recorder
from runtime.coordinator.admission.concurrency import Load
from runtime.coordinator.metrics_recorder import COUNTED, BusyMeter
from runtime.status import Status


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
        return Status(
            role="rollout",
            name="rollout-0",
            state="ready",
            gauges={
                "drafted_tokens_total": 20 * busy,
                "accepted_tokens_total": 10 * busy,
                "busy_seconds_total": busy,
                "decode_steps_total": 10 * busy,
                "tokens_total": 40 * busy,
            },
            pid=1,
            address="",
            uptime_seconds=0.0,
        )


class Pool:
    def __init__(self, *rollouts: Working | Telling, gateways: tuple[Telling, ...] = ()):
        self.serving = rollouts
        self.gateways = gateways


def test_a_long_step_is_as_idle_as_all_of_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy at first, and idle when the step ends: the time before counts too."""
    clock: Any = iter(range(1_000))
    monkeypatch.setattr(metrics_recorder, "now", lambda: float(next(clock)))
    monkeypatch.setattr(timeouts, "STATUS_INTERVAL", 0.0)

    async def measured() -> tuple[dict[str, float], dict[str, float]]:
        rollout = Working(0.0, 2.0, 4.0, 4.0, 4.0)
        meter = BusyMeter(Pool(rollout), silence=1e9)  # type: ignore[arg-type]
        running = asyncio.create_task(meter.run(lambda _: None))
        await asyncio.wait_for(rollout.asked.wait(), 10)
        running.cancel()
        first = meter.close_step()
        return first, meter.close_step()

    first, again = asyncio.run(measured())
    assert 0 < first["idle/rollout"] < 1  # the last intervals alone would say 1
    assert first["rollout/batch"] == 3.0
    assert (first["rollout/drafted"], first["rollout/accepted"]) == (80.0, 0.5)
    assert first["rollout/decode_seconds"] == pytest.approx(0.1)
    assert again == {"idle/rollout": first["idle/rollout"]}  # nothing was told since


def test_what_waits_and_how_full_the_rooms_are_is_told_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STATUS_INTERVAL", 0.0)
    looks: list[Load] = []

    async def measured() -> dict[str, float]:
        own, shared, gateway = Telling("rollout", OWN), Telling("rollout", SHARED), Telling("gateway", GATEWAY)
        meter = BusyMeter(Pool(own, shared, gateways=(gateway,)), silence=1e9)  # type: ignore[arg-type]
        third = asyncio.Event()

        def told(load: Load) -> None:
            looks.append(load)
            if len(looks) == 3:
                third.set()

        running = asyncio.create_task(meter.run(told))
        await asyncio.wait_for(third.wait(), 10)
        running.cancel()
        return meter.close_step()

    figures = asyncio.run(measured())
    assert looks[0]._replace(calls=0, preempted=0) == Load(
        slots=24, running=20, waiting=5, kv_use=0.3, preempted=0, calls=0, episodes=7, unasked=9
    ), "of shared room alone, and a mean over both rollouts"
    assert (looks[0].calls, looks[0].preempted) == (0, 0), "counters of before the first look are of nobody knows when"
    assert [(look.calls, look.preempted) for look in looks[1:]] == [(3, 2)] * 2
    assert figures["rollout/waiting"] == 5
    assert figures["rollout/kv_use"] == pytest.approx(0.7)
    assert figures["rollout/preemptions"] >= 2 * 2


ROLLOUT = {"slots": 8, "running": 8, "waiting": 2, "kv_use": 0.8, "kv_shared": 0.0, "preemptions_total": 0}
OWN = {**ROLLOUT, **dict.fromkeys(COUNTED, 0.0)}
SHARED = {**OWN, "slots": 16, "running": 12, "waiting": 3, "kv_use": 0.6, "kv_shared": 1.0, "preemptions_total": 50}
GATEWAY = {
    **dict.fromkeys(("episodes_total", "forks_total", "overridden_total", "loop_lag_p99"), 0.0),
    "episodes": 7,
    "waiting": 9,
    "calls_total": 100,
}
GROWTH = {"preemptions_total": 2, "calls_total": 3}  # of those that have any


class Telling:
    """A process whose counters grow from look to look."""

    def __init__(self, role: str, gauges: dict[str, float]):
        self._role, self._gauges = role, dict(gauges)

    async def status(self) -> Status:
        told = dict(self._gauges)
        for name, more in GROWTH.items():
            if told.get(name):
                self._gauges[name] += more
        return Status(role=self._role, name=self._role, gauges=told)


def test_a_step_whose_samples_could_not_be_scored_says_so_while_it_runs() -> None:
    assert "not scored 5 of 20" in metrics_recorder.line({"score/masked": 5.0, "samples": 20.0})
    assert "not scored" not in metrics_recorder.line({"score/masked": 0.0, "samples": 20.0})
    assert metrics_recorder.line({"score/mean": 0.5, "trackers/dropped": 2.0}) == "reward 0.50  trackers miss 2"
