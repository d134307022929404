"""Copies of a group's training state in the memory of its nodes. They outlive the processes: a group that is started again goes
on from the newest version that is whole.

Each node has a memory file (`os_process.MEMORY`), which its ranks share. The copy of rank r lies at r · REGION, whichever node
has it: on its own node, and on the next node as a mirror. A version is in the slot of its parity, so that the version before it
stays whole while it is written. A slot is

    head       HEAD bytes; written last, it makes the copy valid
    pieces     the tensors of `ModelBackend.pieces`
    contents   msgpack: what the pieces are, everything else, and checksums of the pieces by CHUNK
"""

from __future__ import annotations

import base64
import logging
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from runtime import types
from runtime.errors import InvariantViolated, ServiceFault, UserError
from runtime.process import os_process, platform
from runtime.trainer.backend import RankInfo, StatePart, TrainingPosition
from runtime.trainer.rank_group import CHUNK, all_gather_json
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion
from runtime.weights.group import page_lock, populate

log = logging.getLogger("sluice")

REGION = 1 << 40  # bytes between two ranks' copies: the file is sparse
HEAD = 4096
_HEAD = struct.Struct("<8sqq16s")  # _MAGIC, where pieces and contents end, and the digest of the contents
_MAGIC = b"SLUICE-1"
_ALIGNED = 64
_SPARE = 1 << 20  # bytes for checksums, counters and generators

Made = tuple[int, int, int]  # (step, begun, world) of the copies that belong together


class Held(NamedTuple):
    """Where elements of a flat tensor are: `name`, `start` and `numel` as in `StatePart`, `offset` in bytes of the slot."""

    name: str
    start: int
    numel: int
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * int(getattr(torch, self.dtype).itemsize)


class Contents(msgspec.Struct, array_like=True):
    """A copy, besides the pieces' bytes. `begun`: when its group started, in ns. Two starts of a group may make versions of one
    name, which are not mixed."""

    version: PolicyVersion
    begun: int
    world: int
    owner: int
    pieces: list[Held]
    counters: dict[str, int]
    position: TrainingPosition
    generators: dict[str, bytes]
    result: bytes
    sums: list[bytes]

    @property
    def made(self) -> Made:
        return self.version.step, self.begun, self.world


class RecalledState(NamedTuple):
    """The version that `recall` restored, and the `result` that was kept with it; or None and the reason, one line."""

    version: PolicyVersion | None
    result: bytes
    reason: str


class Overlap(NamedTuple):
    """`nbytes` bytes of the wanted piece `piece`, from `first` on, that are at `offset` in the slot of `owner`."""

    piece: int
    owner: int
    offset: int
    first: int
    nbytes: int


