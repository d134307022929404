"""How tensors in parts are laid out in buckets and in an arena, which sender sends which part, and over which hops."""

from __future__ import annotations

import graphlib
import itertools
import math
from collections import Counter
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidMessage, UserError
from runtime.weights import group, plan
from runtime.weights.group import BucketTags, copy_and_hash, targets_of
from runtime.weights.plan import Bucket, Cut, GroupAddress, Manifest, Sharding, TensorSpec, arena_offsets, plan_buckets

TAGS = BucketTags(b"k" * 32)
Array = np.ndarray[Any, Any]


@st.composite
def layouts(draw: st.DrawFn, most: int = 4) -> Manifest:
    """Tensors, each whole or in parts of rows or columns. A part has one or more holders, of up to `most` senders, and one or
    more takers, of up to three workers."""
    specs = []
    for number in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 20), max_size=3)))
        specs.append(TensorSpec(f"t{number}", draw(st.sampled_from(sorted(plan.ITEM_BYTES))), shape))
    sides = (draw(shardings(specs, draw(st.integers(1, members)))) for members in (most, 3))
    return Manifest(tuple(specs), draw(st.integers(1, 3000)), *sides)


@st.composite
def shardings(draw: st.DrawFn, specs: list[TensorSpec], members: int) -> Sharding:
    holders = st.lists(st.integers(0, members - 1), min_size=1, unique=True).map(tuple)
    cuts = []
    for spec in specs:
        dim = draw(st.integers(-1, min(1, len(spec.shape) - 1)))
        size = 0 if dim < 0 else draw(st.integers(1, spec.shape[dim] + 2))
        count = math.ceil(spec.shape[dim] / size) + draw(st.integers(0, 2)) if size else 1  # more holders than parts
        cuts.append(Cut(tuple(draw(holders) for _ in range(max(1, count))), max(0, dim), size))
    return Sharding(members, tuple(cuts), tuple(range(len(cuts))))


class Reference:
    """An arena as numpy alone makes it. An array of a tensor has one more dimension: the bytes of an item."""

    def __init__(self, manifest: Manifest) -> None:
        specs = manifest.tensors
        self.places: dict[int, Array] = {}  # of each tensor's bytes in the arena
        self.size = 0
        for index in sorted(range(len(specs)), key=lambda index: len(specs[index].shape) <= 1):  # matrices first
            shape = (*specs[index].shape, torch.empty(0, dtype=getattr(torch, specs[index].dtype)).itemsize)
            self.places[index] = self.size + np.arange(np.prod(shape, dtype=int)).reshape(shape)
            self.size += (self.places[index].size + 63) // 64 * 64
        self.used = np.zeros(self.size, bool)
        for places in self.places.values():
            self.used[places] = True
        self.held, self.needed = self.of(manifest.source), self.of(manifest.target)
        self.arena = np.random.default_rng(0).integers(0, 256, self.size, np.uint8) * self.used

    def of(self, side: Sharding) -> Array:
        """bool [members, bytes]: whether a member has, or needs, a byte."""
        found = np.zeros((side.members, self.size), bool)
        for index, places in self.places.items():
            cut = side.cut(index)
            for number, holders in enumerate(cut.holders if cut.size else cut.holders[:1]):
                part = [slice(None)] * cut.dim + [slice(number * cut.size, (number + 1) * cut.size)] if cut.size else [...]
                for holder in holders:
                    found[holder][places[tuple(part)]] = True
        return found

    def source(self, bucket: Bucket) -> Array:
        """The arena's place of each byte of `bucket`, -1 for padding. Checks that pieces lie apart, aligned, and close."""
        found, end = np.full(bucket.nbytes, -1), 0
        for piece in bucket.pieces:
            assert piece.offset % 64 == 0 and 0 <= piece.offset - end < 64
            end = piece.offset + piece.nbytes
            found[piece.offset : end] = self.places[piece.tensor][tuple(slice(*bounds) for bounds in piece.span)].ravel()
        assert bucket.nbytes % 64 == 0 and 0 <= bucket.nbytes - end < 64
        return found

    def sent(self, bucket: Bucket) -> Array:
        """The bytes that the root sends, which has other bytes where it does not hold a tensor."""
        return np.append(np.where(self.held[bucket.root], self.arena, 255 - self.arena), np.uint8(0))[self.source(bucket)]

    def run(self, source: Array) -> int | None:
        """Where the arena holds a bucket as a whole, with its padding."""
        where = source[0] + np.arange(len(source))
        inside = where[-1] < self.size and where[0] % plan.ALIGNMENT == 0
        return int(where[0]) if inside and np.where(source < 0, ~self.used[where], source == where).all() else None


