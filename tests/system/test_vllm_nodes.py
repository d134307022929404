"""A whole run whose engine spans two machines, each in a network namespace of its own: trained, and started again as a whole
when the part of it on the second machine is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.system.cluster import NAMES, cluster
from tests.system.conftest import make_tiny
from tests.system.listeners import listeners, places
from tests.system.runs import VLLM_PYTHON, eventually, forgotten, needs_vllm, shared_files, steps, summary, write_config

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces")]

START = 200.0  # vLLM takes its time, twice
END = 60.0
STEPS = 8
CLOSE = 1e-4  # log-probabilities of float32, between engines
HERE = {"placement": [NAMES[0]]}


def test_an_engine_over_two_nodes_serves_and_comes_back_whole(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", kv_heads=2, hidden_size=64)  # vLLM's attention wants heads of 32
    spread = {"tensor": 2, "nodes": 2}
    engine = {"replicas": 1, "engine": "vllm", "max_num_seqs": 8, "python": str(VLLM_PYTHON), "parallel": spread}
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        cluster={"nodes": [{"name": name} for name in NAMES[:2]]},
        services={"rollout": engine, "trainer": HERE, "reference": HERE, "reward": HERE},
        training={"steps": STEPS, "staleness": 0},  # no step can end without the engine
        deadlines={"start": START},
    )
    before = shared_files()
    with cluster(config, "training.groups_per_step=8", folder=tmp_path / "run", count=2) as run:
        first, second = run.network.nodes
        run.run.reaches(3, START)
        assert (run.where("rollout-0"), run.where("rollout-0n1")) == ([first.address], [second.address])
        for node, stores in ((first, 1), (second, 0)):  # all else is at the node's own address, or loopback
            found = listeners(node.processes())
            assert all(places(one.ip, node.address) for one in found)
            assert [one.role for one in found if "all" in places(one.ip, node.address)] == ["rollout's child"] * stores
        os.kill(run.pids("rollout-0n1")[0], signal.SIGKILL)
        run.agents[NAMES[0]].wait(START)
        run.agents[NAMES[1]].wait(END)
        eventually(lambda: not any(node.processes() for node in run.network.nodes), END, "the end of every process")
        assert run.lost() == ["rollout-0"]
        assert len(run.pids("rollout-0")) == len(run.pids("rollout-0n1")) == 2
    eventually(lambda: not forgotten(before), END, "that nothing is left in shared memory")
    points = steps(run.folder)
    assert [point["step"] for point in points] == list(range(1, STEPS + 1))
    assert summary(run.folder)["groups"] == {"retired": STEPS * 8, "dropped": 0}
    assert all(point["mismatch/probes"] for point in points[-2:])
    assert max(point["mismatch/max"] for point in points) < CLOSE
