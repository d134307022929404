"""Transport `collective`: each bucket is one broadcast to the next member, over gloo, NCCL or HCCL.

Buffers lie in host memory: NCCL and HCCL copy them through the device. So all else is the same on every backend."""

from __future__ import annotations

import atexit
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import timeouts
from runtime.errors import ServiceFault
from runtime.process import platform
from runtime.weights.group import ForgedValue, Link, Target, Transfer
from runtime.weights.plan import GroupAddress

# Connections between each two members. With one gloo connection, both ends wait for each other part of the time. A second
# connection fills these gaps, so that checksums cost no throughput. A third connection gained nothing.
CONNECTIONS = 2

KINDS = {"nccl": "cuda", "hccl": "npu"}


# ---- The process's own sockets: find them and shut them down


_FDS = Path("/proc/self/fd")
SocketAddress = tuple[str, int]


def _plain(address: tuple[Any, ...]) -> SocketAddress:
    return str(address[0]).removeprefix("::ffff:"), address[1]


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every open internet socket of the process. The next iteration closes the duplicate."""
    for name in os.listdir(_FDS):  # noqa: PTH208 - only the numbers are used
        try:
            if not os.readlink(_FDS / name).startswith("socket:"):  # noqa: PTH115
                continue
            descriptor = os.dup(int(name))
        except OSError:
            continue  # closed by another thread since it was listed
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)  # the number now belongs to another file
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def listeners() -> set[SocketAddress]:
    return {_plain(each.getsockname()) for each in _sockets() if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _connections(local: frozenset[SocketAddress], remote: frozenset[SocketAddress]) -> Iterator[socket.socket]:
    """Yield duplicates of the process's connections that were accepted at one of `local` or lead to one of `remote`."""
    for duplicate in _sockets():
        try:
            peer = duplicate.getpeername()  # fails for listeners: to shut down gloo's listener would end the process
            if _plain(peer) in remote or _plain(duplicate.getsockname()) in local:
                yield duplicate
        except OSError:
            continue  # not connected, or closed by the peer first


def shut_down(local: frozenset[SocketAddress], remote: frozenset[SocketAddress]) -> None:
    """Shut down the process's connections that were accepted at one of `local` or lead to one of `remote`."""
    for duplicate in _connections(local, remote):
        with suppress(OSError):  # closed by the peer first
            duplicate.shutdown(socket.SHUT_RDWR)


def _open_connections(local: frozenset[SocketAddress], remote: frozenset[SocketAddress]) -> int:
    """Count these connections that neither end has closed."""
    found = 0
    for duplicate in _connections(local, remote):
        look = select.poll()
        look.register(duplicate, select.POLLRDHUP)  # poll adds POLLHUP and POLLERR itself
        found += not look.poll(0)
    return found


# ---- Connecting

# gloo waits this many times its timeout for the first message of a peer, even if the peer has died since the rendezvous.
TIMEOUTS_OF_FIRST_WORD = 5


_device_lock = threading.Lock()
_leaving: set[threading.Thread] = set()  # each destroys one group


def reason(error: BaseException) -> str:
    """Return one line of a torch error, without source position and advice."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This", 1)[0] or type(error).__name__


def _let_go(ending: list[Any]) -> None:
    def clear() -> None:
        ending.clear()
        _leaving.discard(thread)

    thread = threading.Thread(target=clear, name="leave-gloo", daemon=True)
    _leaving.add(thread)
    thread.start()


@atexit.register
def _await_leaving() -> None:
    """Join the leaving threads at exit: a thread that is inside torch when the interpreter ends would crash the process."""
    for thread in tuple(_leaving):
        thread.join(timeouts.GLOO_LEAVE)


def _gloo_device(host: str) -> tuple[Any, SocketAddress]:
    """Return a new gloo device bound to `host`, and its address: of the listener that appears, as gloo reports none."""
    with _device_lock:
        for _ in range(16):
            before = listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = [address for address in listeners() - before if address[0] == host]
            if len(new) == 1:
                return device, new[0]
            del device
    raise ServiceFault("gloo", "rendezvous", f"cannot distinguish its own listener on {host} from other threads' listeners")


def meet(store: Any, rank: int, card: str, labels: Sequence[str], name: str, timeout: float) -> list[str]:
    """Publish `card` for the other members, and return all members' cards, by rank. `labels`: the ranks' names for messages;
    `name`: this member's. Raises ServiceFault, phase "rendezvous", with the ranks that did not come within `timeout` s."""
    return cards_of(store, range(len(labels)), labels, name, timeout, (rank, card))


