"""TensorChanges found by shard: what a sending rank makes of them is bit for bit what gathering whole tensors gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from runtime.cluster.topology import data_leaders
from runtime.commands import Accumulate, Apply, BeginStep
from runtime.config import Lora
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import policy_trainer
from runtime.types import PolicyVersion
from runtime.weights import shard_delta
from runtime.weights.delta import encode, words_of
from runtime.weights.plan import Manifest, TensorSpec
from runtime.weights.receiver import WeightReceiver
from runtime.weights.sender import WeightSender
from runtime.weights.shard_delta import Shard, ShardDelta, Span, TensorChanges
from tests.loopback.ranks import run_ranks
from tests.loopback.test_gather import Senders, config_of, equal, publish
from tests.loopback.weight_aborts import connected
from tests.loopback.weight_cases import PATIENCE
from tests.unit.training_cases import make_groups, make_policy

SHAPES = ((7, 6), (64, 9), (1, 4), (33,), (5, 12, 2), (2, 2))
VERSIONS = 12


def cut(place: int, whole: torch.Tensor, rank: int, count: int) -> Iterator[Shard]:
    """Rank `rank`'s part: rows, or of every third tensor columns; of every fourth the whole, which one rank has."""
    if place % 4 == 3:
        if rank == place % count:
            yield Shard(place, (slice(0, whole.shape[0]),), whole)
        return
    dimension = 1 if place % 3 == 1 else 0
    share = -(-whole.shape[dimension] // count)
    start, end = (min(whole.shape[dimension], at * share) for at in (rank, rank + 1))
    index = (slice(start, end),) if dimension == 0 else (slice(0, whole.shape[0]), slice(start, end))
    yield Shard(place, index, whole[index])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.int16)


