"""Adapters are published alone, from a real trainer to rollouts with the embedded engine, over every transport."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import Level, Move
from runtime.config import Lora
from runtime.errors import UserError
from runtime.models.adapters import merged
from runtime.models.hf_weights import WeightFiles
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import policy_trainer
from runtime.weights.plan import plan_buckets
from services.rollout import RolloutService
from services.trainer import TrainerService
from tests.loopback.test_epochs import DEADLINE, PUBLICATION, Port, Stage, stage, until
from tests.loopback.test_peer_sync import counted
from tests.unit.lora_cases import lora_config
from tests.unit.training_cases import make_groups, make_policy
from tests.unit.training_steps import assert_same, run_step

pytestmark = pytest.mark.numeric


class Site:
    """A trainer of adapters and what rolls them out. Only publications are configured otherwise than by default."""

    def __init__(self, at: Path, **publication: Any):
        (at / "policy").mkdir()
        self.path = make_policy(at / "policy")
        self.settings = replace(PUBLICATION, **publication)
        services = config.Services(rollout=config.Rollout(replicas=3))
        lora = lora_config(self.path, Lora(rank=2, alpha=6.0))
        self.config = replace(lora, publication=self.settings, services=services)

    def rollout(self, name: str, path: str = "", incarnation: int = 0) -> Port:
        made = replace(self.config, model=replace(self.config.model, path=path or self.path))
        service = RolloutService(made, name, 0)
        cpu = torch.device("cpu")
        service.use(TorchRolloutEngine(made.model.path, device=cpu, dtype=torch.float32, slots=2, max_model_len=64))
        return Port(service, incarnation)

    def trainer(self) -> Port:
        service = TrainerService(self.config, "trainer-0", 0)
        service._worker = TrainRank(policy_trainer(self.config), self.config)
        port: Any = Port(service)
        port.machines = {port.name: port.machine}
        return port

    def run(self, course: Callable[[Stage], Awaitable[None]], *paths: str) -> None:
        """With a rollout for each of `paths`, their model folders."""

        async def within() -> None:
            rollouts = [self.rollout(f"rollout-{number}", path) for number, path in enumerate(paths)]
            async with stage(self.settings, self.trainer(), rollouts) as here:  # type: ignore[arg-type]
                await asyncio.wait_for(course(here), DEADLINE)

        asyncio.run(within())


async def train_and_publish(here: Stage, step: int) -> Any:
    run_step(here.trainer.service._worker.engine, make_groups(step))
    return await here.publish(step)


def assert_served(rollout: Any, here: Stage) -> None:
    """The engine has the model folder's weights with the trainer's adapters in them, as these are on the wire."""
    engine, worker = rollout.service._engine, here.trainer.service._worker
    assert engine.version.step == here.pool.membership.committed.step
    sent = zip(worker.manifest.tensors, worker.engine.backend.gather(), strict=True)
    adapters = {spec.name: tensor.to(getattr(torch, spec.dtype)) for spec, tensor in sent}
    expected = {name: tensor.float() for name, tensor in merged(WeightFiles(worker.config.model.path), adapters)}
    assert_same(dict(engine._decoder.weights._views), expected)


WAYS: dict[str, dict[str, Any]] = {
    "shared_memory": {},
    "collective": {"transport": "collective"},
    "files": {"transport": "files"},
    "delta": {"transport": "collective", "encoding": "delta", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("way", WAYS)
def test_rollouts_have_the_policy_and_so_has_a_late_one(way: str, tmp_path: Path) -> None:
    site = Site(tmp_path, **WAYS[way], folder=str(tmp_path / "shared") if way == "files" else "")

    async def course(here: Stage) -> None:
        for step in (1, 2):
            figures = await train_and_publish(here, step)
            buckets = plan_buckets(here.trainer.service._worker.manifest)
            assert 0 < figures.bytes < 2 * sum(bucket.total_bytes for bucket in buckets)  # files have headers
            for rollout in here.rollouts:
                assert_served(rollout, here)
        sends = counted(here)
        here.rollouts[1].cut()
        late = site.rollout("rollout-1", incarnation=1)
        await here.comes(late)  # type: ignore[arg-type]
        await until(lambda: late in here.pool.serving)  # type: ignore[comparison-overlap]
        assert_served(late, here)
        assert bool(sends) == (way == "files")  # else the other rollout gave it
        await train_and_publish(here, 3)
        for rollout in (here.rollouts[0], late):
            assert_served(rollout, here)

    site.run(course, site.path, site.path)


def test_a_rollout_that_sleeps_takes_them_in(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def course(here: Stage) -> None:
        (rollout,) = here.rollouts
        for step in (1, 2):
            await rollout.call(Move(Level.ASLEEP))
            await rollout.call(Move(Level.WEIGHTS))
            await train_and_publish(here, step)
            await rollout.call(Move(Level.AWAKE))
            assert_served(rollout, here)

    site.run(course, site.path)


def test_another_base_is_refused_in_one_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "other").mkdir()
    other = make_policy(tmp_path / "other", initializer_range=0.2)
    shutil.copytree(site.path, tmp_path / "same")

    async def fits(here: Stage) -> None:
        await here.publish(1)

    async def does_not(here: Stage) -> None:
        with pytest.raises(UserError, match=rf"^model\.path: '{other}' has other weights here \(\w+\) than where .*\)$"):
            await here.publish(1)
        assert here.rollouts[1].service._engine.version.step == 0

    site.run(fits, site.path, str(tmp_path / "same"))
    site.run(does_not, site.path, other)
