"""How idle the rollouts are told to be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime import timeouts
from runtime.coordinator import metrics_recorder
from runtime.coordinator.metrics_recorder import BusyMeter
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
            gauges={"busy_seconds_total": busy, "decode_steps_total": 10 * busy, "tokens_total": 30 * busy},
            pid=1,
            address="",
            uptime_seconds=0.0,
        )


class Pool:
    def __init__(self, *rollouts: Working):
        self.serving = rollouts
        self.gateways = ()


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
    assert first["rollout/decode_seconds"] == pytest.approx(0.1)
    assert again == {"idle/rollout": first["idle/rollout"]}  # nothing was told since
