"""Faults of collectives and of memory, raised inside a real trainer by a file of its user's: each is survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.runs import started, steps

pytestmark = pytest.mark.timeout(600)

END = 240.0  # seconds that a run may take
STEPS = 12
SETTINGS = (f"training.steps={STEPS}", "checkpoint.every=1")

LOSS = """
import os
from pathlib import Path
from sluice import policy_loss

def once(name, after=None):
    here = Path(__file__).parent
    if os.environ.get("RANK", "{rank}") != "{rank}" or (here / name).exists():
        return False
    if after and not (here / after).exists():
        return False
    (here / name).touch()
    return True

@policy_loss("faulty", zero_without_advantage=True)
def faulty(inputs, options):
    from runtime.algorithms.losses import ppo
    patch()
    if inputs.logp.requires_grad:
        raise_faults()
    return ppo(inputs, options)
"""

COLLECTIVES = """
def raise_faults():
    from torch.distributed import DistBackendError
    if once("nccl"):
        raise DistBackendError("NCCL error: unhandled system error, made up")
    if once("hccl", after="nccl"):
        raise RuntimeError("ERR02200 DIST call hccl api failed, made up")

def patch():
    from torch.distributed import DistBackendError
    from runtime.weights.sender import SendBuffers
    if hasattr(SendBuffers, "whole") or not (Path(__file__).parent / "hccl").exists():  # in a trainer that lives on
        return
    SendBuffers.whole = SendBuffers._send_all
    def send_all(self, group, version, give_up):
        if once("sending"):
            raise DistBackendError("HCCL error in a weight sync, made up")
        self.whole(group, version, give_up)
    SendBuffers._send_all = send_all
"""

BUCKET = """
def raise_faults():
    pass

def patch():
    from runtime.weights.sender import SendBuffers
    if hasattr(SendBuffers, "whole"):
        return
    SendBuffers.whole = SendBuffers._require_same
    def require_same(self, index, digest, name):
        self.whole(index, digest, name)
        if once("flipped"):
            own = [number for number, _ in self.own]
            self.buffers[own.index(index)][0] ^= 1  # behind the checksum's back: receivers find it, then the sender
    SendBuffers._require_same = require_same
"""


def write(path: Path, body: str, rank: int) -> str:
    path.write_text(LOSS.replace("{rank}", str(rank)) + body)
    return f"algorithm.loss={path}:faulty"


def test_errors_of_collectives_end_their_process_or_their_weight_sync(config: Path, tmp_path: Path) -> None:
    own = write(tmp_path / "mine.py", COLLECTIVES, rank=0)
    with started(config, *SETTINGS, own, folder=tmp_path / "run") as run:
        assert run.wait(END) == 0, run.output + run.errors
    assert {path.name for path in tmp_path.iterdir()} >= {"nccl", "hccl", "sending"}
    for error in ("DistBackendError: NCCL error", "RuntimeError: ERR02200 DIST call hccl"):
        assert f"trainer-0: run: {error}" in run.output
    found = steps(run.folder)
    assert sorted({point["step"] for point in found}) == list(range(1, STEPS + 1))
    assert sum(point.get("weight_sync/aborts", 0) for point in found) == 1


def test_a_bucket_that_changed_in_a_senders_memory_is_gathered_and_sent_again(config: Path, tmp_path: Path) -> None:
    """Of the second sender: the first one's is among the chaos's faults."""
    own = write(tmp_path / "mine.py", BUCKET, rank=1)
    two = ("services.trainer.processes=2", "weight_sync.bucket_bytes=4096")
    with started(config, *SETTINGS, *two, own, folder=tmp_path / "run") as run:
        assert run.wait(END) == 0, run.output + run.errors
    assert (tmp_path / "flipped").exists()
    found = steps(run.folder)
    assert sorted({point["step"] for point in found}) == list(range(1, STEPS + 1))
    assert sum(point.get("weight_sync/aborts", 0) for point in found) == 2  # the receivers' find, then the sender's
    assert {point["weight_sync/incarnation"] for point in found if "weight_sync/incarnation" in point} <= {0}
    assert "started again" not in run.output