@given(layouts(), st.randoms(), st.sampled_from([1, 100, 1 << 18]), st.sampled_from([1, 40]))
def test_every_element_arrives_once_from_a_holder(manifest: Manifest, random: Any, step: int, least: int) -> None:
    plan_buckets.cache_clear()
    with mock.patch.object(plan, "LEAST_BYTES", least):
        reference, buckets = Reference(manifest), plan_buckets(manifest)
    offsets, size = arena_offsets(manifest.tensors)
    begins = {index: places.ravel()[0] for index, places in reference.places.items() if places.size}
    assert size == reference.size and begins.items() <= offsets.items()
    arena = torch.zeros(size, dtype=torch.uint8)
    pairs = list(zip(buckets, targets_of(manifest, buckets, arena), strict=True))
    random.shuffle(pairs)  # senders do not wait for each other
    for bucket, target in pairs:
        flat, run = reference.sent(bucket), reference.run(reference.source(bucket))
        for piece in bucket.pieces if least == 1 else ():  # a part that is not cut for its workers goes to any of them
            places = reference.places[piece.tensor][tuple(slice(*bounds) for bounds in piece.span)]
            assert reference.needed[bucket.taker][places].all()
        assert (plan.run_of(manifest, bucket, offsets), target.run is None, target.nbytes) == (run, run is None, len(flat))
        with mock.patch.object(group, "_PIECE", step):
            digest = copy_and_hash(flat, target.parts, TAGS.hasher(), check=lambda: None).digest
            assert digest == TAGS.digest(torch.from_numpy(flat))
            changed = flat ^ (np.arange(len(flat)) == random.randrange(len(flat)))
            (apart,) = targets_of(manifest, [bucket], torch.zeros_like(arena))
            assert copy_and_hash(changed, apart.parts, TAGS.hasher(), check=lambda: None).digest != digest
    assert (arena.numpy() == reference.arena).all()
    moved = np.concatenate([reference.source(bucket) for bucket in buckets] or [np.zeros(0, int)])
    assert (np.sort(moved[moved >= 0]) == np.flatnonzero(reference.used)).all()


def test_a_part_that_would_fall_into_small_pieces_stays_whole() -> None:
    spec, source = TensorSpec("w", "int8", (7, 2 * plan.LEAST_BYTES)), Cut(((0,), (1,)), 0, 4)
    for parts in (2, 8, 16):  # of the last rows an eighth is too small, of the others a sixteenth
        width = spec.shape[1] // parts
        found = list(plan.crossings(spec, source, Cut(tuple((n,) for n in range(parts)), 1, width)))
        apart = [(((0, 4), (n * width, (n + 1) * width)), ((0,), (n,))) for n in range(parts)]
        first = apart if 4 * width >= plan.LEAST_BYTES else [(((0, 4),), ((0,), tuple(range(parts))))]
        assert found[: len(first)] == first
        assert found[-1][1] == ((1,), (parts - 1,) if 3 * width >= plan.LEAST_BYTES else tuple(range(parts)))


