"""A trainer over three nodes. One node is lost with its memory: the group goes on with fewer ranks, and grows again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runtime.telemetry.record import read_jsonl
from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.conftest import make_tiny
from tests.system.runs import SOON, eventually, steps, summary, trained, write_config
from tests.system.test_cluster import END, START, ends_well
from tests.system.test_spmd import COMPARED, SMOOTH, VARIETY
from tests.unit.training_steps import assert_metrics

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces"), pytest.mark.long]

SILENCE = 8.0
STEPS = 400
EVERYWHERE = ["first", "second", "third"]
RUN: dict[str, Any] = {
    "cluster": {"nodes": [{"name": name} for name in NAMES]},
    "deadlines": {"keepalive": SILENCE, "start": START},
    "training": {"steps": STEPS, "staleness": 0, "groups_per_step": 6, "optimizer": SMOOTH},
    "checkpoint": {"every": 1000},
    "services": {
        "trainer": {"processes": 3, "placement": EVERYWHERE, "elastic": True, "restarts": 1000},
        "rollout": {"placement": ["first"]},
        "reward": {"placement": ["first"]},
    },
}


def ranks(run: Cluster) -> list[list[str]]:
    """For each incarnation of the group, the addresses of its ranks."""
    found: list[list[str]] = []
    for name, address in run.registered():
        if name.startswith("trainer-"):
            if name == "trainer-0" or not found:
                found.append([])
            found[-1].append(address)
    return found


def test_a_group_goes_on_without_a_lost_node_and_grows_with_it(tmp_path: Path) -> None:
    (tmp_path / "variety.py").write_text(VARIETY)
    own = {"rewards": {"rules": [{"name": f"{tmp_path / 'variety.py'}:variety"}]}}
    config = write_config(tmp_path / "config.yaml", make_tiny(tmp_path / "tiny", kv_heads=2), **RUN, **own)
    with cluster(config, folder=tmp_path / "run", modules=SOON) as run:
        run.run.reaches(3, START)
        third = run.network.nodes[2]
        os.kill(run.pids("trainer-1")[-1], signal.SIGKILL)  # one rank: all are back, on the same nodes
        at = run.steps()
        eventually(lambda: run.steps() > at + 1, START, "a step after a rank's death")
        third.kill()
        eventually(lambda: "goes on with 2 ranks, after 3" in run.log("coordinator"), START, "fewer ranks")
        at = run.steps()
        eventually(lambda: run.steps() > at + 2, START, "a step of fewer ranks")
        run.start("third")
        eventually(lambda: "goes on with 3 ranks, after 2" in run.log("coordinator"), START, "more ranks")
        at = run.steps()
        eventually(lambda: run.steps() > at + 2, START, "a step of more ranks")
        ends_well(run, *NAMES)
    assert "goes back to its newest checkpoint" not in run.log("coordinator")
    done = summary(run.folder)["steps"]
    assert [point["step"] for point in read_jsonl(run.folder / "metrics.jsonl")] == list(range(1, done + 1))
    # The batch stays the same, and so does what is learned, but for rounding.
    alone = trained(
        config,
        "cluster.nodes=auto",
        *(f"services.{role}.placement=pack" for role in ("trainer", "rollout", "reward")),
        "services.trainer.processes=1",
        f"training.steps={done}",
        folder=tmp_path / "alone",
        timeout=END * 3,
    )
    for step, (ours, theirs) in enumerate(zip(steps(run.folder)[:4], steps(alone.folder), strict=False), 1):
        compared = COMPARED & ours.keys() & theirs.keys()
        assert_metrics({name: ours[name] for name in compared}, {name: theirs[name] for name in compared}, steps=step)
