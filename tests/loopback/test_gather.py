"""What real engines send: the same in the middle of a step, and whoever of the ranks sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
import torch.distributed as dist

from runtime.cluster.topology import data_leaders
from runtime.commands import Accumulate, Apply, BeginStep, SendWeights
from runtime.config import Config, Publication, Trainer
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import policy_trainer
from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress
from runtime.weights.receiver import WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import in_thread
from tests.loopback.ranks import run_ranks
from tests.unit.training_cases import make_config, make_groups, make_policy

DEADLINE = 60.0
BUCKET = 1 << 11  # the tensors are of some dozen buckets

Senders = Literal["one", "all"]


def config_of(folder: Path, engine: str, processes: int, senders: Senders | None) -> Config:
    """Where `senders` are told, megatron's ranks are pipeline stages, or else tensor-parallel."""
    trainer = Trainer(processes=processes, engine=engine)  # type: ignore[arg-type]
    if engine == "megatron":
        spread = {"pipeline" if senders else "tensor": processes}
        trainer = msgspec.structs.replace(trainer, parallel=msgspec.structs.replace(trainer.parallel, **spread))
    made = make_config(str(folder / "policy"), trainer=trainer)
    run = msgspec.structs.replace(made.run, resume="")
    return msgspec.structs.replace(made, run=run, publication=Publication(bucket_bytes=BUCKET, senders=senders or "one"))


def publish(rank: TrainRank, version: int) -> dict[str, torch.Tensor]:
    """What a receiver has of the weights as they are; every rank makes this call."""
    command, count, member = SendWeights(PolicyVersion(0, version), version), len(rank.senders), rank.member
    if rank.rank:
        if count > 1:
            assert member is not None
            address = rank.address_of(*of_rank_0(None))
            member.open(version).result(DEADLINE)
            member.connect(version, lambda: join(address))
            dist.barrier()
        sending = rank.execute(command)
        if sending is not None:
            sending.result(DEADLINE)
        if count > 1:
            dist.barrier()
        return {}
    assert member is not None
    pending = host(version, 1 + count, "127.0.0.1", "gloo", DEADLINE, names=rank.senders, senders=count)
    joining = in_thread("join", lambda: join(msgspec.structs.replace(pending.address, rank=count)))
    if count > 1:
        of_rank_0(pending.address)
    member.open(version).result(DEADLINE)
    member.connect(version, pending.connect, pending.abort)
    if count > 1:
        dist.barrier()
    receiving = joining.result(DEADLINE)
    reception = WeightReceiver(rank.manifest).receive(receiving, command.version, DEADLINE)
    rank.execute(command).result(DEADLINE)
    received = {name: tensor.clone() for name, tensor in reception.result(DEADLINE).tensors().items()}
    receiving.abort()
    member.open(0).result(DEADLINE)
    if count > 1:
        dist.barrier()
    return received


def of_rank_0(address: GroupAddress | None) -> list[GroupAddress]:
    told: list[Any] = [address]
    dist.broadcast_object_list(told, 0)
    return told


def published(
    folder: Path, engine: str, rank: int, processes: int, *, within: bool, senders: Senders | None = None
) -> list[dict[str, torch.Tensor]]:
    """After a step, in the middle of the next if `within`, and after that."""
    config, device = config_of(folder, engine, processes, senders), torch.device("cpu")
    made = policy_trainer(config, rank=rank, world_size=processes, device=device)
    worker = TrainRank(made, config)
    leaders = data_leaders(config.services.trainer)
    found = []
    for step in range(2):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        share = groups[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        worker.execute(BeginStep(step))
        worker.execute(Accumulate(step, share[:1], False))
        if step and within:
            found.append(publish(worker, step))
        worker.execute(Accumulate(step, share[1:], True))
        worker.execute(Apply(step))
        found.append(publish(worker, step + 1))
    if worker.member is not None:
        worker.member.close().result(DEADLINE)
    return found


def all_ways(rank: int, folder: Path, engine: str, processes: int) -> list[list[dict[str, torch.Tensor]]]:
    return [published(folder, engine, rank, processes, within=within) for within in (False, True)]


def shared_ways(rank: int, folder: Path, engine: str, processes: int) -> list[list[dict[str, torch.Tensor]]]:
    """What one of two pipeline stages, or two ranks of FSDP, send for both; and what both send, each a part."""
    ways: tuple[Senders, ...] = "one", "all"
    return [published(folder, engine, rank, processes, within=False, senders=senders) for senders in ways]


Ways = Callable[[int, Path, str, int], list[list[dict[str, torch.Tensor]]]]


def member(rank: int, folder: Path, engine: str, processes: int, ways: Ways) -> None:
    found = ways(rank, folder, engine, processes)
    if rank == 0:
        torch.save(found, folder / "published.pt")


@pytest.mark.parametrize(("engine", "processes"), [("torch", 1), ("torch", 2), ("megatron", 2)])
def test_what_is_sent_in_the_middle_of_a_step_is_what_is_sent_before_it(tmp_path: Path, engine: str, processes: int) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    make_policy(tmp_path / "policy")
    if processes == 1:
        found = all_ways(0, tmp_path, engine, 1)
    else:
        run_ranks(member, tmp_path, processes, engine, processes, all_ways)
        found = torch.load(tmp_path / "published.pt")
    undisturbed, disturbed = found
    first, middle, last = disturbed
    assert equal([first], [middle])
    assert not equal([first], [last])
    assert equal(undisturbed, [first, last])


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_what_two_ranks_send_each_a_part_of_is_what_one_sends(tmp_path: Path, engine: str) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    make_policy(tmp_path / "policy")
    run_ranks(member, tmp_path, 2, engine, 2, shared_ways)
    one, parts = torch.load(tmp_path / "published.pt")
    assert not equal(one[:1], one[1:])
    assert equal(parts, one)


def equal(left: Sequence[dict[str, torch.Tensor]], right: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )
