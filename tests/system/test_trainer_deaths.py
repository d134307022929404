"""Ranks of the trainer are killed and stopped at every moment of a run: it goes on from the copies in memory, no step is made
twice, and the weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.telemetry.record import read_jsonl
from tests.system.conftest import make_tiny
from tests.system.runs import SOON, Live, check_gone, eventually, started, summary
from tests.system.test_takeover import DETERMINISTIC, END, OFTEN, check_ledger

pytestmark = pytest.mark.timeout(600)

STEPS = 24
LIMIT = 4.0  # seconds after which a stopped process counts as stalled
SETTINGS = (
    *DETERMINISTIC,
    "services.trainer.processes=2",
    f"training.steps={STEPS}",
    "checkpoint.every=3",
    "evaluation.every=6",
    f"deadlines.watchdog={{loop: {LIMIT}, forward: {LIMIT}}}",
)
MEGATRON = (
    "services.trainer.engine=megatron",
    "services.trainer.processes=4",
    "services.trainer.parallel.tensor=2",
    "services.trainer.parallel.pipeline=2",
)


def send(run: Live, number: signal.Signals, *ranks: int) -> None:
    """Send a signal to ranks of the trainer that are there."""
    for rank in ranks:
        with suppress(psutil.NoSuchProcess, KeyError):
            run.member("trainer-0", rank).send_signal(number)


def goes_on(run: Live, steps: int = 2) -> None:
    at = run.steps()
    eventually(lambda: run.steps() >= min(STEPS, at + steps) or run.process.poll() is not None, END, f"a step after {at}")


def disturb(run: Live, ranks: int, chance: random.Random) -> None:
    """Every kind of death, from the first step to the last."""
    kills = [
        lambda: send(run, signal.SIGKILL, 0),
        lambda: send(run, signal.SIGKILL, ranks - 1),
        lambda: send(run, signal.SIGKILL, *range(ranks)),
        lambda: send(run, signal.SIGSTOP, chance.randrange(ranks)),
        lambda: (run.member("coordinator").kill(), send(run, signal.SIGKILL, chance.randrange(ranks))),
    ]
    run.comes(lambda: "training" in run.output, END, "the first step")
    send(run, signal.SIGKILL, 1)  # in the first step
    goes_on(run)
    for kill in kills:
        with pytest.raises(psutil.TimeoutExpired):
            run.member("coordinator").wait(chance.uniform(0.0, 0.4))
        kill()
        goes_on(run)
    eventually(lambda: run.steps() >= STEPS - 1, END, "the last step")
    send(run, signal.SIGKILL, 0)  # in the last step, or the evaluation after it


@pytest.mark.parametrize("layout", [(), pytest.param(MEGATRON, marks=pytest.mark.long)], ids=["fsdp", "megatron"])
def test_no_step_is_made_twice_whichever_rank_dies_when(config: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    if layout:
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
        layout = (*layout, f"model.path={make_tiny(tmp_path / 'tiny', kv_heads=2)}/model")
    made: dict[str, bytes] = {}
    for name in ("undisturbed", "disturbed"):
        with started(config, *SETTINGS, *layout, *OFTEN, folder=tmp_path / name, modules=SOON) as run:
            if name == "disturbed":
                disturb(run, 4 if layout else 2, random.Random(5))
            assert run.wait(END) == 0, run.output + run.errors
            check_gone(run.folder)
        made[name] = (run.folder / "model" / "model.safetensors").read_bytes()
        assert [point["step"] for point in read_jsonl(run.folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
        assert summary(run.folder)["steps"] == STEPS
        check_ledger(run.folder, 4)
        assert "goes back to its newest checkpoint" not in (run.folder / "logs" / "coordinator.log").read_text()
    assert made["disturbed"] == made["undisturbed"]
