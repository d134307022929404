"""Blobs over real servers: put by a rollout, held by the agents of two nodes, read in part by trainer and reference."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import blobs, types
from runtime.blobs import BlobStore, PutBlob, ReadBlob
from runtime.config import Config, Moe, Run, Training
from runtime.errors import BlobLost, Forbidden, InvalidMessage, StorageFull
from runtime.process import keys, os_process
from runtime.trainer.micro_batch import RoutedShare, pack, plan
from runtime.trainer.rows import Needs, check_groups, rows_of
from runtime.types import GeneratedGroup, GroupPayload, PolicyVersion, RoutedExperts, Sample, TrainGroup
from services.blobs import READ, BlobClient, BlobKeeper, BlobServer
from services.model_service import FrozenModelService
from tests.coroutines import driven_by, within
from tests.loopback.test_security import holder, of_process

LAYERS, PER_TOKEN, COUNT = 3, 2, 300  # more than 256 experts: two bytes each
BOUND = 4


def config_of(folder: Path) -> Config:
    settings = Config(run=Run(name="a", dir=str(folder)), moe=Moe(router_replay="routing"), training=Training(staleness=BOUND))
    return replace(settings, network=replace(settings.network, interface="127.0.0.1"))


def group_of(group_id: int, lengths: Sequence[int], step: int = 5) -> tuple[GeneratedGroup, np.ndarray]:
    """A group with a prompt of 4 tokens, and its experts [tokens that were fed, LAYERS, PER_TOKEN]."""
    rng = np.random.default_rng(group_id)
    version = PolicyVersion(0, step)
    prompt = rng.integers(0, 100, 4).astype(np.int32)
    first = np.argsort(rng.random((4, LAYERS, COUNT)), -1)[..., :PER_TOKEN].astype(np.uint16)
    samples, taken = [], [first]
    for length in lengths:
        own = np.argsort(rng.random((length - 1, LAYERS, COUNT)), -1)[..., :PER_TOKEN].astype(np.uint16)
        taken.append(own)
        samples.append(
            Sample(
                tokens=rng.integers(0, 100, length).astype(np.int32),
                loss_mask=np.ones(length, np.uint8),
                logprobs=-rng.random(length).astype(np.float32),
                versions=np.full(length, version.pack()),
                finish_reason="stop",
                experts=RoutedExperts.of(np.concatenate([first, own])),
            )
        )
    payload = types.encode(GroupPayload.of(group_id, prompt, samples))
    known: dict[str, Any] = {"prompt_tokens": 4, "response_tokens": list(lengths), "truncated": 0}
    return GeneratedGroup(group_id=group_id, oldest=version, newest=version, payload=payload, **known), np.concatenate(taken)


@asynccontextmanager
async def nodes(config: Config, most: int = 1 << 20) -> AsyncIterator[list[BlobServer]]:
    """The agents of the nodes a and b, each the other's peer, with TLS."""
    servers = [BlobServer(name, most) for name in "ab"]
    try:
        for name, server in zip("ab", servers, strict=True):
            await server.open(config, holder(keys.node_agent(name), tls=True))
        servers[0].peer, servers[1].peer = servers[1]._own, servers[0]._own
        yield servers
    finally:
        for server in servers:
            await server.close()


def keeper(config: Config, server: BlobServer, monkeypatch: pytest.MonkeyPatch) -> BlobKeeper:
    """Make the keeper of the rollout on the node of `server`."""
    monkeypatch.setenv(blobs.ADDRESS, server._own.address)
    monkeypatch.setenv(os_process.NODE, server._own.node)
    return BlobKeeper(config, BlobClient("rollout-0", of_process("rollout-0", tls=True)))


def trained(groups: Sequence[GeneratedGroup]) -> list[TrainGroup]:
    known: dict[str, Any] = {"tokens": 1}
    return [
        TrainGroup(
            group_id=group.group_id,
            payload=group.payload,
            rewards=np.zeros(group.n, np.float32),
            valid=np.ones(group.n, np.uint8),
            **known,
        )
        for group in groups
    ]


