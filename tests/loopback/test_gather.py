"""Weights that real engines send: the same in the middle of a step and by any encoding; and adapters."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, plan_buckets
from runtime.weights.receiver import StagedWeights
from runtime.weights.sender import join_rendezvous
from services.rollout import RolloutService
from services.trainer import TrainerService
from tests.loopback.ranks import run_ranks, run_two
from tests.loopback.test_epochs import WEIGHT_SYNC, Port, Stage, counted, stage
from tests.loopback.weight_cases import on_a_loop, posted
from tests.unit.lora_cases import lora_config
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_same, published, run_step

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

DEADLINE = 60.0
BUCKET = 1 << 11  # the tensors are of some dozen buckets

Tensors = dict[str, torch.Tensor]


def config_of(folder: Path, split: str, processes: int, **weight_sync: str) -> Config:
    """`split`: what lies on the ranks, by engine torch or, where it is a dimension of megatron's, by that one."""
    trainer = Trainer(processes=processes)
    if split in ("tensor", "pipeline"):
        trainer = replace(trainer, engine="megatron", parallel=replace(trainer.parallel, **{split: processes}))
    made = make_config(str(folder / "policy"), trainer=trainer)
    made = replace(made, run=replace(made.run, resume=""), lora=Lora(rank=2, alpha=4.0) if split == "lora" else made.lora)
    return replace(made, weight_sync=WeightSyncConfig(bucket_bytes=BUCKET, **weight_sync))


def publish(rank: TrainRank, version: int) -> dict[str, torch.Tensor]:
    """What a receiver has of the weights as they are; every rank makes this call."""
    command, sender, senders = SendWeights(PolicyVersion(0, version), version), rank.sender, rank.world_size
    if rank.rank:
        asyncio.run(sender.join(*of_rank_0(None)))
        dist.barrier()
        rank.execute(command).result(DEADLINE)
        dist.barrier()
        return {}
    hosted = asyncio.run(sender.open(InitWeightGroup(version, ("rollout-0",), ("",) * (senders + 1))))
    address = replace(hosted.address, rank=senders)
    joining = in_thread("join", lambda: join_rendezvous(address, "rollout-0"))
    if senders > 1:
        of_rank_0(hosted.address)
        dist.barrier()
    receiving = joining.result(DEADLINE)
    reception = posted(StagedWeights(hosted.manifest), receiving, command.version, DEADLINE)
    rank.execute(command).result(DEADLINE)
    received = {name: tensor.clone() for name, tensor in reception.result(DEADLINE).tensors().items()}
    receiving.abort()
    sender.close().result(DEADLINE)
    if senders > 1:
        dist.barrier()
    return received


def of_rank_0(address: GroupAddress | None) -> list[GroupAddress]:
    told: list[Any] = [address]
    dist.broadcast_object_list(told, 0)
    return told


def sent(folder: Path, split: str, rank: int, processes: int, within: bool = False, encoding: str = "") -> list[Tensors]:
    """After each step, and in the middle of the second if `within`. With an `encoding`: of small steps, in bfloat16."""
    small = {"encoding": encoding, "dtype": "bfloat16"} if encoding else {}
    config = config_of(folder, split, processes, **small)
    if small:
        optimizer = replace(config.training.optimizer, learning_rate=1e-6)
        config = replace(config, training=replace(config.training, optimizer=optimizer))
    made = policy_trainer(config, rank=rank, world_size=processes, device=torch.device("cpu"))
    worker = TrainRank(made, config)
    leaders = data_leaders(config.services.trainer)
    found = []
    for step in range(3 if small else 2):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        share = groups[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        worker.execute(BeginStep(step))
        worker.execute(Accumulate(step, share[:1], False))
        if step and within:
            found.append(publish(worker, step))
        worker.execute(Accumulate(step, share[1:], True))
        worker.execute(Apply(step))
        found.append(publish(worker, step + 1))
        assert_held(made, found[-1])
    worker.sender.close().result(DEADLINE)
    return found


def assert_held(engine: ModelTrainer, received: Tensors) -> None:
    """Check that the receiver has the weights that the ranks hold."""
    held = published(engine)
    if engine.backend.rank_info.rank == 0:
        assert_same(received, held)


WAYS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "disturbed": {"within": True},
    "whole": {"encoding": "whole"},
    "delta": {"encoding": "delta"},
}


def every_way(rank: int, folder: Path, split: str, processes: int) -> None:
    found = {way: sent(folder, split, rank, processes, **WAYS[way]) for way in WAYS}
    if rank == 0:
        torch.save(found, folder / "sent.pt")


@pytest.mark.parametrize(
    ("split", "processes"), [("none", 1), ("fully sharded", 2), ("lora", 2), ("tensor", 2), ("pipeline", 2)]
)
def test_what_is_sent_is_what_the_ranks_hold_at_any_time_and_by_any_encoding(
    tmp_path: Path, split: str, processes: int
) -> None:
    if split in ("tensor", "pipeline"):
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    if split == "lora":
        pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    make_policy(tmp_path / "policy")
    if processes == 1:
        every_way(0, tmp_path, split, 1)
    else:
        run_ranks(every_way, tmp_path, processes, split, processes)
    found = torch.load(tmp_path / "sent.pt")
    first, middle, last = found["disturbed"]
    assert equal([first], [middle])
    assert not equal([first], [last])
    assert equal(found["undisturbed"], [first, last])
    assert equal(found["delta"], found["whole"])
    assert not equal(found["whole"][:1], found["whole"][2:])


def equal(left: Sequence[Tensors], right: Sequence[Tensors]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )


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
        return Port(service)

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
    adapters = published(worker.engine)
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
            assert 0 < figures.bytes < 2 * sum(bucket.nbytes for bucket in buckets)
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