@given(layouts(), st.integers(8192 * 8, 8192 * 32))
def test_windows_come_one_after_the_other(manifest: Manifest, window_bytes: int) -> None:
    manifest = msgspec.structs.replace(manifest, window_bytes=window_bytes)
    taken = [(bucket.window, piece.tensor) for bucket in plan_buckets(manifest) for piece in bucket.pieces]
    assert [window for window, _ in taken] == sorted(window for window, _ in taken)
    found = plan.windows(manifest)
    assert {
        (window, index) for window, tensors in enumerate(found) for index in tensors if manifest.tensors[index].nbytes
    } == set(taken)
    assert list(itertools.chain(*found)) == list(range(len(manifest.tensors)))
    sizes = [arena_offsets(manifest.tensors, window)[1] for window in found]
    assert all(size <= window_bytes for size in sizes)
    firsts = [sum(plan.aligned(manifest.tensors[index].nbytes) for index in window[:1]) for window in found]
    assert all(size + first > window_bytes for size, first in zip(sizes, firsts[1:], strict=False))


@given(layouts(1), st.integers(1, 3000))
def test_of_one_sender_every_bucket_is_a_run_in_order(manifest: Manifest, bucket_bytes: int) -> None:
    manifest = Manifest(manifest.tensors, bucket_bytes)
    buckets = plan_buckets(manifest)
    assert buckets == plan_buckets(msgspec.convert(msgspec.to_builtins(manifest), Manifest))
    offsets, size = arena_offsets(manifest.tensors)
    ends = [0, *itertools.accumulate(bucket.nbytes for bucket in buckets)]
    assert [*(plan.run_of(manifest, bucket, offsets) for bucket in buckets), size] == ends
    for bucket, following in itertools.pairwise(buckets):  # none is closed early
        assert bucket.nbytes + following.pieces[0].nbytes > bucket_bytes // plan.ALIGNMENT * plan.ALIGNMENT


@given(layouts())
def test_only_the_fewest_aligned_rows_exceed_a_bucket(manifest: Manifest) -> None:
    for bucket in plan_buckets(manifest):
        if bucket.nbytes > manifest.bucket_bytes:
            (piece,) = bucket.pieces
            shape = manifest.tensors[piece.tensor].shape
            rows = piece.span[0][1] - piece.span[0][0] if piece.span else [*shape, 1][0]
            assert all(piece.nbytes // rows * n % plan.ALIGNMENT for n in range(1, rows)) or bucket.nbytes == plan.ALIGNMENT


@st.composite
def nested(draw: st.DrawFn) -> Manifest:
    """Megabytes of tensors with short rows. Each tensor is held by 1, 2, 4 or 8 adjoining senders."""
    senders = 1 << draw(st.integers(0, 3))
    blocks = [tuple(range(i, i + n)) for n in (1, 2, 4, 8) for i in range(0, senders, n) if i + n <= senders]
    chosen = draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=6, unique=True))
    shape = st.tuples(st.integers(1, 4000), st.integers(1, 500)) | st.tuples(st.integers(1, 1 << 20))
    specs = tuple(TensorSpec(f"t{i}", "bfloat16", each) for i, each in enumerate(draw(st.lists(shape, max_size=12))))
    of = tuple(draw(st.integers(0, len(chosen) - 1)) for _ in specs)
    source = Sharding(senders, tuple(Cut((each,)) for each in chosen), of)
    return Manifest(specs, 1 << draw(st.integers(16, 26)), source, Sharding.whole(draw(st.sampled_from([1, 2, 8]))))


@given(nested())
def test_no_sender_sends_much_more_than_some_must(manifest: Manifest) -> None:
    loads = [0] * manifest.source.members
    for bucket in plan_buckets(manifest):
        loads[bucket.root] += bucket.nbytes
    held = [set(manifest.source.cuts[cut].holders[0]) for cut in manifest.source.cut_of]
    sizes = [math.prod(spec.shape) * 2 + 63 for spec in manifest.tensors]  # with padding
    bounds = [sum(size for size, by in zip(sizes, held, strict=True) if by <= block) / len(block) for block in held]
    assert max(loads) <= 1.1 * max(bounds, default=0) + plan.LEAST_BYTES


