"""Engines over tensor, data and expert parallelism together, and over stages: the same tokens, log-probabilities and routes as
the trainer's model, before and after updates, in flight too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from runtime.config import Config, Model, RolloutParallel, Run, Warmup
from runtime.errors import ServiceFault
from runtime.models import tiny_model
from runtime.rollout.vllm.arguments import OWN
from tests.vllm import cpu_parts
from tests.vllm.faulty_worker import READS
from tests.vllm.rig import PROMPT, SLOTS, Rig
from tests.vllm.test_families import check_declared, check_experts

pytestmark = pytest.mark.timeout(600)

DIED = r"^rollout-0: generate: vLLM's engine has died"
SPREAD = {"tensor": 2, "data": 2, "expert": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A mixture of experts, with shared layers and experts that two devices cut or share out."""
    tiny = Config(run=Run(name="a"), model=Model(path="tiny:qwen3_moe"), warmup=Warmup(cache=str(folder / "cache")))
    return Path(tiny_model.made(tiny).model.path)


@pytest.fixture(scope="module")
def rig(folder: Path, model: Path) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(READS, str(folder))
        cpu_parts.put_in(patch)
        made = Rig(model, parallel=RolloutParallel(**SPREAD), replays=True)
    with made:
        yield made


def test_tokens_log_probabilities_and_routes_are_the_models_own(rig: Rig, folder: Path) -> None:
    for _ in range(2):
        rig.engine.submit([rig.request(n=SLOTS, experts_from=3)])
        payload = rig.finish_one()
        rig.check_exact(payload.samples)
        check_experts(payload, rig.models[rig.newest], 3)
        (greedy,) = rig.generate(rig.request(n=3, temperature=0.0))
        for sample in greedy:
            best = rig.distribution(rig.newest, PROMPT, sample, 1.0).argmax(-1)
            assert np.array_equal(best.numpy(), sample.tokens)
        rig.publish_files(folder / "next")


def test_samples_are_shared_out_evenly_also_with_a_probe(rig: Rig) -> None:
    rig.begin(rig.request(n=SLOTS + 2, tokens=40), tokens=60)
    assert sorted(sequence.rank for sequence in rig.engine._running.values()) == [0] * (SLOTS // 2) + [1] * (SLOTS // 2)
    (samples,) = (rig.finish_one().samples,)
    rig.check_exact(samples)


def test_a_swap_in_flight_is_exact_at_the_boundary_at_every_rank(rig: Rig, folder: Path) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=60), tokens=300)
    rig.publish_files(folder / "next", recompute=True)
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert sum(len(set(sample.versions.tolist())) == 2 for sample in payload.samples) > SLOTS // 2  # more than one rank's


def test_it_sleeps_and_wakes_and_withdraws(rig: Rig) -> None:
    request = rig.request(n=SLOTS, tokens=60)
    rig.begin(request, tokens=100)
    assert rig.engine.abort([request.group_id]) == [request.group_id]
    rig.run(rig.engine.sleep())
    rig.engine.submit([rig.request(n=4)])
    assert not rig.engine.has_work
    rig.run(rig.engine.wake())
    rig.check_exact(rig.finish_one().samples)


def test_workers_read_what_is_declared(rig: Rig, folder: Path, model: Path) -> None:
    """Each only its own experts; both ranks all else, of which their workers have parts."""
    check_declared(model, folder, SPREAD, rig.publish_files(folder / "next"))


def kill(name: str) -> None:
    """One of the newest engine's processes, by its title."""
    found = [each for each in psutil.Process().children(recursive=True) if name in " ".join(each.cmdline())]
    os.kill(max(found, key=psutil.Process.create_time).pid, signal.SIGKILL)


def test_a_worker_of_any_rank_that_is_killed_is_the_engines_end(rig: Rig) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=60), tokens=100)
    kill("Worker_DP1")
    with pytest.raises(ServiceFault, match=DIED):
        rig.finish_one()


def test_stages_and_ranks_of_a_dense_model(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_parts.put_in(monkeypatch)
    monkeypatch.setenv(READS, str(tmp_path))
    with Rig(model_path, parallel=RolloutParallel(pipeline=2, data=2)) as rig:
        rig.begin(rig.request(n=SLOTS, tokens=60), tokens=300)
        rig.run(rig.update(recompute=True))
        payload = rig.finish_one()
        rig.check_exact(payload.samples)
        assert {len(set(sample.versions.tolist())) for sample in payload.samples} == {2}
        for worker in range(4):  # a stage reads its layers, at every rank
            read = torch.load(tmp_path / str(worker))
            layers = {name.split(".")[2] for name, mask in read.items() if ".layers." in name and mask.any()}
            assert layers == {str(worker % 2)}
        rig.begin(rig.request(n=1, tokens=200), tokens=10)
        kill("DPCoordinator")
        with pytest.raises(ServiceFault, match=DIED):
            rig.finish_one()


def test_the_arguments_that_sluice_sets_are_vllms() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert OWN.keys() <= {field.name for field in fields(AsyncEngineArgs)}


def test_what_is_refused_on_cpus_is_what_this_vllm_lacks() -> None:
    """Once it has that, `require_spread` has nothing to refuse."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    assert CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv
