"""Runs by IPv6: on its loopback, and over three nodes that have no address of IPv4 at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runtime import run_files
from runtime.process import keys
from runtime.process.network import is_own
from services.health_check import check
from tests.system.cluster import NAMES, cluster
from tests.system.namespaces import NETWORK_6
from tests.system.runs import LONG, eventually, sluice, started, write_config
from tests.system.test_cluster import NODES, ends_well

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_own("::1"), reason="needs IPv6: this machine has no address ::1"),
]

START = 180.0  # seconds until several processes train, on what may be two busy cores


def test_a_run_on_the_loopback_of_ipv6(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of the trainer, whose store is on loopback; the run is looked at by its folder and by its address."""
    overrides = ("network.interface=::1", "services.trainer.processes=2", "publication.transport=collective")
    with started(config, *LONG, *overrides, folder=tmp_path / "run") as run:
        run.reaches(2, START)
        address = (run.folder / "coordinator.address").read_text().strip()
        assert address.startswith("[::1]:")
        for arguments in (["status", str(run.folder)], ["scale", "rollout=1", str(run.folder)]):
            done = sluice(*arguments)
            assert done.returncode == 0, done.stderr
        monkeypatch.setenv(keys.SECRET, (run.folder / run_files.SECRET).read_text().strip())
        assert sluice("status", address).returncode == 0
        assert check(address, own=keys.of_user(address)) == (True, "serving")
        run.interrupt()
        assert run.wait(START) == 0, run.output + run.errors


@pytest.mark.usefixtures("namespaces")
def test_nodes_without_ipv4(tiny: Path, tmp_path: Path) -> None:
    """The trainer has ranks on two of them, the critic two on one; a rollout is killed and comes back. All with TLS."""
    config = write_config(tmp_path / "config.yaml", tiny, **NODES)
    group = ("services.trainer.processes=2", "services.trainer.placement=[first, second]", "deadlines.stop=60")
    where = (f"network.interface={NETWORK_6}", *LONG)
    critic = ("critic={}", "algorithm.preset=ppo", "services.critic.processes=2", "services.critic.placement=[first]")
    with cluster(config, *group, *critic, *where, folder=tmp_path / "run", network=NETWORK_6) as run:
        run.run.reaches(2, START)
        os.kill(run.pids("rollout-1")[0], signal.SIGKILL)
        eventually(lambda: len(run.pids("rollout-1")) == 2, START, "the rollout's return")
        eventually(lambda: run.serving() == 2, START, "the rollout's service")
        first, second, third = (node.address for node in run.network.nodes)
        assert run.where("trainer-0") + run.where("trainer-1") == [first, second]
        assert run.where("rollout-1") == [third] * 2
        assert run.where("critic-0") + run.where("critic-1") == [first] * 2
        assert "trainer-0 to rollout-0, rollout-1 by collective" in run.log("coordinator")
        ends_well(run, *NAMES)