@given(layouts(), st.integers(2, 4))
def test_senders_come_forward_at_one_pace(manifest: Manifest, senders: int) -> None:
    cuts = [Cut(((number % senders,),)) for number in range(len(manifest.tensors))]
    manifest = Manifest(manifest.tensors, 256, Sharding.of(senders, cuts))
    buckets = plan_buckets(manifest)
    totals, done, shares = Counter[int](), Counter[int](), list[float]()
    for bucket in buckets:
        totals[bucket.root] += bucket.nbytes
    for bucket in buckets:
        shares.append(done[bucket.root] / totals[bucket.root])
        done[bucket.root] += bucket.nbytes
    assert shares == sorted(shares)


def test_what_few_hold_is_given_out_first() -> None:
    specs = tuple(TensorSpec(f"t{number}", "uint8", (plan.LEAST_BYTES,)) for number in range(5))
    source = Sharding(3, (Cut(((0, 1, 2),)), Cut(((1,),))), (0, 0, 0, 1, 1))
    buckets = plan_buckets(Manifest(specs, 2 * plan.LEAST_BYTES, source))
    found = [([piece.tensor for piece in bucket.pieces], bucket.root) for bucket in buckets]
    assert found == [([3, 4], 1), ([0], 0), ([1], 2), ([2], 0)]  # a bucket may be exactly full


