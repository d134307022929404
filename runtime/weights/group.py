"""Process groups beside torch's default one: a rendezvous with a deadline, broadcasts with deadlines, and a real abort.

A group meets in a TCPStore that rank 0 hosts. `host` opens it and `join` enters it; both return when all are connected, or
raise ServiceFault with the ranks that are missing. Buffers are always in host memory: on NCCL and HCCL the group moves them
through the device itself, so that the sender, the receiver and the checksums are the same on every backend.

Nobody enters a collective before the sender announces it in the store (`announce`, `await_announcement`). A receiver may
therefore be posted a whole training step ahead: it occupies no device stream, and deadlines count from the announcement.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from msgspec import structs

from runtime.errors import ServiceFault, UserError
from runtime.weights.device_link import DeviceLink
from runtime.weights.plan import GroupAddress

BACKENDS = ("gloo", "nccl", "hccl")
# Upper bound of a wait that nobody aborts, when coordinator and sender are both lost without closing a socket.
BACKSTOP = 4 * 3600.0

_FDS = Path("/proc/self/fd")
_device_lock = threading.Lock()
SocketAddress = tuple[str, int]


def local_address(interface: str) -> str:
    """The IPv4 address of a device ("eth0"), or `interface` itself when it is an address. Raises UserError."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        devices = psutil.net_if_addrs()
    for entry in devices.get(interface, ()):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise UserError(
        f"network.interface: {interface!r} is neither an address nor one of the devices {', '.join(sorted(devices))}"
    )


def route_to(host: str, port: int) -> str:
    """The local address from which `host` is reached; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def reason(error: BaseException) -> str:
    """One line of a torch error, without source position and advice."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This", 1)[0] or type(error).__name__


