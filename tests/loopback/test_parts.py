"""Senders with parts by rows and by columns: what receivers behind a relay have, and what memory each member takes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.process.waiting import in_thread
from runtime.types import PolicyVersion
from runtime.weights import plan
from runtime.weights.group import Shard, indexed
from runtime.weights.plan import Cut, Manifest, Sharding, TensorSpec, arena_offsets, parts
from runtime.weights.receiver import SLOTS, StagedWeights
from runtime.weights.sender import SendBuffers
from tests.loopback.weight_cases import PATIENCE, connected, posted

VERSIONS = 20
SPECS = tuple(TensorSpec(f"t{index}", "bfloat16", (64, 96)) for index in range(8))


def shards(manifest: Manifest, number: int, tensors: list[torch.Tensor]) -> list[Shard]:
    return [
        Shard(index, span, indexed(tensor, span))
        for index, tensor in enumerate(tensors)
        for span, holders in parts(manifest.tensors[index], manifest.source.cut(index))
        if number in holders
    ]


def test_changes_of_rows_and_columns_reach_every_worker_behind_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of senders and of workers cross in every way."""
    monkeypatch.setattr(plan, "LEAST_BYTES", 64)
    rows, columns = Cut(((0,), (1,)), 0, 32), Cut(((0,), (1,)), 1, 48)
    needs = (rows, columns, Cut(((0, 1),)), Cut(((1,), (0, 1)), 0, 40))
    manifest = Manifest(SPECS, 4096, Sharding(2, (rows, columns), (0, 1) * 4), Sharding(2, needs, (0, 0, 1, 1, 2, 2, 3, 3)))
    groups = connected("relay+delta", 6, senders=("trainer-0", "trainer-1"), workers=2)
    senders = [SendBuffers(manifest, number=number, takes_changes=True) for number in range(2)]
    receivers, generator = [StagedWeights(manifest) for _ in range(2)], torch.Generator().manual_seed(0)
    tensors, took = [torch.randn(spec.shape, generator=generator).bfloat16() for spec in SPECS], []
    try:
        for step in range(VERSIONS):
            version = PolicyVersion(0, step)
            for tensor in tensors:
                changed = torch.rand(tensor.shape, generator=generator) < 0.02
                tensor[changed] = torch.randn(tensor.shape, generator=generator).bfloat16()[changed]
            receptions = [posted(each, groups[2 + 2 * n :][:2], version, PATIENCE) for n, each in enumerate(receivers)]
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


def test_a_version_in_windows_takes_turns_in_two_arenas_and_is_loaded_part_by_part() -> None:
    """The engine has a tensor once its window is verified, and its bytes stay until the engine has loaded them."""
    cuts = (Cut(((0,), (1,)), 0, 32), Cut(((0,), (1,)), 1, 48))
    source = Sharding(2, cuts, (0, 1) * 4)
    manifest = Manifest(SPECS, 4096, source, Sharding.whole(2), window_bytes=3 * SPECS[0].nbytes + 64)
    groups = connected("relay", 6, senders=("trainer-0", "trainer-1"), workers=2)
    senders = [SendBuffers(manifest, number=number) for number in range(2)]
    receivers, generator = [StagedWeights(manifest) for _ in range(2)], torch.Generator().manual_seed(0)
    engines: list[dict[str, torch.Tensor]] = [{}, {}]
    calls: list[list[tuple[int, bool, bool]]] = [[], []]

    def load(number: int, tensors: Mapping[str, torch.Tensor], first: bool, last: bool) -> Future[None]:
        def copy() -> None:
            engines[number] |= {name: tensor.clone() for name, tensor in tensors.items()}
            calls[number].append((len(tensors), first, last))

        return in_thread("load", copy)

    try:
        for step in range(3):
            tensors = [torch.randn(spec.shape, generator=generator).bfloat16() for spec in SPECS]
            version = PolicyVersion(0, step)
            loads = [partial(load, 0), None if step == 1 else partial(load, 1)]  # one has the version already
            receptions = [
                in_thread("receive", partial(each.receive, groups[2 + 2 * n :][:2], version, PATIENCE, loads[n]))
                for n, each in enumerate(receivers)
            ]
            for number, sender in enumerate(senders):
                sender.begin(version, PATIENCE)
                sender.fill(shards(manifest, number, tensors))
            for sent in [sender.send(group, version, PATIENCE) for sender, group in zip(senders, groups, strict=False)]:
                sent.result(PATIENCE)
            for n, (reception, receiver) in enumerate(zip(receptions, receivers, strict=True)):
                reception.result(PATIENCE)
                assert receiver.version is None  # there is nothing to send on
                assert sum(arena.nbytes for arena in receiver._arenas) == 2 * manifest.window_bytes
                slots = {id(share._slots): len(share._slots) for _, shares in receiver._windows for share in shares}
                assert len(slots) == 2 and set(slots.values()) <= {0, SLOTS}  # of the workers, not of the windows
                assert step == n == 1 or all(torch.equal(engines[n][name], tensors[int(name[1:])]) for name in engines[n])
                receiver.release()
    finally:
        for group in groups:
            group.abort()
    assert calls == [3 * [(3, True, False), (3, False, False), (2, False, True)], 2 * calls[0][:3]]


def test_an_engine_that_does_not_load_ends_the_reception_in_time() -> None:
    manifest = Manifest(SPECS, 4096, window_bytes=SPECS[0].nbytes)
    groups, sender, never = connected("collective", 2), SendBuffers(manifest), list[Future[None]]()

    def load(*_: object) -> Future[None]:
        never.append(Future())
        return never[-1]

    sender.fill([Shard(index, (), torch.ones(spec.shape)) for index, spec in enumerate(SPECS)])
    reception = in_thread("receive", lambda: StagedWeights(manifest).receive([groups[1]], PolicyVersion(0, 1), 1.0, load))
    sending = sender.send(groups[0], PolicyVersion(0, 1), PATIENCE)
    with pytest.raises(DeadlineExceeded, match=r"load: the engine did not load 0\.1 \(deadline 1 s\)"):
        reception.result(PATIENCE)
    assert len(never) == 2 and all(each.cancelled() for each in never)
    for group in groups:
        group.abort()
    with pytest.raises(ServiceFault, match="transfer"):
        sending.result(PATIENCE)


def test_a_sender_takes_memory_for_its_part_and_a_rollout_for_one_model() -> None:
    manifest = Manifest(SPECS, 4096, Sharding(4, (Cut(((0,), (1,), (2,), (3,)), 0, 16),)))
    whole = sum(spec.nbytes for spec in SPECS)
    for number in range(4):
        buffers = SendBuffers(manifest, number=number).buffers
        assert buffers[0].untyped_storage().nbytes() == sum(buffer.nbytes for buffer in buffers) == whole // 4
    for cut in (manifest.source.cuts[0], Cut(((0,), (1,), (2,), (3,)), 1, 24)):
        receiver = StagedWeights(Manifest(SPECS, 4096, Sharding(4, (cut,))))
        receiver._prepare(False)
        assert [each.untyped_storage().nbytes() for each in receiver._arenas] == [arena_offsets(SPECS)[1]] == [whole]
