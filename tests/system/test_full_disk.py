"""A run whose disk is full, or fills up: it waits, says for what, and goes on by itself once there is room."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.runs import STOP, Live, eventually, fill, refused, sluice, started, steps, write_config

pytestmark = pytest.mark.timeout(300)

PATIENCE = 200.0  # seconds until there is no room, on a busy machine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, timeout=10
        )
    except FileNotFoundError:
        pytest.skip("a full disk needs a file system of its own, and there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a full disk needs a file system of its own, and mounting one is not allowed: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_disk_that_is_full_at_the_start_is_a_mistake(config: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - (1 << 15)))
    line = refused(config, small_disk / "run", whole=True)
    assert str(small_disk / "run") in line
    assert "no space left" in line


def make_room(small_disk: Path, mebibytes: int = 64) -> None:
    subprocess.run(["mount", "-o", f"remount,size={mebibytes}m", str(small_disk)], check=True, timeout=10)


def waits(run: Live, times: int = 1) -> None:
    """For room, for the `times`-th time."""
    log = run.folder / "logs" / "coordinator.log"
    run.comes(lambda: log.exists() and log.read_text().count("waits until") >= times, PATIENCE, "that it waits")


def test_a_run_whose_disk_fills_up_waits_and_goes_on_once_there_is_room(tiny: Path, small_disk: Path, tmp_path: Path) -> None:
    """By itself at first; then what a coordinator, an agent and the log of a process write when they begin anew waits too."""
    (small_disk / "run").mkdir()
    (small_disk / "some").write_bytes(bytes(600 << 10))
    folder = tmp_path / "run"  # what the command prints goes elsewhere
    folder.symlink_to(small_disk / "run")
    config = write_config(tmp_path / "config.yaml", tiny, training={"steps": 100000}, evaluation={"every": 2})
    with started(config, "checkpoint.every=0", folder=folder) as run:
        eventually(lambda: "waits until" in sluice("status", str(folder)).stdout, PATIENCE, "that it waits")
        told = (folder / "logs" / "coordinator.log").read_text()
        assert re.search(rf"waits until [\d,]+ bytes can be written to {folder}/[a-z]+\S*: no space left on device", told)
        before = run.steps()
        make_room(small_disk)
        run.reaches(before + 3)

        ballast = small_disk / "ballast"
        fill(ballast)
        for name in ("coordinator", "rollout-0"):
            run.member(name).kill()
        run.says("no space left on device")
        assert run.process.poll() is None, run.output + run.errors
        before = run.steps()
        ballast.unlink()
        run.reaches(before + 3)
        run.interrupt()
        assert run.wait(STOP) == 0, run.output + run.errors
    with LedgerReader(folder / "ledger") as ledger:
        ledger.check_final(4)
    done = [point["step"] for point in steps(folder)]
    assert sorted(set(done)) == list(range(1, len(set(done)) + 1))
    results = sorted(path.parent.name for path in (folder / "evaluations").glob("step-*/results.json"))
    assert results[0] == "step-00000002" and len(results) > 1


def test_figures_and_the_last_checkpoint_wait_for_room_and_another_is_left_out(
    tiny: Path, small_disk: Path, tmp_path: Path
) -> None:
    config, folder = write_config(tmp_path / "config.yaml", tiny, training={"steps": 4}), tmp_path / "run"
    fill(small_disk / "startup")
    with started(config, "checkpoint.every=2", folder=folder) as run:
        eventually((folder / "ledger").exists, PATIENCE, "the ledger")
        (folder / "startup.json.partial").symlink_to(small_disk / "startup.json")
        (folder / "checkpoints").symlink_to(small_disk)
        waits(run)
        assert not (folder / "startup.json").exists()
        (small_disk / "startup").unlink()
        (small_disk / "ballast").write_bytes(bytes((1 << 20) - (100 << 10)))  # a checkpoint takes 380 kB
        log = folder / "logs" / "coordinator.log"
        run.comes(lambda: f"waiting for room in {folder}" in log.read_text(), PATIENCE, "that it waits")
        assert f"no checkpoint of step 2: no room in {folder}/checkpoints\n" in log.read_text()
        assert "ALARM: waiting for room" in sluice("status", str(folder)).stdout
        make_room(small_disk)
        assert run.wait(STOP) == 0, run.output + run.errors
    assert (folder / "startup.json").stat().st_size
    assert (folder / "checkpoints" / "step-00000004").is_dir()
