"""Engines over two nodes, here two processes that meet on loopback: the same tokens as on one node, the trainer's
log-probabilities before and after updates, and the end of one that is the other's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import save_file

from runtime.config import Config, Model, RolloutParallel, Run, Warmup
from runtime.errors import ServiceFault
from runtime.models import tiny_model
from runtime.process import network
from runtime.rollout.vllm import leftovers
from runtime.rollout.vllm.arguments import UnitPlace
from runtime.types import PolicyVersion
from tests.vllm import cpu_parts
from tests.vllm.follower import HOST
from tests.vllm.rig import SLOTS, Rig

pytestmark = pytest.mark.timeout(300)

END = 60.0
SPREADS = {"tensor": {"tensor": 2, "nodes": 2}, "data": {"data": 2, "nodes": 2}}


class TwoNodes(Rig):
    """An engine whose second node is the process `other`."""

    def __init__(self, path: Path, spread: dict[str, int], **options: Any):
        with ExitStack() as stack:
            found = [stack.enter_context(closing(network.listen(HOST, None, 1))).getsockname()[1] for _ in range(2)]
        ports, module = (found[0], found[1]), "tests.vllm.follower"
        command = (sys.executable, "-m", module, str(path), json.dumps(spread), *map(str, ports))
        self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        place = UnitPlace(0, HOST, HOST, ports)
        super().__init__(path, parallel=RolloutParallel(**spread), place=place, **options)
        self.tensor = spread.get("tensor", 1) > 1
        self.says("started")

    def says(self, word: str) -> None:
        assert self.other.stdout is not None
        assert word in (line.strip() for line in self.other.stdout), self.other.communicate()[1]

    async def swap(self, tensors: dict[str, Any], version: PolicyVersion, recompute: bool = False) -> None:
        file = Path(self.folder) / "next.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        assert self.other.stdin is not None
        self.other.stdin.write(f"{file}\n")
        self.other.stdin.flush()
        self.says("staged")
        await super().swap(tensors, version, recompute)

    folder: Path

    def close(self) -> None:
        super().close()
        self.other.communicate(timeout=END)
        leftovers.clear()


@pytest.fixture(scope="module", params=list(SPREADS))
def rig(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with TwoNodes(model_path, SPREADS[request.param]) as made:
        made.folder = tmp_path_factory.mktemp("nodes")
        yield made


def test_weights_that_the_other_node_has_not_staged_are_not_loaded(rig: TwoNodes) -> None:
    """The engine on the first node alone has them. It goes on with the next version, which both have."""
    tensors, version = rig.next_weights(), PolicyVersion(0, rig.newest)
    with pytest.raises(ServiceFault, match=r"swap: version 0\.1 was not loaded: .*this node has staged other weights"):
        rig.run(Rig.swap(rig, tensors, version))
    rig.run(rig.update())
    rig.check_exact(rig.generate(rig.request(n=SLOTS))[0])


def test_tokens_are_those_of_one_node(rig: TwoNodes, model_path: Path) -> None:
    tensors = rig.next_weights()
    rig.run(rig.swap(tensors, PolicyVersion(0, rig.newest)))
    request = rig.request(n=SLOTS, seed=7)
    (found,) = rig.generate(request)
    with Rig(model_path) as alone:
        alone.run(alone.swap(tensors, PolicyVersion(0, rig.newest)))
        (expected,) = alone.generate(request)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    rig.check_exact(found)


def test_a_swap_in_flight_is_exact_at_the_boundary(rig: TwoNodes) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=60), tokens=300)
    rig.run(rig.update(recompute=True))
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert sum(len(set(sample.versions.tolist())) == 2 for sample in payload.samples) > SLOTS // 2  # more than one rank's


def test_the_end_of_vllms_processes_on_the_other_node_is_seen(rig: TwoNodes) -> None:
    """The process there says so, and ends for its agent to see: then all begin again. With tensor parallelism the engine on the
    first node ends too; vLLM does not miss a data-parallel rank elsewhere."""
    rig.begin(rig.request(n=SLOTS, tokens=200), tokens=50)
    of_vllm = [each for each in psutil.Process(rig.other.pid).children(recursive=True) if "VLLM::" in " ".join(each.cmdline())]
    for process in of_vllm:
        os.kill(process.pid, signal.SIGKILL)
    said = rig.other.communicate(timeout=END)[1]
    assert rig.other.returncode == 1
    assert "rollout-0n1: generate: vLLM's engine has died" in said
    if rig.tensor:
        with pytest.raises(ServiceFault, match=r"^rollout-0: generate: "):
            rig.finish_one()


def test_experts_of_two_nodes_are_the_models_own_before_and_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Config(run=Run(name="a"), model=Model(path="tiny:qwen3_moe"), warmup=Warmup(cache=str(tmp_path / "cache")))
    cpu_parts.put_in(monkeypatch)
    with TwoNodes(Path(tiny_model.made(tiny).model.path), {"data": 2, "expert": 2, "nodes": 2}) as rig:
        rig.folder = tmp_path
        rig.check_exact(rig.generate(rig.request(n=SLOTS))[0])
        rig.publish_files(tmp_path / "next")
        (samples,) = rig.generate(rig.request(n=SLOTS))
        rig.check_exact(samples)
        assert {version & 0xFFFFFFFF for sample in samples for version in sample.versions.tolist()} == {1}
