"""Where the bytes of a version go: over which hops, from one or more senders by rows, to receivers on one other machine.

All members are threads of this process, and the other machine is one by its name only, so rates say less than bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from statistics import median
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.weight_sync.tensors import uneven
from runtime.config import WeightSyncConfig
from runtime.errors import ServiceFault
from runtime.process.network import AUTO
from runtime.process.waiting import in_thread
from runtime.telemetry.shown import LiteralTable
from runtime.types import PolicyVersion
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, GroupAddress, Manifest, hops, parts
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import SendBuffers, WeightGroup, join_rendezvous, open_rendezvous

DEADLINE = 120.0  # seconds of a rendezvous, and of a transfer
ROW = 64  # elements of a row: 128 bytes, as the width of a model is a multiple of 64 bytes
CASES = ((1, 1, "here"), (4, 1, "here"), (1, 1, "there"), (4, 1, "there"), (1, 8, "there"), (4, 8, "there"))


class Spread(Struct):
    """Bytes of one version. `hops`: of each, transport, members that get it, and bytes to each of them. `left`: that left the
    senders' machine. `staged`: host memory of the receiver that has most. `seconds`: of each round, gathering included."""

    senders: int
    receivers: int
    where: str
    model: int
    hops: list[tuple[str, int, int]]
    left: int
    staged: int
    seconds: list[float]

    def total(self, transport: str) -> int:
        return sum(members * nbytes for name, members, nbytes in self.hops if name == transport)


def measure(rounds: int, show: Callable[[str], None], megabytes: int) -> list[Spread]:
    """Raises ServiceFault if a receiver has other weights than were sent."""
    found = []
    for senders, receivers, where in CASES:
        show(f"{megabytes} MB: {senders} senders, {receivers} receivers {where}")
        found.append(_measure(senders, receivers, where, rounds, megabytes))
    return found


def _measure(senders: int, receivers: int, where: str, rounds: int, megabytes: int) -> Spread:
    specs = [replace(spec, shape=(spec.shape[0] // ROW, ROW)) for spec in uneven(megabytes) if spec.shape[0] >= ROW]
    cuts = tuple(Cut(tuple((rank,) for rank in range(senders)), 0, -(-spec.shape[0] // senders)) for spec in specs)
    manifest = Manifest(tuple(specs), WeightSyncConfig().bucket_bytes, senders, cuts, tuple(range(len(cuts))))
    machines = (*["here"] * senders, *[where] * receivers)
    address = GroupAddress(
        epoch=1, world_size=len(machines), backend="gloo", timeout=DEADLINE, machines=machines, senders=senders
    )
    lead = open_rendezvous(address, AUTO)
    others = [replace(lead.address, rank=rank) for rank in range(1, len(machines))]
    joining = [in_thread("join", partial(join_rendezvous, each, each.label(each.rank))) for each in others]
    groups = [lead.connect(), *(each.result(DEADLINE) for each in joining)]
    sending = [SendBuffers(manifest, number=rank) for rank in range(senders)]
    staging = [StagedWeights(manifest) for _ in range(receivers)]
    seconds = []
    for number in range(1 + rounds):  # the first makes the memory
        whole = [torch.randn(spec.shape).bfloat16() for spec in specs]
        seconds.append(_publish(manifest, PolicyVersion(0, 1 + number), whole, groups, sending, staging))
    for group in groups:
        group.abort()
    over = _sent(groups, machines, senders, 1 + rounds)
    network = [hop for hop in over if hop[0] == "collective"]
    left = sum(nbytes for _, _, nbytes, parent in network if parent < senders)
    memory = [[next(iter(one.tensors().values())), *one._slots[:1]] for one in staging]  # a tensor of each file
    staged = max(sum(each.untyped_storage().nbytes() for each in of_one) for of_one in memory)
    model = sum(spec.nbytes for spec in specs)
    return Spread(senders, receivers, where, model, [hop[:3] for hop in over], left, staged, seconds[1:])


def _publish(
    manifest: Manifest,
    version: PolicyVersion,
    whole: Sequence[torch.Tensor],
    groups: Sequence[WeightGroup],
    sending: Sequence[SendBuffers],
    staging: Sequence[StagedWeights],
) -> float:
    """Seconds until the last receiver has verified it."""
    shards: list[list[Shard]] = [[] for _ in sending]
    for index, tensor in enumerate(whole):
        for span, holders in parts(manifest, index):
            shards[holders[0]].append(Shard(index, span, tensor[slice(*span[0])] if span else tensor))
    pairs = list(zip(groups[len(sending) :], staging, strict=True))
    began = time.monotonic()
    waiting = [in_thread("receive", partial(into.receive, at, version, DEADLINE)) for at, into in pairs]
    for buffers in sending:
        buffers.begin(version, DEADLINE)
    sent = [buffers.send(group, version, DEADLINE) for buffers, group in zip(sending, groups, strict=False)]
    filling = [in_thread("fill", partial(to.fill, held)) for to, held in zip(sending, shards, strict=True)]
    pending: list[Future[Any]] = [*filling, *sent, *waiting]
    for each in pending:
        each.result(2 * DEADLINE)
    took = time.monotonic() - began
    for into in staging:
        if not all(map(torch.equal, into.tensors().values(), whole)):
            raise ServiceFault("bench", "spread", f"version {version} is not what was sent")
        into.release()
    return took


def _sent(
    groups: Sequence[WeightGroup], machines: Sequence[str], senders: int, versions: int
) -> list[tuple[str, int, int, int]]:
    """Transport, members, bytes of one version to each of them, and parent, of each hop: as its link at the parent counts."""
    every = sorted({hop for sender in range(senders) for hop in hops(machines, senders, sender)})
    found = []
    for rank, group in enumerate(groups):
        mine = [hop for hop in every if rank in (hop.parent, *hop.children)]
        for hop, link in zip(mine, group._links, strict=True):
            if hop.parent == rank:
                found.append((hop.transport, len(hop.children), link.sent_bytes // versions, rank))
    return found


def compared(found: Sequence[Spread]) -> list[Compared]:
    return [
        Compared(f"{what}, {one.senders} to {one.receivers} on another machine", [nbytes / one.model], asked)
        for one in found
        if one.where == "there" and one.receivers > 1
        for what, nbytes, asked in (
            ("bytes that leave the machine / the model", one.left, "≤ 1.05"),
            ("host memory of a receiver / its share", one.staged, ""),
        )
    ]


def render(found: Sequence[Spread]) -> LiteralTable:
    title = f"Where {found[0].model / 1e6:.0f} MB go: receivers on the senders' machine (here) or on another (there), MB"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    columns = ("senders", "receivers", "", "network, by hop", "shared memory, by hop", "left / model", "staged / share", "GB/s")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for one in found:
        rate = one.model * one.receivers / 1e9 / median(one.seconds)
        by_hop = (_by_hop(one, "collective"), _by_hop(one, "shared_memory"))
        shares = (f"{one.left / one.model:.2f}", f"{one.staged / one.model:.2f}", f"{rate:.2f}")
        table.add_row(str(one.senders), str(one.receivers), one.where, *by_hop, *shares)
    return table


def _by_hop(one: Spread, transport: str) -> str:
    sizes = [f"{members} × {nbytes / 1e6:.1f}" for name, members, nbytes in one.hops if name == transport]
    each = f"{len(sizes)} × ({sizes[0]})" if len(sizes) > 1 else "".join(sizes)  # the senders have equal parts
    return f"{each} = {one.total(transport) / 1e6:.0f}" if sizes else "–"
