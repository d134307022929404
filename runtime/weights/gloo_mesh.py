"""A ProcessGroupGloo for one rendezvous, with a deadline and a real abort, beside torch's default group."""

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
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime import timeouts
from runtime.errors import ServiceFault
from runtime.weights.group import ForgedValue

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


# ---- The mesh

# gloo waits this many times its timeout for the first message of a peer, even if the peer has died since the rendezvous.
TIMEOUTS_OF_FIRST_WORD = 5


_device_lock = threading.Lock()
_leaving: set[threading.Thread] = set()  # each destroys one group


def reason(error: BaseException) -> str:
    """Return one line of a torch error, without source position and advice."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This", 1)[0] or type(error).__name__


def _let_go(ending: list[Any]) -> None:
    """Drop the contents of `ending` in a thread."""

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
    """Return a new gloo device bound to `host`, and the address at which the device listens.

    gloo does not report its port. So this looks for the listener on `host` that appears with the device. It tries again if
    another thread opened a listener in the same instant.
    """
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
    """Publish `card` for the other members, and return the cards of all members, by rank. `labels`: the ranks' names for
    messages; `name`: this member's. Raises ServiceFault, phase "rendezvous", with the ranks that did not come within `timeout`
    seconds."""
    return _cards(store, range(len(labels)), labels, name, timeout, (rank, card))


def card_of(store: Any, rank: int, labels: Sequence[str], name: str, timeout: float) -> str:
    """Return the card of member `rank` alone, without a card from this member. Raises as `meet` does."""
    return _cards(store, [rank], labels, name, timeout)[0]


def _cards(
    store: Any, ranks: Sequence[int], labels: Sequence[str], name: str, timeout: float, own: tuple[int, str] | None = None
) -> list[str]:
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


class GlooMesh:
    """A ProcessGroupGloo whose sockets are known, so that `abort` frees every thread that is blocked in the group.

    torch's own `ProcessGroupGloo.abort` leaves a blocked collective to its timeout. A shutdown of the sockets ends the
    collective at once, here and at the peers.
    """

    def __init__(
        self, store: Any, rank: int, labels: Sequence[str], host: str, timeout: float, *, name: str, connections: int = 1
    ):
        """Block until all of `labels` (one per rank) are connected. Raises ServiceFault after `timeout` seconds.
        `connections`: between each two ranks, each with its own thread. gloo gives each collective to the next connection in
        turn, so that several collectives move at once.
        """
        give_up = time.monotonic() + timeout
        self._leaving = threading.Lock()
        devices, own = zip(*(_gloo_device(host) for _ in range(connections)), strict=True)
        cards = meet(store, rank, " ".join([host, *(str(port) for _, port in own)]), labels, name, timeout)
        heard = [(address, int(port)) for address, *ports in map(str.split, cards) for port in ports]
        self._local = frozenset(own)
        self._remote = frozenset(heard) - self._local
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
        options = gloo._Options()
        options._devices = list(devices)
        options._threads = 2 * connections
        options._timeout = timedelta(seconds=max((give_up - time.monotonic()) / TIMEOUTS_OF_FIRST_WORD, timeouts.GLOO_LEAST))
        try:
            self.pg: Any = gloo(store.within("gloo"), rank, len(labels), options)
        except RuntimeError as error:
            raise ServiceFault(name, "rendezvous", f"a member was lost while connecting: {reason(error)}", timeout) from error
        self.pg._set_default_timeout(timedelta(seconds=timeouts.GLOO_BACKSTOP))
        self._open = _open_connections(self._local, self._remote)

    def lost(self) -> bool:
        """Return whether any of the mesh's first connections has been closed, here or by the peer."""
        return _open_connections(self._local, self._remote) < self._open

    def abort(self) -> None:
        """Close every connection and free the threads. Idempotent, from any thread, and does not block.

        gloo forgets a send whose connection fails while gloo's own thread writes: only `set_timeout` ends a wait for that send.
        A group's destructor waits for its threads, so a separate thread destroys the group.
        """
        with self._leaving:
            pg, self.pg = self.pg, None
        if pg is not None:
            shut_down(self._local, self._remote)
            ending = [pg]
            del pg
            _let_go(ending)

    def set_timeout(self, seconds: float) -> None:
        """Let collectives that begin from now on block a thread for at most `seconds`."""
        if (pg := self.pg) is not None:
            pg._set_default_timeout(timedelta(seconds=seconds))
