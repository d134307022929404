"""One run over three machines, each in a network namespace of its own: trained across them, and what a cut link, a node that is
killed and one that comes late lead to."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.runs import LONG, eventually, summary, write_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces")]

SILENCE = 30.0  # seconds without a word after which a node, or a rollout, is given up
BLIP = 10.0  # seconds of a cut that is none: TCP may need as long again until it tries
LOSS = SILENCE + 30.0  # seconds until a loss is seen
START = 180.0  # seconds until several machines' worth of processes train, or one more serves, on what may be two busy cores
END = 90.0

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make install-dev"
)
NODES: dict[str, Any] = {
    "cluster": {"nodes": [{"name": name} for name in NAMES]},
    "deadlines": {"silence": SILENCE},
    "publication": {"transfer_timeout": SILENCE, "commit_timeout": SILENCE, "join_timeout": SILENCE},
    "services": {
        "trainer": {"placement": ["first"]},
        "reference": {"placement": ["first"]},
        "reward": {"placement": ["first"]},
        "rollout": {"placement": ["second", "third"], "restarts": {"backoff": 0.5}},
    },
}


@pytest.fixture
def nodes(tiny: Path, tmp_path: Path) -> Path:
    """A small run: trainer, reference and rewards on the first node, a rollout on each of the others."""
    return write_config(tmp_path / "config.yaml", tiny, **NODES)


def goes_on(run: Cluster) -> None:
    run.run.reaches(run.run.steps() + 3, START)


def ends_well(run: Cluster, *names: str) -> None:
    """Ctrl-C on the coordinator's node ends everything in order."""
    run.run.interrupt()
    eventually(lambda: (run.folder / "summary.json").exists(), END, "the summary")
    for name in names:
        run.agents[name].wait(END)
    eventually(lambda: not any(node.processes() for node in run.network.nodes), END, "the end of every process")


def test_a_run_is_trained_across_three_nodes(nodes: Path, tmp_path: Path) -> None:
    with cluster(nodes, folder=tmp_path / "run") as run:
        assert [run.agents[name].wait(2 * START) for name in NAMES] == [0, 0, 0], run.said()
        assert summary(run.folder)["steps"] == 4
        first, second, third = (node.address for node in run.network.nodes)
        assert {name: run.where(name) for name in ("trainer-0", "rollout-0", "rollout-1")} == {
            "trainer-0": [first],
            "rollout-0": [second],
            "rollout-1": [third],
        }
        assert "epoch 1: trainer-0 to rollout-0, rollout-1 by collective" in run.log("coordinator")
        assert not any(node.processes() for node in run.network.nodes)


@pytest.mark.parametrize("engine", ["torch", pytest.param("megatron", marks=needs_megatron)])
def test_the_ranks_of_one_group_are_on_two_nodes(nodes: Path, tmp_path: Path, engine: str) -> None:
    """Their groups of gloo are formed over the bridge, although this machine's name stands for loopback on every node."""
    group = (
        f"services.trainer.engine={engine}",
        "deadlines.stop=60",
        "services.trainer.processes=2",
        "services.trainer.placement=[second, third]",
    )
    with cluster(nodes, *group, folder=tmp_path / "run") as run:
        assert [run.agents[name].wait(2 * START) for name in NAMES] == [0, 0, 0], run.said()
        assert summary(run.folder)["steps"] == 4
        assert {name: run.where(name) for name in ("trainer-0", "trainer-1")} == {
            "trainer-0": [run.node("second").address],
            "trainer-1": [run.node("third").address],
        }


def test_a_rank_that_is_killed_on_one_node_takes_its_group_along_on_both(nodes: Path, tmp_path: Path) -> None:
    group = (
        "services.trainer.processes=2",
        "services.trainer.placement=[first, second]",
        "services.trainer.restarts.backoff=0.5",
    )
    with cluster(nodes, *LONG, *group, "checkpoint.every=2", "deadlines.stop=60", folder=tmp_path / "run") as run:
        run.run.reaches(4, START)
        os.kill(run.pids("trainer-1")[0], signal.SIGKILL)
        eventually(lambda: len(run.pids("trainer-0")) == len(run.pids("trainer-1")) == 2, START, "both ranks' return")
        goes_on(run)
        assert run.where("trainer-1") == [run.node("second").address] * 2
        assert len(run.pids("rollout-0")) == 1
        ends_well(run, *NAMES)


def test_a_sigterm_on_every_node_saves_what_is_there(nodes: Path, tmp_path: Path) -> None:
    group = ("services.trainer.processes=2", "services.trainer.placement=[second, third]", "deadlines.stop=60")
    with cluster(nodes, *LONG, *group, folder=tmp_path / "run") as run:
        run.run.reaches(2, START)
        for process in [one for node in run.network.nodes for one in node.processes()]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        eventually(lambda: not any(node.processes() for node in run.network.nodes), END, "the end of every process")
        assert summary(run.folder)["stop_reason"] == "interrupted", run.said()
        assert (run.folder / "model" / "model.safetensors").exists()


def test_a_node_that_comes_back_with_another_configuration_is_refused(nodes: Path, tmp_path: Path) -> None:
    with cluster(nodes, *LONG, "deadlines.silence=5", folder=tmp_path / "run") as run:
        run.run.reaches(2, START)
        run.node("third").kill()
        own, run.overrides = run.overrides, (*run.overrides, "sampling.temperature=0.5")
        run.start("third")
        assert run.agents["third"].wait(START) != 0  # torchrun's code tells of the failure alone
        assert "configuration" in run.said()
        goes_on(run)
        run.overrides = own
        run.start("third")
        eventually(lambda: run.serving() == 2, START, "the rollout of the node that came back")
        ends_well(run, *NAMES)


def test_a_link_that_is_cut_for_a_moment_and_for_too_long(nodes: Path, tmp_path: Path) -> None:
    with cluster(nodes, *LONG, folder=tmp_path / "run") as run:
        run.run.reaches(2, START)
        third = run.node("third")

        run.network.cut(third)
        time.sleep(BLIP)
        run.network.mend(third)
        goes_on(run)
        assert run.lost() == []
        assert run.serving() == 2

        run.network.cut(third)
        eventually(lambda: run.lost() == ["rollout-1"], LOSS, "the loss of rollout-1")
        goes_on(run)
        assert run.serving() == 1

        run.network.mend(third)
        eventually(lambda: run.serving() == 2, START, "the rollout of the node that came back")
        assert run.where("rollout-1") == [third.address] * 2
        assert run.lost() == ["rollout-1"]
        ends_well(run, *NAMES)


def test_a_node_that_comes_late_and_one_whose_power_goes(nodes: Path, tmp_path: Path) -> None:
    with cluster(nodes, *LONG, "cluster.min_nodes=2", folder=tmp_path / "run", start=2) as run:
        run.run.reaches(2, START)
        assert run.serving() == 1
        run.start("third")
        eventually(lambda: run.serving() == 2, START, "the rollout of the node that came late")

        run.network.cut(run.node("second"))  # nobody is told, as when the power goes
        run.node("second").kill()
        eventually(lambda: run.lost() == ["rollout-0"], LOSS, "the loss of rollout-0")
        goes_on(run)
        assert run.serving() == 1
        assert run.where("rollout-1") == [run.node("third").address]
        ends_well(run, "first", "third")
