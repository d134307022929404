"""Transport `shared_memory`: on one machine, receivers copy each bucket out of the sender's own memory.

The sender, or a rollout that passes buckets on, has them in a memory file (`group.py`). Over a unix socket, it sends "bucket i
is whole" with the file's descriptor, and receivers answer "bucket taken". Socket and memory file have no name. So when a
process ends, its peers read the end of the connection at once, and no file stays behind. Receivers connect to the socket by its
descriptor in /proc, which other users cannot open. The sender also accepts only connections of its own user, as the kernel
reports it."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from runtime import timeouts
from runtime.errors import ServiceFault, UserError
from runtime.weights.collective import cards_of, meet
from runtime.weights.group import (
    AVAILABLE,
    BucketReceipt,
    BucketTags,
    Link,
    Target,
    Transfer,
    copy_and_hash,
    file_of,
    in_memory_file,
)
from runtime.weights.plan import GroupAddress

_RANK = struct.Struct("<I")  # a receiver's first message
_WHOLE = struct.Struct("<IQQ")  # bucket, its offset in the memory file, its bytes
_TAKEN = b"t"  # a receiver's answer, once for each bucket, in order
_CREDENTIALS = struct.Struct("3i")  # pid, user, group

# Buckets that a receiver copies at once: one thread does not use all of the memory bandwidth.
LANES = min(2, len(os.sched_getaffinity(0))) if AVAILABLE else 1

# Memory files of a sender that stay mapped: its buckets or arena, its slots, and the tags of a version.
FILES = 3


class _SocketLink(Link):
    """A link over sockets. A thread that uses them holds `_using`: `abort` shuts them down, which frees it, then closes."""

    def __init__(self, sockets: Iterable[socket.socket]):
        self._sockets = tuple(sockets)
        self._using = threading.Lock()
        self._aborted = False

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        self._aborted = True
        for each in self._sockets:
            with suppress(OSError):  # closed here, or by the peer
                each.shutdown(socket.SHUT_RDWR)
        with self._using:
            self._close()

    def _close(self) -> None:
        for each in self._sockets:
            each.close()


class SendingLink(_SocketLink):
    def __init__(self, peers: Mapping[str, socket.socket]):
        """Make the sender's end. `peers`: the receivers' sockets by label."""
        super().__init__(peers.values())
        self._peers = dict(peers)
        self._sent = 0
        self._taken = dict.fromkeys(peers, 0)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        shared = in_memory_file(buffer)  # the file lives as long as any descriptor, also a descriptor in a sent message
        descriptor, offset = file_of(shared)
        message = _WHOLE.pack(index, offset, buffer.numel())
        with self._using:
            for label, peer in self._peers.items():
                self._check()
                try:
                    socket.send_fds(peer, [message], [descriptor])
                except OSError as error:
                    self._check()
                    raise RuntimeError(f"{label} is gone: {error}") from error
            self._sent += 1
            self.sent_bytes += buffer.numel()
            return partial(self._await_taken, self._sent)

    def _await_taken(self, number: int, give_up: float) -> None:
        """Wait until all receivers have taken the `number`th sent bucket. Raises RuntimeError if any receiver ends, or late."""
        with self._using:
            self._check()
            labels = {peer.fileno(): label for label, peer in self._peers.items()}
            readable = select.poll()
            for descriptor in labels:
                readable.register(descriptor, select.POLLIN)
            while late := [label for label, taken in self._taken.items() if taken < number]:
                ready = readable.poll(max(0.0, give_up - time.monotonic()) * 1e3)
                self._check()
                if not ready:
                    raise RuntimeError(f"timed out waiting for {', '.join(late)}")
                for descriptor, _ in ready:
                    self._read(labels[descriptor])

    def _read(self, label: str) -> None:
        try:
            message = self._peers[label].recv(len(_TAKEN))
        except OSError as error:
            raise RuntimeError(f"{label} is gone: {error}") from error
        self._check()
        if not message:
            raise RuntimeError(f"{label} is gone")
        self._taken[label] += 1


class ReceivingLink(_SocketLink):
    """The receiver's end. Copies up to `LANES` buckets at once, in threads that end when no bucket is posted."""

    scatters = True

    def __init__(self, sender: socket.socket, label: str, tags: BucketTags):
        """Make the receiver's end. `label`: the sender's name for messages. `tags`: of the sender's buckets."""
        super().__init__((sender,))
        self._label = label
        self._sender = sender
        self._tags = tags
        self._files: dict[int, Any] = {}  # the sender's memory files by inode, uint8, read-only; the last one used is last
        self._changed = threading.Lock()  # guards the fields below, and sends to the sender; taken inside `_using`
        self._posted: deque[tuple[int, Target, Future[BucketReceipt]]] = deque()  # to copy: bucket, into, its end
        self._lanes: set[threading.Thread] = set()

    def receive(self, index: int, target: Target) -> Transfer:
        copied: Future[BucketReceipt] = Future()
        with self._changed:
            self._check()
            self._posted.append((index, target, copied))
            if len(self._lanes) < LANES:
                lane = threading.Thread(target=self._run_lane, name="copy-weights", daemon=True)
                self._lanes.add(lane)
                lane.start()
        return partial(self._take, copied)

    def _take(self, copied: Future[BucketReceipt], give_up: float) -> BucketReceipt:
        """Wait until the next bucket, in order, was copied, and notify the sender. Raises RuntimeError."""
        try:
            receipt = copied.result(give_up - time.monotonic())
        except TimeoutError as error:
            raise RuntimeError(f"timed out waiting for {self._label}") from error
        try:
            with self._changed:
                self._check()
                self._sender.send(_TAKEN)
        except OSError as error:
            raise self._gone(error) from error
        return receipt

    def abort(self) -> None:
        super().abort()
        with self._changed:
            lanes = tuple(self._lanes)
        for lane in lanes:  # no lane may write into a buffer after `abort`: the owner may reuse the buffer
            lane.join()

    def _run_lane(self) -> None:
        while True:
            with self._using:  # messages arrive in the order in which buckets are posted
                with self._changed:
                    if not self._posted:
                        self._lanes.remove(threading.current_thread())
                        return
                    number, target, copied = self._posted.popleft()
                try:
                    source = self._await(number, target.nbytes)
                except (RuntimeError, OSError) as error:
                    _fail(copied, self._gone(error) if isinstance(error, OSError) else error)
                    continue
            try:
                copied.set_result(copy_and_hash(source, target.parts, self._tags.hasher(), self._check))
            except RuntimeError as error:
                _fail(copied, error)

    def _gone(self, error: OSError) -> RuntimeError:
        if self._aborted:
            return RuntimeError("the group was aborted")
        return RuntimeError(f"{self._label} is gone: {error}")

    def _await(self, index: int, nbytes: int) -> Any:
        """Wait for the sender's message, and return the bucket in the sender's memory. Raises RuntimeError, OSError."""
        self._check()
        message, descriptors, _, _ = socket.recv_fds(self._sender, _WHOLE.size, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            self._map(descriptor)
        self._check()
        if not message:
            raise RuntimeError(f"{self._label} is gone")
        number, offset, size = _WHOLE.unpack(message)
        memory = next(reversed(self._files.values()), b"")
        if (number, size) != (index, nbytes) or offset + size > len(memory):
            sent = f"bucket {number}, {size} bytes at {offset}"
            raise RuntimeError(f"{self._label} sent {sent}, for bucket {index}, {nbytes} bytes")
        return memory[offset : offset + size]

    def _map(self, descriptor: int) -> None:
        """Map the file of `descriptor`, unless it is mapped: the first access to a page costs as much as its copy."""
        try:
            inode = os.fstat(descriptor).st_ino
            known = self._files.pop(inode, None)
            mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if known is None else None
            self._files[inode] = known if mapped is None else np.frombuffer(mapped, np.uint8)
            if len(self._files) > FILES:
                del self._files[next(iter(self._files))]
        finally:
            os.close(descriptor)

    def _close(self) -> None:
        with self._changed:
            super()._close()
            self._files.clear()


def _fail(copied: Future[BucketReceipt], error: RuntimeError) -> None:
    copied.set_exception(error.with_traceback(None))  # the traceback's frames would keep the sender's memory alive


def connect(store: Any, address: GroupAddress, labels: Sequence[str], name: str, interface: str) -> Link:
    """Connect, and block until all members are connected. Raises UserError without Linux; ServiceFault, phase "rendezvous"."""
    if not AVAILABLE:
        raise UserError("weight_sync.transport: shared_memory needs Linux; must be collective here")
    if address.rank == 0:
        return _listen(store, address, labels, name)
    return _enter(store, address, labels, name)


def _listen(store: Any, address: GroupAddress, labels: Sequence[str], name: str) -> Link:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, _bound(listener) as card:
        listener.listen(len(labels))
        listener.setblocking(False)
        meet(store, 0, card, labels, name, address.timeout)
        peers = _accept(listener, len(labels))  # receivers connect before they publish a card
    missing = [labels[rank] for rank in range(1, len(labels)) if rank not in peers]
    if missing:
        for peer in peers.values():
            peer.close()
        raise ServiceFault(name, "rendezvous", f"{', '.join(missing)} did not connect", address.timeout)
    return SendingLink({labels[rank]: peers[rank] for rank in range(1, len(labels))})


@contextmanager
def _bound(listener: socket.socket) -> Iterator[str]:
    """Bind `listener`, and give the path by which only this user's processes reach it inside the block."""
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        listener.bind(f"/proc/self/fd/{parent}/socket")  # a socket's path is limited in length, and the folder's may be long
        descriptor = os.open("socket", os.O_PATH | os.O_CLOEXEC, dir_fd=parent)
        os.close(parent)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _accept(listener: socket.socket, world_size: int) -> dict[int, socket.socket]:
    """Accept all waiting connections, and return them by the rank in their first message. Closes connections of strangers."""
    peers: dict[int, socket.socket] = {}
    with suppress(BlockingIOError):
        while True:
            peer = listener.accept()[0]
            peer.setblocking(False)
            rank = _rank_of(peer) if user_of(peer) == os.geteuid() else 0
            if 0 < rank < world_size and rank not in peers:
                peers[rank] = peer
            else:
                peer.close()
    return peers


def _rank_of(peer: socket.socket) -> int:
    """Return the rank in the peer's first message; 0 if there is none."""
    with suppress(OSError, struct.error):
        return int(_RANK.unpack(peer.recv(_RANK.size))[0])
    return 0


def _enter(store: Any, address: GroupAddress, labels: Sequence[str], name: str) -> Link:
    give_up = time.monotonic() + address.timeout
    (card,) = cards_of(store, [0], labels, name, address.timeout)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sender.settimeout(address.timeout)
        sender.connect(card)
        user = user_of(sender)
        if user != os.geteuid():
            raise ServiceFault(name, "rendezvous", f"{labels[0]} is of user {user}, this process of {os.geteuid()}")
        sender.send(_RANK.pack(address.rank))
        meet(store, address.rank, "", labels, name, max(give_up - time.monotonic(), timeouts.RENDEZVOUS_LEAST))
        sender.settimeout(None)  # lanes wait for buckets without a timeout; `abort` frees the lanes
    except OSError as error:
        sender.close()
        message = f"{labels[0]} cannot be reached on this machine, where transport shared_memory needs it: {error}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
    except BaseException:
        sender.close()
        raise
    return ReceivingLink(sender, labels[0], BucketTags(address.key))


def user_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket, as the kernel reports it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
