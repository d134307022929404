"""SIMULATION: Sluice's way through an NPU's names (device, streams, backend hccl), without one.

Processes see the stand-in for torch_npu in tests/simulated_npu. What is shown is that Sluice's own code runs there: not that a
real NPU, CANN or HCCL does what the stand-in does, which tests/contract/test_ascend.py compares by name alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.loopback.weight_cases import ROOT, SIMULATED_NPU

SENDER = """
import json
import torch
from runtime.process import platform
from runtime.types import PolicyVersion
from runtime.weights.sender import SendBuffers
from tests.loopback.ranks import FRESH
from tests.loopback.weight_cases import MANIFEST, gather
from tests.loopback.weight_cases import Member, connect, leave, post

torch.set_num_threads(1)
device = platform.device()
assert platform.collective_backend("auto", device) == "hccl"
assert platform.memory(device).available == platform.memory(device).total // 2 + (2 << 20)
state = platform.rng_state(device)
platform.set_rng_state(device, state)
members = [Member("rollout-0", FRESH)]
said = {"device": str(device)}
try:
    group = connect(members, 1, 90.0, backend="hccl")
    said["link"] = type(group._links[0]).__name__
    sender = SendBuffers(MANIFEST)
    said["staged"] = []
    for version in range(2):
        post(members, version, 60.0)
        gather(sender, version)
        sender.send(group, PolicyVersion(0, version), 60.0).result(60)
        said["staged"].append(members[0].hear())
    leave(members, group)
finally:
    for one in members:
        one.end()
print(json.dumps(said))
"""


pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(SIMULATED_NPU), str(ROOT))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SENDER], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_weight_sync_crosses_a_simulated_npu(said: dict[str, Any]) -> None:
    assert (said["device"], said["link"]) == ("npu:0", "DeviceLink")
    assert said["staged"] == [["staged", 0, True], ["staged", 1, True]]
