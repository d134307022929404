"""What a group's ranks on this node have of its checkpoints, where nodes share no folder (`ledger.node_checkpoints`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runtime import codec
from runtime.commands import Restore, Save
from runtime.config import Config
from runtime.errors import UserError
from runtime.ledger import checkpoint, node_checkpoints
from runtime.ledger.position import Position
from runtime.process import os_process
from runtime.trainer.backend import RankInfo
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion

CHUNK = 64 << 20  # bytes that are sent at a time


class NodePart:
    """Every method is a collective of all ranks but `complete`, which follows one."""

    def __init__(self, config: Config, role: str, info: RankInfo):
        self._role, self._info, self._gathers = role, info, config.checkpoint.gather
        self._leads = os.environ.get("LOCAL_RANK", "0") == "0"  # of this node's ranks
        run_dir, node = Path(config.run.dir), os.environ.get(os_process.NODE, "")
        self._root, self._name = node_checkpoints.root(run_dir, node, role), f"{role}/{node}"
        self._whole = partial(node_checkpoints.whole, run_dir, node, sums=False)  # which the agent has compared

    def begin(self, command: Save) -> Path:
        """Where this node's ranks are to write."""
        step = codec.decode(Position, command.place).version.step
        if self._leads:
            node_checkpoints.begin(self._root, step, command.keep)
        self._info.largest([0])  # nobody writes before all folders are there
        return checkpoint.partial_of(checkpoint.folder_for(self._root, step))

    def complete(self, folder: Path, command: Save) -> list[str]:
        """All ranks have written into `folder`. The part that this rank speaks for, which is safe then."""
        if not self._leads or not node_checkpoints.files(folder):
            return []
        position = codec.decode(Position, command.place)
        checkpoint.complete(folder, checkpoint.folder_for(self._root, position.version.step), position)
        return [] if self._gathers and self._info.rank else [self._name]

    def load(self, command: Restore, engine: ModelTrainer) -> PolicyVersion:
        """Have `engine` restore the checkpoint; gives its version. What a node's ranks read, and others have alone, it gets
        from them for as long. Raises UserError, on all ranks, when a part that the checkpoint consists of is not there."""
        position = codec.decode(Position, command.place)
        folder = checkpoint.folder_for(self._root, position.version.step)
        if self._leads:
            checkpoint.sweep(self._root)
            checkpoint.set_aside(self._root, position.version.step, command.incarnation)
        has = self._leads and f"{self._name}/{node_checkpoints.identity(position)}" in self._whole()
        if self._leads and not has and self._name not in position.parts:
            checkpoint.discard(folder)  # of no use, and in the way
        told = _all_told([self._name, has], self._info)
        for part in position.parts:
            if part.startswith(f"{self._role}/") and [part, True] not in told:
                raise UserError(f"run.resume: {command.folder}: {node_checkpoints.missing(part)}")
        got = list(exchange(folder, lambda name: not name.endswith(".distcp"), self._info))
        got += exchange(folder, engine.backend.needed(folder).__contains__, self._info)
        engine.load(str(folder))
        self._info.largest([0])  # nobody reads any more
        for path in got:
            path.unlink()
        return position.version


def _all_told(own: Any, info: RankInfo) -> list[Any]:
    """What each rank says, as JSON has it, in their order."""
    line = torch.tensor(list(json.dumps(own).encode() + b"\n"), dtype=torch.int32)[:, None]
    return [json.loads(told) for told in bytes(info.gathered(line).flatten().tolist()).splitlines()]


def exchange(folder: Path, needed: Callable[[str], bool], info: RankInfo) -> Iterator[Path]:
    """Copy into `folder`, whose name differs from node to node, the files that ranks there need and other nodes alone have.
    Gives those that this rank has written. A collective, which is over once all is given."""
    own = node_checkpoints.files(folder)
    told = _all_told([str(folder), own], info)
    sizes: dict[str, int] = {name: size for _, files in told for name, size in files.items()}
    wanted = _all_told([name for name in sizes if name not in own and needed(name)], info)
    for name, size in sorted(sizes.items()):
        sender = next(rank for rank, (_, files) in enumerate(told) if name in files)
        first = {told[rank][0]: rank for rank in reversed(range(len(told))) if name in wanted[rank]}  # of each node
        for receiver in first.values():
            if info.rank == sender:
                _carry(folder / name, "rb", size, receiver, info)
            elif info.rank == receiver:
                yield _carry(folder / name, "wb", size, sender, info)
    info.largest([0])


def _carry(path: Path, mode: str, size: int, other: int, info: RankInfo) -> Path:
    """Send a file to the rank `other`, or write what it sends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path if mode == "rb" else path.with_name(f".{path.name}.partial")
    carrier = torch.device("cpu") if dist.get_backend(info.group) == "gloo" else info.device
    with checkpoint.full_disk_told(path.parent), place.open(mode) as file:
        for first in range(0, size, CHUNK):
            data = torch.empty(min(CHUNK, size - first), dtype=torch.uint8)
            if mode == "rb":
                data.numpy()[:] = np.frombuffer(file.read(len(data)), np.uint8)
                dist.send(data.to(carrier), other, info.group)
            else:
                dist.recv(there := data.to(carrier), other, info.group)
                file.write(there.cpu().numpy().data)
    return place.replace(path)
