"""Groups whose members meet in a TCPStore that rank 0 hosts, and move buckets over a link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from runtime.errors import ServiceFault
from runtime.network import AUTO, PortRange, listen, own_address
from runtime.types import PolicyVersion
from runtime.weights import collective, delta, shared_memory
from runtime.weights.gloo_mesh import BACKSTOP, drop_frames, reason
from runtime.weights.group import PendingGroup, WeightGroup
from runtime.weights.link import Link, Transfer
from runtime.weights.plan import GroupAddress
from runtime.weights.sockets import SocketAddress, shut_down

BACKLOG = 1024  # members that knock at once

LINKS: dict[str, Callable[[Any, GroupAddress, Sequence[str], str, str], Link]] = {
    "collective": collective.connect,
    "shared_memory": shared_memory.connect,
    "delta": delta.connect,
}
"""By transport: (store, address, everyone's label by rank, own name, own interface's address) to a link, within the timeout."""


class StoreGroup(WeightGroup):
    def __init__(self, address: GroupAddress, name: str, store: Any, link: Link, paths: frozenset[SocketAddress]):
        super().__init__(address, name)
        self._store = store
        self._link = link
        self._paths = paths
        self._transfers = 0

    @property
    def sent_bytes(self) -> int:
        return self._link.sent_bytes

    def announce(self, version: PolicyVersion) -> None:
        self._transfers += 1
        self._running_store().set(f"transfer/{self._transfers}", b"")

    def await_announcement(self, version: PolicyVersion) -> None:
        self._transfers += 1
        self._running_store().wait([f"transfer/{self._transfers}"], timedelta(seconds=BACKSTOP))

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        return self._link.send(index, buffer)

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        return self._link.receive(index, buffer)

    def bound(self, seconds: float) -> None:
        self._link.bound(seconds)

    def abort(self) -> None:
        self.aborted = True
        self._link.abort()
        shut_down(None, self._paths)
        self._store = None

    def _running_store(self) -> Any:
        store = self._store
        if store is None:
            raise RuntimeError("the group was aborted")
        return store


class PendingStoreGroup(PendingGroup):
    def __init__(self, address: GroupAddress, name: str, store: Any, interface: str):
        self.address = address
        self._name = name
        self._store = store
        self._interface = interface

    def connect(self) -> WeightGroup:
        try:
            return self._connect()
        except ServiceFault as fault:
            drop_frames(fault)
            raise

    def abort(self) -> None:
        shut_down((here := (self.address.host, self.address.port)), frozenset({here}))

    def _connect(self) -> WeightGroup:
        address = self.address
        labels = list(map(address.label, range(address.world_size)))
        store, self._store = self._store, None
        link = LINKS[address.transport](store, address, labels, self._name, self._interface)
        return StoreGroup(address, self._name, store, link, frozenset({(address.host, address.port)}))


def host(
    epoch: int,
    world_size: int,
    interface: str,
    backend: str,
    timeout: float,
    name: str,
    transport: str,
    full_every: int,
    port_range: PortRange | None,
    names: Sequence[str],
) -> PendingGroup:
    """As `group.host`."""
    ip = own_address(interface)
    with listen(ip, port_range, BACKLOG) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            ip,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    address = GroupAddress(
        epoch=epoch,
        host=ip,
        port=port,
        rank=0,
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        transport=transport,
        full_every=full_every,
        names=tuple(names),
    )
    return PendingStoreGroup(address, name, dist.PrefixStore(f"epoch/{epoch}", store), ip)


def join(address: GroupAddress, name: str, interface: str) -> WeightGroup:
    """As `group.join`."""
    began = time.monotonic()
    try:
        store = dist.TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=address.timeout), wait_for_workers=False
        )
    except RuntimeError as error:
        message = f"{address.label(0)} at {address.host}:{address.port} cannot be reached: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
    ip = own_address(interface or AUTO, address.host)
    left = structs.replace(address, timeout=max(address.timeout - (time.monotonic() - began), 0.1))
    return PendingStoreGroup(left, name, dist.PrefixStore(f"epoch/{address.epoch}", store), ip).connect()
