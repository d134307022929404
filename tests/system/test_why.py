"""`sluice why` of a real run in which one delay after the other is planted, each a hundred times as long as all else. Then its
launcher is killed: nothing outlives it, and what was done is explained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.runs import ROOT, Live, all_gone, eventually, everyone, here, one_line, sluice, started, steps

pytestmark = pytest.mark.timeout(400)

END = 240.0  # seconds that anything may take
SETTINGS = (
    "training.steps=100000",
    "training.groups_per_step=8",
    "training.staleness=0",
    "sampling.max_new_tokens=32",
    "algorithm.kl_coefficient=0",
    "services.trainer.processes=2",
)
# What is slow while a file of that name is there: the rewards, and the second of two rollouts.
RULE = """
import time
from pathlib import Path
from sluice import RuleContext, rule

@rule("slow")
def slow(text: str, label: str, context: RuleContext) -> float:
    if Path(__file__).with_name("score").exists():
        time.sleep(0.2)
    return float(len(set(text)))
"""
ROLLOUT = """
import time
from pathlib import Path
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.weights.receiver import StagedWeights

step_, take_ = TorchRolloutEngine._step, StagedWeights._take_all

def step(self):
    began = time.monotonic()
    step_(self)
    if Path(__file__).with_name("generate").exists():
        time.sleep(0.1 + 9 * (time.monotonic() - began))

def take(self, *arguments):
    if Path(__file__).with_name("publish").exists():
        time.sleep(4)
    return take_(self, *arguments)

TorchRolloutEngine._step, StagedWeights._take_all = step, take
"""


def why(run: Path, *options: str) -> dict[str, Any]:
    done = here("why", str(run), "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    whole = sum(step["end"] - step["start"] for step in found["steps"])
    assert sum(total["seconds"] for total in found["totals"]) == pytest.approx(whole, abs=1e-6)
    return found


def blamed(run: Path, *options: str) -> tuple[str, str]:
    """What most of a run's time went to, and to whom; as a person is told it, too."""
    first = why(run, *options)["totals"][0]
    whom = f" by {first['process']}" if first["process"] else ""
    assert f"of the time went to {first['cause']}{whom} – " in " ".join(here("why", str(run), *options).stdout.split())
    return first["cause"], first["process"]


def published(run: Path, steps_: str) -> list[list[Any]]:
    """Return the parts of these steps that were weight syncs."""
    return [part for step in why(run, "--steps", steps_)["steps"] for part in step["parts"] if part[0] == "publish"]


def delayed(run: Live, file: Path, named: str = "") -> str:
    """`--steps` of two steps that were slow from their beginning to their end. `named`: what the status says meanwhile."""
    file.touch()
    first = run.steps() + 1  # the one that is under way was quick at first
    if named:
        eventually(lambda: named in sluice("status", str(run.folder)).stdout, END, f"a status with {named}")
    run.reaches(first + 2, END)
    file.unlink()
    return f"{first}:{first + 1}"


def test_who_is_slow_is_named_and_a_run_whose_launcher_was_killed_is_explained(config: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(RULE)
    (tmp_path / "sitecustomize.py").write_text(ROLLOUT)
    rollouts = f"services.rollout=[{{max_num_seqs: 16}}, {{max_num_seqs: 16, env: {{PYTHONPATH: '{tmp_path}:{ROOT}'}}}}]"
    rules = f"rewards.rules=[{{name: '{tmp_path}/slow.py:slow'}}]"
    with started(config, *SETTINGS, rollouts, rules, folder=tmp_path / "run") as run:
        run.reaches(1)
        score = delayed(run, tmp_path / "score", "(generated, reward-0, ")
        generate, publish = (delayed(run, tmp_path / name) for name in ("generate", "publish"))
        # Spans are written once a second: a kill loses the newest, and with them the process that the last step waited for.
        eventually(lambda: {each[3] for each in published(run.folder, publish)} == {"rollout-1"}, END, "the spans of rollout-1")
        family = everyone(run)
        assert len(family) >= 7  # itself, coordinator, rollouts, reward, ranks
        run.process.kill()
        run.wait(END)
        all_gone(family)
    assert blamed(run.folder, "--steps", score) == ("score", "reward-0")
    assert blamed(run.folder, "--steps", generate) == ("generate", "rollout-1")
    assert blamed(run.folder, "--steps", publish) == ("publish", "rollout-1")
    found = [step["step"] for step in why(run.folder)["steps"]]
    assert found == list(range(len(found))) and len(found) >= len(steps(run.folder)) - 1  # the newest may not be committed
    assert [step["step"] for step in why(run.folder, "--steps", "1:2")["steps"]] == [1, 2]
    for steps_, said in (
        ("5:3", "error: --steps: '5:3' ends before it begins; a range is a:b, with a at most b"),
        ("x", "error: --steps: 'x' is neither a number nor a range a:b"),
        ("90000:", f"error: {run.folder}: no step was made of --steps 90000:"),
    ):
        for command in ("why", "trace"):
            told = here(command, str(run.folder), "--steps", steps_)
            assert (told.returncode, one_line(told.stderr)) == (2, said)
    shutil.rmtree(run.folder / "spans")  # the ledger alone knows less
    assert blamed(run.folder, "--steps", generate) == ("generate", "rollout-1")
    assert blamed(run.folder, "--steps", publish) == ("publish", "")


def test_what_is_no_runs_folder_is_the_users_to_mend(tmp_path: Path) -> None:
    for command in ("why", "trace"):
        told = here(command, str(tmp_path))
        assert told.returncode == 2 and str(tmp_path) in one_line(told.stderr)
    told = here("trace", str(tmp_path / "none"), "--output", str(tmp_path))
    assert told.returncode == 2 and str(tmp_path / "none") in one_line(told.stderr)