def cards_of(
    store: Any, ranks: Sequence[int], labels: Sequence[str], name: str, timeout: float, own: tuple[int, str] | None = None
) -> list[str]:
    """Return the cards of `ranks`, after publishing the `own` rank and card, if any. Raises as `meet` does."""
    keys = [f"member/{rank}" for rank in ranks]
    try:
        if own is not None:
            store.set(f"member/{own[0]}", own[1])
        store.wait(keys, timedelta(seconds=timeout))
        return [bytes(value).decode() for value in store.multi_get(keys)]
    except ForgedValue as error:
        raise ServiceFault(name, "rendezvous", str(error), timeout) from error
    except RuntimeError as error:
        chosen = [labels[rank] for rank in ranks]
        raise ServiceFault(name, "rendezvous", _missing(store, keys, chosen, labels[0], error), timeout) from error


def _missing(store: Any, keys: list[str], labels: Sequence[str], host: str, error: RuntimeError) -> str:
    try:
        missing = [label for label, key in zip(labels, keys, strict=True) if not store.check([key])]
    except RuntimeError:
        missing = []  # the store is gone: rank 0 hosts it
    return f"{', '.join(missing)} did not join" if missing else f"{host} is gone: {reason(error)}"


# ---- Links


class GlooLink(Link):
    """A ProcessGroupGloo beside torch's default group, with a deadline and a real abort: torch's own leaves a blocked
    collective to its timeout. The sockets are known here. Their shutdown ends the collective at once, also at the peers."""

    def __init__(
        self,
        store: Any,
        rank: int,
        labels: Sequence[str],
        host: str,
        timeout: float,
        *,
        name: str,
        connections: int = 1,
        leader: SocketAddress | None = None,
    ):
        """Block until all of `labels` (one per rank) are connected. Raises ServiceFault after `timeout` seconds. `connections`:
        between each two ranks, a thread each; gloo uses them in turn, so several collectives move at once. `leader`: where the
        process with the store accepts connections; a wait ends when that process leaves, too."""
        give_up = time.monotonic() + timeout
        self._leaving = threading.Lock()
        devices, own = zip(*(_gloo_device(host) for _ in range(connections)), strict=True)
        cards = meet(store, rank, " ".join([host, *(str(port) for _, port in own)]), labels, name, timeout)
        heard = [(address, int(port)) for address, *ports in map(str.split, cards) for port in ports]
        self._local = frozenset(own)
        self._remote = frozenset(heard) - self._local
        kind: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
        settings = kind._Options()
        settings._devices = list(devices)
        settings._threads = 2 * connections
        settings._timeout = timedelta(seconds=max((give_up - time.monotonic()) / TIMEOUTS_OF_FIRST_WORD, timeouts.GLOO_LEAST))
        try:
            self.gloo: Any = kind(store.within("gloo"), rank, len(labels), settings)
        except RuntimeError as error:
            raise ServiceFault(name, "rendezvous", f"a member was lost while connecting: {reason(error)}", timeout) from error
        self.gloo._set_default_timeout(timedelta(seconds=timeouts.GLOO_BACKSTOP))
        self._watched = self._remote | ({leader} if leader else set())
        self._open = _open_connections(self._local, self._watched)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self.sent_bytes += buffer.nbytes
        return self._broadcast(buffer)

    def receive(self, index: int, target: Target) -> Transfer:
        assert target.run is not None
        return self._broadcast(target.run)

    def _broadcast(self, buffer: torch.Tensor) -> Transfer:
        gloo = self.gloo
        if gloo is None:
            raise RuntimeError("the group was aborted")
        return partial(self._wait, gloo.broadcast(buffer, 0))

    def _wait(self, work: Any, give_up: float) -> None:
        """Wait in slices: gloo may forget a collective whose connection failed, and torch may give up a moment early.

        A member's last data may still be on its way when its connection is seen closed. So two looks must find the loss."""
        look, lost = time.monotonic() + timeouts.COLLECTIVE_LOSS, False
        while True:
            aborted, now = self.gloo is None, time.monotonic()
            if _ends(work, 0.0 if aborted else min(give_up - now, timeouts.COLLECTIVE_SLICE)):
                return
            if aborted or now >= give_up:
                raise RuntimeError("the group was aborted" if aborted else "timed out")
            if now >= look:
                if lost:
                    raise RuntimeError("the connection to a member was lost")
                # Whether any of the first connections has been closed, here or by the peer.
                lost = _open_connections(self._local, self._watched) < self._open
                look = now + timeouts.COLLECTIVE_LOSS

    def abort(self) -> None:
        """Close every connection and free the threads. Idempotent, from any thread; does not block. gloo forgets a send whose
        connection fails while gloo's thread writes: `set_timeout` ends a wait for that. A thread destroys the group."""
        with self._leaving:
            gloo, self.gloo = self.gloo, None
        if gloo is not None:
            shut_down(self._local, self._remote)
            ending = [gloo]
            del gloo
            _let_go(ending)

    def set_timeout(self, seconds: float) -> None:
        """Let collectives that begin from now on block a thread for at most `seconds`."""
        if (gloo := self.gloo) is not None:
            gloo._set_default_timeout(timedelta(seconds=seconds))


