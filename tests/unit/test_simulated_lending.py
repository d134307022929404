"""A trainer's devices that generate while it waits, beside sums by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime.simulation.cores import Cores
from runtime.simulation.costs import Costs, Fixed
from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.lending import Lending
from runtime.simulation.loop import BEGAN, SimulatedLoop, SimulatedWorld
from runtime.simulation.prediction import simulated
from services.rpc.client import ContractDeadlines
from tests.unit.test_simulate import configured

Moves = list[tuple[float, bool]]


def moves(main: Callable[[Lending], Coroutine[Any, Any, None]], move: float | None) -> Moves:
    """When the devices were lent and taken back, in seconds from the beginning."""
    loop = SimulatedLoop("0", SimulatedWorld())  # type: ignore[abstract]
    found: Moves = []

    class Noted:
        def lend(self, lent: bool) -> None:
            found.append((round(loop.time() - BEGAN, 6), lent))

    try:
        loop.run(main(Lending(loop, move, Noted())))
    finally:
        loop.end()
    return found


async def steps(lending: Lending, waits: list[float]) -> None:
    """One wait in each step, and a second of training."""
    for wait in waits:
        lending.begin_step()
        lending.offer()
        await asyncio.sleep(wait)
        await lending.take_back()
        await asyncio.sleep(1.0)


def test_devices_are_lent_once_waits_are_worth_two_moves_and_each_move_takes_its_time() -> None:
    # The first wait, of 10 s, is only measured: until 11 s. The second is from 11 s; they are away from 13 s, and back at 23 s.
    assert moves(lambda lending: steps(lending, [10.0, 10.0]), 2.0) == [(13.0, True), (21.0, False)]


def test_waits_that_are_too_short_are_left_alone() -> None:
    assert moves(lambda lending: steps(lending, [3.0] * 5), 2.0) == []
    assert moves(lambda lending: steps(lending, [10.0] * 5), None) == []


def test_one_that_is_called_back_on_the_way_returns_in_as_long() -> None:
    async def main(lending: Lending) -> None:
        await steps(lending, [10.0])
        lending.begin_step()
        lending.offer()
        await asyncio.sleep(0.5)
        await lending.take_back()
        assert asyncio.get_running_loop().time() - BEGAN == pytest.approx(11.0 + 0.5 + 0.5)

    assert moves(main, 2.0) == []


def test_who_helps_takes_sequences_and_gives_slots() -> None:
    loop = SimulatedLoop("0", SimulatedWorld())  # type: ignore[abstract]
    ended: list[float] = []

    async def main() -> None:
        engine = SimulatedEngine(loop, Costs(decode_step=1.0, decode_sequence=0.25), 2, Cores(loop, 0))
        engine.help(1.0)
        for _ in range(4):
            engine.submit("one", 0, 2, lambda: None, lambda: ended.append(loop.time() - BEGAN))
        await asyncio.sleep(100)

    try:
        loop.run(main())
    finally:
        loop.end()
    assert ended == pytest.approx([3.0] * 4)  # two steps, each of two sequences on either device


def test_a_run_whose_rollouts_are_too_few_gains(tmp_path: Path) -> None:
    config = configured(tmp_path / "run")
    costs = Costs(reply_tokens=Fixed(32.0), decode_step=1e-3, decode_sequence=1e-3, train_token=1e-5)
    seconds = {}
    for lend in (None, 0.0):
        seconds[lend] = simulated(config, replace(costs, lend=lend), ContractDeadlines(config), 15).observed.seconds["step"]
    assert seconds[0.0] < 0.9 * seconds[None]
