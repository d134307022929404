"""Profiles of a process that goes on: what of its work is in one, and what comes of those that cannot be made."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import Accumulate, Apply, BeginStep
from runtime.config import Config
from runtime.errors import UserError
from runtime.process import platform
from runtime.status import Profile
from runtime.trainer.rank import GroupRank, TrainRank, make_rank
from services import profiles
from services.model_service import SpmdService
from tests.coroutines import within
from tests.loopback.weight_cases import ROOT, SIMULATED_NPU
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_same, weights

PATIENCE = 100.0
run = within(PATIENCE)


def names(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def settings(folder: Path, steps: int = 10) -> Config:
    return Config(run=config.Run(name="test", dir=str(folder)), training=config.Training(steps=steps))


class NamingRank(GroupRank):
    """Each step is in a trace under its number."""

    role = "trainer"

    def begin_step(self, command: BeginStep) -> None:
        with torch.profiler.record_function(f"begin {command.step}"):
            torch.ones(1).requires_grad_().sum().backward()

    def apply(self, command: Apply) -> None:
        with torch.profiler.record_function(f"apply {command.step}"):
            torch.ones(1)


async def step(service: SpmdService, number: int) -> None:
    await service.execute(BeginStep(number))
    await service.execute(Apply(number))


def trainer(folder: Path, rank: int = 0, steps: int = 10) -> SpmdService:
    service = SpmdService("trainer", NamingRank, settings(folder, steps), "trainer-0", rank)
    service.load()
    return service


def test_a_trainers_profile_is_of_the_steps_after_the_one_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        service = trainer(tmp_path, rank=1)
        await step(service, 0)
        await service.execute(BeginStep(1))
        taking = asyncio.ensure_future(service.profile(Profile(step=0, steps=2)))
        await asyncio.sleep(0)
        await service.execute(Apply(1))
        for number in range(2, 5):
            await step(service, number)
        (trace,) = await taking
        assert trace == tmp_path / "profiles" / "trainer-1.1.2.json.gz"
        found = names(trace)
        assert {name for name in found if name.startswith(("begin", "apply"))} == {"begin 2", "apply 2", "begin 3", "apply 3"}
        assert any("Backward" in name for name in found)
        with pytest.raises(UserError, match=r"^--steps: 5; only 4 are left after the current step"):
            await service.profile(Profile(step=0, steps=5))
        await service.close()

    run(test())


def test_a_profile_that_nobody_waits_for_any_more_ends_and_makes_room_for_another(tmp_path: Path) -> None:
    async def test() -> None:
        service = trainer(tmp_path)
        kept = profiles.Profiles("trainer-0", service.profile, "steps")
        given_up = asyncio.ensure_future(kept.profile(Profile(steps=5)))
        await asyncio.sleep(0)
        for number in range(3):
            await step(service, number)
        with pytest.raises(UserError, match="trainer-0: another profile of it is under way"):
            await kept.profile(Profile(steps=1))
        given_up.cancel()
        await asyncio.wait([given_up])
        assert kept._taken is not None
        await asyncio.wait([kept._taken])  # until the thread is out of it
        again = asyncio.ensure_future(kept.profile(Profile(step=3, steps=1)))
        await asyncio.sleep(0)
        for number in range(3, 6):
            await step(service, number)
        (file,) = (await again).files
        assert "begin 4" in names(Path(file)) and "begin 3" not in names(Path(file))
        assert [path.name for path in (tmp_path / "profiles").iterdir()] == [Path(file).name]
        await service.close()

    run(test())


def test_a_file_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("")

    async def test() -> None:
        service = trainer(tmp_path)
        taking = asyncio.ensure_future(profiles.Profiles("trainer-0", service.profile, "steps").profile(Profile(steps=1)))
        await asyncio.sleep(0)
        await step(service, 0)
        with pytest.raises(UserError, match=r"^trainer-0: .*profiles: file exists$"):
            await taking
        await service.close()

    run(test())


@pytest.mark.skipif(platform.device_kind() == "cuda", reason="CUDA has what is refused elsewhere")
def test_memory_is_of_cuda_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--memory: is of CUDA's allocator, and this process computes on"):
        platform.TorchProfile(tmp_path / "x", memory=True)

    with pytest.raises(UserError, match=r"^--memory: is of CUDA's allocator"):
        run(profiles.by_spy(tmp_path / "x", Profile(seconds=1.0, memory=True)))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", rf"has no torch.*pip install py-spy; .*py-spy record --pid {os.getpid()}"),
        ("echo one; echo may not look; exit 3", "py-spy: may not look$"),
        ("exit 3", "py-spy: exit code 3$"),
    ],
    ids=["without", "one that says why", "one that says nothing"],
)
def test_what_py_spy_cannot_is_told_in_a_line(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script:
        (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    with pytest.raises(UserError, match=f"^{said}"):
        run(profiles.by_spy(tmp_path / "x", Profile(seconds=1.0)))


def trained(folder: Path, profiled: bool) -> dict[str, torch.Tensor]:
    """The weights that four steps leave, the middle two of which were perhaps profiled."""
    made = replace(make_config(make_policy(folder / "model")), run=config.Run(name="test", dir=str(folder)))
    service = SpmdService("trainer", partial(make_rank, TrainRank), made, "trainer-0", 0)
    service.load()

    async def test() -> None:
        taking = asyncio.ensure_future(service.profile(Profile(steps=2))) if profiled else None
        await asyncio.sleep(0)
        for number in range(4):
            await service.execute(BeginStep(number))
            await service.execute(Accumulate(number, make_groups(number), last=True))
            await service.execute(Apply(number))
        if taking is not None:
            assert any("Backward" in name for name in names((await taking)[0]))

    run(test())
    found = weights(service._worker.engine)
    run(service.close())
    return found


def test_a_profile_changes_no_bit_of_what_is_trained(tmp_path: Path) -> None:
    assert_same(trained(tmp_path / "with", True), trained(tmp_path / "without", False))


ENDS = """
import asyncio, pathlib, sys
from runtime.errors import Cancelled
from tests.unit.test_profiles import Profile, profiles, step, trainer

async def main():
    service = trainer(pathlib.Path(sys.argv[1]))
    kept = profiles.Profiles("trainer-0", service.profile, "steps")
    taking = asyncio.ensure_future(kept.profile(Profile(steps=5)))
    await asyncio.sleep(0)
    for number in range(2):
        await step(service, number)
    await kept.close()
    await service.close()
    try:
        await taking
    except Cancelled as error:
        print(error)

asyncio.run(main())
"""


def test_a_process_that_ends_in_the_middle_of_a_profile_ends_well(tmp_path: Path) -> None:
    """An interpreter of its own: what is forked ends without torch's end, in which the profile would crash."""
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "trainer-0 ended before its profile was complete\n"), done.stderr


NPU = """
import sys, pathlib
from runtime.process import platform
profile = platform.TorchProfile(pathlib.Path(sys.argv[1]), memory=False)
profile.start()
profile.stop()
print(*profile.write())
"""


def test_of_a_simulated_npu_there_is_the_folder_that_torch_npu_made_and_did_not_analyse(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(SIMULATED_NPU), str(ROOT)))}
    command = [sys.executable, "-c", NPU, str(tmp_path / "trainer-0.0.3")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == f"{tmp_path / 'trainer-0.0.3'}\n", done.stderr
    (analysed,) = tmp_path.glob("trainer-0.0.3/*_ascend_pt/analysed")
    assert analysed.read_text() == "False"
