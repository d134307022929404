"""Processes of a test module that are ranks of one gloo group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

DEADLINE = 100.0


def run_two(module: str, folder: Path) -> None:
    """`run_ranks`, of two."""
    run_ranks(module, folder, 2)


def run_ranks(module: str, folder: Path, count: int, *arguments: str) -> None:
    """Run `python -m MODULE FOLDER RANK COUNT ...` for each rank; fails with what they said, unless all end well."""
    (folder / "store").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", module, str(folder)]
    root = Path(__file__).parents[2]
    tails = [[str(rank), str(count), *arguments] for rank in range(count)]
    ranks = [subprocess.Popen([*command, *tail], cwd=root, env=environment, stderr=subprocess.PIPE) for tail in tails]
    try:
        errors = [rank.communicate(timeout=DEADLINE)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(errors)


def as_rank(work: Callable[[int, Path], None]) -> None:
    """The `__main__` of such a module: `work(rank, folder)` within the group."""
    import torch
    import torch.distributed as dist

    folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=DEADLINE))
    work(rank, folder)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads and the interpreter's end race for what both use
