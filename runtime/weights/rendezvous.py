"""The rendezvous of an epoch's members: `host` opens a group by the name of its transport, and `join` enters the group.

`join`, and `connect` of the group that `host` opens, block until all members are connected. Both raise ServiceFault with the
missing ranks. Members meet in a TCPStore that rank 0 hosts, and buckets move over links: one from each sender to all
receivers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from runtime import timeouts
from runtime.errors import ServiceFault, UserError
from runtime.process.network import AUTO, PortRange, listen, own_address
from runtime.types import PolicyVersion
from runtime.weights import collective, shared_memory
from runtime.weights.delta import DeltaLink
from runtime.weights.gloo_mesh import SocketAddress, meet, reason, shut_down
from runtime.weights.group import AuthenticatedStore, Link, PendingGroup, Transfer, WeightGroup, new_key
from runtime.weights.plan import GroupAddress

BACKENDS = ("gloo", "nccl", "hccl")
TRANSPORTS = ("collective", "shared_memory")
BACKLOG = 1024  # members that connect at once

LINKS: dict[str, Callable[[Any, GroupAddress, Sequence[str], str, str], Link]] = {
    "collective": collective.connect,
    "shared_memory": shared_memory.connect,
}
"""By transport: (store, address, all labels by rank, own name, own interface's address) -> link, within the timeout."""


class StoreGroup(WeightGroup):
    def __init__(
        self,
        address: GroupAddress,
        name: str,
        store: AuthenticatedStore,
        links: Sequence[Link],
        paths: frozenset[SocketAddress],
    ):
        """Make the group over `links`: at a receiver one link from each sender, by the sender's rank; at a sender its own."""
        super().__init__(address, name)
        self._senders = address.senders
        self._label = address.label
        self._store: AuthenticatedStore | None = store
        self._links = links
        self._paths = paths
        self._transfers = 0

    def announce(self, version: PolicyVersion) -> None:
        self._transfers += 1
        if self.rank == 0:
            self._running_store().set(f"transfer/{self._transfers}", b"")

    def await_announcement(self, version: PolicyVersion) -> None:
        self._transfers += 1
        self._running_store().await_value(f"transfer/{self._transfers}", timeouts.GLOO_BACKSTOP)

    def set_changed(self, index: int, changed: Any) -> None:
        self._links[0].set_changed(index, changed)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        transfer = self._links[0].send(index, buffer)
        self.sent_bytes = self._links[0].sent_bytes
        return transfer

    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Transfer:
        return self._links[root if self._senders > 1 else 0].receive(index, buffer)

    def wait_for_senders(self, nbytes: int, give_up: float) -> int:
        if self.rank:
            self._running_store().set(self._part(self.rank), str(nbytes))
            return nbytes
        # Each other sender sets its part after its own receivers have taken all its buckets, or reports its failure.
        return nbytes + sum(self._await_part(sender, give_up) for sender in range(1, self._senders))

    def report_failure(self, message: str) -> None:
        if self.rank:
            with suppress(RuntimeError):  # rank 0 has left
                self._running_store().set(self._part(self.rank), message)

    def sender_name(self, root: int) -> str | None:
        return self._label(root) if self._senders > 1 else None

    def _part(self, sender: int) -> str:
        return f"part/{self._transfers}/{sender}"

    def _await_part(self, sender: int, give_up: float) -> int:
        """Wait until the receivers have the sender's part, and return its bytes."""
        store, label = self._running_store(), self._label(sender)
        try:
            message = store.await_value(self._part(sender), max(give_up - time.monotonic(), timeouts.TORCH_LEAST)).decode()
        except RuntimeError as error:
            self._running_store()
            late = time.monotonic() >= give_up
            raise RuntimeError(f"the part of {label} was not taken" + ("" if late else f": {reason(error)}")) from error
        if not message.isdigit():
            raise RuntimeError(f"{label}: {message}")
        return int(message)

    def set_timeout(self, seconds: float) -> None:
        for link in self._links:
            link.set_timeout(seconds)

    def abort(self) -> None:
        self.aborted = True
        for link in self._links:
            link.abort()
        shut_down(frozenset(), self._paths)
        self._store = None

    def _running_store(self) -> AuthenticatedStore:
        store = self._store
        if store is None:
            raise RuntimeError("the group was aborted")
        return store


class PendingStoreGroup(PendingGroup):
    def __init__(self, address: GroupAddress, name: str, store: AuthenticatedStore, interface: str):
        self.address = address
        self._name = name
        self._store: Any = store
        self._interface = interface

    def abort(self) -> None:
        here = frozenset({(self.address.host, self.address.port)})
        shut_down(here, here)

    def connect(self) -> WeightGroup:
        address = self.address
        give_up = time.monotonic() + address.timeout
        labels = list(map(address.label, range(address.world_size)))
        store, self._store = self._store, None
        links: list[Link] = []
        try:
            if address.senders > 1:  # meet first: otherwise errors would name members that only wait for the missing one
                meet(store.within("all"), address.rank, "", labels, self._name, address.timeout)
            mine = [address.rank] if address.rank < address.senders else range(address.senders)
            for sender in mine:
                timeout = _left(give_up) if address.senders > 1 else address.timeout
                links.append(self._link_from(sender, store, labels, timeout))
        except BaseException:
            for link in links:
                link.abort()
            raise
        return StoreGroup(address, self._name, store, links, frozenset({(address.host, address.port)}))

    def _link_from(self, sender: int, store: AuthenticatedStore, labels: Sequence[str], timeout: float) -> Link:
        """Connect and return the link from `sender`. The sender is the link's rank 0; the receivers follow."""
        address, first = self.address, self.address.senders
        part = structs.replace(
            address,
            rank=0 if address.rank < first else address.rank - first + 1,
            world_size=address.world_size - first + 1,
            timeout=timeout,
        )
        apart = store.within(f"sender/{sender}")
        link = LINKS[address.transport](apart, part, [labels[sender], *labels[first:]], self._name, self._interface)
        return DeltaLink(link, address.full_every) if address.full_every else link


def _left(give_up: float) -> float:
    return max(give_up - time.monotonic(), timeouts.RENDEZVOUS_LEAST)


def host(address: GroupAddress, interface: str, port_range: PortRange | None = None, name: str = "sender") -> PendingGroup:
    """Open the rendezvous of `address` as rank 0, on a free port of `interface` within `port_range`. Does not block.

    `address` lacks its host, its port and its key. With `full_every` = n > 0 versions are deltas, except one of every n, which
    is whole. Raises UserError for an unknown interface, backend or transport, or a range without a free port.
    """
    if address.backend not in BACKENDS:
        raise UserError(f"weight_sync.backend: {address.backend!r} is not one of {', '.join(BACKENDS)}")
    if address.transport not in TRANSPORTS:
        raise UserError(f"weight_sync.transport: {address.transport!r} is not one of {', '.join(TRANSPORTS)}")
    address = structs.replace(address, key=new_key())
    ip, patience = own_address(interface), timedelta(seconds=address.timeout)
    with listen(ip, port_range, BACKLOG) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()
        store = dist.TCPStore(ip, port, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=descriptor)
    address = structs.replace(address, host=ip, port=port)
    return PendingStoreGroup(address, name, _members_store(store, address), ip)


def join(address: GroupAddress, name: str = "", interface: str = "") -> WeightGroup:
    """Enter the rendezvous as `address.rank`, and block until every member is connected. `interface` defaults to the local
    address that reaches `address.host`. Raises ServiceFault, phase "rendezvous"."""
    name = name or f"rank {address.rank}"
    give_up, patience = time.monotonic() + address.timeout, timedelta(seconds=address.timeout)
    try:
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        message = f"{address.label(0)} at {address.host}:{address.port} cannot be reached: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
    ip = own_address(interface or AUTO, address.host)
    left = structs.replace(address, timeout=_left(give_up))
    return PendingStoreGroup(left, name, _members_store(store, address), ip).connect()


def _members_store(store: Any, address: GroupAddress) -> AuthenticatedStore:
    return AuthenticatedStore(store, address.key).within(f"epoch/{address.epoch}")
