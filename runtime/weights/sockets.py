"""What of its own sockets a process can find and shut down."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FDS = Path("/proc/self/fd")
SocketAddress = tuple[str, int]


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


def listeners() -> set[SocketAddress]:
    return {_plain(each.getsockname()) for each in _sockets() if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def shut_down(local: SocketAddress | None, remote: frozenset[SocketAddress]) -> None:
    """Shut down the process's connections that were accepted at `local` or lead to one of `remote`."""
    for duplicate in _sockets():
        try:
            peer = duplicate.getpeername()  # fails for listeners: shutting gloo's down would end the process
            if _plain(peer) in remote or _plain(duplicate.getsockname()) == local:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or the peer was faster
