"""A process's rank in its group, and the collectives between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runtime.ledger import checkpoint


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in its service's group. `group`: another process group of the same ranks; None: the default group."""

    rank: int
    world_size: int
    device: torch.device
    group: Any = None

    def largest(self, counts: list[int]) -> list[int]:
        """Return the elementwise maximum over ranks."""
        if self.world_size == 1:
            return counts
        tensor = torch.tensor(counts, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.tolist()

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part` over ranks, in its dtype and on its device."""
        if self.world_size == 1:
            return part
        # NPUs reduce nothing wider than float32.
        whole = part.to(self.device, torch.float32 if self.device.type == "npu" else torch.float64)
        dist.all_reduce(whole, group=self.group)
        return whole.to(part)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the rows of `part` [n, k] of all ranks, in the order of ranks, on the host."""
        if self.world_size == 1:
            return part
        longest = self.largest([len(part)])[0]
        padded = torch.zeros(longest + 1, part.shape[1], dtype=part.dtype, device=self.device)
        padded[0, 0] = len(part)
        padded[1 : len(part) + 1] = part.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, self.group)
        return torch.cat([each[1 : int(each[0, 0]) + 1] for each in parts]).cpu()


CHUNK = 64 << 20  # bytes that are sent at once


def _all_gather_json(own: Any, info: RankInfo) -> list[Any]:
    """Return the JSON value of each rank, in the order of ranks."""
    line = torch.tensor(list(json.dumps(own).encode() + b"\n"), dtype=torch.int32)[:, None]
    return [json.loads(value) for value in bytes(info.gathered(line).flatten().tolist()).splitlines()]


def exchange(folder: Path, needed: Callable[[str], bool], info: RankInfo) -> Iterator[Path]:
    """Copy into `folder` the files that ranks of its node need and only other nodes have. The folder's name differs from node
    to node. Yield the files that this rank has written. Collective; it ends when all files are copied."""
    own = checkpoint.files_of(folder)
    of_ranks = _all_gather_json([str(folder), own], info)
    sizes: dict[str, int] = {name: size for _, files in of_ranks for name, size in files.items()}
    wanted = _all_gather_json([name for name in sizes if name not in own and needed(name)], info)
    for name, size in sorted(sizes.items()):
        sender = next(rank for rank, (_, files) in enumerate(of_ranks) if name in files)
        # The first rank of each node that needs the file.
        first = {of_ranks[rank][0]: rank for rank in reversed(range(len(of_ranks))) if name in wanted[rank]}
        for receiver in first.values():
            if info.rank == sender:
                _transfer(folder / name, "rb", size, receiver, info)
            elif info.rank == receiver:
                yield _transfer(folder / name, "wb", size, sender, info)
    info.largest([0])


def _transfer(path: Path, mode: str, size: int, other: int, info: RankInfo) -> Path:
    """Send the file to the rank `other` ("rb"), or write the file that `other` sends ("wb")."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path if mode == "rb" else path.with_name(f".{path.name}.partial")
    carrier = torch.device("cpu") if dist.get_backend(info.group) == "gloo" else info.device
    with checkpoint.as_storage_full(path.parent), target.open(mode) as file:
        for first in range(0, size, CHUNK):
            data = torch.empty(min(CHUNK, size - first), dtype=torch.uint8)
            if mode == "rb":
                data.numpy()[:] = np.frombuffer(file.read(len(data)), np.uint8)
                dist.send(data.to(carrier), other, info.group)
            else:
                dist.recv(received := data.to(carrier), other, info.group)
                file.write(received.cpu().numpy().data)
    return target.replace(path)
