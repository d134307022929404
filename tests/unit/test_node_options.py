"""What somebody gives on the command line of a node, or of `sluice scale`, and cannot be: one line that names it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.commands.scale import scale
from launcher.commands.status import address_of
from launcher.node.__main__ import run_node
from launcher.node.local_node import LocalNode
from launcher.node.machine import on_this_machine
from runtime.config import Config, loading
from runtime.errors import ConfigError, UserError

TWO_NODES = """
run: {name: test}
cluster: {nodes: [{name: a}, {name: b}]}
network: {interface: auto}
services: {coordinator: {host: 192.0.2.77, port: 7000}}
"""


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "test"}, **sections}, Config)


@pytest.mark.parametrize("devices", [-1, 1_000_000])
def test_a_number_of_devices_that_there_is_not(devices: int) -> None:
    with pytest.raises(UserError, match=f"^--devices: {devices}, but this machine has [0-9]+; must be from 0 to that$"):
        LocalNode.of(make(), devices=devices)


def test_a_node_whose_name_the_configuration_does_not_have_asks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_NODES)
    options = argparse.Namespace(config=path, overrides=[], name="c", address="", devices=None, verbose=False)
    with pytest.raises(UserError, match=r"^node c: not in cluster.nodes, a, b; must be one of these \(--name\)$"):
        run_node(options)


def test_an_address_is_told_by_the_option_that_gave_it() -> None:
    with pytest.raises(UserError, match=r"^--address: '203.0.113.9' is not an address of this machine"):
        on_this_machine(make(), "203.0.113.9")
    with pytest.raises(UserError, match=r"^--address: '127.0.0.1' gives this node 127.0.0.1, by which no other is reached"):
        on_this_machine(make(cluster={"min_nodes": 2}), "127.0.0.1")
    with pytest.raises(UserError, match=r"^network.interface: 'lo0nowhere' is neither"):
        on_this_machine(make(network={"interface": "lo0nowhere"}))


@pytest.mark.parametrize("run", ["host", "host:", "host:x", "host:0", "host:65536", ":7000", "::1:7000"])
def test_what_is_neither_a_folder_nor_an_address(run: str) -> None:
    with pytest.raises(UserError, match=f"^scale: '{run}' is neither a run's folder nor host:port or .IPv6.:port$"):
        address_of(run, "scale")


@pytest.mark.parametrize("run", ["host:1", "10.0.0.1:65535", "[::1]:7000"])
def test_an_address_is_taken_as_it_is(run: str) -> None:
    assert address_of(run, "scale") == run


@pytest.mark.parametrize("wanted", ["rollout", "rollout=", "rollout=-1", "rollout=two", "trainer=2"])
def test_what_cannot_be_scaled_asks_nobody(wanted: str) -> None:
    with pytest.raises(UserError, match=f"^scale: '{wanted}' is not rollout=N"):
        asyncio.run(scale("127.0.0.1:9", wanted))


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("network.port_range=[7000]", "network.port_range: has 1 items, not 2"),
        ("network.port_range=[0,70000]", "network.port_range.1: 70000 is not an integer >= 0 and <= 65535"),
        ("network.port_range=7000", "network.port_range: 7000 is not a list or null"),
    ],
)
def test_a_range_of_ports_is_told_by_what_is_wrong_in_it(tmp_path: Path, override: str, fault: str) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_NODES)
    with pytest.raises(ConfigError) as refused:
        loading.load(path, [override])
    assert refused.value.faults == [fault]
