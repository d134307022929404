"""torchrun as an agent is started by it: it opens no port, and hands on what its worker ends with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.loopback.ranks import DEADLINE, FORKED

OPTIONS = ("--nproc-per-node", "1", "--max-restarts", "0", "--log-dir", os.devnull)
# Says where the torchrun that started it listens.
WORKER = """
import os, sys
import psutil
parent = psutil.Process(os.getppid())
listens = [one.laddr for one in parent.net_connections("inet") if one.status == psutil.CONN_LISTEN]
print("listens:", listens, flush=True)
sys.exit(int(sys.argv[1]))
"""


def torchrun(said: Path, *options: str) -> None:
    from torch.distributed.run import main

    for descriptor in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    main(options)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--rdzv-backend", "sluice"), 0, "listens: []\n"),
        (("--rdzv-backend", "sluice"), 3, "listens: []\n"),
        (("--standalone",), 0, "port="),  # what is not seen with the backend
        (
            ("--rdzv-backend", "sluice", "--nnodes", "2"),
            3,
            "--nnodes: 2; must be 1 with --rdzv-backend sluice: each node has a",
        ),
    ],
)
def test_nothing_listens_and_how_the_worker_ends_is_handed_on(
    options: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    worker, out = tmp_path / "worker.py", tmp_path / "out.txt"
    worker.write_text(WORKER)
    process = FORKED.Process(target=torchrun, args=(out, *options, *OPTIONS, str(worker), str(code)))
    process.start()
    process.join(DEADLINE)
    process.kill()
    process.join()
    assert said in out.read_text()
    assert process.exitcode == bool(code)
