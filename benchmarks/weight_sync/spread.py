"""Where the bytes of a version go: over which hops, from one or more senders by rows, to rollouts on one other machine, of one
or more workers that take rows.

All members are threads of this process, and the other machine is one by its name only, so rates say less than bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import product
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
from runtime.weights.plan import Cut, GroupAddress, Hop, Manifest, Sharding, TensorSpec, hops, parts
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import SendBuffers, WeightGroup, join_rendezvous, open_rendezvous

DEADLINE = 120.0  # seconds of a rendezvous, and of a transfer
ROW = 64  # elements of a row: 128 bytes, as the width of a model is a multiple of 64 bytes
CASES = (
    (1, 1, 1, "here"),
    (4, 1, 1, "here"),
    (4, 1, 2, "here"),
    (1, 1, 1, "there"),
    (4, 1, 1, "there"),
    (4, 1, 2, "there"),
    (1, 8, 1, "there"),
    (4, 8, 1, "there"),
    (4, 4, 2, "there"),
)


class Spread(Struct):
    """Bytes of one version. `hops`: of each, transport, members that get it, and bytes to each of them. `left`: that left the
    senders' machine. `received`: by the worker that gets most. `staged`: host memory of the rollout that has most. `seconds`:
    of each round, gathering included."""

    senders: int
    rollouts: int
    workers: int
    where: str
    model: int
    hops: list[tuple[str, int, int]]
    left: int
    received: int
    staged: int
    seconds: list[float]

    def total(self, transport: str) -> int:
        return sum(members * nbytes for name, members, nbytes in self.hops if name == transport)


def measure(rounds: int, show: Callable[[str], None], megabytes: int) -> list[Spread]:
    """Raises ServiceFault if a receiver has other weights than were sent."""
    found = []
    for senders, rollouts, workers, where in CASES:
        show(f"{megabytes} MB: {senders} senders, {rollouts} rollouts of {workers} workers {where}")
        found.append(_measure(senders, rollouts, workers, where, rounds, megabytes))
    return found


def _measure(senders: int, rollouts: int, workers: int, where: str, rounds: int, megabytes: int) -> Spread:
    specs = [replace(spec, shape=(spec.shape[0] // ROW, ROW)) for spec in uneven(megabytes) if spec.shape[0] >= ROW]
    source, target = (Sharding.of(n, [_rows(spec, n) for spec in specs]) for n in (senders, workers))
    manifest = Manifest(tuple(specs), WeightSyncConfig().bucket_bytes, source, target)
    machines = (*["here"] * senders, *[where] * rollouts)
    address = GroupAddress(
        epoch=1,
        world_size=senders + rollouts * workers,
        backend="gloo",
        timeout=DEADLINE,
        machines=machines,
        senders=senders,
        workers=workers,
    )
    lead = open_rendezvous(address, AUTO)
    others = [replace(lead.address, rank=rank) for rank in range(1, address.world_size)]
    joining = [in_thread("join", partial(join_rendezvous, each, each.label(each.rank))) for each in others]
    groups = [lead.connect(), *(each.result(DEADLINE) for each in joining)]
    sending = [SendBuffers(manifest, number=rank) for rank in range(senders)]
    staging = [StagedWeights(manifest) for _ in range(rollouts)]
    seconds = []
    for number in range(1 + rounds):  # the first makes the memory
        whole = [torch.randn(spec.shape).bfloat16() for spec in specs]
        seconds.append(_publish(manifest, PolicyVersion(0, 1 + number), whole, groups, sending, staging))
    for group in groups:
        group.abort()
    over = _sent(groups, address, 1 + rounds)
    left = sum(nbytes for hop, nbytes in over if hop.transport == "collective" and hop.parent < senders)
    of_workers = Counter(dict.fromkeys(range(senders, address.world_size), 0))
    for hop, nbytes in over:
        of_workers.update(dict.fromkeys(hop.children, nbytes))
    received = max(of_workers.values())
    # Of each file, a tensor.
    memory = [[*one._arenas, *(share._slots[0] for share in one._windows[0][1] if share._slots)] for one in staging]
    staged = max(sum(each.untyped_storage().nbytes() for each in of_one) for of_one in memory)
    model = sum(spec.nbytes for spec in specs)
    shown = [(hop.transport, len(hop.children), nbytes) for hop, nbytes in over]
    return Spread(senders, rollouts, workers, where, model, shown, left, received, staged, seconds[1:])


def _rows(spec: TensorSpec, members: int) -> Cut:
    return Cut(tuple((rank,) for rank in range(members)), 0, -(-spec.shape[0] // members))


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
        for span, holders in parts(manifest.tensors[index], manifest.source.cut(index)):
            shards[holders[0]].append(Shard(index, span, tensor[slice(*span[0])] if span else tensor))
    workers, first = manifest.target.members, len(sending)
    pairs = [(groups[first + n * workers :][:workers], into) for n, into in enumerate(staging)]
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


def _sent(groups: Sequence[WeightGroup], address: GroupAddress, versions: int) -> list[tuple[Hop, int]]:
    """Each hop, and the bytes of one version to each of its members: as its link at the parent counts."""
    ways = product(range(address.senders), range(address.workers))
    every = sorted({hop for s, w in ways for hop in hops(address.machines, address.senders, s, address.workers, w)})
    found = []
    for rank, group in enumerate(groups):
        mine = [hop for hop in every if rank in (hop.parent, *hop.children)]
        pairs = zip(mine, group._links, strict=True)
        found += [(hop, link.sent_bytes // versions) for hop, link in pairs if hop.parent == rank]
    return found


def compared(found: Sequence[Spread]) -> list[Compared]:
    return [
        Compared(f"{what}, {one.senders} to {one.rollouts} × {one.workers} on another machine", [nbytes / one.model], asked)
        for one in found
        if one.where == "there" and one.rollouts > 1
        for what, nbytes, asked in (
            ("bytes that leave the machine / the model", one.left, "≤ 1.02"),
            ("bytes that a worker receives / its share", one.received * one.workers, "≤ 1.02"),
            ("host memory of a rollout / its share", one.staged, "≤ 1.05"),
        )
    ]


def render(found: Sequence[Spread]) -> LiteralTable:
    title = f"Where {found[0].model / 1e6:.0f} MB go: rollouts on the senders' machine (here) or on another (there), MB"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    columns = (
        "senders",
        "rollouts",
        "workers",
        "",
        "network, by hop",
        "shared memory, by hop",
        "left / model",
        "worker / share",
        "staged",
        "GB/s",
    )
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for one in found:
        rate = one.model * one.rollouts / 1e9 / median(one.seconds)
        by_hop = (_by_hop(one, "collective"), _by_hop(one, "shared_memory"))
        ratios = (one.left / one.model, one.received * one.workers / one.model, one.staged / one.model, rate)
        members = (str(one.senders), str(one.rollouts), str(one.workers), one.where)
        table.add_row(*members, *by_hop, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _by_hop(one: Spread, transport: str) -> str:
    sizes = [f"{members} × {nbytes / 1e6:.1f}" for name, members, nbytes in one.hops if name == transport]
    each = f"{len(sizes)} × ({sizes[0]})" if len(sizes) > 1 else "".join(sizes)  # the senders have equal parts
    return f"{each} = {one.total(transport) / 1e6:.0f}" if sizes else "–"
