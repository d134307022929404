"""A run whose disk is full, or fills up: it waits, says for what, and goes on by itself once there is room."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.runs import STOP, check_gone, eventually, fill, one_line, sluice, started, steps, write_config

pytestmark = pytest.mark.timeout(300)


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
    ended = sluice("train", str(config), f"run.dir={small_disk / 'run'}")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    check_gone(small_disk / "run")
    line = one_line(ended.stderr)
    assert str(small_disk / "run") in line
    assert "no space left" in line


@pytest.fixture
def on_small_disk(small_disk: Path, tmp_path: Path) -> Path:
    """A run's folder there; what the command prints goes elsewhere."""
    (small_disk / "run").mkdir()
    (tmp_path / "run").symlink_to(small_disk / "run")
    return tmp_path / "run"


def make_room(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True, timeout=10)


def test_a_run_whose_disk_fills_up_waits_and_goes_on_once_there_is_room(
    tiny: Path, small_disk: Path, on_small_disk: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", tiny, training={"steps": 100000})
    with started(config, "checkpoint.every=0", folder=on_small_disk) as run:
        eventually(lambda: "waits until" in sluice("status", str(on_small_disk)).stdout, 200.0, "that it waits")
        told = (on_small_disk / "logs" / "coordinator.log").read_text()
        assert re.search(rf"waits until [\d,]+ bytes can be written to {on_small_disk}/ledger: no space left on device", told)
        before = run.steps()
        make_room(small_disk)
        run.reaches(before + 3)
        run.interrupt()
        assert run.wait(STOP) == 0, run.output + run.errors
    with LedgerReader(on_small_disk / "ledger") as ledger:
        ledger.check_final(4)
    assert [point["step"] for point in steps(on_small_disk)] == list(range(1, len(steps(on_small_disk)) + 1))


def test_processes_that_are_killed_while_there_is_no_room_come_back_once_there_is(
    tiny: Path, small_disk: Path, on_small_disk: Path, tmp_path: Path
) -> None:
    """What a coordinator, an agent and the log of a process write when they begin anew waits too."""
    config = write_config(tmp_path / "config.yaml", tiny, training={"steps": 100000})
    with started(config, "checkpoint.every=0", folder=on_small_disk) as run:
        run.reaches(2)
        ballast = small_disk / "ballast"
        fill(ballast)
        for name in ("coordinator", "rollout-0"):
            run.member(name).kill()
        run.says("no space left on device")
        assert run.process.poll() is None, run.output + run.errors
        before = run.steps()
        ballast.unlink()
        make_room(small_disk)
        run.reaches(before + 3)
        run.interrupt()
        assert run.wait(STOP) == 0, run.output + run.errors
    with LedgerReader(on_small_disk / "ledger") as ledger:
        ledger.check_final(4)


def test_a_checkpoint_without_room_is_left_out_and_the_last_one_waits_for_room(
    tiny: Path, small_disk: Path, tmp_path: Path
) -> None:
    config, folder = write_config(tmp_path / "config.yaml", tiny, training={"steps": 4}), tmp_path / "run"
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - (100 << 10)))  # a checkpoint takes 380 kB
    with started(config, "checkpoint.every=2", folder=folder) as run:
        eventually((folder / "ledger").exists, 200.0, "the ledger")
        (folder / "checkpoints").symlink_to(small_disk)
        log = folder / "logs" / "coordinator.log"
        eventually(lambda: log.exists() and f"waits for room in {folder}" in log.read_text(), 60.0, "that it waits")
        assert f"no checkpoint of step 2: no room in {folder}/checkpoints\n" in log.read_text()
        assert "ALARM: waits for room" in sluice("status", str(folder)).stdout
        make_room(small_disk)
        assert run.wait(STOP) == 0, run.output + run.errors
    assert (folder / "checkpoints" / "step-00000004").is_dir()


def test_the_results_of_an_evaluation_wait_for_room(tiny: Path, small_disk: Path, on_small_disk: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "config.yaml", tiny, training={"steps": 4}, evaluation={"every": 2, "after": True}, checkpoint={"every": 0}
    )
    with started(config, folder=on_small_disk) as run:
        run.reaches(1)
        ballast = small_disk / "ballast"
        fill(ballast)
        log = on_small_disk / "logs" / "coordinator.log"
        eventually(lambda: "waits until" in log.read_text() or run.process.poll() is not None, STOP, "that it waits")
        assert run.process.poll() is None, run.output + run.errors
        ballast.unlink()
        make_room(small_disk)
        assert run.wait(STOP) == 0, run.output + run.errors
    results = sorted((on_small_disk / "evaluations").glob("step-*/results.json"))
    assert [path.parent.name for path in results] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("file", ["startup.json", "summary.json"])
def test_the_figures_of_a_run_wait_for_room(tiny: Path, small_disk: Path, tmp_path: Path, file: str) -> None:
    config, folder = write_config(tmp_path / "config.yaml", tiny, training={"steps": 2}), tmp_path / "run"
    fill(small_disk / "ballast")
    with started(config, "checkpoint.every=0", folder=folder) as run:
        eventually((folder / "ledger").exists, 200.0, "the ledger")
        partial = folder / f"{file}.partial"
        partial.symlink_to(small_disk / file)
        log = folder / "logs" / "coordinator.log"
        eventually(lambda: "waits until" in log.read_text() or run.process.poll() is not None, STOP, "that it waits")
        assert run.process.poll() is None, run.output + run.errors
        make_room(small_disk)
        assert run.wait(STOP) == 0, run.output + run.errors
    assert (folder / file).stat().st_size
