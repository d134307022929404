"""One run over three machines, each in a network namespace of its own: trained across them, and what a cut link, a node or rank
that is killed, and a node that comes late lead to."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.process.network import is_own
from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.namespaces import NETWORK, NETWORK_6
from tests.system.runs import LONG, eventually, summary, write_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces")]

SILENCE = 20.0  # seconds without a word after which a node, or a rollout, is given up
BLIP = 5.0  # seconds of a cut that is none: TCP may need as long again until it tries
LOSS = SILENCE + 30.0  # seconds until a loss is seen
START = 180.0  # seconds until several machines' worth of processes train, or one more serves, on what may be two busy cores
END = 90.0

NODES: dict[str, Any] = {
    "cluster": {"nodes": [{"name": name} for name in NAMES]},
    "deadlines": {"keepalive": SILENCE},
    "weight_sync": {"transfer_timeout": SILENCE, "commit_timeout": SILENCE, "join_timeout": SILENCE},
    "services": {
        "trainer": {"placement": ["first"]},
        "reference": {"placement": ["first"]},
        "reward": {"placement": ["first"]},
        "rollout": {"placement": ["second", "third"]},
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


@pytest.mark.long
def test_a_run_over_three_nodes_outlives_what_happens_to_them(nodes: Path, tmp_path: Path) -> None:
    """Without IPv4, where this machine has IPv6. The trainer has ranks on two of them, whose groups are formed over the bridge,
    although this machine's name stands for loopback on every node. The third comes late. The model's experts are replayed."""
    network = NETWORK_6 if is_own("::1") else NETWORK
    group = ("services.trainer.processes=2", "services.trainer.placement=[first, second]")
    settings = (
        *LONG,
        *group,
        "model=tiny:qwen3_moe",
        "moe.router_replay=routing",
        "checkpoint.every=2",
        "cluster.min_nodes=2",
        "deadlines.stop=60",
        f"network.interface={network}",
    )
    with cluster(nodes, *settings, folder=tmp_path / "run", start=2, network=network) as run:
        first, second, third = run.network.nodes
        run.run.reaches(2, START)
        assert run.serving() == 1
        run.start("third")
        eventually(lambda: run.serving() == 2, START, "the rollout of the node that came late")
        assert run.where("trainer-0") + run.where("trainer-1") == [first.address, second.address]
        assert (run.where("rollout-0"), run.where("rollout-1")) == ([second.address], [third.address])
        assert "by collective" in run.log("coordinator")

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

        third.kill()
        own, run.overrides = run.overrides, (*run.overrides, "sampling.temperature=0.5")
        run.start("third")
        assert run.agents["third"].wait(START) != 0  # torchrun's code tells of the failure alone
        assert "configuration" in run.said()
        goes_on(run)
        run.overrides = own
        run.start("third")
        eventually(lambda: run.serving() == 2, START, "the rollout of the node whose configuration is the run's again")

        os.kill(run.pids("trainer-1")[0], signal.SIGKILL)
        eventually(lambda: len(run.pids("trainer-0")) == len(run.pids("trainer-1")) == 2, START, "both ranks' return")
        goes_on(run)
        assert run.where("trainer-1") == [second.address] * 2
        assert len(run.pids("rollout-0")) == 1

        for process in [one for node in run.network.nodes for one in node.processes()]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        eventually(lambda: not any(node.processes() for node in run.network.nodes), END, "the end of every process")
        assert summary(run.folder)["stop_reason"] == "interrupted", run.said()
        assert (run.folder / "model" / "model.safetensors").exists()
    with LedgerReader(run.folder / "ledger") as reader:
        holders = [{holder.node for holder in row.holders or []} for row in reader.groups(states=[Phase.RETIRED])]
    assert all(holders)
    assert {("first", "second"), ("second", "third"), ("first", "third")} <= {tuple(sorted(nodes)) for nodes in holders}
