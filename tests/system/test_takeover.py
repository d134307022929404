"""The coordinator is killed in the middle of a run, again and again: another takes up the processes that live, and what comes
out is what an undisturbed run makes."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.system.runs import SOON, Live, eventually, started, steps

pytestmark = pytest.mark.timeout(600)

END = 240.0  # seconds that a run may take
OFTEN = ("services.coordinator.restarts=1000",)
# One group is decoded at a time, a step makes two updates of its whole batch, and the loss looks at no log-probabilities of
# rollouts or references, whose last bits depend on what they compute together: so the weights depend on the tokens alone.
DETERMINISTIC = (
    "training.staleness=0",
    "services.rollout.replicas=1",
    "services.rollout.max_num_seqs=4",
    "training.mini_batch_size=2",
    "algorithm.loss=ppo",
    "algorithm.kl_coefficient=0",
)


def others(run: Live) -> dict[int, str]:
    """The processes of the run besides the coordinator, by their ids."""
    family = {one.pid: one.cmdline() for one in psutil.Process(run.process.pid).children(recursive=True)}
    return {pid: " ".join(command[2:5]) for pid, command in family.items() if "services.coordinator" not in command}


def kill_coordinator(run: Live, seconds: float) -> None:
    """Once it has trained for `seconds` more, whatever it is at; returns when another has made a step."""
    before = run.steps()
    eventually(lambda: run.steps() > before, END, "a step")
    with pytest.raises(psutil.TimeoutExpired):
        run.member("coordinator").wait(seconds)
    former = run.member("coordinator")
    former.kill()
    former.wait(END)
    at = run.steps()
    eventually(lambda: run.steps() > at or run.process.poll() is not None, END, f"a step after step {at}")


def check_ledger(folder: Path, groups_per_step: int) -> None:
    """Every group has one final state, those that were trained were generated once, and each step has its batch."""
    with LedgerReader(folder / "ledger") as ledger:
        ledger.check_final(groups_per_step)
        rows = list(ledger.groups())
    assert [row.group_id for row in rows] == list(range(len(rows)))
    assert {row.phase for row in rows} <= {Phase.RETIRED, Phase.DROPPED}
    assert {row.why for row in rows if row.phase == Phase.DROPPED} <= {"run ended"}
    assert {row.attempt for row in rows if row.phase == Phase.RETIRED} == {1}
    batches: dict[Any, list[Any]] = {}
    for row in rows:
        if row.phase == Phase.RETIRED:
            batches.setdefault(row.taken, []).append(row.place)
    assert sorted(batches) == list(range(len(batches)))
    assert all(sorted(places) == list(range(groups_per_step)) for places in batches.values())


# What Sluice itself reads of the time of day is two hours early in rollouts, and from the second coordinator on two hours late.
# gRPC reads the clock in C as well.
CLOCKS = """
import os, sys, time
late, own = os.environ["SLUICE_INCARNATION"] != "0", time.time
off = -7200.0 if late else float(os.environ.get("OFF", "0"))
def read():
    ours = sys._getframe(1).f_globals["__name__"].partition(".")[0] in ("runtime", "services")
    return own() + off * ours
time.time = read
"""


def test_it_goes_on_with_the_processes_that_it_had_and_the_weights_are_those_of_an_undisturbed_run_bit_for_bit(
    config: Path, tmp_path: Path
) -> None:
    """Whatever the clocks say."""
    (tmp_path / "sitecustomize.py").write_text(CLOCKS)
    path = f"PYTHONPATH: {tmp_path}"
    clocks = (f"services.coordinator.env={{{path}}}", f"services.rollout.env={{{path}, OFF: '7200'}}", "stop.hours=1")
    settings, chance = (*DETERMINISTIC, "training.steps=30", "checkpoint.every=7"), random.Random(11)
    made: dict[str, bytes] = {}
    for name, kills in (("undisturbed", 0), ("disturbed", 6)):
        with started(config, *settings, *(OFTEN + clocks if kills else ()), folder=tmp_path / name, modules=SOON) as run:
            run.reaches(1)
            before = others(run)
            for _ in range(kills):
                kill_coordinator(run, chance.uniform(0.0, 0.3))
                assert run.process.poll() is not None or others(run) == before
            if kills:  # once more, while the processes of the finished run are stopped
                eventually((run.folder / "summary.json").exists, END, "the summary")
                with suppress(KeyError, psutil.NoSuchProcess):  # it has ended already
                    run.member("coordinator").kill()
            assert run.wait(END) == 0, run.output + run.errors
        made[name] = (run.folder / "model" / "model.safetensors").read_bytes()
        found = steps(run.folder)
        assert sorted({point["step"] for point in found}) == list(range(1, 31))
        assert {point["weight_sync/incarnation"] for point in found if "weight_sync/incarnation" in point} <= {0}
        check_ledger(run.folder, 4)
    assert made["disturbed"] == made["undisturbed"]
