"""A group of ranks that share a model: how a rank joins it, and the part of a checkpoint that a node's ranks write and read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runtime import types
from runtime.commands import Restore, Save
from runtime.config import Config, Spread
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.models import limits
from runtime.models.hf_folder import read_raw
from runtime.process import os_process, platform
from runtime.trainer.backend import RankInfo
from runtime.types import PolicyVersion
from runtime.weights.group import AuthenticatedStore


def join_group(role: str, settings: Spread, world_size: int, timeout: float) -> torch.device:
    """Join the group if there are several ranks, and return this rank's device. `timeout`: seconds of the group's collectives.
    Raises UserError if the role's `backend` does not work on that device."""
    device = platform.device(index=int(os.environ.get("LOCAL_RANK", "0")))
    # torch's gloo has no NPU support. On CUDA, gloo has what FSDP2 needs, but neither the sends between pipeline stages nor the
    # coalesced gathers of megatron-core.
    staged = device.type == "cuda" and settings.engine == "torch"
    backend = platform.collective_backend(settings.backend, device, f"services.{role}.backend", gloo=staged)
    if world_size > 1:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")  # newest collectives that the flight recorder keeps
        limit, rank = timedelta(seconds=timeout), int(os.environ["RANK"])
        _stores.append(store := _store(world_size, limit, backend))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return device


_stores: list[dist.Store] = []  # keeps the default group's store alive: torch calls it for each further group


def _store(world_size: int, timeout: timedelta, backend: platform.CollectiveBackend) -> dist.Store:
    """Open or join the group's store. Rank 0 opens it on the socket that it inherited, which already listens. NCCL and HCCL
    call a store from their own threads, which must not wait for Python's lock: their store is not authenticated."""
    key = bytes.fromhex(os.environ.pop(os_process.STORE_KEY))
    host, port, given = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.get(os_process.STORE)
    listening: dict[str, Any] = {} if given is None else {"is_master": True, "master_listen_fd": int(given)}
    store = dist.TCPStore(host, port, world_size, timeout=timeout, **listening)
    return AuthenticatedStore(store, key) if backend == "gloo" else store


def require_memory(role: str, config: Config, source: str, device: torch.device) -> None:
    """Check that a rank of `role` with the model of folder `source` fits its device. Raises UserError if it surely does not."""
    if getattr(config.services, role).engine != "megatron":
        return
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    held = limits.rank_memory(config, role, read_raw(source), on_cpus=device.type == "cpu")
    if fault := limits.memory_fault(config, role, held, platform.memory(device).total // sharing):
        raise UserError(fault)


class NodePart:
    """The part of a checkpoint that this node's ranks write and read, where nodes share no folder. Every method is a collective
    of all ranks, except `complete`, which is called after one."""

    def __init__(self, config: Config, role: str, info: RankInfo):
        self._role, self._info, self._gathers = role, info, config.checkpoint.gather
        self._leads = os.environ.get("LOCAL_RANK", "0") == "0"  # the first of this node's ranks
        run_dir, node = Path(config.run.dir), os.environ.get(os_process.NODE, "")
        self._root, self._name = checkpoint.part_root(run_dir, node, role), f"{role}/{node}"
        self._whole = partial(checkpoint.whole_parts, run_dir, node, sums=False)  # the agent has compared the checksums

    def begin(self, command: Save) -> Path:
        """Create the folder that this node's ranks write to, and return it."""
        step = types.decode(Position, command.place).version.step
        if self._leads:
            checkpoint.begin_part(self._root, step, command.keep)
        self._info.largest([0])  # no rank writes before all folders exist
        return checkpoint.partial_of(checkpoint.folder_for(self._root, step))

    def complete(self, folder: Path, command: Save) -> list[str]:
        """Complete the checkpoint after all ranks have written into `folder`. Return the parts, if any, that are safe."""
        if not self._leads or not checkpoint.files_of(folder):
            return []
        position = types.decode(Position, command.place)
        checkpoint.complete(folder, checkpoint.folder_for(self._root, position.version.step), position)
        return [] if self._gathers and self._info.rank else [self._name]

    def load(self, command: Restore, needed: Callable[[Path], set[str]], load: Callable[[str], None]) -> PolicyVersion:
        """Restore the checkpoint by `load` and return its version. `needed` returns the files `*.distcp` that this rank reads.
        Those that only other nodes have are copied here until the load is over. Raises UserError if a part is missing."""
        position = types.decode(Position, command.place)
        folder = checkpoint.folder_for(self._root, position.version.step)
        if self._leads:
            checkpoint.sweep(self._root)
            checkpoint.set_aside(self._root, position.version.step, command.incarnation)
        has = self._leads and f"{self._name}/{checkpoint.identity(position)}" in self._whole()
        if self._leads and not has and self._name not in position.parts:
            checkpoint.discard(folder)  # useless, and it would be in the way
        of_ranks = all_gather_json([self._name, has], self._info)
        for part in position.parts:
            if part.startswith(f"{self._role}/") and [part, True] not in of_ranks:
                raise UserError(f"run.resume: {command.folder}: {checkpoint.missing_part(part)}")
        got = list(exchange(folder, lambda name: not name.endswith(".distcp"), self._info))
        got += exchange(folder, needed(folder).__contains__, self._info)
        load(str(folder))
        self._info.largest([0])  # no rank reads any more
        for path in got:
            path.unlink()
        return position.version


CHUNK = 64 << 20  # bytes that are sent at once


def all_gather_json(own: Any, info: RankInfo) -> list[Any]:
    """Return the JSON value of each rank, in the order of ranks."""
    line = torch.tensor(list(json.dumps(own).encode() + b"\n"), dtype=torch.int32)[:, None]
    return [json.loads(value) for value in bytes(info.gathered(line).flatten().tolist()).splitlines()]


def exchange(folder: Path, needed: Callable[[str], bool], info: RankInfo) -> Iterator[Path]:
    """Copy into `folder` the files that ranks of its node need and only other nodes have. The folder's name differs from node
    to node. Yield the files that this rank has written. Collective; it ends when all files are copied."""
    own = checkpoint.files_of(folder)
    of_ranks = all_gather_json([str(folder), own], info)
    sizes: dict[str, int] = {name: size for _, files in of_ranks for name, size in files.items()}
    wanted = all_gather_json([name for name in sizes if name not in own and needed(name)], info)
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
