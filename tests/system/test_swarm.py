"""The coordinator as it is, on a virtual clock, with faults: some hundred seeds, each the same wherever it runs. And bugs that
are planted, each in a process of its own, which the swarm finds."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime import config
from tests.swarm import swarm
from tests.swarm.faults import DAMAGES, Fault
from tests.swarm.planted import BUGS, hunt

ROOT = Path(__file__).parents[2]
PARTS, SEEDS = 4, 50  # 200 seeds; `make swarm` runs more
BEHIND = {"phase"}  # behind each of these deadlines stands a command's own: see docs/simulation.md
MENDED = {
    "a weight sync of which no rollout could be a member": (1942, "cut:rollout-0@0.00638219"),
    "a reward that stalled ended the run": (905, "stop:reward-0@0.0965103"),
    "a reference that stalled ended the run": (1032, "stop:reference-0@2.36153"),
}


def traces(first: int, seeds: int) -> str:
    """Of each seed: its number, and a hash of all that happened. What runs in the other process."""
    lines = []
    for seed in range(first, first + seeds):
        with swarm.quiet(), swarm.simulation(swarm.case_of(seed)) as simulation:
            said = swarm.said(simulation, swarm.case_of(seed))
            lines.append(f"{seed} {simulation.trace} {said}")
    return "\n".join(lines)


@pytest.mark.parametrize("part", range(1, PARTS))
def test_every_seed_holds(part: int) -> None:
    mine = traces(part * SEEDS, SEEDS)
    assert [line for line in mine.splitlines() if len(line.split()) > 2] == []


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_every_seed_holds_and_gives_the_same_trace_in_another_process(part: int) -> None:
    first = part * SEEDS
    code = f"from tests.system import test_swarm; print(test_swarm.traces({first}, {SEEDS}))"
    environment = os.environ | {"PYTHONHASHSEED": str(part + 1)}
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        mine = traces(first, SEEDS)
        theirs, _ = other.communicate(timeout=300)
    finally:
        other.kill()
        other.wait()
    assert theirs.strip() == mine.strip()
    assert [line for line in mine.splitlines() if len(line.split()) > 2] == []


def test_a_ledger_that_is_damaged_between_two_lives_costs_no_prompt_and_trains_none_twice() -> None:
    """The run goes on from its checkpoint, and what is missing is said."""
    whens = ((4, 0.5), (10, 6.0), (27, 6.0), (32, 6.0), (2, 2.0))  # in the middle of a run, behind a checkpoint
    for index, what in enumerate(DAMAGES):
        seed, at = whens[index % len(whens)]
        case = swarm.case_of(seed)
        often = replace(case.config, checkpoint=config.Checkpoint(every=1, keep=2, in_memory="off"))
        case = dataclasses.replace(case, config=often, faults=(Fault("crash", at, what, rounds=seed),))
        with swarm.quiet(), swarm.simulation(case) as simulation:
            assert swarm.said(simulation, case) == "", swarm.command(case)
            lost = [
                line
                for line in simulation.said
                if re.search(r"/ledger: \d+ of the \d+ groups that step-\d{8} has trained", line)
            ]
            assert len(lost) == (what not in ("cut-70", "cut-80", "cut-90")), what  # where no trained group was in what was cut
            aside = [
                line for line in simulation.said if line.endswith("; it is set aside as ledger.broken-1, and another begun")
            ]
            assert len(aside) == (what == "garbage-0") == len(simulation.said) - len(lost)


def test_each_planted_bug_has_its_place_in_the_source() -> None:
    """tests/system plants them; this says so sooner when the source has moved on."""
    found = {name: (ROOT / f"{bug.module.replace('.', '/')}.py").read_text().count(bug.right) for name, bug in BUGS.items()}
    assert {name: count for name, count in found.items() if count != 1} == {}


@pytest.mark.parametrize(("seed", "faults"), MENDED.values(), ids=MENDED)
def test_what_a_seed_has_found_stays_mended(seed: int, faults: str) -> None:
    with swarm.quiet():
        assert swarm.verdict(dataclasses.replace(swarm.case_of(seed), faults=swarm.parse(faults))) == ""


def test_a_seed_that_breaks_something_is_shrunk_to_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rollout that is killed is said to break something: of five faults that one is left."""
    faults = "cut:rollout-0@0.1,kill:rollout-0@0.2,clock@0.3/9,slow:trainer-0@0.4/1,full@0.5+1"
    case = dataclasses.replace(swarm.case_of(3), faults=swarm.parse(faults), nodes=1)
    monkeypatch.setattr(swarm, "verdict", lambda one: "Broken: x" if any(f.kind == "kill" for f in one.faults) else "")
    command = swarm.command(swarm.shrink(case, "Broken: x"))
    assert command == "python -m tests.swarm.swarm --first 3 --seeds 1 --faults 'kill:rollout-0@0.2'"
    assert [str(fault) for fault in swarm.parse(faults)] == faults.split(",")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(BUGS.keys() - BEHIND))
def test_a_planted_bug_is_found(name: str) -> None:
    assert hunt(name, 600, seconds=400.0, first=BUGS[name].first).startswith("after ")
