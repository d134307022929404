"""Which address of this machine is meant, which device has it, and what is said of one that is not there."""

from __future__ import annotations

import socket

import psutil
import pytest

from runtime.errors import UserError
from runtime.process import network
from runtime.process.network import (
    candidates,
    interface_of,
    is_host_port,
    is_loopback,
    is_own,
    own_address,
    transport_variables,
)

NOT_OURS = "198.51.100.7"  # of a block for documentation, RFC 5737


def loopback_device() -> str:
    return next(
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in entries)
    )


def outer() -> tuple[str, str]:
    """A device that is not loopback, and the first of its IPv4 addresses."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not is_loopback(entry.address):
                return name, entry.address
    pytest.skip("this machine has no address but loopback")


@pytest.mark.parametrize("interface", ["127.0.0.1", "127.0.0.0/8", "127.0.0.1/32", "auto"])
def test_loopback_by_address_network_and_default(interface: str) -> None:
    assert own_address(interface) == "127.0.0.1"


@pytest.mark.parametrize(
    ("own", "address"),
    [({"127.0.0.1"}, "127.0.0.1"), ({"127.0.0.1", "::1"}, "127.0.0.1"), ({"::1"}, "::1"), (set(), "127.0.0.1")],
)
def test_loopback_is_of_ipv6_where_there_is_no_other(own: set[str], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_own", own.__contains__)
    assert network.loopback() == own_address("auto") == address


@pytest.mark.parametrize("text", ["host:1", "10.1.0.7:65535", "[::1]:7077", "[fd00:1::2]:7077"])
def test_what_has_host_and_port(text: str) -> None:
    assert is_host_port(text)


@pytest.mark.parametrize(
    "text", ["host", ":1", "host:0", "host:65536", "host:x", "::1", "::1:7077", "[::1]", "[::1:7077", "[host]:1"]
)
def test_what_has_not(text: str) -> None:
    assert not is_host_port(text)


def test_a_device_by_its_name() -> None:
    assert own_address(loopback_device()) == "127.0.0.1"
    device, address = outer()
    assert own_address(device) == address


def test_auto_is_the_address_from_which_the_other_is_reached() -> None:
    assert own_address("auto", "127.0.0.1") == own_address("auto", "localhost") == "127.0.0.1"
    _, address = outer()
    assert own_address("auto", address) == address


@pytest.mark.parametrize(
    ("interface", "towards", "fault"),
    [
        (NOT_OURS, "", f"network.interface: '{NOT_OURS}' is not an address of this machine, which has 127.0.0.1"),
        ("0.0.0.0", "", "network.interface: '0.0.0.0' is no address that others reach; must be one of 127.0.0.1"),
        ("198.51.100.0/24", "", "network.interface: this machine has no address in 198.51.100.0/24; it has 127.0.0.1"),
        ("nowhere0", "", "network.interface: 'nowhere0' is neither an address, nor a network, nor auto, nor one of"),
        ("auto", "a name", "services.coordinator.host: nobody knows the name 'a name'"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(interface: str, towards: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        own_address(interface, towards)
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


def test_the_device_of_an_address() -> None:
    device, address = outer()
    assert interface_of(address) == device
    assert interface_of("127.0.0.1") == interface_of("127.5.5.5") == loopback_device()
    for unknown in (NOT_OURS, "localhost"):
        with pytest.raises(UserError, match=f"network.interface: '{unknown}' is not an address"):
            interface_of(unknown)


def test_torch_is_told_the_device_and_on_loopback_gloo_alone() -> None:
    device, address = outer()
    assert transport_variables(address) == {
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": f"={device}",
        "HCCL_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
    }
    assert transport_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback_device()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("127.0.0.0/8", True),
        ("::1", True),
        ("localhost", True),
        ("lo", True),
        ("10.0.0.1", False),
        ("10.0.0.0/8", False),
        ("fd00::1", False),
        ("eth0", False),
        ("node-1", False),
        ("auto", False),
    ],
)
def test_what_is_loopback_by_how_it_is_written(value: str, expected: bool) -> None:
    assert is_loopback(value) is expected


def test_what_can_be_bound_here() -> None:
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    for other in (NOT_OURS, "0.0.0.0", "a name"):
        assert not is_own(other)


def test_ports_of_a_range_come_once_each_but_those_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        first, last = (taken - 3, taken + 3) if taken < 65000 else (taken - 6, taken)
        found = list(candidates("127.0.0.1", (first, last)))
        assert len(set(found)) == len(found)
        assert set(found) <= set(range(first, last + 1)) - {taken}
    assert taken in list(candidates("127.0.0.1", (taken, taken)))
    assert list(candidates("127.0.0.1", None)) == [0]