def follow(rank: int, folder: Path, count: int, seed: int, exchange_bytes: int) -> None:
    """Random changes of random tensors, the same on all ranks: what the targets make of them is those tensors."""
    shard_delta.EXCHANGE_BYTES = exchange_bytes
    random = np.random.default_rng(seed)
    wholes = [
        torch.from_numpy(random.integers(-(2**15), 2**15, shape, dtype=np.int16)).view(torch.bfloat16) for shape in SHAPES
    ]
    targets = [int(random.integers(0, count)) for _ in SHAPES]
    delta = ShardDelta(rank, torch.device("cpu"), targets)
    held: dict[int, torch.Tensor] = {}
    for version in range(VERSIONS):
        for whole in wholes:
            flat = bits(whole)
            if version % 5 == 4:
                flat += 1
            at = torch.from_numpy(random.integers(0, len(flat), int(random.integers(0, min(3, len(flat) // 5) + 1))))
            flat[at] = torch.from_numpy(random.integers(-(2**15), 2**15, len(at), dtype=np.int16))
        lost = version == 7  # by one rank, which did not fill its buckets
        shards = (shard for place, whole in enumerate(wholes) for shard in cut(place, whole, rank, count))
        changes = delta.find(shards, not (lost and rank == count - 1))
        assert (changes is None) == (version == 0 or lost or version % 5 == 4), f"version {version}"
        own = [place for place, target in enumerate(targets) if target == rank]
        if changes is None:
            held = {place: wholes[place].clone() for place in own}
            continue
        found = list(changes)
        assert len(found) == len(own)
        for place, change in zip(own, found, strict=True):
            change.apply(held[place])
            assert torch.equal(bits(held[place]), bits(wholes[place])), f"version {version}, tensor {place}"


@pytest.mark.parametrize(("count", "exchange_bytes"), [(1, 1 << 20), (2, 1 << 20), (3, 16), (4, 64)])
def test_what_the_targets_have_is_the_tensors_as_they_are(tmp_path: Path, count: int, exchange_bytes: int) -> None:
    run_ranks(follow, tmp_path, count, count, 11 * count, exchange_bytes)


@pytest.mark.parametrize("way", ["collective+delta", "shared_memory+delta", "files+delta"])
def test_a_sender_that_is_told_what_changed_sends_that_and_keeps_no_copy(tmp_path: Path, way: str) -> None:
    manifest = Manifest(tuple(TensorSpec(str(place), "bfloat16", shape) for place, shape in enumerate(SHAPES)), 600)
    groups, receiver, sender = (
        connected(way, 2, folder=str(tmp_path)),
        WeightReceiver(manifest),
        WeightSender(manifest, told=True),
    )
    random, wholes = np.random.default_rng(1), [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    took = []
    for version in range(6):
        before = [whole.clone() for whole in wholes]
        for whole in wholes:
            bits(whole)[torch.from_numpy(random.integers(0, whole.numel(), 1 + version % 3))] += 1
        reception = receiver.receive(groups[1], PolicyVersion(0, version), PATIENCE)
        sender.begin(PATIENCE)
        sender.fill(wholes if version in (0, 4) else [changed(*pair) for pair in zip(before, wholes, strict=True)])
        took.append(sender.send(groups[0], PolicyVersion(0, version), PATIENCE).result(PATIENCE).nbytes)
        staged = reception.result(PATIENCE)
        assert all(torch.equal(bits(got), bits(whole)) for got, whole in zip(staged.tensors().values(), wholes, strict=True))
        staged.release()
    assert took[4] > max(took[1:4])  # which is whole
    encoder = groups[0]._encoder if way.startswith("files") else groups[0]._links[0]._encoder  # type: ignore[attr-defined]
    assert encoder._last == {}
    for group in groups:
        group.abort()


def changed(before: torch.Tensor, now: torch.Tensor) -> TensorChanges:
    """Found in two shards: the first columns, or rows, and the others."""
    changes, rows = TensorChanges(), before.shape[0]
    spans: list[Span] = (
        [((0, rows), (0, 1)), ((0, rows), (1, before.shape[1]))] if before.ndim > 1 else [((0, 5),), ((5, rows),)]
    )
    for span in spans:
        index = tuple(slice(*bounds) for bounds in span)
        old, new = (words_of(tensor[index].contiguous().view(-1).view(torch.uint8)) for tensor in (before, now))
        payload = encode(old, new)
        changes.add(span, new.view(np.uint8) if payload is None else payload)
    return changes


def published(
    folder: Path, engine: str, rank: int, senders: Senders, split: str, encoding: str
) -> list[dict[str, torch.Tensor]]:
    """What two ranks publish after each of four steps, and how often they gathered whole tensors for it."""
    config, device = config_of(folder, engine, 2, "all" if split == "pipeline" else None), torch.device("cpu")
    rate = msgspec.structs.replace(config.training.optimizer, learning_rate=1e-6)
    config = msgspec.structs.replace(
        config,
        training=msgspec.structs.replace(config.training, optimizer=rate),
        publication=msgspec.structs.replace(config.publication, encoding=encoding, dtype="bfloat16", senders=senders),
    )
    if split == "lora":
        config = msgspec.structs.replace(config, lora=Lora(rank=2, alpha=4.0))
    engine_here = policy_trainer(config, rank=rank, world_size=2, device=device)
    worker = TrainRank(engine_here, config)
    leaders = data_leaders(config.services.trainer)
    gather, wholes = engine_here.backend.gather, []

    def counted(targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        wholes.append(targets)
        return gather(targets)

    engine_here.backend.gather = counted  # type: ignore[method-assign]
    found = []
    for step in range(4):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        worker.execute(BeginStep(step))
        worker.execute(Accumulate(step, groups[leaders.index(rank) :: len(leaders)] if rank in leaders else [], True))
        worker.execute(Apply(step))
        found.append(publish(worker, step + 1))
    if worker.member is not None:
        worker.member.close().result(60.0)
    assert len(wholes) == (1 if encoding == "delta" else 4)
    assert worker.member is None or worker.member.sender._told == (encoding == "delta")
    return found


def member(rank: int, folder: Path, engine: str, senders: Senders, split: str) -> None:
    found = [published(folder, engine, rank, senders, split, encoding) for encoding in ("whole", "delta")]
    if rank == 0:
        torch.save(found, folder / "published.pt")


@pytest.mark.parametrize("senders", ["one", "all"])
@pytest.mark.parametrize("split", ["", "lora", "tensor", "pipeline"])
def test_engines_publish_by_shard_what_they_publish_whole(tmp_path: Path, split: str, senders: Senders) -> None:
    engine = "torch" if split in ("", "lora") else "megatron"
    if engine == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    if split == "lora":
        pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    make_policy(tmp_path / "policy")
    run_ranks(member, tmp_path, 2, engine, senders, split)
    whole, by_shard = torch.load(tmp_path / "published.pt")
    assert not equal(whole[:1], whole[3:])
    assert equal(whole, by_shard)
