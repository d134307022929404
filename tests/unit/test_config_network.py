"""Addresses and ports by which nodes cannot reach each other are refused before anything is started."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.config import Config
from runtime.config.service_checks import network_faults

TWO_NODES = {"nodes": [{"name": "a"}, {"name": "b"}]}
REACHED: dict[str, Any] = {"services": {"coordinator": {"host": "10.1.0.1", "port": 7000}}, "network": {"interface": "eth0"}}


def faults(trains: bool = True, **sections: Any) -> list[str]:
    config = msgspec.convert({"run": {"name": "test"}, **sections}, Config)
    return list(network_faults(config, trains))


@pytest.mark.parametrize("cluster", [{}, {"min_nodes": 1}, {"nodes": [{"name": "a"}]}])
def test_one_node_may_be_on_loopback(cluster: dict[str, Any]) -> None:
    assert faults(cluster=cluster) == []


@pytest.mark.parametrize("cluster", [{"min_nodes": 2}, TWO_NODES, TWO_NODES | {"min_nodes": 1}])
def test_several_nodes_need_addresses_that_others_reach(cluster: dict[str, Any]) -> None:
    assert faults(cluster=cluster, **REACHED) == []
    interface, host, port = faults(cluster=cluster)
    assert interface.startswith(
        "network.interface: '127.0.0.1' is loopback, by which no other node is reached; on several nodes"
    )
    assert host.startswith("services.coordinator.host: missing; on several nodes it must be the address that all reach")
    assert port == "services.coordinator.port: 0 is any free port, on one node; on several it must be named"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.0.1", "localhost", "::1"])
def test_a_coordinator_on_loopback_is_reached_by_its_own_node_alone(host: str) -> None:
    (fault,) = faults(cluster=TWO_NODES, **REACHED | {"services": {"coordinator": {"host": host, "port": 7000}}})
    assert fault.startswith(f"services.coordinator.host: '{host}' is loopback; on several nodes it must be the address")


@pytest.mark.parametrize(("security", "used"), [("auto", True), ("tls", True), ("token", False), ("none", False)])
def test_certificates_that_are_not_used_are_told(security: str, used: bool) -> None:
    told = faults(network={"security": security, "tls": {"ca": "a", "certificate": "b", "key": "c"}})
    fault = f"network.tls: is not used with network.security {security}; must be left out, or that be tls or auto"
    assert told == ([] if used else [fault])


@pytest.mark.parametrize(
    ("cluster", "standby", "told"),
    [
        (TWO_NODES, "b", []),
        ({"min_nodes": 2}, "anybody", []),
        (TWO_NODES, "c", ["services.coordinator.standby: 'c' is no node; must be one of a, b"]),
        ({}, "b", ["services.coordinator.standby: 'b', but the run has one node; needs cluster.nodes or cluster.min_nodes"]),
    ],
)
def test_the_standby_is_a_node_of_several(cluster: dict[str, Any], standby: str, told: list[str]) -> None:
    services = {"coordinator": REACHED["services"]["coordinator"] | {"standby": standby}}
    assert faults(cluster=cluster, **REACHED | {"services": services}) == told


@pytest.mark.parametrize(
    ("port_range", "fault"),
    [
        ([80, 90], "network.port_range: [80, 90] is not a range of ports from 1024 to 65535, first and last"),
        ([7000, 6999], "network.port_range: [7000, 6999] is not a range of ports from 1024 to 65535, first and last"),
        ([7000, 7004], "network.port_range: [7000, 7004] has fewer ports than the run needs, 6"),
        ([59000, 60000], "network.port_range: [59000, 60000] overlaps hccl_host_ports [60000, 60999]"),
        ([61500, 61600], "network.port_range: [61500, 61600] overlaps hccl_npu_ports [61000, 61999]"),
    ],
)
def test_a_range_of_ports_that_is_none_too_small_or_hccls(port_range: list[int], fault: str) -> None:
    rewards = {"rules": [{"name": "gsm8k"}]}
    assert faults(network={"port_range": port_range}, rewards=rewards) == [fault]


def test_a_range_holds_what_listens_at_once() -> None:
    """A rollout, a reward, a trainer, the coordinator, and two rendezvous of the weights: six."""
    rewards = {"rules": [{"name": "gsm8k"}]}
    assert faults(network={"port_range": [7000, 7005]}, rewards=rewards) == []
    own = {"coordinator": {"port": 6000}}
    assert faults(network={"port_range": [7000, 7004]}, rewards=rewards, services=own) == []
    assert faults(trains=False, network={"port_range": [7000, 7002]}, rewards=rewards) == []
    # Which nodes take how many of it is known when they are there.
    assert faults(cluster=TWO_NODES, **REACHED | {"network": {"interface": "eth0", "port_range": [7000, 7001]}}) == []


def test_a_range_holds_what_prometheus_asks_too() -> None:
    """As many again as there are processes, the coordinator among them unless its port is named."""
    own: dict[str, Any] = {"rewards": {"rules": [{"name": "gsm8k"}]}}
    for port, needed in ((0, 10), (6000, 9)):
        own["metrics"] = {"prometheus": {"port": port}}
        assert faults(network={"port_range": [7000, 7000 + needed - 1]}, **own) == []
        (fault,) = faults(network={"port_range": [7000, 7000 + needed - 2]}, **own)
        assert fault.endswith(f"has fewer ports than the run needs, {needed}")


@pytest.mark.parametrize(
    ("network", "refused"),
    [
        ({}, False),
        ({"interface": "::1"}, False),
        ({"interface": "10.1.0.0/16"}, True),
        ({"interface": "10.1.0.7", "security": "token"}, True),
        ({"interface": "10.1.0.7", "security": "none"}, False),
    ],
)
def test_off_this_machine_metrics_are_for_who_has_the_token(network: dict[str, Any], refused: bool) -> None:
    told = faults(network=network, metrics={"prometheus": {}})
    assert [fault.partition(";")[0] for fault in told] == ["metrics.prometheus.token: missing"] * refused
    assert faults(network=network, metrics={"prometheus": {"token": {"from": "SCRAPED"}}}) == []
    assert faults(network=network) == []


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        ({"nodes": []}, "cluster.nodes: empty; must be auto, or name at least one node"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "cluster.nodes.1.name: 'a' is that of another node; must be its own"),
        (
            {"nodes": [{"name": "a"}, {"name": ""}]},
            "cluster.nodes.1.name: '' is no name; must be what its agent is called (--name, or its host name)",
        ),
        (TWO_NODES | {"min_nodes": 3}, "cluster.min_nodes: 3, but cluster.nodes names 2; must be at most that"),
    ],
)
def test_nodes_that_cannot_come(cluster: dict[str, Any], fault: str) -> None:
    assert faults(cluster=cluster, **REACHED) == [fault]


@pytest.mark.parametrize(
    ("placement", "fault"),
    [
        ([], "services.trainer.placement: empty; must be pack, spread, or name at least one node"),
        (["a", "b", "a"], "services.trainer.placement: names 'a' twice; must name each node once"),
    ],
)
def test_a_placement_that_names_nobody_or_somebody_twice(placement: list[str], fault: str) -> None:
    services = REACHED["services"] | {"trainer": {"placement": placement}}
    assert faults(cluster=TWO_NODES, **REACHED | {"services": services}) == [fault]
