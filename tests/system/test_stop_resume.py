"""Ends that are asked for, and going on after them. Ctrl-C twice is in test_stalls.py, a SIGTERM in test_prometheus.py."""

from __future__ import annotations

import os
import pty
import select
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from runtime.ledger.checkpoint import read_position
from runtime.ledger.checkpoint import steps as checkpoints
from runtime.ledger.reader import LedgerReader
from tests.system.runs import LONG, START, check_gone, refused, started, steps, summary, trained

pytestmark = pytest.mark.timeout(300)

ORDERLY = 90.0  # seconds that a run may take to drain, save and end, on a busy machine
RUN = 120.0
RULE = """
from sluice import rule

@rule("anything")
def anything(text, label, context):
    return 1.0
"""


def test_ctrl_c_saves_and_the_run_goes_on_where_it_was_until_it_is_as_accurate_as_wanted(
    config: Path, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with started(config, *LONG, folder=folder) as run:
        run.reaches(3)
        run.member("coordinator").kill()  # another comes, which is told
        run.interrupt()
        assert run.wait(ORDERLY) == 0, run.output + run.errors
        check_gone(folder)
    first = summary(folder)
    done = first["steps"]
    assert done >= 3
    assert first["stop_reason"] == "interrupted"
    assert checkpoints(folder)[-1] == done
    assert [point["step"] for point in steps(folder)] == list(range(1, done + 1))
    AutoModelForCausalLM.from_pretrained(folder / "model")
    with LedgerReader(folder / "ledger") as reader:
        assert reader.check_final(4)["retired"] == 4 * done
        given_up = [group.problem for group in reader.groups() if group.why is not None]
    assert read_position(folder / "checkpoints" / f"step-{done:08d}").stream.returned == given_up

    # Another order of prompts is refused, once the checkpoint is read.
    assert "run.seed" in refused(config, folder, f"training.steps={done + 1}", "run.resume=auto", "run.seed=99", whole=True)

    (tmp_path / "anything.py").write_text(RULE)
    every = done // 2 + 1  # so that the first one is within the new steps
    accurate = (f"rewards.rules=[{{name: '{tmp_path / 'anything.py'}:anything'}}]", f"evaluation.every={every}")
    trained(config, *LONG[:1], *accurate, "stop.accuracy=0.99", "run.resume=auto", folder=folder, timeout=RUN)
    second, now = summary(folder), len(steps(folder))
    assert "accuracy 100.0% reached 99.0%" in second["stop_reason"]
    assert now > done
    assert [point["step"] for point in steps(folder)] == list(range(1, now + 1))
    assert checkpoints(folder)[-1] == now == done + second["steps"]
    with LedgerReader(folder / "ledger") as reader:
        assert reader.check_final(4)["retired"] == 4 * now
        trained_on = sorted(group.problem for group in reader.groups() if group.why is None)
    assert len(set(trained_on)) == len(trained_on)  # less than an epoch: no prompt came twice
    # The reference is the model that the run began with, so what the policy has learned shows in the divergence at once.
    resumed = [point for point in steps(folder) if point["step"] == done + 1]
    assert resumed[0]["actor/kl_loss"] > 1e-9
    assert f"reference: {tiny / 'model'}" in (folder / "config.yaml").read_text()


def test_a_lost_terminal_saves_as_ctrl_c_does(config: Path, tmp_path: Path) -> None:
    folder, shown = tmp_path / "run", bytearray()
    ours, theirs = pty.openpty()
    with started(config, *LONG, folder=folder, terminal=theirs) as run:
        os.close(theirs)

        def trains() -> bool:
            if select.select([ours], [], [], 0)[0]:  # nobody reads a full terminal: the run would block
                shown.extend(os.read(ours, 1 << 16))
            return run.steps() >= 2

        run.comes(trains, START, "step 2")
        os.close(ours)
        assert run.wait(ORDERLY) == 0, shown.decode()
        check_gone(folder)
    assert summary(folder)["stop_reason"] == "interrupted"
    assert checkpoints(folder)[-1] == summary(folder)["steps"] >= 2


def test_ctrl_c_before_there_is_anything_to_save_ends_the_run_in_time(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.says("starting")
        run.interrupt()
        assert run.wait(ORDERLY) in (0, 130), run.output + run.errors
        check_gone(run.folder)
        assert not run.errors
        assert "Traceback" not in run.output