def passes(groups: Sequence[GeneratedGroup], share: RoutedShare, budget: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each micro-batch, the tokens and experts of what the rank's routers see; as the engine's thread makes them, twice."""
    rows = rows_of(check_groups(trained(groups), 100, needs := Needs(experts=(LAYERS, PER_TOKEN, COUNT))), needs)
    found = []
    for chosen in 2 * plan(rows, np.arange(len(rows.length)), budget):
        batch = pack(rows, chosen, {}, blobs_device(), routed=share)
        assert batch.experts is not None
        where = share.tokens(batch.input_ids.shape[1])
        found.append((batch.input_ids[0].numpy()[where], batch.experts.numpy()))
    return found


def blobs_device() -> Any:
    import torch

    return torch.device("cpu")


@driven_by(within(30.0))
async def test_a_rank_reads_the_experts_of_its_own_tokens_and_layers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout has ended, and blobs have several pieces. One agent dies, then the other."""
    monkeypatch.setattr(blobs, "PIECE", 64)
    config = config_of(tmp_path)
    made = [group_of(number, lengths) for number, lengths in enumerate([(5, 9, 2), (7,), (3, 3)])]
    inline = [replace(group) for group, _ in made]
    share = RoutedShare(slice(1, 3), lambda packed: np.arange(packed)[1::2])  # a stage's layers, and every other token
    async with nodes(config) as (first, second):
        own = keeper(config, first, monkeypatch)
        kept = [await own.kept(group) for group, _ in made]
        await own._client.close()  # the rollout has ended
        assert [[each.node for each in group.holders] for group in kept] == [["a", "b"]] * 3
        assert not any(len(types.decode(GroupPayload, group.payload).experts.data) for group in kept)  # type: ignore[union-attr]
        reader, sizes = BlobClient("trainer-0", of_process("trainer-0", tls=True)), list[int]()
        reader.serve_threads()
        for server in (first, second):
            monkeypatch.setattr(server.store, "read", counting(server.store.read, sizes))
        expected = passes(inline, share, 12)
        assert sizes == []
        found = await asyncio.to_thread(passes, kept, share, 12)
        assert len(found) == len(expected) > 4
        for (tokens, experts), (same_tokens, same) in zip(found, expected, strict=True):
            assert (tokens == same_tokens).all() and (experts == same).all()
        # Once each, though two passes and several micro-batches needed them: this rank's tokens and layers, 2 bytes a choice.
        assert sum(sizes) == 2 * np.unique(np.concatenate([experts for _, experts in expected]), axis=0).size

        await first.close()
        again = await asyncio.to_thread(passes, kept, RoutedShare(), 12)
        assert all((a[1] == b[1]).all() for a, b in zip(again, passes(inline, RoutedShare(), 12), strict=True))
        await second.close()
        with pytest.raises(BlobLost, match="no agent holds blob"):
            await asyncio.to_thread(passes, kept, share, 12)
        await reader.close()


def counting(read: Any, sizes: list[int]) -> Any:
    def counted(asked: ReadBlob) -> bytes:
        data: bytes = read(asked)
        sizes.append(len(data))
        return data

    return counted


@driven_by(within(30.0))
async def test_a_lost_peer_costs_a_copy_and_not_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout may put and may not read. If its agent has no room, the experts stay in the payload."""
    monkeypatch.setattr("runtime.timeouts.BLOB_COPY", 0.5)
    config = config_of(tmp_path)
    async with nodes(config) as (first, second):
        await second.close()
        own = keeper(config, first, monkeypatch)
        kept = await own.kept(group_of(0, (5,))[0])
        assert [each.node for each in kept.holders] == ["a"] and first.peer is None
        experts = types.decode(GroupPayload, kept.payload).experts
        assert experts is not None and experts.blob is not None
        asked = ReadBlob(digest=experts.blob.digest, width=experts.blob.width, begin=0, end=4, ranges=np.array([0, 1]))
        with pytest.raises(Forbidden, match="may not call"):
            await own._client.call(first._own, READ, asked)
        monkeypatch.setattr(first.store, "put", full)
        group, taken = group_of(1, (4,))
        again = types.decode(GroupPayload, (await own.kept(group)).payload).experts
        assert again is not None and (again.rows == taken).all() and not group.holders
        await own._client.close()


def full(_: PutBlob) -> None:
    raise StorageFull("/tmp")


def part(data: bytes, until: int = 3, **changed: Any) -> PutBlob:
    return replace(blobs.pieces(data, until, blobs.digest_of(data))[0], **changed)


def rows(data: bytes, *bounds: int, width: int = 4, begin: int = 0, end: int = 4) -> ReadBlob:
    return ReadBlob(digest=blobs.digest_of(data), width=width, begin=begin, end=end, ranges=np.array(bounds, np.int64))


@pytest.mark.parametrize("most", [1 << 20, 0], ids=["in memory", "in temporary files"])
def test_a_store_gives_rows_and_columns_until_no_step_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store, data = BlobStore(most), bytes(range(32))
    store.put(part(data))
    assert store.read(rows(data, 0, 1, 5, 8)) == data[:4] + data[20:32]
    assert store.read(rows(data, 1, 3, begin=1, end=3)) == bytes([5, 6, 9, 10])
    assert store.read(rows(data)) == b"" and list(tmp_path.iterdir()) == []
    beyond = rows(data, 7, 9), rows(data, -1, 2), rows(data, 0, 1, end=5), rows(data, 0, 1, begin=5), rows(data, 0, 1, width=5)
    for wrong in beyond:
        with pytest.raises(InvalidMessage, match="no such rows and columns"):
            store.read(wrong)
    store.put(part(data, until=7))  # another group has the same
    store.expire(7)
    assert store.read(rows(data, 0, 1)) == data[:4]
    store.expire(8)
    with pytest.raises(BlobLost, match="is not here"):
        store.read(rows(data, 0, 1))
    assert store._resident == 0


def test_a_store_refuses_what_is_not_the_named_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PIECE", 16)
    store, data = BlobStore(1 << 20), bytes(range(40))
    first, second, third = blobs.pieces(data, 3, blobs.digest_of(data))
    for wrong in (replace(first, offset=1), replace(second, data=b"short"), replace(third, size=41)):
        with pytest.raises(InvalidMessage, match="no piece of it"):
            store.put(wrong)
    for each in (third, first, first, replace(second, data=bytes(16))):  # a piece comes twice; the last has other bytes
        with pytest.raises(BlobLost):
            store.read(rows(data, 0, 1))
        if each.data != bytes(16):
            store.put(each)
    with pytest.raises(InvalidMessage, match="another hash"):
        store.put(replace(second, data=bytes(16)))
    for each in (first, second, third):
        store.put(each)
    assert store.read(rows(data, 0, 10)) == data


class Scores(FrozenModelService):
    """Fails as a reference does that reads the experts of a batch."""

    role = "reference"

    def load(self) -> None:
        self.answers = self.scored

    def scored(self, requests: Sequence[int]) -> list[int]:
        if 2 in requests:
            raise BlobLost("reference-0", "read", "no agent holds blob 02 any more")
        return [10 * each for each in requests]


@driven_by(within(30.0))
async def test_a_reference_fails_only_the_group_whose_blob_is_lost(tmp_path: Path) -> None:
    service = Scores(config_of(tmp_path), "reference-0", 0)
    service.load()
    await service.start()
    try:
        found = await asyncio.gather(*(service._actor.send(each) for each in (1, 2, 3)), return_exceptions=True)
        assert found[::2] == [10, 30] and isinstance(found[1], BlobLost)
    finally:
        await service.close()
