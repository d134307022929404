"""The process's own address on this machine, the interface of an address, and the ports to listen on."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache

import psutil
from msgspec import Struct

from runtime.errors import UserError

PortRange = tuple[int, int]  # first and last

AUTO = "auto"
LAST_PORT = 65535

_NOWHERE = 9  # any port, to look up a route: `connect` of a datagram socket sends no packet


def own_address(interface: str, towards: str = "", key: str = "network.interface") -> str:
    """Return this machine's address for `network.interface`: one of the machine's addresses, its network (`10.1.0.0/16`), the
    name of a device (`eth0`), or `auto`. `auto` gives the address from which the machine reaches `towards`, a name or an
    address; without `towards`, loopback. Raises UserError with `key` if there is no such address."""
    if interface == AUTO:
        return _route_to(towards) if towards else loopback()
    with suppress(ValueError):
        if ipaddress.ip_address(interface).is_unspecified:
            raise UserError(f"{key}: '{interface}' is no address that other machines reach; must be one of {_known()}")
        if is_own(interface):
            return interface
        raise UserError(f"{key}: '{interface}' is not an address of this machine, which has {_known()}")
    with suppress(ValueError):
        network = ipaddress.ip_network(interface, strict=False)
        for _, address in _addresses():
            if ipaddress.ip_address(address) in network:
                return address
        raise UserError(f"{key}: this machine has no address in {interface}; it has {_known()}")
    for device, address in _addresses():
        if device == interface:
            return address
    wrong = f"'{interface}' is neither an address, nor a network, nor auto, nor one of this machine's devices"
    raise UserError(f"{key}: {wrong}; it has {_known()}")


def loopback() -> str:
    return "::1" if is_own("::1") and not is_own("127.0.0.1") else "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the name of the device with `address`, an address of this machine. Raises UserError."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        raise UserError(f"network.interface: '{address}' is not an address") from None
    for device, each in _addresses():
        listed = ipaddress.ip_address(each)
        if listed == wanted or (listed.is_loopback and wanted.is_loopback):  # only one of 127.0.0.0/8 is listed
            return device
    raise UserError(f"network.interface: '{address}' is not an address of this machine, which has {_known()}")


def transport_variables(address: str) -> dict[str, str]:
    """Return the variables that bind torch's own connections to the device with `address`. Raises UserError."""
    device = interface_of(address)
    gloo = {"GLOO_SOCKET_IFNAME": device}
    if is_loopback(address):
        return gloo  # NCCL and HCCL find the devices of one machine themselves
    # NCCL reads a name as a prefix, unless it follows "=".
    return gloo | {"NCCL_SOCKET_IFNAME": f"={device}", "HCCL_SOCKET_IFNAME": device, "TP_SOCKET_IFNAME": device}


def is_loopback(value: str) -> bool:
    """Return whether an address, a network, a device or a name is loopback, judged by its text alone."""
    try:
        return ipaddress.ip_network(value, strict=False).is_loopback
    except ValueError:
        return value in ("lo", "localhost") or value.endswith(".localhost")


def is_own(host: str) -> bool:
    """Return whether an address, or any address of a name, can be bound here. False for an unknown name."""
    return any(_can_bind(family, address) for family, address in _resolved(host))


def host_port(host: str, port: int) -> str:
    """Format HOST:PORT, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_port(text: str) -> bool:
    """Return whether `text` is HOST:PORT, with brackets around IPv6."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    return bool(host) and (bracketed == (":" in host)) and port.isdecimal() and 0 < int(port) <= LAST_PORT


def candidates(host: str, ports: PortRange | None) -> Iterator[int]:
    """Yield the ports to try to listen on: 0 for any, or the unused ports of the range, then raise UserError."""
    if ports is None:
        yield 0
        return
    first, last = ports
    begin = random.randint(first, last)  # callers of an ended process then hardly ever reach a new one on its port
    for port in (*range(begin, last + 1), *range(first, begin)):
        if _is_free(host, port):
            yield port
    raise UserError(f"network.port_range: all ports from {first} to {last} are in use on {host}")


def listen(host: str, ports: PortRange | None, backlog: int) -> socket.socket:
    """Return a listening socket on an address of this machine. Raises UserError if no port of the range is free."""
    for port in candidates(host, ports):
        try:
            return listener(host, port, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports is None:
                raise UserError(f"network.interface: cannot listen on {host_port(host, port)}: {error.strerror}") from error
    raise AssertionError("`candidates` of a range ends with an error")


def listener(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket on `port`, 0 for any. Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog)


def _is_free(host: str, port: int) -> bool:
    try:
        listener(host, port, 1).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # `listen` reports any other error
    return True


def _route_to(host: str) -> str:
    found = _resolved(host)
    if not found:
        raise UserError(f"services.coordinator.host: the name '{host}' is unknown on this machine")
    for family, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _NOWHERE))
            return str(probe.getsockname()[0])
    raise UserError(f"services.coordinator.host: there is no route to '{host}' from this machine, which has {_known()}")


def _resolved(host: str) -> Sequence[tuple[int, str]]:
    """Return the host's addresses with their families; empty for an unknown name."""
    try:
        return [(family, str(address[0])) for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return not ipaddress.ip_address(address).is_unspecified


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (device, address) of all addresses that bind without a device name: IPv4 first, without IPv6 link-local."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for device, entries in psutil.net_if_addrs().items():
            yield from ((device, entry.address) for entry in entries if entry.family == family and "%" not in entry.address)


def _known() -> str:
    return ", ".join(f"{address} ({device})" for device, address in _addresses())


class Certificates(Struct, frozen=True):
    """PEM: the trusted authorities, the own certificate, and its private key."""

    ca: bytes
    own: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Certificates(...)"


@cache
def server_name(party: str) -> str:
    """Return the host name that shows a caller that it reached `party`: `3.rollout-0.sluice`; "": any process of the run."""
    return ".".join(filter(None, (*reversed(party.split("/")), "sluice")))
