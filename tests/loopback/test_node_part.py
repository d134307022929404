"""The parts of a checkpoint on two nodes, each with a rank: what they give each other, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime import codec
from runtime.commands import Restore, Save
from runtime.config import Config
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint, node_checkpoints
from runtime.ledger.position import Position
from runtime.process import os_process
from runtime.trainer import node_part
from runtime.trainer.backend import RankInfo
from runtime.trainer.node_part import NodePart, exchange
from runtime.types import PolicyVersion
from tests.loopback.ranks import run_two

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
NODES = ("a", "b")
BOTH = ["trainer/a", "trainer/b"]
LARGE = bytes(range(256)) * 3  # in chunks of CHUNK bytes, the last of which is shorter
CHUNK = 500


class Engine:
    """Reads what a rank of megatron-core does: the files that all need, its own tensors, and the other's of one name."""

    def __init__(self, rank: int):
        self.rank, self.backend = rank, self
        self.seen: dict[str, bytes] = {}

    def needed(self, folder: Path) -> set[str]:
        return {f"t/__{self.rank}_0.distcp", "t/__0_1.distcp"}

    def load(self, folder: str) -> None:
        self.seen = {name: (Path(folder) / name).read_bytes() for name in node_checkpoints.files(Path(folder))}


def made(rank: int, folder: Path) -> tuple[NodePart, RankInfo]:
    os.environ[os_process.NODE] = NODES[rank]
    node_part.CHUNK = CHUNK
    info = RankInfo(rank, 2, torch.device("cpu"))
    given = {"run": {"name": "r", "dir": str(folder / "run")}, "cluster": {"shared_folder": False}}
    return NodePart(msgspec.convert(given, Config), "trainer", info), info


def place(step: int, **values: Any) -> Position:
    return Position(version=PolicyVersion(0, step), stream=STREAM, trained=[], run="5f", **values)


def save(part: NodePart, rank: int, step: int, keep: tuple[int, ...] = ()) -> list[str]:
    command = Save("/nowhere", codec.encode(place(step)), keep)
    partial = part.begin(command)
    (partial / "t").mkdir()
    if rank == 0:
        (partial / checkpoint.TRAINER).write_text(f'{{"step": {step}}}')
        (partial / "t" / "__0_1.distcp").write_bytes(b"")
        (partial / "t" / "__0_2.distcp").write_bytes(b"nobody reads it")
    (partial / "t" / f"__{rank}_0.distcp").write_bytes(LARGE + bytes([rank]))
    return part.complete(partial, command)


def gives_and_takes(rank: int, folder: Path) -> None:
    part, info = made(rank, folder)
    assert save(part, rank, 2) == [BOTH[rank]]
    assert save(part, rank, 4, (2,)) == [BOTH[rank]]  # of which no checkpoint comes
    engine: Any = Engine(rank)
    own = checkpoint.folder_for(node_checkpoints.root(folder / "run", NODES[rank], "trainer"), 2)
    before = node_checkpoints.files(own)
    assert part.load(Restore("/r/step-2", codec.encode(place(2, parts=BOTH)), 7), engine) == PolicyVersion(0, 2)
    expected = {checkpoint.TRAINER: b'{"step": 2}', "t/__0_1.distcp": b"", f"t/__{rank}_0.distcp": LARGE + bytes([rank])}
    assert engine.seen == expected | ({"t/__0_2.distcp": b"nobody reads it"} if rank == 0 else {})
    assert node_checkpoints.files(own) == before, "what was read is kept"
    assert (own.parent / "dead-7" / "step-00000004").is_dir()
    # Gathered: all of it is on the node of the first rank.
    assert [path.name for path in exchange(own, lambda _: rank == 0, info)] == (["__1_0.distcp"] if rank == 0 else [])
    assert len(node_checkpoints.files(own)) == (5 if rank == 0 else 1)


def refuses(rank: int, folder: Path) -> None:
    part, _ = made(rank, folder)
    save(part, rank, 2)
    own = checkpoint.folder_for(node_checkpoints.root(folder / "run", NODES[rank], "trainer"), 2)
    engine: Any = Engine(rank)

    def lacks(node: str, named: list[str], **values: Any) -> None:
        told = rf"^run.resume: /r/step-2: node {node} has not the trainer's part of it whole, or takes no part in it$"
        position = msgspec.structs.replace(place(2, parts=named), **values)
        with pytest.raises(UserError, match=told):
            part.load(Restore("/r/step-2", codec.encode(position)), engine)

    lacks("c", [*BOTH, "trainer/c"])
    lacks("a", BOTH, run="another")
    lacks("a", BOTH, version=PolicyVersion(1, 2))
    if rank:
        (own / "t" / "__1_0.distcp").write_bytes(b"torn")
    lacks("b", BOTH)
    assert engine.seen == {}
    # What nobody needs may be torn: the other node gives what is read.
    engine.needed = lambda _: {"t/__0_0.distcp"}
    part.load(Restore("/r/step-2", codec.encode(place(2, parts=["trainer/a", "critic/d"]))), engine)
    assert engine.seen["t/__0_0.distcp"] == LARGE + b"\0"
    assert "t/__1_0.distcp" not in engine.seen


@pytest.mark.parametrize("work", [gives_and_takes, refuses])
def test_two_nodes(tmp_path: Path, work: Callable[[int, Path], None]) -> None:
    run_two(work, tmp_path)
