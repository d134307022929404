"""`sluice profile` on a run that goes on."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.process.os_process import find_program
from tests.system.runs import LONG, ROOT, Live, check_gone, eventually, one_line, sluice, started, write_config

pytestmark = pytest.mark.timeout(400)

PATIENCE = 150.0  # seconds that one answer may take on a busy machine


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run with a trainer of two ranks, in the middle of its training."""
    folder = tmp_path_factory.mktemp("live")
    config = write_config(folder / "config.yaml", tiny, services={"trainer": {"processes": 2}})
    with started(config, *LONG, folder=folder / "run") as run:
        run.reaches(2)
        yield run
        run.interrupt()
        assert run.wait(2 * PATIENCE) == 0, run.output + run.errors
        check_gone(run.folder)


def profile(live: Live, *options: str) -> dict[str, Path]:
    """What was written, by process; the run has gone on."""
    ended = sluice("profile", str(live.folder), *options, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(": ") for line in ended.stdout.splitlines())
    live.reaches(live.steps() + 2)
    return {name: Path(path) for name, path in found.items()}


def events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        found = json.load(file)
    return found if isinstance(found, list) else found["traceEvents"]


def test_the_ranks_of_the_trainer_record_the_same_steps_and_the_run_goes_on(live: Live) -> None:
    found = profile(live, "--role", "trainer", "--steps", "2")
    assert found.keys() == {"trainer-0", "trainer-1"}
    names = {re.fullmatch(rf"{name}\.[01]\.(\d+)\.json\.gz", path.name) for name, path in found.items()}
    assert len({match and match.group(1) for match in names}) == 1 and None not in names
    for path in found.values():
        assert path.parent == live.folder / "profiles"
        assert any("Backward" in event.get("name", "") for event in events(path))


@pytest.mark.parametrize("role", ["rollout", "reference"])
def test_what_has_torch_records_what_it_computes(role: str, live: Live) -> None:
    found = profile(live, "--role", role, "--seconds", "1")
    assert found.keys() == ({"rollout-0", "rollout-1"} if role == "rollout" else {"reference-0"})
    for path in found.values():
        assert any(event.get("name") == "aten::mm" for event in events(path))


@pytest.mark.skipif(find_program("py-spy") is None, reason="needs py-spy: pip install py-spy")
@pytest.mark.parametrize("role", ["reward", "coordinator"])
def test_what_has_no_torch_is_looked_at_with_its_children(role: str, live: Live) -> None:
    (path,) = profile(live, "--role", role, "--seconds", "2").values()
    found = events(path)
    own = live.member(role if role == "coordinator" else f"{role}-0")
    pids = {own.pid} | ({child.pid for child in own.children(recursive=True)} if role == "reward" else set())
    assert own.pid in {event["pid"] for event in found} <= pids


def test_whom_it_cannot_ask_is_a_line_and_exit_code_2(live: Live, tmp_path: Path) -> None:
    for options, said in (
        (("--role", "critic"), "--role: 'critic' is not one of coordinator, "),
        (("--process", "trainer-7"), "--process: 'trainer-7' is not one of coordinator, "),
        (("--process", "trainer-0", "--seconds", "1"), "trainer-0: is profiled for so many steps"),
        (("--process", "rollout-0", "--steps", "1"), "rollout-0: is profiled for so many seconds"),
        (("--process", "trainer-0", "--steps", "100000"), "trainer-0: --steps: 100000; after the one under way "),
        (("--process", "trainer-0", "--steps", "0"), "--steps: 0; must be above 0"),
        (("--process", "trainer-0", "--memory"), "trainer-0: --memory: is of CUDA's allocator"),
        (("--process", "reward-0", "--memory"), "reward-0: --memory: is of CUDA's allocator"),
    ):
        ended = sluice("profile", str(live.folder), *options, timeout=PATIENCE)
        assert ended.returncode == 2 and said in one_line(ended.stderr), ended.stderr
    ended = sluice("profile", str(tmp_path), "--role", "trainer", timeout=PATIENCE)
    assert ended.returncode == 2 and "no run is under way" in one_line(ended.stderr)


def test_its_deadline_ends_a_profile_and_another_can_be_made(live: Live) -> None:
    ended = sluice(
        *("profile", str(live.folder), "--process", "rollout-0", "--seconds", "900", "--timeout", "2"), timeout=PATIENCE
    )
    assert ended.returncode == 2 and "rollout-0: Profile: did not answer (deadline 2 s)" in one_line(ended.stderr)

    eventually(lambda: _can_be_made(live, "rollout-0"), PATIENCE, "another profile of rollout-0")  # which hears a moment later


def test_a_process_that_dies_meanwhile_is_told_of(live: Live) -> None:
    command = [sys.executable, "-m", "launcher.cli", "profile", str(live.folder), "--process", "rollout-1", "--seconds", "900"]
    victim = live.member("rollout-1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        eventually(lambda: _calls(asking.pid, victim), PATIENCE, "a call of rollout-1")
        victim.kill()
        _, said = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 2 and "rollout-1: Profile: " in one_line(said)
    eventually(lambda: _can_be_made(live, "rollout-1"), PATIENCE, "a profile of the process that came in its place")


def _can_be_made(live: Live, name: str) -> bool:
    return sluice("profile", str(live.folder), "--process", name, "--seconds", "0.1", timeout=PATIENCE).returncode == 0


def _calls(caller: int, called: psutil.Process) -> bool:
    """Whether the process `caller` has a connection to `called`."""
    ports = {one.laddr.port for one in called.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    try:
        own = psutil.Process(caller).net_connections("inet")
    except psutil.Error:
        return False
    return any(one.raddr and one.raddr.port in ports and one.status == psutil.CONN_ESTABLISHED for one in own)
