"""Processes that live and do not go on: each is found, named, ended and followed by another, and the run goes on. Ctrl-C twice
ends it even though its trainer is stopped."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.system.runs import SOON, Live, check_gone, eventually, started

pytestmark = pytest.mark.timeout(600)

END = 240.0  # seconds that a run may take
LIMIT = 4.0
SETTINGS = (
    "training.steps=100000",
    "checkpoint.every=1",
    f"deadlines.watchdog={{loop: {LIMIT}, forward: {LIMIT}, decode: {LIMIT}}}",
)

# Sleeps once in a step, in C code that has released the interpreter's lock, as a kernel that never ends does.
HANGS = """
import ctypes, os
from pathlib import Path
from sluice import policy_loss

@policy_loss("hangs", zero_without_advantage=True)
def hangs(inputs, options):
    hung = Path(__file__).with_name("hung")
    if inputs.logp.requires_grad and os.environ.get("RANK", "0") == "1" and Path(__file__).with_name("go").exists():
        if not hung.exists():
            hung.touch()
            ctypes.CDLL(None).pause()
    from runtime.algorithms.losses import ppo
    return ppo(inputs, options)
"""


@pytest.mark.long
def test_whoever_makes_no_progress_is_named_and_followed(config: Path, tmp_path: Path) -> None:
    """A rank in a call that never returns; then one process of each role, stopped, long before `deadlines.keepalive`. A
    launcher that is stopped is waited for."""
    (tmp_path / "mine.py").write_text(HANGS)
    own = (f"algorithm.loss={tmp_path / 'mine.py'}:hangs", "services.trainer.processes=2")
    with started(config, *SETTINGS, *own, folder=tmp_path / "run", modules=SOON) as run:
        run.reaches(4)
        (tmp_path / "go").touch()
        run.says("no progress", END)
        goes_on(run)
        hung = next(line for line in run.output.splitlines() if "no progress" in line)
        for name in ("reward-0", "rollout-0", "reference-0", "coordinator", "trainer-0"):
            rank = int(name == "trainer-0")
            run.member(name, rank).suspend()
            run.says(f"{name}: run: {f'rank {rank}: ' if rank else ''}is stopped: its event loop has not run", END)
            goes_on(run)
        launcher, told = psutil.Process(run.process.pid), run.output.count("is stopped")
        launcher.suspend()
        goes_on(run, steps=20)
        launcher.resume()
        goes_on(run)
        assert run.output.count("is stopped") == told
        run.member("trainer-0").suspend()  # so that it does not end in order
        run.interrupt()
        run.says("stopping")
        run.interrupt()
        assert run.wait(END) == 130
        check_gone(run.folder)
        assert "Traceback" not in run.errors
    assert "trainer-0: run: rank 1: no progress in forward of micro-batch" in hung
    assert f"deadlines.watchdog.forward: {LIMIT:g} s" in hung
    assert "other ranks wait for it in collective" in hung
    stacks = (run.folder / "logs/trainer-0.log").read_text()
    assert "in hangs" in stacks or "hangs (" in stacks  # what the process wrote, what py-spy found
    (recorded,) = json.loads((run.folder / "logs/trainer-0.rank0.flight.json").read_text())
    assert recorded["entries"][-1]["state"] != "completed"


def goes_on(run: Live, steps: int = 2) -> None:
    before = run.steps()
    eventually(lambda: run.steps() >= before + steps, END, f"{steps} more steps after step {before}")
