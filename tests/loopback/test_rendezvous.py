"""torchrun as an agent is started by it: it opens no port, and hands on what its worker ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE = 120.0
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


def torchrun(folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    command = (sys.executable, "-m", "torch.distributed.run", *options, *OPTIONS, str(worker), str(code))
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.parametrize("code", [0, 3])
def test_nothing_listens(tmp_path: Path, code: int) -> None:
    ended = torchrun(tmp_path, "--rdzv-backend", "sluice", code=code)
    assert ended.stdout == "listens: []\n", ended.stderr
    assert bool(ended.returncode) is bool(code)


def test_with_torchruns_own_something_does(tmp_path: Path) -> None:
    """What the test before would see."""
    assert "port=" in torchrun(tmp_path, "--standalone").stdout


def test_more_than_one_node_is_refused(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "--rdzv-backend", "sluice", "--nnodes", "2")
    assert ended.returncode != 0
    assert "--nnodes: 2; must be 1 with --rdzv-backend sluice: each node has a torchrun of its own" in ended.stderr
