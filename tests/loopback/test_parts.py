"""Senders with parts by rows and by columns: what receivers behind a relay have, and what memory each member takes."""

from __future__ import annotations

import torch

from runtime.types import PolicyVersion
from runtime.weights.group import Shard, indexed
from runtime.weights.plan import Cut, Manifest, TensorSpec, arena_offsets, parts
from runtime.weights.receiver import SLOTS, StagedWeights
from runtime.weights.sender import SendBuffers
from tests.loopback.weight_cases import PATIENCE, connected, posted

VERSIONS = 20
SPECS = tuple(TensorSpec(f"t{index}", "bfloat16", (64, 96)) for index in range(6))


def shards(manifest: Manifest, number: int, tensors: list[torch.Tensor]) -> list[Shard]:
    return [
        Shard(index, span, indexed(tensor, span))
        for index, tensor in enumerate(tensors)
        for span, holders in parts(manifest, index)
        if number in holders
    ]


def test_changes_of_rows_and_columns_reach_every_receiver_behind_a_relay() -> None:
    cuts = (Cut(((0,), (1,)), 0, 32), Cut(((0,), (1,)), 1, 48))
    manifest = Manifest(SPECS, 4096, senders=2, cuts=cuts, cut_of=(0, 1) * 3)
    groups = connected("relay+delta", 4, senders=("trainer-0", "trainer-1"))
    senders = [SendBuffers(manifest, number=number, takes_changes=True) for number in range(2)]
    receivers, generator = [StagedWeights(manifest) for _ in range(2)], torch.Generator().manual_seed(0)
    tensors, took = [torch.randn(spec.shape, generator=generator).bfloat16() for spec in SPECS], []
    try:
        for step in range(VERSIONS):
            version = PolicyVersion(0, step)
            for tensor in tensors:
                changed = torch.rand(tensor.shape, generator=generator) < 0.02
                tensor[changed] = torch.randn(tensor.shape, generator=generator).bfloat16()[changed]
            receptions = [posted(each, group, version, PATIENCE) for each, group in zip(receivers, groups[2:], strict=True)]
            for number, sender in enumerate(senders):
                sender.begin(version, PATIENCE)
                sender.fill(shards(manifest, number, tensors))
            sending = [sender.send(group, version, PATIENCE) for sender, group in zip(senders, groups, strict=False)]
            took.append([each.result(PATIENCE).bytes for each in sending])
            for reception in receptions:
                staged = reception.result(PATIENCE)
                assert all(torch.equal(found, tensors[int(name[1:])]) for name, found in staged.tensors().items()), step
                staged.release()
    finally:
        for group in groups:
            group.abort()
    assert max(count for count, _ in took[1:]) < took[0][0] / 4  # the others were changes


def test_a_sender_takes_memory_for_its_part_and_a_receiver_for_one_model_and_slots() -> None:
    manifest = Manifest(SPECS, 4096, senders=4, cuts=(Cut(((0,), (1,), (2,), (3,)), 0, 16),))
    whole = sum(spec.nbytes for spec in SPECS)
    for number in range(4):
        buffers = SendBuffers(manifest, number=number).buffers
        assert buffers[0].untyped_storage().nbytes() == sum(buffer.nbytes for buffer in buffers) == whole // 4
    for cut in (manifest.cuts[0], Cut(((0,), (1,), (2,), (3,)), 1, 24)):
        receiver = StagedWeights(Manifest(SPECS, 4096, senders=4, cuts=(cut,)))
        receiver._prepare(False)
        assert receiver._arena is not None
        assert receiver._arena.untyped_storage().nbytes() == arena_offsets(SPECS)[1] == whole
        if cut.dim:
            assert receiver._slots[0].untyped_storage().nbytes() <= SLOTS * 4096
