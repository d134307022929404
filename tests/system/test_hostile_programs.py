"""Hostile programs in a real sandbox: none reaches what is outside, and nothing of them is there when it is closed."""

from __future__ import annotations

import asyncio

import pytest

from tests.sandboxes import needs_bwrap
from tests.system.hostile_programs import HostileProgram, carry_out, programs

PROGRAMS = list(programs())
SLOW = ("timeout", "cpu")  # on a machine that is busy, whatever else a program would have met


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 40
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_it_neither_escapes_nor_stays(program: HostileProgram) -> None:
    needs_bwrap()
    ending = asyncio.run(carry_out(program))
    assert ending.touched == []
    assert not ending.told, ending.said
    assert ending.left == []
    assert ending.reason in (*program.reasons, *SLOW), ending