def mirrors(nodes: Sequence[str]) -> list[int]:
    """Return for each rank the rank that holds its mirror; -1 with one node. `nodes`: each rank's. The mirrors are on the next
    node, spread evenly over its ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    if len(ranks) == 1:
        return [-1] * len(nodes)
    holders = dict(zip(ranks, [*list(ranks.values())[1:], ranks[nodes[0]]], strict=True))
    return [holders[node][ranks[node].index(rank) % len(holders[node])] for rank, node in enumerate(nodes)]


def choose(found: Mapping[Made, Mapping[int, Sequence[int]]]) -> tuple[Made, list[int]] | None:
    """Return the newest version that has a copy of every owner, and for each owner the rank that reads it: the owner, if its
    node has the copy. None: no version is whole. `found`: the ranks on whose nodes a copy is, by version and owner."""
    whole = [made for made, owners in found.items() if all(owners.get(owner) for owner in range(made[2]))]
    if not whole:
        return None
    made = max(whole)
    holders = [found[made][owner] for owner in range(made[2])]
    return made, [owner if owner in ranks else ranks[owner % len(ranks)] for owner, ranks in enumerate(holders)]


def overlaps(wanted: Sequence[Held], held: Sequence[Sequence[Held]]) -> list[Overlap] | None:
    """Return the parts that make up the pieces `wanted`, in order; None if elements are missing. `held`: by owner."""
    known: dict[tuple[str, str], list[tuple[int, int, Held]]] = defaultdict(list)
    for owner, pieces in enumerate(held):
        for each in pieces:
            known[each.name, each.dtype].append((each.start, owner, each))
    parts = []
    for index, (name, start, numel, dtype, _) in enumerate(wanted):
        size, place = getattr(torch, dtype).itemsize, start
        for begin, owner, each in sorted(known[name, dtype]):
            end = min(begin + each.numel, start + numel)
            if begin <= place < end:
                offset = each.offset + (place - begin) * size
                parts.append(Overlap(index, owner, offset, (place - start) * size, (end - place) * size))
                place = end
        if place < start + numel:
            return None
    return parts


def _layout(pieces: Sequence[StatePart]) -> list[Held]:
    """Return where the pieces lie in a slot."""
    held, end = [], HEAD
    for name, start, data in pieces:
        held.append(Held(name, start, data.numel(), str(data.dtype).removeprefix("torch."), end))
        end += -(-data.nbytes // _ALIGNED) * _ALIGNED
    return held


def _end(held: Sequence[Held]) -> int:
    """Return where the last piece ends."""
    return held[-1].offset + held[-1].nbytes if held else HEAD


def _chunks(end: int) -> Iterator[slice]:
    for begin in range(HEAD, end, CHUNK):
        yield slice(begin, min(begin + CHUNK, end))


class NodeMemory:
    """The slots in the memory file of this process's node."""

    def __init__(self, pinned: int):
        """Use the file that the node's agent passed on, or else a private one. The slots of the owner `pinned`, or -1 for none,
        are page-locked for CUDA's copies: the thread of the engine must map them first."""
        given = os.environ.get(os_process.MEMORY)
        self._file, self._pinned = os.memfd_create("sluice-copies") if given is None else int(given), pinned
        self._mapped: dict[int, torch.Tensor] = {}

    def room(self) -> int:
        """Return the bytes of memory that the file has or may get."""
        return platform.memory(torch.device("cpu")).available + 512 * os.fstat(self._file).st_blocks

    def slot(self, owner: int, step: int, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` of the slot of `owner` for `step`, uint8. The memory is reserved at the first use. Raises
        UserError if there is none."""
        place = self._place(owner, step)
        known = self._mapped.get(place)
        if known is None or len(known) < nbytes:
            size = -(-nbytes // _SPARE) * _SPARE
            try:
                os.posix_fallocate(self._file, place, size)
            except OSError as error:
                raise _too_large(size, self.room()) from error
            known = torch.frombuffer(mmap.mmap(self._file, size, offset=place), dtype=torch.uint8)
            populate(known)
            if owner == self._pinned:
                page_lock(known)
            self._mapped[place] = known
        return known[:nbytes]

    @staticmethod
    def _place(owner: int, step: int) -> int:
        return owner * REGION + step % 2 * (REGION // 2)

    def copies(self) -> list[Contents]:
        """Return the valid copies. The bytes of their pieces are not read."""
        owners = range(-(-os.fstat(self._file).st_size // REGION))
        found = (self.read(owner, step) for owner in owners for step in range(2))
        return [each for each in found if each is not None]

    def read(self, owner: int, step: int) -> Contents | None:
        """Return the contents of the copy in a slot; None if it is not valid."""
        place = self._place(owner, step)
        head = os.pread(self._file, _HEAD.size, place)
        if not head.startswith(_MAGIC):
            return None
        _, body, end, digest = _HEAD.unpack(head)
        contents = os.pread(self._file, end - body, place + body)
        return types.decode(Contents, contents) if xxhash.xxh3_128_digest(contents) == digest else None

    def free(self, owners: Container[int]) -> None:
        """Return the memory of all copies that are not of `owners` to the system."""
        for place in range(0, size := os.fstat(self._file).st_size, REGION):
            if place // REGION not in owners:
                with mmap.mmap(self._file, min(REGION, size - place), offset=place) as region:
                    region.madvise(mmap.MADV_REMOVE)
        self._mapped = {place: each for place, each in self._mapped.items() if place // REGION in owners}

    def seal(self, owner: int, step: int, body: int, end: int) -> None:
        """Write the head, behind which everything else is there. Pieces end at `body`, contents at `end`."""
        slot = self.slot(owner, step, end)
        head = _HEAD.pack(_MAGIC, body, end, xxhash.xxh3_128_digest(slot[body:].numpy().data))
        for own in (slice(8, _HEAD.size), slice(0, 8)):  # a process may be killed at any point: the magic comes last
            slot[own] = torch.frombuffer(bytearray(head[own]), dtype=torch.uint8)

    def wrong(self, copy: Contents) -> bool:
        """Return whether bytes of the pieces do not have their checksums."""
        return list(_sums(self.slot(copy.owner, copy.version.step, _end(copy.pieces)))) != copy.sums


def _sums(slot: torch.Tensor) -> Iterator[bytes]:
    for own in _chunks(len(slot)):
        yield xxhash.xxh3_128_digest(slot[own].numpy().data)


def _too_large(nbytes: int, available: int) -> UserError:
    needs, left = (f"{each / 2**30:.1f} GiB" for each in (nbytes, available))
    what = f"needs {needs} of host memory on this node for the copies of its ranks, {left} are available"
    return UserError(f"checkpoint.in_memory: {what}; must be off")


def _wait(work: Sequence[dist.Work | None]) -> None:
    for each in work:
        if each is not None:
            each.wait()


class MemoryCopies:
    """A rank's copies of the training state. Every method is a collective of all ranks, which call alike."""

    def __init__(self, trainer: ModelTrainer, timeout: float):
        """Check the nodes' memory. The state is on its device. `timeout`: seconds of each transfer. Raises UserError if the
        memory is not enough."""
        info = trainer.backend.rank_info
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if info.world_size > 1 else None
        self._info = RankInfo(info.rank, info.world_size, torch.device("cpu"), group)
        self._trainer, self._device = trainer, info.device
        self._memory = NodeMemory(info.rank if info.device.type == "cuda" else -1)
        node = f"{os_process.machine()} {os.environ.get(os_process.NODE, '')}"
        nbytes = 2 * (_end(_layout(trainer.backend.pieces())) + _SPARE)
        of_ranks = all_gather_json([node, nbytes, self._memory.room(), time.time_ns()], self._info)
        self._nodes: list[str] = [each[0] for each in of_ranks]
        self._begun: int = of_ranks[0][3]
        self._holders, self._finished, self._kept = mirrors(self._nodes), True, False
        needs: dict[str, int] = defaultdict(int)
        for rank, (node, nbytes, _, _) in enumerate(of_ranks):
            needs[node] += nbytes
            if self._holders[rank] >= 0:
                needs[self._nodes[self._holders[rank]]] += nbytes
        for node, _, left, _ in of_ranks:
            if needs[node] > left:
                raise _too_large(needs[node], left)

    # ------------------------------------------------------------------------------------------ keep

    def keep(self, version: PolicyVersion, result: bytes) -> Callable[[], None]:
        """Copy the state of `version`, the present one, to this node's memory. Return a function that does the rest in any
        thread. When it returns, all ranks have valid copies and mirrors. Only then keep another version."""
        if not self._finished:
            raise InvariantViolated(f"the copies of the version before {version} are not finished")
        self._finished = False
        backend = self._trainer.backend
        pieces = backend.pieces()
        held = _layout(pieces)
        slot = self._memory.slot(self._info.rank, version.step, _end(held) + len(types.encode(held)) + len(result) + _SPARE)
        slot[:HEAD] = 0
        with torch.no_grad():
            for (_, _, data), place in zip(pieces, held, strict=True):
                slot[place.offset :][: data.nbytes].copy_(data.view(torch.uint8), non_blocking=True)
        platform.synchronize(self._device)
        generators = {kind: each.numpy().tobytes() for kind, each in platform.rng_state(self._device).items()}
        whole = version, self._begun, self._info.world_size, self._info.rank, held, backend.counters()
        return partial(self._finish, Contents(*whole, self._trainer.position(), generators, result, []))

    def _finish(self, copy: Contents) -> None:
        rank, step, body = copy.owner, copy.version.step, _end(copy.pieces)
        copy.sums = list(_sums(self._memory.slot(rank, step, body)))
        encoded = types.encode(copy)
        end = body + len(encoded)
        self._memory.slot(rank, step, end)[body:] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._memory.seal(rank, step, body, end)
        sends = [(rank, self._holders[rank])] if self._holders[rank] >= 0 else []
        try:
            self._exchange(step, sends, [(owner, owner) for owner, holder in enumerate(self._holders) if holder == rank])
            self._info.largest([0])  # the next version overwrites the one before this, which no rank then needs
        except RuntimeError as error:  # gloo's
            raise self._fault(f"version {copy.version}: a rank is lost: {error}") from error
        if not self._kept:
            # Those of the node's ranks and their mirrors stay.
            same = [node == self._nodes[rank] for node in self._nodes]
            self._memory.free({owner for owner, each in enumerate(self._holders) if same[owner] or (each >= 0 and same[each])})
        self._finished = self._kept = True

    def _exchange(self, step: int, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> None:
        """Send copies of `step`, (owner, to which rank), and receive copies, (owner, from which rank)."""
        group, slot = self._info.group, self._memory.slot
        heads = [torch.zeros(_HEAD.size, dtype=torch.uint8) for _ in receives]
        work = [dist.irecv(head, source, group) for head, (_, source) in zip(heads, receives, strict=True)]
        _wait([*work, *(dist.isend(slot(owner, step, _HEAD.size), target, group) for owner, target in sends)])
        ends = [_HEAD.unpack(head.numpy().tobytes())[1:3] for head in heads]
        work = []
        for (owner, source), (_, end) in zip(receives, ends, strict=True):
            into = slot(owner, step, end)
            into[:HEAD] = 0
            work += [dist.irecv(into[own], source, group) for own in _chunks(end)]
        for owner, target in sends:
            _, _, end, _ = _HEAD.unpack(slot(owner, step, _HEAD.size).numpy().tobytes())
            work += [dist.isend(slot(owner, step, end)[own], target, group) for own in _chunks(end)]
        _wait(work)
        for (owner, _), (body, end) in zip(receives, ends, strict=True):
            if self._memory.wrong(types.decode(Contents, bytes(slot(owner, step, end)[body:].numpy()))):
                raise self._fault(f"the copy of rank {owner} arrived with wrong bytes")
            self._memory.seal(owner, step, body, end)

    def _fault(self, reason: str) -> ServiceFault:
        return ServiceFault(f"{self._trainer.role} rank {self._info.rank}", "copies", reason)

    # ------------------------------------------------------------------------------------------ recall

    @torch.no_grad()
    def recall(self, least: PolicyVersion) -> RecalledState:
        """Restore the newest version, `least` or the one after it, that has a copy of every rank that made it. The
        number of ranks and their layout may have changed since. If no version is whole, nothing changes."""
        chosen, reason = self._choose(least)
        if chosen is None:
            return RecalledState(None, b"", reason)
        ((step, _, world), sources), rank = chosen, self._info.rank
        version, pieces = PolicyVersion(least.incarnation, step), self._trainer.backend.pieces()
        wanted, copy = _layout(pieces), None
        if world == self._info.world_size:
            sends = [(owner, owner) for owner, source in enumerate(sources) if source == rank != owner]
            self._exchange(step, sends, [(rank, sources[rank])] if sources[rank] != rank else [])
            copy = self._memory.read(rank, step)
        if self._info.largest([copy is None or copy.pieces != wanted])[0]:
            copy = self._recut(step, sources, pieces, wanted)
        else:
            slot = self._memory.slot(rank, step, _end(wanted))
            for (_, _, data), place in zip(pieces, wanted, strict=True):
                data.view(torch.uint8).copy_(slot[place.offset :][: data.nbytes], non_blocking=True)
        if copy is None:
            return RecalledState(None, b"", f"version {version}: the copies of {world} ranks do not fit this model and layout")
        platform.synchronize(self._device)
        self._trainer.restored(copy.counters, copy.position)
        if copy.generators:
            states = {kind: torch.frombuffer(bytearray(each), dtype=torch.uint8) for kind, each in copy.generators.items()}
            platform.set_rng_state(self._device, states)
        self._info.largest([0])  # no rank reads another's copies any more
        return RecalledState(version, copy.result, "")

    def _choose(self, least: PolicyVersion) -> tuple[tuple[Made, list[int]] | None, str]:
        """Return what `choose` returns, of copies whose checksums are right, or else the reason. A wrong copy is logged."""
        near = {least, PolicyVersion(least.incarnation, least.step + 1)}
        own = [(each.made, each.owner) for each in self._memory.copies() if each.version in near]
        found: dict[Made, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, here in enumerate(all_gather_json(own, self._info)):
            for (step, begun, world), owner in here:
                found[step, begun, world][owner].append(rank)
        reasons = []
        while (chosen := choose(found)) is not None:
            made, sources = chosen
            read = [owner for owner, source in enumerate(sources) if source == self._info.rank]
            wrong = [(owner, what) for owner in read if (what := self._wrong(owner, made[0]))]
            of_ranks = [each for of_rank in all_gather_json(wrong, self._info) for each in of_rank]
            if not of_ranks:
                return chosen, ""
            for owner, what in of_ranks:
                reasons.append(what)
                node, ranks = self._nodes[sources[owner]], found[made][owner]
                found[made][owner] = [rank for rank in ranks if self._nodes[rank] != node]
        for made, owners in sorted(found.items(), reverse=True):
            lost = ", ".join(str(owner) for owner in range(made[2]) if not owners.get(owner))
            reasons.append(f"of version {least.incarnation}.{made[0]} no copy of ranks {lost} is left")
        return None, "; ".join(reasons) or f"no node has a copy of version {least} or the next"

    def _wrong(self, owner: int, step: int) -> str:
        """Return what is wrong with the copy of `owner` on this node, and log it; "" for nothing."""
        copy = self._memory.read(owner, step)
        if copy is not None and not self._memory.wrong(copy):
            return ""
        here = owner < self._info.world_size and self._nodes[owner] == self._nodes[self._info.rank]
        which, node = "its own copy" if here else "its mirror", os.environ.get(os_process.NODE) or "-"
        what = f"rank {owner}: {which} of step {step} on node {node} has wrong bytes"
        log.error("%s: %s", self._trainer.role, what)
        return what

    def _recut(self, step: int, sources: Sequence[int], pieces: Sequence[StatePart], wanted: Sequence[Held]) -> Contents | None:
        """Restore the pieces of this rank from the copies of ranks that had others. Return the contents that it goes on with:
        None, and nothing changes, if elements are missing."""
        rank, group = self._info.rank, self._info.group
        own = {owner: self._memory.read(owner, step) for owner, source in enumerate(sources) if source == rank}
        text = {owner: base64.b64encode(types.encode(copy)).decode() for owner, copy in own.items()}
        given = all_gather_json([text, wanted], self._info)
        held = [types.decode(Contents, base64.b64decode(given[source][0][str(owner)])) for owner, source in enumerate(sources)]
        plans = [overlaps([Held(*each) for each in wants], [each.pieces for each in held]) for _, wants in given]
        if any(plan is None for plan in plans):
            return None
        for target, plan in enumerate(plans):
            for index, owner, offset, first, nbytes in plan or ():
                source, data = sources[owner], torch.empty(0, dtype=torch.uint8)
                if rank == source:
                    data = self._memory.slot(owner, step, offset + nbytes)[offset:]
                    if source != target:
                        dist.send(data, target, group)
                elif rank == target:
                    dist.recv(data := data.new_empty(nbytes), source, group)
                if rank == target:
                    pieces[index].data.view(torch.uint8)[first:][:nbytes].copy_(data)
        if rank < len(held):
            return held[rank]
        return msgspec.structs.replace(held[0], generators={}, result=b"")  # this rank's generators stay as they are
