"""`sluice why` and `trace` of real runs, each with one delay planted, which is a hundred times as long as all else."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.runs import LONG, ROOT, Live, belonging, eventually, one_line, sluice, started, steps, trained
from tests.system.test_environments import SUMS, written
from tests.unit.test_trace import check_trace

pytestmark = pytest.mark.timeout(400)

END = 240.0  # seconds that a run may take
SHORT = ("training.steps=3", "training.groups_per_step=2", "algorithm.kl_coefficient=0")

RULE = """
import time
from sluice import RuleContext, rule

@rule("slow")
def slow(text: str, label: str, context: RuleContext) -> float:
    time.sleep(1)
    return float(len(set(text)))
"""
ENGINE = """
import time
from runtime.rollout.torch.engine import TorchRolloutEngine

really = TorchRolloutEngine._step

def step(self):
    began = time.monotonic()
    really(self)
    time.sleep(0.1 + 9 * (time.monotonic() - began))

TorchRolloutEngine._step = step
"""
LINK = """
import time
from runtime.weights.receiver import Reception

really = Reception.take

def take(self, *arguments):
    time.sleep(4)
    really(self, *arguments)

Reception.take = take
"""
AGENT = """
import asyncio

async def run(data, *, episode, **_):
    reply = await episode.chat(data["messages"])
    await asyncio.sleep(2)  # a tool
    messages = [*data["messages"], {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "and?"}]
    return len(set((await episode.chat(messages))["content"] or "")) / 16
"""


def why(run: Path, *options: str) -> dict[str, Any]:
    done = sluice("why", str(run), "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    whole = sum(step["end"] - step["start"] for step in found["steps"])
    assert sum(total["seconds"] for total in found["totals"]) == pytest.approx(whole, abs=1e-6)
    return found


def blamed(run: Path) -> tuple[str, str]:
    """What most of a run's time went to, and to whom; as a person is told it, too."""
    first = why(run)["totals"][0]
    said = sluice("why", str(run))
    assert f"of the time went to {first['cause']} by {first['process']}" in said.stdout
    return first["cause"], first["process"]


def second_of_two(folder: Path, patch: str) -> str:
    """Two rollouts, the second of which has `patch` in its process."""
    (folder / "sitecustomize.py").write_text(patch)
    return f"services.rollout=[{{slots: 16}}, {{slots: 16, env: {{PYTHONPATH: '{folder}:{ROOT}'}}}}]"


def test_a_reward_that_is_slow_is_named_while_it_is_waited_for_and_afterwards(config: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(RULE)
    with started(config, *SHORT, f"rewards.rules=[{{name: '{tmp_path}/slow.py:slow'}}]", folder=tmp_path / "run") as run:

        def named() -> bool:
            said = sluice("status", str(run.folder)).stdout
            return "(generated, reward-0, " in said

        eventually(named, END, "a status that names the reward")
        assert run.wait(END) == 0, run.output + run.errors
    assert blamed(run.folder) == ("score", "reward-0")


LONG_REPLIES = ("training.staleness=0", "training.groups_per_step=8", "sampling.max_new_tokens=64")


@pytest.mark.parametrize(
    ("patch", "settings", "cause"),
    [
        pytest.param(ENGINE, LONG_REPLIES, "generate", id="engine"),
        pytest.param(ENGINE, (), "probe", id="probe"),  # it is given few groups, and its probe is waited for in every step
        pytest.param(LINK, (), "publish", id="link"),
    ],
)
def test_the_slower_of_two_rollouts_is_named(
    config: Path, tmp_path: Path, patch: str, settings: tuple[str, ...], cause: str
) -> None:
    run = trained(config, *SHORT, *settings, second_of_two(tmp_path, patch), folder=tmp_path / "run", timeout=END)
    assert blamed(run.folder) == (cause, "rollout-1")
    shutil.rmtree(run.folder / "spans")  # the ledger alone knows less
    found = why(run.folder)["totals"][0]
    known = {"generate": ("generate", "rollout-1"), "probe": ("train", "trainer-0"), "publish": ("publish", "")}
    assert (found["cause"], found["process"]) == known[cause]


@pytest.fixture
def played(tiny: Path, tmp_path: Path) -> Live:
    """A run whose agent has a slow tool."""
    (tmp_path / "agent.py").write_text(AGENT)
    config = written(tiny, tmp_path, [SUMS], {"sums": {"run": f"{tmp_path}/agent.py:run", "concurrency": 64}})
    return trained(config, *SHORT, folder=tmp_path / "run", timeout=END)


def test_a_tool_that_is_slow_is_told_apart_from_the_policy(played: Live) -> None:
    assert blamed(played.folder) == ("agent", "environment sums")
    found = {(total["cause"], total["process"]): total for total in why(played.folder)["totals"]}
    policy = [total for (cause, process), total in found.items() if cause == "policy" and process.startswith("rollout-")]
    assert policy and all("decode" in total["inside"] for total in policy)

    done = sluice("trace", str(played.folder))
    assert (done.returncode, one_line(done.stdout)) == (0, str(played.folder / "trace.json")), done.stderr
    events = json.loads((played.folder / "trace.json").read_text())["traceEvents"]
    check_trace(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"steps", "coordinator", "gateway-0", "environment-0", "rollout-0", "rollout-1", "trainer-0"} <= names
    assert {"s", "f"} <= {event["ph"] for event in events}
    of_policy = [event for event in events if event["name"] == "policy" and event["args"].get("group", -1) >= 0]
    assert len(of_policy) >= 3 * 2 * 4 * 2  # steps, groups, episodes, turns


def test_a_run_that_was_killed_is_explained_as_far_as_it_came(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.reaches(3)
        for process in belonging(run.folder):
            with suppress(psutil.NoSuchProcess):  # whose agent was killed before it ends with that
                process.kill()
        run.wait(END)
        done = len(steps(run.folder))
        found = [step["step"] for step in why(run.folder)["steps"]]
        assert found == list(range(len(found))) and len(found) >= done - 1  # the newest may not be committed
        assert [step["step"] for step in why(run.folder, "--steps", "1:2")["steps"]] == [1, 2]
        for steps_, said in (
            ("5:3", "error: --steps: '5:3' ends before it begins; a range is a:b, with a at most b"),
            ("x", "error: --steps: 'x' is neither a number nor a range a:b"),
            ("90000:", f"error: {run.folder}: no step was made of --steps 90000:"),
        ):
            for command in ("why", "trace"):
                told = sluice(command, str(run.folder), "--steps", steps_)
                assert (told.returncode, one_line(told.stderr)) == (2, said)


def test_what_is_no_runs_folder_is_the_users_to_mend(tmp_path: Path) -> None:
    for command in ("why", "trace"):
        told = sluice(command, str(tmp_path))
        assert told.returncode == 2 and str(tmp_path) in one_line(told.stderr)
    told = sluice("trace", str(tmp_path / "none"), "--output", str(tmp_path))
    assert told.returncode == 2 and str(tmp_path / "none") in one_line(told.stderr)
