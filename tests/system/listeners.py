"""On what the processes of a run listen, as the kernel knows it, in whatever network namespace each of them is."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from runtime import run_files
from tests.system.runs import ROOT, Live, belonging

LOOPBACK = "127.0.0.1"
TCP_LISTENS, UDP_OPEN = "0A", "07"  # states of /proc/net/tcp and udp
_FAMILIES = {"tcp": TCP_LISTENS, "tcp6": TCP_LISTENS, "udp": UDP_OPEN, "udp6": UDP_OPEN}

# What a client of a store of torch.distributed says first: "validate" with a number that all versions know, and a ping, which
# is answered with what it carries.
_PING = struct.Struct("=BIBI")
_VALIDATE, _MAGIC, _PINGS, _NONCE = 0, 0x3C85F7CE, 13, 0x51A1CE


@dataclass(frozen=True)
class Listener:
    """`role`: as `services.ROLE` names it; of what descends from such a process, and is none, ROLE's child; else ""."""

    pid: int
    role: str
    protocol: str  # tcp or udp
    ip: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.ip}:{self.port}"


def listeners(processes: Sequence[psutil.Process]) -> list[Listener]:
    """Of TCP and UDP; a UDP socket counts where it takes what anybody sends."""
    found = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            inodes, role = _inodes(process.pid), role_of(process)
            for name, state in _FAMILIES.items():
                for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == state and fields[9] in inodes:
                        ip, _, port = fields[1].partition(":")
                        found.append(Listener(process.pid, role, name[:3], _ip(ip), int(port, 16)))
    return found


def role_of(process: psutil.Process) -> str:
    """See `Listener.role`."""
    for word in process.cmdline():
        if word.startswith("services."):
            return word.removeprefix("services.")
    above = [role for parent in process.parents() if (role := role_of(parent))]
    return above[0].partition("'")[0] + "'s child" if above else ""


def is_store(address: str, seconds: float = 2.0) -> bool:
    """Whether a store of torch.distributed answers there. Its own client waits for ever where something else does."""
    ip, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((ip, int(port)), seconds) as connection:
        connection.sendall(_PING.pack(_VALIDATE, _MAGIC, _PINGS, _NONCE))
        return connection.recv(4) == struct.pack("=I", _NONCE)
    return False


def documented() -> set[tuple[str, str, str]]:
    """(role, what for, address), by the table of the guide."""
    guide = (ROOT / "docs" / "guides" / "cluster.md").read_text()
    table = guide.partition("### What listens\n")[2].partition("\n#")[0]
    return set(_rows(table))


def places(ip: str, interface: str) -> set[str]:
    """What the table calls an address of a node whose `network.interface` is at `interface`."""
    address = ipaddress.ip_address(ip)
    names = {"interface": ip == interface, "loopback": address.is_loopback, "all": address.is_unspecified}
    return {name for name, holds in names.items() if holds}


def check_documented(found: list[Listener], grpc: set[str], stores: set[str], interface: str) -> None:
    """Each of them is in the guide's table. `grpc` and `stores`: the addresses of those."""
    table = {(role, what.split(" ")[0].rstrip(":"), place) for role, what, place in documented()}
    unknown = []
    for one in found:
        what = "gRPC" if one.address in grpc else "store" if one.address in stores else "gloo"
        if one.protocol != "tcp" or not any((one.role, what, place) in table for place in places(one.ip, interface)):
            unknown.append((what, one))
    assert unknown == []


def addresses(folder: Path) -> dict[str, str]:
    """HOST:PORT of every process that answers over gRPC, by its name."""
    log = (folder / run_files.LOGS / "coordinator.log").read_text().splitlines()
    words = [line.split() for line in log if " registered: pid " in line]
    found = {line[line.index("registered:") - 1]: line[line.index("at") + 1].rstrip(",") for line in words}
    return {"coordinator": (folder / run_files.ADDRESS).read_text().strip(), **found}


def check_run(run: Live) -> None:
    """A run on this machine listens on what the guide lists, and on a store."""
    found, grpc = listeners(belonging(run.folder)), set(addresses(run.folder).values())
    others = [one.address for one in found if one.address not in grpc]
    with ThreadPoolExecutor(max(1, len(others))) as together:  # what is no store keeps silent, and the run goes on
        stores = {address for address, is_one in zip(others, together.map(is_store, others), strict=True) if is_one}
    assert grpc <= {one.address for one in found}
    assert stores
    check_documented(found, grpc, stores, LOOPBACK)


def _rows(table: str) -> Iterator[tuple[str, str, str]]:
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| process")):
            roles, what, where = (cell.strip() for cell in line.split("|")[1:4])
            for role in roles.split(", "):
                for place in re.split(", | or ", where):
                    yield role, what, place


def _inodes(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                found.add(match[1])
    return found


def _ip(text: str) -> str:
    """An address as the kernel writes it: each 4 bytes in the order of this machine."""
    words = [bytes.fromhex(text[index : index + 8])[::-1] for index in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
