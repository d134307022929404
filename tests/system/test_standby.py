"""The coordinator's node is lost: another one leads the run from then on, and the processes of the others go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.system.chaos import check_ledger
from tests.system.cluster import NAMES, cluster
from tests.system.runs import eventually, steps, summary, write_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces")]

SILENCE = 5.0
START, END = 180.0, 90.0  # seconds, as of test_cluster
GROUPS = 4
SECTIONS = {
    "cluster": {"nodes": [{"name": name} for name in NAMES]},
    "training": {"steps": 100_000, "groups_per_step": GROUPS},
    "deadlines": {"keepalive": SILENCE, "stop": 60.0},
    "services": {
        "coordinator": {"standby": "second"},
        "trainer": {"placement": ["second"]},
        "reference": {"placement": ["third"]},
        "reward": {"placement": ["third"]},
        "rollout": {"placement": ["first", "third"]},
    },
}


def test_the_standby_leads_once_the_coordinators_node_is_lost(tiny: Path, tmp_path: Path) -> None:
    """The first node comes back, and does what the second says; the coordinator there is killed too; a SIGTERM saves."""
    config = write_config(tmp_path / "config.yaml", tiny, **SECTIONS)
    with cluster(config, folder=tmp_path / "run") as run:
        first, second, third = NAMES
        run.run.reaches(3, START)
        lived = {name: run.run.member(name).pid for name in ("trainer-0", "reference-0", "reward-0", "rollout-1")}
        run.node(first).kill()
        before = steps(run.folder)[-1]["step"]
        run.agents[second].says(f"{second} leads the run", START)
        standby = run.agents[second]
        standby.reaches(before + 3, START)
        assert {name: standby.member(name).pid for name in lived} == lived, "a process was started again"
        assert run.agents[third].process.poll() is None, run.said()

        standby.member("rollout-1").kill()  # which finds the coordinator of now
        run.start(first)
        eventually(lambda: run.serving() == 2, START, "the rollout of the node that came back")
        assert run.agents[first].process.poll() is None, run.said()

        standby.member("coordinator").send_signal(signal.SIGKILL)
        standby.reaches(standby.steps() + 3, START)
        del lived["rollout-1"]
        assert {name: standby.member(name).pid for name in lived} == lived, "a process was started again"

        for process in run.node(second).processes():
            if "sluice.node" in process.cmdline() and "torch.distributed.run" not in process.cmdline():
                process.terminate()
        eventually(lambda: not any(node.processes() for node in run.network.nodes), END, "the end of every process")
        assert summary(run.folder)["stop_reason"] == "interrupted", run.said()
        assert (run.folder / "model" / "model.safetensors").exists()
        assert len({point["step"] for point in steps(run.folder)}) == len(steps(run.folder)), "a step was made twice"
        check_ledger(run.folder / "ledger", GROUPS)
