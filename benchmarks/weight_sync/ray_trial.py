"""Ray's object store in `sluice bench weight_sync`.

`python -m benchmarks.weight_sync.ray_trial FOLDER MEGABYTES RECEIVERS` starts a Ray of its own on this machine: an
actor in the trainer's place has the tensors in a dict and puts them into the object store, actors in the rollouts' place get
them and copy them into tensors of their own. Orders come as those of `trial`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

import torch

from benchmarks.weight_sync.tensors import uneven
from benchmarks.weight_sync.trial import begin, digest, serve, speak

# Nothing is told to anybody, nor kept in the user's home.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
STORE = 2  # times the tensors, of memory for objects: one version may be freed while the next is put


class Holder:
    """An actor: the tensors of one process."""

    def __init__(self, megabytes: int, first: bool):
        torch.set_num_threads(1)
        self._tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in uneven(megabytes)}
        if first:
            generator = torch.Generator().manual_seed(megabytes)
            for tensor in self._tensors.values():
                tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

    def put(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def digest(self) -> int:
        return digest(list(self._tensors.values()))


class RayTrial:
    def __init__(self, folder: str, megabytes: int, receivers: int):
        """`folder` has a short name: paths of sockets lie in it."""
        self._folder, self._megabytes, self._receivers = folder, megabytes, receivers
        self._ray: Any
        self._sender: Any
        self._others: list[Any]

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        import ray

        self._ray = ray
        ray.init(
            num_cpus=1 + self._receivers,
            include_dashboard=False,
            object_store_memory=STORE * max(self._megabytes, 64) * 1_000_000,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._folder,
        )
        actor = ray.remote(Holder)
        self._sender = actor.remote(self._megabytes, True)
        self._others = [actor.remote(self._megabytes, False) for _ in range(self._receivers)]
        self._move()  # processes start with their first call
        digests = ray.get([each.digest.remote() for each in (self._sender, *self._others)])
        if len(set(digests)) > 1:
            raise RuntimeError("did not bring what was sent")

    async def move(self) -> float:
        """Seconds from the sender's beginning to the end of the last receiver."""
        return await asyncio.to_thread(self._move)

    def _move(self) -> float:
        began = time.monotonic()
        tensors = self._sender.put.remote()
        self._ray.get([other.load.remote(tensors) for other in self._others])
        return time.monotonic() - began

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)


def main() -> None:
    os.environ.update(ENVIRONMENT)
    begin()
    folder, megabytes, receivers = sys.argv[1:]
    asyncio.run(serve(RayTrial(folder, int(megabytes), int(receivers)), speak()))


if __name__ == "__main__":
    main()
