"""Processes that live and do not go on: each is found, named, ended and followed by another, and the run goes on to its end."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.system.runs import eventually, started, steps

pytestmark = pytest.mark.timeout(600)

END = 240.0  # seconds that a run may take
LIMIT = 4.0
SETTINGS = (
    "training.steps=30",
    "checkpoint.every=1",
    f"deadlines.stall={{loop: {LIMIT}, forward: {LIMIT}, decode: {LIMIT}}}",
    "services.coordinator.restarts.backoff=0",
)

# Sleeps once in a step, in C code that has released the interpreter's lock, as a kernel that never ends does.
HANGS = """
import ctypes, os
from pathlib import Path
from sluice import policy_loss

@policy_loss("hangs", zero_without_advantage=True)
def hangs(inputs, options):
    hung = Path(__file__).with_name("hung")
    if inputs.logp.requires_grad and os.environ.get("RANK", "0") == "{rank}" and Path(__file__).with_name("go").exists():
        if not hung.exists():
            hung.touch()
            ctypes.CDLL(None).pause()
    from runtime.algorithms.losses import ppo
    return ppo(inputs, options)
"""


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1)])
def test_a_call_that_never_returns_ends_its_process_alone(config: Path, tmp_path: Path, ranks: int, rank: int) -> None:
    (tmp_path / "mine.py").write_text(HANGS.replace("{rank}", str(rank)))
    own = (f"algorithm.loss={tmp_path / 'mine.py'}:hangs", f"services.trainer.processes={ranks}")
    with started(config, *SETTINGS, *own, folder=tmp_path / "run") as run:
        run.reaches(4)
        (tmp_path / "go").touch()
        assert run.wait(END) == 0, run.output + run.errors
    assert sorted({point["step"] for point in steps(run.folder)}) == list(range(1, 31))
    told = next(line for line in run.output.splitlines() if "no progress" in line)
    named = f"trainer-0: run: {f'rank {rank}: ' if ranks > 1 else ''}no progress in forward of micro-batch"
    assert named in told
    assert f"deadlines.stall.forward: {LIMIT:g} s" in told
    stacks = (run.folder / "logs/trainer-0.log").read_text()
    assert 'mine.py", line' in stacks
    assert "in hangs" in stacks
    if ranks > 1:
        assert "other ranks wait for it in collective" in told
        (recorded,) = json.loads((run.folder / "logs/trainer-0.rank0.flight.json").read_text())
        assert recorded["entries"][-1]["state"] != "completed"


def test_whoever_is_stopped_is_followed(config: Path, tmp_path: Path) -> None:
    """Long before `deadlines.silence`, whatever its role; of two ranks the one that was stopped is named. A launcher that is
    stopped is waited for."""
    names = ("reward-0", "rollout-0", "reference-0", "coordinator", "trainer-0")
    two = ("training.steps=100000", "services.trainer.processes=2")
    with started(config, *SETTINGS, *two, folder=tmp_path / "run") as run:
        run.reaches(4)
        for name in names:
            rank = int(name == "trainer-0")
            run.member(name, rank).suspend()
            run.says(f"{name}: run: {f'rank {rank}: ' if rank else ''}is stopped: its event loop has not run", END)
            before = run.steps()
            eventually(lambda before=before: run.steps() > before + 1, END, f"a step after {name} was stopped")
        launcher, before, told = psutil.Process(run.process.pid), run.steps(), run.output.count("is stopped")
        launcher.suspend()
        eventually(lambda: run.steps() > before + 50, END, "steps without the launcher")
        launcher.resume()
        assert run.output.count("is stopped") == told
        run.interrupt()
        assert run.wait(END) == 0, run.output + run.errors
