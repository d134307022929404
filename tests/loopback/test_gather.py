"""What real engines send: the same in the middle of a step, by shard or whole, whoever sends it; and adapters."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime import config
from runtime.cluster.topology import data_leaders
from runtime.commands import Accumulate, Apply, BeginStep, InitWeightGroup, Level, SendWeights, SetLevel
from runtime.config import Config, Lora, Trainer, WeightSyncConfig
from runtime.errors import UserError
from runtime.models.adapters import merged
from runtime.models.hf_folder import WeightFiles
from runtime.process.waiting import in_thread
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.trainer.megatron import facade
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import policy_trainer
from runtime.types import PolicyVersion
from runtime.weights import delta as delta_module
from runtime.weights.delta import Shard, ShardChange, ShardDelta, Span, TensorChanges, encode, words_of
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec, plan_buckets
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import SendBuffers, join_rendezvous
from services.rollout import RolloutService
from services.trainer import TrainerService
from tests.loopback.ranks import run_ranks, run_two
from tests.loopback.test_epochs import WEIGHT_SYNC, Port, Stage, counted, stage
from tests.loopback.weight_cases import PATIENCE, connected, on_a_loop, posted
from tests.unit.lora_cases import lora_config
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_same, run_step

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

DEADLINE = 60.0
BUCKET = 1 << 11  # the tensors are of some dozen buckets

Senders = Literal["one", "all"]


def config_of(folder: Path, split: str, processes: int, senders: Senders, **weight_sync: str) -> Config:
    """`split`: what lies on the ranks, by engine torch or, where it is a dimension of megatron's, by that one."""
    trainer = Trainer(processes=processes)
    if split in ("tensor", "pipeline"):
        trainer = replace(trainer, engine="megatron", parallel=replace(trainer.parallel, **{split: processes}))
    made = make_config(str(folder / "policy"), trainer=trainer)
    made = replace(made, run=replace(made.run, resume=""), lora=Lora(rank=2, alpha=4.0) if split == "lora" else made.lora)
    return replace(made, weight_sync=WeightSyncConfig(bucket_bytes=BUCKET, senders=senders, **weight_sync))


def publish(rank: TrainRank, version: int) -> dict[str, torch.Tensor]:
    """What a receiver has of the weights as they are; every rank makes this call."""
    command, sender = SendWeights(PolicyVersion(0, version), version), rank.sender
    several = rank.manifest.senders > 1
    if rank.rank:
        if several:
            assert sender is not None
            asyncio.run(sender.join(*of_rank_0(None)))
            dist.barrier()
        sending = rank.execute(command)
        if sender is not None:
            sending.result(DEADLINE)
        if several:
            dist.barrier()
        return {}
    assert sender is not None
    hosted = asyncio.run(sender.open(InitWeightGroup(version, 2, "collective", (rank.role, "rollout-0"))))
    address = replace(hosted.address, rank=rank.manifest.senders)
    joining = in_thread("join", lambda: join_rendezvous(address, "rollout-0"))
    if several:
        of_rank_0(hosted.address)
        dist.barrier()
    receiving = joining.result(DEADLINE)
    reception = posted(StagedWeights(hosted.manifest), receiving, command.version, DEADLINE)
    rank.execute(command).result(DEADLINE)
    received = {name: tensor.clone() for name, tensor in reception.result(DEADLINE).tensors().items()}
    receiving.abort()
    sender.close().result(DEADLINE)
    if several:
        dist.barrier()
    return received


def of_rank_0(address: GroupAddress | None) -> list[GroupAddress]:
    told: list[Any] = [address]
    dist.broadcast_object_list(told, 0)
    return told


