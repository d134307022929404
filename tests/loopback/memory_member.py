"""One rank of a group under training that keeps copies in memory files of the test's process, or goes on from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from runtime.cluster.topology import data_leaders
from runtime.errors import ServiceFault
from runtime.process import os_process
from runtime.process.waiting import in_thread
from runtime.trainer.memory import MemoryCopies
from runtime.trainer.step import policy_trainer
from runtime.types import PolicyVersion
from tests.loopback.megatron_member import Layout
from tests.loopback.ranks import DEADLINE
from tests.unit.training_cases import make_groups
from tests.unit.training_steps import run_step, weights

STEPS, INCARNATION = 3, 4


class Case(NamedTuple):
    """A group, the descriptors of its nodes' memory files, and what it does. The ranks are spread evenly over the nodes."""

    name: str
    layout: Layout
    files: Sequence[int]
    optimizer: str = "adamw"
    least: int = STEPS  # of what goes on
    torn: bool = False  # the last rank ends while it keeps another version


def member(rank: int, folder: Path, work: str, of: int, cases: Sequence[Case]) -> None:
    """`of`: the process with the files. Writes FOLDER/WORK-RANKS-RANK.pt, what was found by the case's name."""
    found = {}
    for case in cases:
        file, node = (
            case.files[rank * len(case.files) // case.layout.processes],
            rank * len(case.files) // case.layout.processes,
        )
        os.environ[os_process.MEMORY] = str(os.open(f"/proc/{of}/fd/{file}", os.O_RDWR))
        os.environ[os_process.NODE] = f"node-{node}"
        torch.manual_seed(rank + (100 if work == "recall" else 0))
        found[case.name] = {"keep": keep, "recall": recall}[work](rank, folder, case)
        torch.save(found, folder / f"{work}-{cases[0].layout.processes}-{rank}.pt")


def make_engine(rank: int, folder: Path, case: Case) -> Any:
    config = case.layout.config(folder, "trainer")
    training = replace(config.training, optimizer=replace(config.training.optimizer, name=case.optimizer))
    config = replace(config, training=training, algorithm=replace(config.algorithm, kl_target=0.01, kl_horizon=20))
    return policy_trainer(config, rank=rank, world_size=case.layout.processes, device=torch.device("cpu"))


def step(engine: Any, rank: int, case: Case) -> None:
    leaders = data_leaders(engine._config.services.trainer)
    groups = make_groups(engine.step, (5, 4, 6, 3), step=engine.step)
    groups = [replace(group, reference=None) if case.layout.lora else group for group in groups]
    run_step(engine, groups[leaders.index(rank) :: len(leaders)] if rank in leaders else [])


def state_of(engine: Any) -> dict[str, Any]:
    pieces = {(name, start): data.clone() for name, start, data in engine.backend.pieces()}
    position = tuple(engine.position())
    return {"pieces": pieces, "counters": engine.backend.counters(), "position": position, "published": weights(engine)}


def keep(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    undisturbed, states = make_engine(rank, folder, case), []
    for _ in range(STEPS + 1):
        step(undisturbed, rank, case)
        states.append(state_of(undisturbed))
    engine, found = make_engine(rank, folder, case), {"states": states, "random": []}
    copies, kept = MemoryCopies(engine, DEADLINE), None
    for count in range(1, STEPS + 1 + case.torn):
        step(engine, rank, case)
        torch.rand(1)
        if kept is not None:
            kept.result(DEADLINE)
        found["random"].append(torch.get_rng_state())
        finish = copies.keep(PolicyVersion(INCARNATION, count), f"{count} of {rank}".encode())
        if count > STEPS:
            torch.save({case.name: found}, folder / f"keep-{case.layout.processes}-{rank}.pt")
            try:
                if rank < case.layout.processes - 1:
                    in_thread("keep", finish).result(DEADLINE)
            except ServiceFault as error:
                (folder / f"torn-{rank}").write_text(str(error))
            os._exit(0)
        kept = in_thread("keep", finish)  # beside the next step
    if kept is not None:
        kept.result(DEADLINE)
    return found


def recall(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    engine = make_engine(rank, folder, case)
    before = state_of(engine)
    copies = MemoryCopies(engine, DEADLINE)
    recalled = copies.recall(PolicyVersion(INCARNATION, case.least))
    random, states = torch.get_rng_state(), [before, state_of(engine)]
    step(engine, rank, case)
    in_thread("keep", copies.keep(PolicyVersion(INCARNATION, engine.step), b"")).result(DEADLINE)
    return {"recalled": tuple(recalled), "random": random, "states": [*states, state_of(engine)]}
