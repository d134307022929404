"""Transfers that are aborted, one epoch after another in one process, and what they leave behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch

from runtime.errors import Cancelled, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.receiver import WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import in_thread
from tests.loopback.weight_cases import MANIFEST, PATIENCE, settles, threads_and_files, transport_and_encoding

VERSION = PolicyVersion(0, 1)


def connected(
    transport: str, world_size: int = 2, timeout: float = PATIENCE, folder: str = "", senders: Sequence[str] = ()
) -> list[WeightGroup]:
    """The members of one epoch, by rank, all in this process."""
    torch.set_num_threads(1)
    transport, full_every = transport_and_encoding(transport)
    pending = host(
        1,
        world_size,
        "127.0.0.1",
        "gloo",
        timeout,
        "trainer",
        transport,
        folder,
        full_every,
        names=senders,
        senders=max(1, len(senders)),
    )
    names = [*senders, *(f"rollout-{rank}" for rank in range(len(senders), world_size))]
    others = [
        in_thread("join", lambda rank=rank: join(msgspec.structs.replace(pending.address, rank=rank), names[rank]))
        for rank in range(1, world_size)
    ]
    return [pending.connect(), *(other.result(PATIENCE) for other in others)]


class Aborts:
    """Epochs of a sender and two receivers, each of which is left before, or within, its transfer."""

    def __init__(self, transport: str, folder: str = "") -> None:
        self._transport, self._folder = transport, folder
        self._receivers = [WeightReceiver(MANIFEST) for _ in range(2)]
        self._number = 0
        threads, files = threads_and_files()
        self.one()
        assert settles(threads_and_files, [threads + 1, files + 4])  # torch's own, once for the process
        self.warm = threads_and_files()

    def one(self) -> None:
        groups = connected(self._transport, 3, folder=self._folder)
        receptions = [
            receiver.receive(group, VERSION, 60.0) for receiver, group in zip(self._receivers, groups[1:], strict=True)
        ]
        self._number += 1
        if self._number % 2:
            groups[0].announce(VERSION)
        for group in groups:
            group.abort()
        for reception in receptions:
            with suppress(ServiceFault, Cancelled):
                reception.result(PATIENCE)  # where a name server is silent, torch takes its time to say that a connection ended


def report(count: int, transport: str) -> str:
    """Threads and files before and after `count` aborts, and their seconds; raises AssertionError when something is left."""
    aborts, seconds = Aborts(transport), []
    for _ in range(count):
        began = time.monotonic()
        aborts.one()
        seconds.append(time.monotonic() - began)
    assert settles(threads_and_files, aborts.warm), f"{threads_and_files()} threads and files after {aborts.warm}"
    median = sorted(seconds)[len(seconds) // 2]
    return (
        f"{count} aborts: threads and files {aborts.warm} before, {threads_and_files()} after; "
        f"an epoch's rendezvous and abort took {median:.3f} s (median), {max(seconds):.3f} s (worst)"
    )
