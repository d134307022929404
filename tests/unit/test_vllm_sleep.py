"""What vLLM is told as the engine sleeps and wakes on an accelerator, by an engine whose core only notes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.commands import Level
from runtime.errors import InvariantViolated
from runtime.rollout.engine import EngineStats
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from runtime.types import PolicyVersion


class Core:
    dead = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.told.append("abort")

    async def pause(self, forget: bool) -> None:
        self.told.append("pause")

    async def resume(self) -> None:
        self.told.append("resume")

    async def outstanding(self) -> list[Any]:
        return []

    async def load(self, locations: Sequence[Any]) -> list[str]:
        self.told.append("load")
        return []

    async def sleep(self) -> None:
        self.told.append("sleep")

    async def wake(self, tags: Sequence[str]) -> None:
        self.told.append(tuple(tags))


@pytest.mark.parametrize("sleeps", [True, False])
def test_weights_come_back_first_and_vllm_goes_on_with_the_cache(sleeps: bool) -> None:
    engine = object.__new__(VLLMRolloutEngine)
    engine._core = core = Core()  # type: ignore[assignment]
    engine._sleeps, engine._level, engine._swap_timeout = sleeps, Level.AWAKE, 5.0
    engine._running, engine._withdrawn, engine.torn = {}, [], False
    engine._waiting, engine.version = deque(), PolicyVersion()
    engine._name, engine._stats = "rollout-0", EngineStats()

    async def go() -> None:
        await engine.sleep()
        with pytest.raises(InvariantViolated, match="asleep"):
            await engine.swap(PolicyVersion(0, 1))
        await engine.wake(cache=False)
        engine._staged = ([], [])
        await engine.swap(PolicyVersion(0, 1))
        await engine.wake()
        await engine.sleep()
        await engine.wake()

    asyncio.run(go())
    on_device = ["sleep", ("weights",), "load", ("kv_cache",), "sleep", ("weights", "kv_cache")]
    assert core.told == (on_device if sleeps else ["pause", "load", "resume", "pause", "resume"])
