"""Hostile programs in a real sandbox: none reaches what is outside, and nothing of them is there when it is closed."""

from __future__ import annotations

import asyncio

import pytest

from tests.sandboxes import needs_bwrap
from tests.system.hostile_programs import HostileProgram, carry_out, programs

PROGRAMS = list(programs())
# Those that are ended at a limit take as long as it is, and there are many of each kind: these always, all in `make test-long`.
BRIEF = {
    *("fork bomb", "memory of many children", "disk: empty files", "endless output", "silent"),
    *("an answer that is forged", "stopping its parent", "deaf to signals"),
}
SLOW = ("timeout", "cpu")  # on a machine that is busy, whatever else a program would have met


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 40
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


def marked(program: HostileProgram) -> object:
    ends_by_itself = "" in program.reasons
    return pytest.param(program, id=program.name, marks=() if ends_by_itself or program.name in BRIEF else pytest.mark.long)


@pytest.mark.parametrize("program", [marked(program) for program in PROGRAMS])
def test_it_neither_escapes_nor_stays(program: HostileProgram) -> None:
    needs_bwrap()
    ending = asyncio.run(carry_out(program))
    assert ending.touched == []
    assert not ending.told, ending.said
    assert ending.left == []
    assert ending.reason in (*program.reasons, *SLOW), ending
