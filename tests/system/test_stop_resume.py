"""Ends that are asked for, and going on after them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from runtime.ledger.checkpoint import read_position
from runtime.ledger.checkpoint import steps as checkpoints
from runtime.ledger.reader import LedgerReader
from tests.system.runs import LONG, belonging, check_gone, one_line, started, steps, summary, trained, write_config

pytestmark = pytest.mark.timeout(300)

ORDERLY = 90.0  # seconds that a run may take to drain, save and end, on a busy machine
RUN = 120.0


def test_ctrl_c_saves_and_the_run_goes_on_where_it_was(config: Path, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(config, *LONG, folder=folder) as run:
        run.reaches(3)
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

    trained(config, f"training.steps={done + 4}", "run.resume=auto", folder=folder, timeout=RUN)
    second = summary(folder)
    assert second["stop_reason"] == "all steps done"
    assert [point["step"] for point in steps(folder)] == list(range(1, done + 5))
    assert checkpoints(folder)[-1] == done + 4
    with LedgerReader(folder / "ledger") as reader:
        assert reader.check_final(4)["retired"] == 4 * (done + 4)
        trained_on = sorted(group.problem for group in reader.groups() if group.why is None)
    assert len(set(trained_on)) == len(trained_on)  # less than an epoch: no prompt came twice
    # The reference is the model that the run began with, so what the policy has learned shows in the divergence at once.
    resumed = [point for point in steps(folder) if point["step"] == done + 1]
    assert resumed[0]["actor/kl_loss"] > 1e-9
    assert f"reference: {tiny / 'model'}" in (folder / "config.yaml").read_text()


def test_a_sigterm_to_every_process_saves_as_well(config: Path, tmp_path: Path) -> None:
    """As a scheduler gives it that ends a job: to the launcher, the services, and what starts ranks and they alike."""
    with started(config, *LONG, "services.trainer.processes=2", "deadlines.stop=60", folder=tmp_path / "run") as run:
        run.reaches(3)
        for process in belonging(run.folder):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        assert run.wait(ORDERLY) == 0, run.output + run.errors
        check_gone(run.folder)
    assert summary(run.folder)["stop_reason"] == "interrupted"
    assert checkpoints(run.folder)[-1] == summary(run.folder)["steps"]
    AutoModelForCausalLM.from_pretrained(run.folder / "model")


def test_ctrl_c_twice_ends_at_once(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.reaches(2)
        run.member("trainer-0").suspend()  # so that it does not end in order
        run.interrupt()
        run.says("stopping")
        run.interrupt()
        assert run.wait(ORDERLY) == 130
        check_gone(run.folder)
        assert "Traceback" not in run.output + run.errors


@pytest.mark.parametrize(
    ("phase", "codes"),
    [("starting", (0, 130)), ("evaluating", (0,))],  # what has not begun has nothing to save: it may be stopped at once
)
def test_ctrl_c_before_training_ends_the_run_in_time(tiny: Path, tmp_path: Path, phase: str, codes: tuple[int, ...]) -> None:
    config = write_config(tmp_path / "config.yaml", tiny, evaluation={"before": True, "problems": 0, "samples": 64})
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.says(phase)
        run.interrupt()
        assert run.wait(ORDERLY) in codes, run.output + run.errors
        check_gone(run.folder)
        assert not run.errors
        assert "Traceback" not in run.output


def test_a_run_ends_when_its_hours_are_over(config: Path, tmp_path: Path) -> None:
    run = trained(config, *LONG, "stop.hours=0.0005", folder=tmp_path / "run", timeout=RUN)
    result = summary(run.folder)
    assert "hours are over" in result["stop_reason"]
    assert 1.8 <= result["rl_seconds"] <= ORDERLY
    assert result["groups"]["retired"] == 4 * result["steps"]


def test_a_run_ends_when_it_is_as_accurate_as_wanted(tiny: Path, tmp_path: Path) -> None:
    rule = tmp_path / "anything.py"
    rule.write_text(
        'from runtime.rewards.rules import rule\n\n\n@rule("anything")\ndef anything(text, label, context):\n    return 1.0\n'
    )
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards={"rules": [{"name": f"{rule}:anything"}]},
        evaluation={"every": 3},
        stop={"accuracy": 0.99},
    )
    run = trained(config, "training.steps=100000", folder=tmp_path / "run", timeout=RUN)
    result = summary(run.folder)
    assert "accuracy 100.0% reached 99.0%" in result["stop_reason"]
    assert result["steps"] >= 3


def test_a_checkpoint_of_another_order_of_prompts_is_refused(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(config, "training.steps=1", folder=folder, timeout=RUN)
    with started(config, "training.steps=2", "run.resume=auto", "run.seed=99", folder=folder) as run:
        assert run.wait(RUN) == 2, run.output + run.errors
        check_gone(folder)
        assert "run.seed" in one_line(run.errors)