def test_query_key_and_value_adjoin() -> None:
    names = [f"{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    specs = [TensorSpec(name, "bfloat16", (16, 8) if "weight" in name else (32,)) for name in names]
    offsets, size = arena_offsets(specs)
    assert ([offsets[index] for index in (0, 2, 4, 1, 3, 5)], size) == ([0, 256, 512, 768, 832, 896], 960)


W, SCALAR = TensorSpec("w", "int8", (4, 2)), TensorSpec("w", "int8", ())
UNCOVERED = r"is not covered by its parts over the senders; its layouts: senders .*, workers whole"


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        (Manifest((TensorSpec("w", "complex64", (1,)),), 64), "tensor w: dtype 'complex64' is not one of"),
        (Manifest((W, W), 64), "tensor w occurs twice"),
        (Manifest((), 0), "bucket_bytes is 0, must be"),
        (Manifest((), 64, Sharding(0)), "senders is 0, must be"),
        (Manifest((W,), 64, Sharding(cut_of=(0, 0))), "cut_of of the senders names 2 cuts for 1 tensors"),
        *((Manifest((W,), 64, Sharding(cut_of=(cut,))), f"tensor w has cut {cut} of 1") for cut in (1, -1)),
        (Manifest((W,), 64, Sharding(2, (Cut(((0, 2),)),))), r"tensor w of .* is held by \(\(0, 2\),\), of 2 senders"),
        (
            Manifest((W,), 64, Sharding(2, (Cut(((0,), ()), 0, 2),))),
            r"tensor w of .* is held by \(\(0,\), \(\)\), of 2 senders",
        ),
        *(
            (Manifest((W,), 64, Sharding(1, (Cut(((0,),), *cut),))), UNCOVERED)
            for cut in ((0, 3), (1, 1), (2, 4), (-1, 4), (0, -4))
        ),
        *(
            (Manifest((spec,), 64, Sharding(1, (cut,))), UNCOVERED)
            for spec in (W, SCALAR)
            for cut in (Cut(()), Cut(((0,),), 0, 1))
        ),
    ],
)
def test_a_bad_manifest_is_refused(manifest: Manifest, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        plan_buckets(manifest)


def test_a_window_that_is_too_small_is_told_by_its_key() -> None:
    with pytest.raises(UserError, match=r"^weight_sync\.staging_bytes: 126; must be 0 or at least 128, twice w$"):
        plan_buckets(Manifest((W,), 64, window_bytes=63))


def test_messages_call_a_member_by_its_rank_and_name() -> None:
    names = ("trainer-0", "rollout-1")
    several = GroupAddress(epoch=1, world_size=5, backend="gloo", timeout=1.0, names=names, workers=2)
    assert [several.label(rank) for rank in range(4)] == [
        *("rank 0 (trainer-0)", "rank 1 (rollout-1 worker 0)", "rank 2 (rollout-1 worker 1)", "rank 3")
    ]
    address = GroupAddress(epoch=1, host="h", port=1, world_size=3, backend="gloo", timeout=1.0, key=b"0123", names=names)
    assert [address.label(rank) for rank in range(3)] == ["rank 0 (trainer-0)", "rank 1 (rollout-1)", "rank 2"]
    assert repr(address) == "GroupAddress(rank 0 (trainer-0) of epoch 1 at h:1)"  # without the key


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=9), st.data())
def test_buckets_reach_each_receiver_on_one_way(machines: list[str], data: st.DataObject) -> None:
    """The way of each worker's buckets. The test counts processes in the place of members."""
    senders, workers = data.draw(st.integers(1, len(machines))), data.draw(st.integers(1, 3))
    taker = data.draw(st.integers(0, workers - 1))
    ranks = [*range(senders), *range(senders + taker, senders + (len(machines) - senders) * workers, workers)]
    network, used = dict[object, set[object]](), set[str]()
    for sender in range(senders):
        reached, entered = [sender], Counter[object]()
        for transport, parent, children in plan.hops(machines, senders, sender, workers, taker):
            hop = plan.Hop(transport, ranks.index(parent), tuple(map(ranks.index, children)))
            used.add(hop.transport)
            assert hop.parent in reached and hop.children
            reached += hop.children
            if hop.transport == "shared_memory":
                assert {machines[rank] for rank in hop.children} == {machines[hop.parent]} != {""}
            else:
                (child,) = hop.children
                entered.update([machines[child] or child, *(["from the sender"] if hop.parent == sender else [])])
                if hop.parent >= senders:
                    network.setdefault(machines[child] or child, set()).add(machines[hop.parent] or hop.parent)
        assert sorted(reached) == [sender, *range(senders, len(machines))]
        assert max(entered.values(), default=0) <= 1 and not (machines[sender] and entered[machines[sender]])
    graphlib.TopologicalSorter(network).prepare()  # raises for machines that wait for each other
    assert plan.transports(machines, senders) == used


def test_the_receivers_of_a_machine_take_turns_as_its_head() -> None:
    heads = [hop.children for sender in range(4) for hop in plan.hops(["s"] * 4 + ["a"] * 3, 4, sender) if hop.parent == sender]
    assert heads == [(4,), (5,), (6,), (4,)]


HERE = {"trainer-0": "a", "rollout-0": "a", "rollout-1": "a"}
APART = HERE | {"rollout-1": "b"}
UNKNOWN = dict.fromkeys(HERE, "")


@pytest.mark.parametrize(
    ("transport", "backend", "shares"),
    [("auto", "auto", True), ("auto", "gloo", False), ("collective", "auto", False), ("shared_memory", "nccl", True)],
)
def test_members_share_memory_as_the_transport_allows(transport: str, backend: str, shares: bool) -> None:
    for machines in (HERE, APART, UNKNOWN) if transport != "shared_memory" else (HERE,):
        assert plan.shared_machines(transport, backend, machines) == (tuple(machines.values()) if shares else ("", "", ""))


@pytest.mark.parametrize(("machines", "named"), [(APART, "rollout-1"), (UNKNOWN, "trainer-0, rollout-0, rollout-1")])
def test_shared_memory_across_machines_names_who_is_apart(machines: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=f"weight_sync.transport: shared_memory needs .*, but {named} may"):
        plan.shared_machines("shared_memory", "auto", machines)
