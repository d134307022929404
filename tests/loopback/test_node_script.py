"""launcher/node.sh: MindSpeed-RL's variables become an agent's command, and a wrong one is one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
GOOD = {
    "NNODES": "2",
    "NPUS_PER_NODE": "8",
    "MASTER_ADDR": "10.1.0.1",
    "MASTER_PORT": "29777",
    "CURRENT_IP": "10.1.0.2",
    "NODE_RANK": "1",
}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs the script with a torchrun that only tells how it was called; variables of None are not set."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)

    def run(*arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **own}
        command = ["bash", str(ROOT / "launcher" / "node.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)

    return run


def test_the_run_is_told_by_overrides_and_the_machine_by_options(start: Start) -> None:
    ended = start("my run.yaml", "training.steps=5", "run.name=a b")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        *("--rdzv-backend", "sluice", "--nproc-per-node", "1", "--max-restarts", "0", "-m", "sluice.node"),
        *("--name", "node-1", "--address", "10.1.0.2", "--devices", "8", "my run.yaml"),
        *("cluster.min_nodes=2", "services.coordinator.host=10.1.0.1", "services.coordinator.port=29777"),
        *("training.steps=5", "run.name=a b"),
    ]


def test_the_port_has_a_default_and_a_machine_need_not_have_accelerators(start: Start) -> None:
    said = start("c.yaml", MASTER_PORT=None, NPUS_PER_NODE="0").stdout.splitlines()
    assert "services.coordinator.port=29400" in said
    assert said[said.index("--devices") + 1] == "0"


@pytest.mark.parametrize("address", ["fd00:1::2", "FD00::", "2001:db8:0:1:2:3:4:5", "::ffff:10.1.0.2"])
def test_machines_may_have_ipv6_alone(start: Start, address: str) -> None:
    said = start("c.yaml", MASTER_ADDR="fd00:1::1", CURRENT_IP=address).stdout.splitlines()
    assert said[said.index("--address") + 1] == address
    assert "services.coordinator.host=fd00:1::1" in said


def test_one_machine_may_be_its_own_master(start: Start) -> None:
    assert start("c.yaml", NNODES="1", NODE_RANK="0", MASTER_ADDR="localhost", CURRENT_IP="127.0.0.1").returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NNODES", None, "not set; must be an integer of at least 1"),
        ("NNODES", "0", "'0' is not an integer of at least 1"),
        ("NNODES", "two", "'two' is not an integer of at least 1"),
        ("NPUS_PER_NODE", "", "not set; must be an integer of at least 0"),
        ("NPUS_PER_NODE", "010", "'010' is not an integer of at least 0"),
        ("NODE_RANK", "-1", "'-1' is not an integer of at least 0"),
        ("NODE_RANK", "2", "'2' is not below NNODES, which is 2"),
        ("MASTER_PORT", "65536", "'65536' is not a port; the largest is 65535"),
        ("MASTER_ADDR", None, "not set; must be a host's name or address"),
        ("MASTER_ADDR", "a b", "'a b' is not a host's name or address"),
        ("MASTER_ADDR", "127.0.0.1", "'127.0.0.1' is loopback; must be an address that all NNODES=2 machines reach"),
        ("MASTER_ADDR", "::1", "'::1' is loopback; must be an address that all NNODES=2 machines reach"),
        ("MASTER_ADDR", "[fd00::1]", "'[fd00::1]' is not a host's name or address"),
        ("CURRENT_IP", "fe80::1%eth0", "'fe80::1%eth0' is not this machine's address, such as 10.1.0.2 or fd00:1::2"),
        ("CURRENT_IP", "eth0", "'eth0' is not this machine's address, such as 10.1.0.2 or fd00:1::2"),
    ],
)
def test_a_wrong_variable_is_one_line_that_names_it(start: Start, name: str, value: str | None, said: str) -> None:
    ended = start("c.yaml", **{name: value})
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"error: {name}: {said}\n")


def test_a_missing_configuration_is_told(start: Start) -> None:
    ended = start()
    assert (ended.returncode, ended.stderr) == (2, "error: CONFIG: not given; bash launcher/node.sh CONFIG [key=value ...]\n")
