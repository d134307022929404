"""Faults of collectives and of memory, raised inside a real trainer of two ranks by a file of its user's: each is survived."""

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

def once(name, rank, after=""):
    here = Path(__file__).parent
    if int(os.environ["RANK"]) != rank or (here / name).exists() or (after and not (here / after).exists()):
        return False
    (here / name).touch()
    return True

@policy_loss("faulty", zero_without_advantage=True)
def faulty(inputs, options):
    from runtime.algorithms.losses import ppo
    from torch.distributed import DistBackendError
    patch()
    if inputs.logp.requires_grad:
        if once("nccl", 0):
            raise DistBackendError("NCCL error: unhandled system error, made up")
        if once("hccl", 0, after="nccl"):
            raise RuntimeError("ERR02200 DIST call hccl api failed, made up")
    return ppo(inputs, options)

def patch():
    from torch.distributed import DistBackendError
    from runtime.weights.sender import WeightSender
    if hasattr(WeightSender, "whole"):
        return
    WeightSender.whole, send_whole = WeightSender._require_same, WeightSender._send_all
    def send_all(self, group, version, give_up):
        if once("sending", 0, after="hccl"):
            raise DistBackendError("HCCL error in a publication, made up")
        send_whole(self, group, version, give_up)
        once("sent", 0, after="sending")
    def require_same(self, index, digest, name):
        self.whole(index, digest, name)
        if once("flipped", 1, after="sent"):
            own = [number for number, _ in self._own]
            self._buffers[own.index(index)][0] ^= 1  # behind the checksum's back: receivers find it, then the sender
    WeightSender._send_all, WeightSender._require_same = send_all, require_same
"""


def test_errors_of_collectives_end_their_process_or_publication_and_a_bucket_that_changed_is_sent_again(
    config: Path, tmp_path: Path
) -> None:
    """The bucket is the second sender's: the first one's is among the chaos's faults."""
    (tmp_path / "mine.py").write_text(LOSS)
    two = ("services.trainer.processes=2", "publication.senders=all", "publication.bucket_bytes=4096")
    soon = ("services.trainer.restarts.attempts=3", "services.trainer.restarts.backoff=0.1")
    loss = f"algorithm.loss={tmp_path / 'mine.py'}:faulty"
    with started(config, *SETTINGS, *two, *soon, loss, folder=tmp_path / "run") as run:
        assert run.wait(END) == 0, run.output + run.errors
    assert {path.name for path in tmp_path.iterdir()} >= {"nccl", "hccl", "sending", "sent", "flipped"}
    assert "trainer-0: run: " in run.output  # and why, as the launcher or the coordinator saw it first
    logs = "".join(path.read_text() for path in (run.folder / "logs").glob("trainer-0*.log"))
    for error in ("DistBackendError: NCCL error", "RuntimeError: ERR02200 DIST call hccl"):
        assert error in logs
    assert run.output.count("started again") == 2
    found = steps(run.folder)
    assert sorted({point["step"] for point in found}) == list(range(1, STEPS + 1))
    assert sum(point.get("publication/aborts", 0) for point in found) == 3  # of the error, the receivers' find, the sender's
