"""From shard to shard: for every pair of layouts, each rank of the rollout gets exactly its parts, and no byte twice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from benchmarks.weight_sync.slices import Parts, SliceExchange, SliceTransfer, parameters_of, parts, plan, size
from runtime.errors import ServiceFault
from runtime.models.families import Family, Layout
from runtime.types import PolicyVersion
from runtime.weights.collective import GlooLink
from runtime.weights.plan import TRAILER
from tests.unit.family_cases import make_family, make_tensors

pytestmark = pytest.mark.ranks

PATIENCE = 60.0
KEY = bytes(range(32))
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}
SIZES = {"hidden_size": 192, "intermediate_size": 240, "num_hidden_layers": 4, **HEADS}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 96}
DENSE = [
    Layout(tensor=tensor, pipeline=pipeline, layers_per_stage=(1, 2, 1) if pipeline == 3 else ())
    for tensor, pipeline in product((1, 2, 3, 4), repeat=2)
]
MIXED = [Layout(tensor=t, pipeline=p, expert=e) for t, p, e in product((1, 2, 4), (1, 2), (1, 2, 4)) if t * p * e <= 16]
TARGETS = [Layout(tensor=tensor) for tensor in (1, 2, 3, 4)]


@cache
def model(case: str) -> tuple[Family, dict[str, torch.Tensor]]:
    sizes = SIZES | (EXPERTS if case == "qwen3_moe" else {})
    family = make_family(case, **sizes)
    return family, make_tensors(family, torch.bfloat16)


@cache
def shards(case: str, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """What each rank holds, out of the parameters as megatron-core has them."""
    family, tensors = model(case)
    return [
        {source.name: block for each in rank for source, _, block in each.blocks(each.from_hf(tensors.__getitem__))}
        for rank in parameters_of(family, layout)
    ]


def elements(needed: list[Parts]) -> int:
    return sum(size(bounds) for rank in needed for bounds in rank.values())


@pytest.mark.parametrize("case", ["qwen2-tied", "qwen3_moe"])
def test_each_element_is_sent_once_and_by_who_holds_it(case: str) -> None:
    family, tensors = model(case)
    for source, target in product(MIXED if case == "qwen3_moe" else DENSE, [Layout(tensor=tensor) for tensor in (1, 2, 4)]):
        held, needed = parts(family, source), parts(family, target)
        seen = [{name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in tensors.items()} for _ in needed]
        transfers = plan(held, needed)
        for each in transfers:
            assert held[each.source][each.tensor] == each.held
            seen[each.target][each.tensor][tuple(slice(*bounds) for bounds in each.bounds)] += 1
        for rank, marks in zip(needed, seen, strict=True):
            for name, bounds in rank.items():
                marks[name][tuple(slice(*part) for part in bounds)] -= 1
            assert not any(mark.any() for mark in marks.values())
        assert sum(each.elements for each in transfers) == elements(needed)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_share_what_they_send_evenly(replicas: int) -> None:
    family, _ = model("qwen2")
    held = parts(family, Layout(tensor=2, pipeline=2)) * replicas
    transfers = plan(held, parts(family, Layout(tensor=4)))
    for rank in range(4):
        loads = [sum(each.elements for each in transfers if each.source == rank + 4 * replica) for replica in range(replicas)]
        assert max(loads) - min(loads) <= max(each.elements for each in transfers if each.source % 4 == rank)


def test_a_part_that_nobody_holds_is_told() -> None:
    family, _ = model("qwen2")
    held = parts(family, Layout(tensor=2))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: of .* a part is held by nobody"):
        plan(held[:1], parts(family, Layout()))


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[GlooLink]]:
    """16 sources and 4 targets, which are threads."""
    store, count = dist.HashStore(), 20
    labels = [f"rank {rank}" for rank in range(count)]

    def meet(rank: int) -> GlooLink:
        return GlooLink(Apart(store), rank, labels, "127.0.0.1", PATIENCE, name=labels[rank])

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(meet, range(count)))
    try:
        yield made
    finally:
        for mesh in made:
            mesh.abort()


class Apart(dist.PrefixStore):
    """A store with the one method that a mesh asks of it besides torch's."""

    def __init__(self, store: dist.Store, prefix: str = "all"):
        super().__init__(prefix, store)
        self._inner = store

    def within(self, prefix: str) -> Apart:
        return Apart(self._inner, prefix)


def exchange(meshes: list[GlooLink], case: str, source: Layout, target: Layout) -> tuple[int, list[SliceTransfer]]:
    """Each target has what cutting the whole tensors gives it; the bytes that were sent."""
    family, _ = model(case)
    held, wanted = shards(case, source), shards(case, target)
    transfers = plan(parts(family, source), parts(family, target))
    version = PolicyVersion(0, 3)
    members = [SliceExchange(mesh.gloo, transfers, len(meshes) - 4, KEY, "a member") for mesh in meshes]
    empty = [{name: torch.zeros(block.shape, dtype=block.dtype) for name, block in rank.items()} for rank in wanted]
    with ThreadPoolExecutor(len(held) + len(wanted)) as pool:
        sending = [pool.submit(members[rank].send, rank, blocks, version) for rank, blocks in enumerate(held)]
        receiving = [pool.submit(members[len(meshes) - 4 + rank].receive, rank, got, version) for rank, got in enumerate(empty)]
        for future in [*sending, *receiving]:
            future.result(PATIENCE)
    for got, want in zip(empty, wanted, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    return sum(member.sent_bytes for member in members), transfers


@pytest.mark.parametrize("number", range(4))
def test_every_layout_up_to_4x4_arrives_over_gloo_with_the_fewest_bytes(meshes: list[GlooLink], number: int) -> None:
    dense = zip(["qwen2"] * 4, DENSE[number::4], TARGETS[number:] + TARGETS[:number], strict=True)
    for case, source, target in (*dense, ("qwen3_moe", MIXED[4 * number], Layout(tensor=1 << number % 3))):
        least = 2 * elements(parts(model(case)[0], target))
        sent, transfers = exchange(meshes, case, source, target)
        assert sent == least + TRAILER.size * len(transfers)
        assert sent <= 1.02 * least, f"from {source.tensor}x{source.pipeline}"


def test_a_part_that_changed_on_its_way_is_named(meshes: list[GlooLink], monkeypatch: pytest.MonkeyPatch) -> None:
    family, _ = model("qwen2")
    transfers = plan(parts(family, Layout(tensor=2)), parts(family, Layout()))[:1]
    sender, receiver = (SliceExchange(mesh.gloo, transfers, 16, KEY, "rollout-0") for mesh in (meshes[0], meshes[16]))
    stamp = sender._tags.stamp

    def stamped(number: int, bucket: object, buffer: torch.Tensor, version: PolicyVersion) -> int:
        digest = stamp(number, bucket, buffer, version)  # type: ignore[arg-type]
        buffer[7] ^= 1
        return digest

    monkeypatch.setattr(sender._tags, "stamp", stamped)
    empty = {transfers[0].tensor: torch.zeros(tuple(last - first for first, last in transfers[0].needed), dtype=torch.bfloat16)}
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, transfers[0].source, shards("qwen2", Layout(tensor=2))[0], PolicyVersion(0, 3))
        with pytest.raises(ServiceFault, match=rf"rollout-0: verify: {transfers[0].tensor}.* of rank 0: the checksum"):
            receiver.receive(0, empty, PolicyVersion(0, 3))
        sending.result(PATIENCE)