def drop_frames(error: BaseException | None) -> None:
    """Empty the frames that `error` and its causes passed through.

    Their locals hold stores and process groups, whose sockets would stay open as long as somebody keeps the error.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _plain(address: tuple[Any, ...]) -> SocketAddress:
    return str(address[0]).removeprefix("::ffff:"), address[1]


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of every open internet socket of the process, each closed when the next is asked for."""
    for name in os.listdir(_FDS):  # noqa: PTH208 - only the numbers are wanted
        try:
            if not os.readlink(_FDS / name).startswith("socket:"):  # noqa: PTH115
                continue
            descriptor = os.dup(int(name))
        except OSError:
            continue  # closed by another thread since it was listed
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)  # by now another file
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def _listeners() -> set[SocketAddress]:
    return {_plain(each.getsockname()) for each in _sockets() if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _shut(local: SocketAddress | None, remote: frozenset[SocketAddress]) -> None:
    """Shut down the process's connections that were accepted at `local` or lead to one of `remote`."""
    for duplicate in _sockets():
        try:
            peer = duplicate.getpeername()  # fails for listeners: shutting gloo's down would end the process
            if _plain(peer) in remote or _plain(duplicate.getsockname()) == local:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or the peer was faster


def _gloo_device(host: str) -> tuple[Any, SocketAddress]:
    """A gloo device bound to `host`, and the address at which it listens.

    gloo does not tell its port, so it is the listener on `host` that appears with the device; should another thread open
    one in the same instant, try again.
    """
    with _device_lock:
        for _ in range(16):
            before = _listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = [address for address in _listeners() - before if address[0] == host]
            if len(new) == 1:
                return device, new[0]
            del device
    raise ServiceFault("gloo", "rendezvous", f"cannot tell its own listener on {host} from those of other threads")


def meet(store: Any, rank: int, card: str, labels: Sequence[str], name: str, timeout: float) -> list[str]:
    """Leave `card` for the others and return everyone's, by rank. `labels` says how each rank is called, `name` this one.

    Raises ServiceFault, phase "rendezvous", with the ranks that did not come within `timeout` seconds.
    """
    keys = [f"member/{other}" for other in range(len(labels))]
    try:
        store.set(keys[rank], card)
        store.wait(keys, timedelta(seconds=timeout))
        return [bytes(value).decode() for value in store.multi_get(keys)]
    except RuntimeError as error:
        raise ServiceFault(name, "rendezvous", _missing(store, keys, labels, error), timeout) from error


def _missing(store: Any, keys: list[str], labels: Sequence[str], error: RuntimeError) -> str:
    try:
        missing = [label for label, key in zip(labels, keys, strict=True) if not store.check([key])]
    except RuntimeError:
        missing = []  # the store is gone, and it lives in rank 0
    return f"{', '.join(missing)} did not join" if missing else f"{labels[0]} is gone: {reason(error)}"


class GlooMesh:
    """A ProcessGroupGloo whose sockets are known, so that `abort` frees every thread that is stuck in it.

    torch's own `ProcessGroupGloo.abort` leaves a blocked collective to its timeout. Shutting the sockets down ends it at
    once, here and at the peers.
    """

    def __init__(self, store: Any, rank: int, labels: Sequence[str], host: str, timeout: float, *, name: str):
        """Blocks until all of `labels` (one per rank) are connected; raises ServiceFault after `timeout` seconds."""
        give_up = time.monotonic() + timeout
        device, self._local = _gloo_device(host)
        cards = meet(store, rank, f"{self._local[0]} {self._local[1]}", labels, name, timeout)
        listeners = [(address, int(port)) for address, port in (card.split() for card in cards)]
        self._remote = frozenset(listeners) - {self._local}
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
        options = gloo._Options()
        options._devices = [device]
        options._threads = 2
        options._timeout = timedelta(seconds=max(give_up - time.monotonic(), 0.1))
        try:
            self.pg: Any = gloo(dist.PrefixStore("gloo", store), rank, len(labels), options)
        except RuntimeError as error:
            raise ServiceFault(name, "rendezvous", f"a member was lost while connecting: {reason(error)}", timeout) from error
        self.pg._set_default_timeout(timedelta(seconds=BACKSTOP))

    def abort(self) -> None:
        """Close every connection and free the threads. Idempotent; any thread may call it."""
        pg, self.pg = self.pg, None
        if pg is not None:
            _shut(self._local, self._remote)


class Transfer(Protocol):
    """A broadcast under way."""

    def wait(self, timeout: float) -> None:
        """Return when the buffer may be reused (sender) or is filled (receiver). Raises RuntimeError."""


class _Link(Protocol):
    def broadcast(self, buffer: torch.Tensor, rank: int) -> Transfer: ...

    def abort(self) -> None: ...


class _HostTransfer:
    def __init__(self, work: Any):
        self._work = work

    def wait(self, timeout: float) -> None:
        self._work.wait(timedelta(seconds=timeout))


class _GlooLink:
    def __init__(self, mesh: GlooMesh):
        self._mesh = mesh

    def broadcast(self, buffer: torch.Tensor, rank: int) -> Transfer:
        pg = self._mesh.pg
        if pg is None:
            raise RuntimeError("the group was aborted")
        return _HostTransfer(pg.broadcast(buffer, 0))

    def abort(self) -> None:
        self._mesh.abort()


class WeightGroup:
    """One epoch's members, connected. Rank 0 sends; every member makes the same calls in the same order, from one thread."""

    def __init__(self, address: GroupAddress, name: str, store: Any, link: _Link, paths: frozenset[SocketAddress]):
        self.name = name
        self.epoch = address.epoch
        self.rank = address.rank
        self.world_size = address.world_size
        self._store = store
        self._link = link
        self._paths = paths
        self._transfers = 0
        self.aborted = False

    def announce(self) -> None:
        """Rank 0: the broadcasts of the next transfer begin."""
        self._transfers += 1
        self._running_store().set(f"transfer/{self._transfers}", b"")

    def await_announcement(self) -> None:
        """The others: block until `announce`, `abort`, or the loss of rank 0. Raises RuntimeError for the latter two."""
        self._transfers += 1
        self._running_store().wait([f"transfer/{self._transfers}"], timedelta(seconds=BACKSTOP))

    def broadcast(self, buffer: torch.Tensor) -> Transfer:
        """Start the broadcast of `buffer` (uint8, host memory) from rank 0. Raises RuntimeError, as does its `wait`."""
        return self._link.broadcast(buffer, self.rank)

    def abort(self) -> None:
        """Leave for good: threads blocked here fail at once, the peers as soon as they see it. Idempotent, from any thread.

        It is also how a group ends in order, but only once the last transfer is verified everywhere: gloo fails even what
        has arrived when its connection closes. A process should leave its groups before it exits.
        """
        self.aborted = True
        self._link.abort()
        _shut(None, self._paths)
        self._store = None

    def _running_store(self) -> Any:
        store = self._store
        if store is None:
            raise RuntimeError("the group was aborted")
        return store


class PendingGroup:
    """A rendezvous that is open until `connect` returns or fails, `abort` is called, or this object is dropped."""

    def __init__(self, address: GroupAddress, name: str, store: Any, interface: str):
        self.address = address
        self._name = name
        self._store = store
        self._interface = interface

    def connect(self, names: Sequence[str] = ()) -> WeightGroup:
        """Block until every member is there; once only. `names`, by rank, serve the message of a failure.

        Raises ServiceFault, phase "rendezvous", with the ranks that did not come within the address's timeout.
        """
        try:
            return self._connect(names)
        except ServiceFault as fault:
            drop_frames(fault)
            raise

    def abort(self) -> None:
        """Fail `connect`, here and, where rank 0 does it, at everyone who came already. Idempotent, from any thread."""
        _shut((here := (self.address.host, self.address.port)), frozenset({here}))

    def _connect(self, names: Sequence[str]) -> WeightGroup:
        address = self.address
        labels = [f"rank {rank}" + (f" ({names[rank]})" if rank < len(names) else "") for rank in range(address.world_size)]
        store, self._store = self._store, None
        link: _Link
        if address.backend == "gloo":
            link = _GlooLink(GlooMesh(store, address.rank, labels, self._interface, address.timeout, name=self._name))
        else:
            link = self._over_devices(store, labels)
        return WeightGroup(address, self._name, store, link, frozenset({(address.host, address.port)}))

    def _over_devices(self, store: Any, labels: Sequence[str]) -> _Link:
        address = self.address
        give_up = time.monotonic() + address.timeout
        meet(store, address.rank, "", labels, self._name, address.timeout)
        left = max(give_up - time.monotonic(), 0.1)
        try:
            return DeviceLink(store, address.rank, address.world_size, address.backend, left, BACKSTOP)
        except RuntimeError as error:
            message = f"{address.backend} could not connect the members: {reason(error)}"
            raise ServiceFault(self._name, "rendezvous", message, address.timeout) from error


def host(epoch: int, world_size: int, interface: str, backend: str, timeout: float, name: str = "sender") -> PendingGroup:
    """Open the rendezvous of `epoch` on a free port of `interface`, as rank 0; does not block.

    The others are given `.address` with their own rank in it. Raises UserError for an unknown interface or backend.
    """
    if backend not in BACKENDS:
        raise UserError(f"publication.backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    ip = local_address(interface)
    with socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=1024) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            ip,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    address = GroupAddress(epoch=epoch, host=ip, port=port, rank=0, world_size=world_size, backend=backend, timeout=timeout)
    return PendingGroup(address, name, dist.PrefixStore(f"epoch/{epoch}", store), ip)


def join(address: GroupAddress, name: str = "", interface: str = "") -> WeightGroup:
    """Enter the rendezvous as `address.rank`; blocks until every member is there.

    `interface` defaults to the local address from which `address.host` is reached. Raises ServiceFault, phase "rendezvous".
    """
    name = name or f"rank {address.rank}"
    began = time.monotonic()
    try:
        store = dist.TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=address.timeout), wait_for_workers=False
        )
    except RuntimeError as error:
        message = f"rank 0 at {address.host}:{address.port} cannot be reached: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
    ip = local_address(interface) if interface else route_to(address.host, address.port)
    left = structs.replace(address, timeout=max(address.timeout - (time.monotonic() - began), 0.1))
    return PendingGroup(left, name, dist.PrefixStore(f"epoch/{address.epoch}", store), ip).connect()
