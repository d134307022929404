"""Ranks of one gloo group, each a process of its own.

Most are forked from a server that has imported torch and megatron-core once: an import takes some seconds of each process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

DEADLINE = 100.0
FORKED: Any = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.loopback.preloaded"])
FRESH: Any = multiprocessing.get_context("spawn")  # imports by itself, with this process's sys.path
Work = Callable[..., None]


def run_two(work: Work, folder: Path) -> None:
    """`run_ranks`, of two."""
    run_ranks(work, folder, 2)


def run_ranks(work: Work, folder: Path, count: int, *arguments: Any, context: Any = FORKED) -> None:
    """Run `work(rank, folder, *arguments)` in `count` processes that are a group; fails with what they said, unless all end
    well. `work` is a function of a module, and `arguments` can be pickled.
    """
    (folder / "store").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        context.Process(target=_be_rank, args=(work, environment, rank, count, folder, arguments)) for rank in range(count)
    ]
    give_up = time.monotonic() + DEADLINE
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.0, give_up - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert codes == [0] * count, "\n".join(_said(folder, rank).read_text() for rank in range(count))


class Helper:
    """A process that runs `work(connection)`, with whose other end the test talks to it."""

    def __init__(self, work: Callable[[Any], None], context: Any = FORKED):
        self.connection, other = context.Pipe()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.process = context.Process(target=_be_helper, args=(work, environment, other))
        self.process.start()
        other.close()

    def tell(self, *words: Any) -> None:
        self.connection.send(words)

    def hear(self) -> Any:
        """What it said next. Raises EOFError when it has ended."""
        if not self.connection.poll(DEADLINE):
            raise TimeoutError(f"the process says nothing for {DEADLINE:.0f} seconds")
        return self.connection.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def heard(connection: Any) -> Iterator[tuple[Any, ...]]:
    """What such a process is told, until its test has ended."""
    with suppress(EOFError):
        while True:
            yield connection.recv()


def _be_helper(work: Callable[[Any], None], environment: Mapping[str, str], connection: Any) -> None:
    _begin(environment)
    work(connection)
    os._exit(0)


def _begin(environment: Mapping[str, str]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)


def _said(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _be_rank(
    work: Work, environment: Mapping[str, str], rank: int, count: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    with _said(folder, rank).open("wb") as log:
        os.dup2(log.fileno(), 2)
    faulthandler.enable(2)  # a rank that a signal ends says where it was
    _begin(environment)
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=DEADLINE))
    work(rank, folder, *arguments)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads and the interpreter's end race for what both use
