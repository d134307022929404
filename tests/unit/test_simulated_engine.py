"""Continuous batching in a simulation, beside sums by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runtime.simulation.cores import Cores
from runtime.simulation.costs import Costs
from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.loop import BEGAN, SimulatedLoop, SimulatedWorld

STEP, SEQUENCE = 1.0, 0.25  # a step of B sequences takes 1 + B / 4 seconds
COSTS = Costs(decode_step=STEP, decode_sequence=SEQUENCE, prefill_token=0.5)


def run(main: Callable[[SimulatedEngine, list[tuple[str, float]]], Coroutine[Any, Any, None]], slots: int) -> dict[str, float]:
    """When each sequence ended, in seconds from the beginning."""
    loop = SimulatedLoop("0", SimulatedWorld())  # type: ignore[abstract]
    ended: list[tuple[str, float]] = []
    try:
        loop.run(main(SimulatedEngine(loop, COSTS, slots, Cores(loop, 0)), ended))
    finally:
        loop.end()
    return {name: at - BEGAN for name, at in ended}


def submit(engine: SimulatedEngine, ended: list[tuple[str, float]], name: str, tokens: int, prompt: int = 0) -> None:
    def done() -> None:
        ended.append((name, asyncio.get_running_loop().time()))

    engine.submit(name, prompt, tokens, lambda: None, done)


def test_a_step_takes_longer_the_more_sequences_it_has() -> None:
    async def main(engine: SimulatedEngine, ended: list[tuple[str, float]]) -> None:
        submit(engine, ended, "short", 2)
        submit(engine, ended, "long", 6)
        await asyncio.sleep(100)
        assert engine.busy == pytest.approx(8.0)

    # Two steps of 1.5 s, then four of 1.25 s.
    assert run(main, slots=4) == pytest.approx({"short": 3.0, "long": 8.0})


def test_what_has_no_slot_waits_for_one() -> None:
    async def main(engine: SimulatedEngine, ended: list[tuple[str, float]]) -> None:
        for name in ("first", "second", "third"):
            submit(engine, ended, name, 4)
        await asyncio.sleep(100)

    assert run(main, slots=1) == pytest.approx({"first": 5.0, "second": 10.0, "third": 15.0})


def test_a_prompt_is_read_before_the_next_token() -> None:
    async def main(engine: SimulatedEngine, ended: list[tuple[str, float]]) -> None:
        submit(engine, ended, "one", 4, prompt=6)
        await asyncio.sleep(100)

    assert run(main, slots=1) == pytest.approx({"one": 3.0 + 5.0})


def test_a_pause_takes_no_tokens_and_what_is_withdrawn_gives_its_slot_back() -> None:
    async def main(engine: SimulatedEngine, ended: list[tuple[str, float]]) -> None:
        submit(engine, ended, "withdrawn", 100)
        submit(engine, ended, "next", 4)
        await asyncio.sleep(10)
        engine.pause()
        await asyncio.sleep(7)
        engine.go_on()
        engine.withdraw("withdrawn")
        await asyncio.sleep(100)

    assert run(main, slots=1) == pytest.approx({"next": 17.0 + 5.0})


def test_it_is_drained_once_the_last_sequence_ends_and_begins_none_meanwhile() -> None:
    async def main(engine: SimulatedEngine, ended: list[tuple[str, float]]) -> None:
        submit(engine, ended, "running", 4)
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(engine.drained())
        await asyncio.sleep(0)
        submit(engine, ended, "waiting", 4)
        await draining
        ended.append(("drained", asyncio.get_running_loop().time()))
        await asyncio.sleep(100)

    assert run(main, slots=2) == pytest.approx({"running": 5.0, "drained": 5.0, "waiting": 10.0})