def published(
    folder: Path, split: str, rank: int, processes: int, senders: Senders = "one", within: bool = False, encoding: str = ""
) -> list[dict[str, torch.Tensor]]:
    """After each step, and in the middle of the second if `within`. With an `encoding`: of small steps, in bfloat16."""
    small = {"encoding": encoding, "dtype": "bfloat16"} if encoding else {}
    config = config_of(folder, split, processes, senders, **small)
    if small:
        optimizer = replace(config.training.optimizer, learning_rate=1e-6)
        config = replace(config, training=replace(config.training, optimizer=optimizer))
    made = policy_trainer(config, rank=rank, world_size=processes, device=torch.device("cpu"))
    worker, wholes, gather = TrainRank(made, config), [], made.backend.gather

    def noted(targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        wholes.append(targets)
        return gather(targets)

    made.backend.gather = noted
    leaders = data_leaders(config.services.trainer)
    found, steps = [], 3 if small else 2
    for step in range(steps):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        share = groups[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        worker.execute(BeginStep(step))
        worker.execute(Accumulate(step, share[:1], False))
        if step and within:
            found.append(publish(worker, step))
        worker.execute(Accumulate(step, share[1:], True))
        worker.execute(Apply(step))
        found.append(publish(worker, step + 1))
    if worker.sender is not None:
        worker.sender.close().result(DEADLINE)
    told = encoding == "delta" and processes > 1
    assert len(wholes) == (1 if told else len(found))
    assert worker.sender is None or worker.sender.buffers._takes_changes == told
    return found


WAYS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "disturbed": {"within": True},
    "whole": {"encoding": "whole"},
    "whole, of all": {"encoding": "whole", "senders": "all"},
    "by shard": {"encoding": "delta"},
    "by shard, of all": {"encoding": "delta", "senders": "all"},
}


def every_way(rank: int, folder: Path, split: str, processes: int) -> None:
    found = {way: published(folder, split, rank, processes, **WAYS[way]) for way in WAYS if processes > 1 or "all" not in way}
    if rank == 0:
        torch.save(found, folder / "published.pt")


@pytest.mark.parametrize(
    ("split", "processes"), [("none", 1), ("fully sharded", 2), ("lora", 2), ("tensor", 2), ("pipeline", 2)]
)
def test_what_is_sent_is_the_same_whoever_sends_it_and_when(tmp_path: Path, split: str, processes: int) -> None:
    if split in ("tensor", "pipeline"):
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    if split == "lora":
        pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    make_policy(tmp_path / "policy")
    if processes == 1:
        every_way(0, tmp_path, split, 1)
    else:
        run_ranks(every_way, tmp_path, processes, split, processes)
    found = torch.load(tmp_path / "published.pt")
    first, middle, last = found.pop("disturbed")
    assert equal([first], [middle])
    assert not equal([first], [last])
    assert equal(found.pop("undisturbed"), [first, last])
    whole = found.pop("whole")
    assert not equal(whole[:1], whole[2:])
    for way, versions in found.items():
        assert equal(versions, whole), way


def equal(left: Sequence[dict[str, torch.Tensor]], right: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )


# ------------------------------------------------------------------------------------------------ changes, found by shard
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
    delta_module.EXCHANGE_BYTES = exchange_bytes
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


@pytest.mark.parametrize(("count", "exchange_bytes"), [(1, 1 << 20), (2, 1 << 20), (3, 16)])
def test_what_the_targets_have_is_the_tensors_as_they_are(tmp_path: Path, count: int, exchange_bytes: int) -> None:
    run_ranks(follow, tmp_path, count, count, 11 * count, exchange_bytes)


@pytest.mark.parametrize("way", ["collective+delta", "shared_memory+delta"])
def test_a_sender_that_is_told_what_changed_sends_that_and_keeps_no_copy(way: str) -> None:
    manifest = Manifest(tuple(TensorSpec(str(place), "bfloat16", shape) for place, shape in enumerate(SHAPES)), 600)
    groups, receiver, sender = (connected(way, 2), StagedWeights(manifest), SendBuffers(manifest, takes_changes=True))
    random, wholes = np.random.default_rng(1), [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    took = []
    for version in range(6):
        before = [whole.clone() for whole in wholes]
        for whole in wholes:
            bits(whole)[torch.from_numpy(random.integers(0, whole.numel(), 1 + version % 3))] += 1
        reception = posted(receiver, groups[1], PolicyVersion(0, version), PATIENCE)
        sender.begin(PolicyVersion(0, version), PATIENCE)
        sender.fill(wholes if version in (0, 4) else [changed(*pair) for pair in zip(before, wholes, strict=True)])
        took.append(sender.send(groups[0], PolicyVersion(0, version), PATIENCE).result(PATIENCE).bytes)
        staged = reception.result(PATIENCE)
        assert all(torch.equal(bits(got), bits(whole)) for got, whole in zip(staged.tensors().values(), wholes, strict=True))
        staged.release()
    assert took[4] > max(took[1:4])  # which is whole
    assert groups[0]._links[0]._last == {}
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
        payload = new.view(np.uint8) if payload is None else payload
        changes.append(ShardChange(0, span, payload.data))
    return changes


# ------------------------------------------------------------------------------------------------ parts of different sizes
ROWS = ((3, 2), (0, 4), (2, 2), (0, 0))  # rows of the two ranks


def part(owner: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 2, dtype=torch.float64).view(rows, 2) + 10 * (owner + 1)


def gather_and_scatter(rank: int, folder: Path) -> None:
    found = []
    for sizes in ROWS:
        flat = torch.full((sum(sizes), 2), torch.nan, dtype=torch.float64)
        facade.gather_uneven(list(flat.split(sizes)), part(rank, sizes[rank]), group=dist.group.WORLD)
        given = [part(rank, rows) for rows in sizes]
        kept = [each.clone() for each in given]
        own = torch.full((sizes[rank], 2), torch.nan, dtype=torch.float64)
        facade.reduce_scatter_uneven(own, given, group=dist.group.WORLD)
        assert all(torch.equal(each, before) for each, before in zip(given, kept, strict=True))
        found.append((flat, own))
    torch.save(found, folder / f"{rank}.pt")


def test_parts_of_different_sizes_are_gathered_and_summed(tmp_path: Path) -> None:
    run_two(gather_and_scatter, tmp_path)
    for rank in range(2):
        for sizes, (gathered, own) in zip(ROWS, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert torch.equal(gathered, torch.cat([part(owner, rows) for owner, rows in enumerate(sizes)]))
            assert torch.equal(own, part(0, sizes[rank]) + part(1, sizes[rank]))


# ------------------------------------------------------------------------------------------------ adapters
class Site:
    """A trainer of adapters and what rolls them out. Only weight syncs are configured otherwise than by default."""

    def __init__(self, at: Path, **weight_sync: Any):
        (at / "policy").mkdir()
        self.path = make_policy(at / "policy")
        self.settings = replace(WEIGHT_SYNC, **weight_sync)
        services = config.Services(rollout=config.Rollout(replicas=3))
        lora = lora_config(self.path, Lora(rank=2, alpha=6.0))
        self.config = replace(lora, weight_sync=self.settings, services=services)

    def rollout(self, name: str, path: str = "", incarnation: int = 0) -> Port:
        made = replace(self.config, model=replace(self.config.model, path=path or self.path))
        service = RolloutService(made, name, 0)
        cpu = torch.device("cpu")
        service.use(TorchRolloutEngine(made.model.path, device=cpu, dtype=torch.float32, slots=2, max_model_len=64))
        return Port(service, incarnation)

    def trainer(self) -> Port:
        service = TrainerService(self.config, "trainer-0", 0)
        service._worker = TrainRank(policy_trainer(self.config), self.config)
        port: Any = Port(service)
        port.machines = {port.name: port.machine}
        return port

    def stage(self, *paths: str) -> Any:
        """With a rollout for each of `paths`, their model folders."""
        rollouts = [self.rollout(f"rollout-{number}", path) for number, path in enumerate(paths)]
        return stage(self.settings, self.trainer(), rollouts)


async def train_and_publish(here: Stage, step: int) -> Any:
    run_step(here.trainer.service._worker.engine, make_groups(step))
    return await here.publish(step)


def assert_served(rollout: Any, here: Stage) -> None:
    """The engine has the model folder's weights with the trainer's adapters in them, as these are on the wire."""
    engine, worker = rollout.service._engine, here.trainer.service._worker
    assert engine.version.step == here.pool.membership.committed.step
    sent = zip(worker.manifest.tensors, worker.engine.backend.gather(), strict=True)
    adapters = {spec.name: tensor.to(getattr(torch, spec.dtype)) for spec, tensor in sent}
    expected = {name: tensor.float() for name, tensor in merged(WeightFiles(worker.config.model.path), adapters)}
    assert_same(dict(engine._decoder.weights._views), expected)


@pytest.mark.parametrize(
    "weight_sync", [{}, {"transport": "collective", "encoding": "delta", "dtype": "bfloat16"}], ids=["shared_memory", "delta"]
)
@on_a_loop
async def test_rollouts_have_the_policy_and_so_has_a_late_one(weight_sync: dict[str, str], tmp_path: Path) -> None:
    site = Site(tmp_path, **weight_sync)
    same = shutil.copytree(site.path, tmp_path / "same")
    async with site.stage(site.path, str(same)) as here:
        for step in (1, 2):
            figures = await train_and_publish(here, step)
            buckets = plan_buckets(here.trainer.service._worker.manifest)
            assert 0 < figures.bytes < 2 * sum(bucket.total_bytes for bucket in buckets)
            for rollout in here.rollouts:
                assert_served(rollout, here)
        sends = counted(here)
        here.rollouts[1].cut()
        late = await here.comes(site.rollout("rollout-1", incarnation=1))
        assert_served(late, here)
        assert not sends  # the other rollout gave it
        await late.call(SetLevel(Level.ASLEEP))
        await late.call(SetLevel(Level.WEIGHTS))
        await train_and_publish(here, 3)
        await late.call(SetLevel(Level.AWAKE))
        for rollout in (here.rollouts[0], late):
            assert_served(rollout, here)


@on_a_loop
async def test_another_base_is_refused_in_one_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    other = make_policy(tmp_path / "other", initializer_range=0.2)
    async with site.stage(site.path, other) as here:
        with pytest.raises(
            UserError, match=rf"^model\.path: '{other}' has other weights here \(\w+\) than in the trainer .*\)$"
        ):
            await here.publish(1)
        assert here.rollouts[1].service._engine.version.step == 0