def _ends(work: Any, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=max(seconds, timeouts.TORCH_LEAST)))
    except RuntimeError:
        if not work.is_completed():
            return False
    # The collective may have ended between its timeout and `is_completed`: this `wait` raises its error, if any.
    work.wait(timedelta(seconds=timeouts.TORCH_LEAST))
    return True


class DeviceLink(Link):
    """A ProcessGroupNCCL or ProcessGroupHCCL beside torch's default group."""

    def __init__(self, store: Any, rank: int, size: int, backend: str, timeout: float):
        """Connect within `timeout` seconds: the first collective makes the communicator. Raises RuntimeError."""
        kind = KINDS[backend]
        self.module = torch.get_device_module(kind)
        self._device = torch.device(kind, self.module.current_device())
        self.stream = self.module.Stream(device=self._device)
        group = platform.process_group_class(backend)
        options = group.Options()
        options._timeout = timedelta(seconds=timeouts.GLOO_BACKSTOP)
        self._pg: Any = group(dist.PrefixStore(backend, store), rank, size, options)
        try:
            self._broadcast(torch.zeros(1, dtype=torch.uint8), rank == 0)(time.monotonic() + timeout)
        except RuntimeError:
            self.abort()
            raise

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self.sent_bytes += buffer.nbytes
        return self._broadcast(buffer, True)

    def receive(self, index: int, target: Target) -> Transfer:
        assert target.run is not None
        return self._broadcast(target.run, False)

    def _broadcast(self, buffer: torch.Tensor, sends: bool) -> Transfer:
        pg = self._running()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self.module.stream(self.stream):
            staged = buffer.to(self._device, non_blocking=True) if sends else torch.empty_like(buffer, device=self._device)
            work = pg.broadcast([staged], options)
        return partial(self._wait, work, staged, None if sends else buffer)

    def _wait(self, work: Any, staged: torch.Tensor, target: torch.Tensor | None, give_up: float) -> None:
        """Wait for a broadcast, and copy `staged` to `target`, a receiver's host buffer. The `wait` of NCCL and HCCL only makes
        the current stream wait. So an event marks the end on that stream, and this thread polls the event, until `give_up`."""
        timeout = max(give_up - time.monotonic(), timeouts.TORCH_LEAST)
        with self.module.stream(self.stream):
            work.wait(timedelta(seconds=timeout))
            if target is not None:
                target.copy_(staged, non_blocking=True)
            end = self.module.Event()
            end.record(self.stream)
        while not end.query():
            self._running()
            if time.monotonic() > give_up:
                raise RuntimeError(f"the device did not end the broadcast within {timeout:.1f} s")
            time.sleep(timeouts.COLLECTIVE_POLL)
        self._running()  # an abort also completes the event, without the data

    def _running(self) -> Any:
        """Return the communicator. Raises RuntimeError after `abort`."""
        if (pg := self._pg) is None:
            raise RuntimeError("the group was aborted")
        return pg

    def abort(self) -> None:
        """Destroy the communicator, and free the threads that wait for a transfer. Idempotent, from any thread."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        # A backend may block here until its running collective ends, at most for its backstop: hence a separate thread.
        ending = threading.Thread(target=_abort, args=(pg,), name="abort-weights", daemon=True)
        ending.start()
        del pg
        ending.join(timeouts.COLLECTIVE_ABORT)


def _abort(pg: Any) -> None:
    if hasattr(pg, "abort_hccl_comm"):
        pg.abort_hccl_comm("reinit")  # as torch_npu's reinit_process_group does; torch_npu does not implement `abort`
    else:
        pg.abort()


def connect(store: Any, address: GroupAddress, labels: Sequence[str], name: str, interface: str) -> Link:
    """Connect, and block until all members are connected. Raises ServiceFault, phase "rendezvous"."""
    if address.backend == "gloo":
        leader = (address.host, address.port)
        return GlooLink(
            store, address.rank, labels, interface, address.timeout, name=name, connections=CONNECTIONS, leader=leader
        )
    give_up = time.monotonic() + address.timeout
    meet(store, address.rank, "", labels, name, address.timeout)
    left = max(give_up - time.monotonic(), timeouts.RENDEZVOUS_LEAST)
    try:
        return DeviceLink(store.unauthenticated(), address.rank, address.world_size, address.backend, left)
    except RuntimeError as error:
        message = f"{address.backend} could not connect the members: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
