"""The report of a start-up, and what it is made of."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sluice
from launcher.commands import train
from runtime.config import Config, Run
from runtime.process import os_process
from runtime.telemetry import startup
from runtime.telemetry.startup import Phases, Startup

FOUND = Startup(
    phases={
        "launcher": 0.5,
        "coordinator": 0.4,
        "data": 0.2,
        "services": 3.9,
        "first publication": 0.1,
        "evaluation": 0.4,
        "first step": 0.2,
        "to first step": 5.3,
    },
    processes={
        "coordinator": {"interpreter": 0.1, "imports": 9.0},
        "rollout-0": {"interpreter": 0.1, "imports": 0.3, "libraries": 1.5, "load": 0.1},
        "trainer-0": {"interpreter": 0.1, "imports": 0.3, "libraries": 3.0, "load": 0.4},
    },
)


def test_the_line_has_the_phases_in_order_and_who_was_waited_for() -> None:
    assert startup.line(FOUND) == (
        "5.3 s to the first step: launcher 0.5, coordinator 0.4, data 0.2, "
        "services 3.9 (trainer-0: interpreter 0.1, imports 0.3, libraries 3.0, load 0.4), "
        "first publication 0.1, first step 0.2; not counted: evaluation 0.4"
    )


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Startup.read(tmp_path) is None
    FOUND.write(tmp_path)
    assert Startup.read(tmp_path) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["startup.json"]


def test_a_message_may_shuffle_the_phases_of_a_process() -> None:
    shuffled = {"load": 4.0, "imports": 2.0, "libraries": 3.0, "interpreter": 1.0, "fork server": 5.0}
    assert list(startup.in_order(shuffled)) == ["fork server", "interpreter", "imports", "libraries", "load"]


def test_phases_follow_each_other_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 106.5))
    monkeypatch.setattr(startup.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(os_process, "age", lambda: 2.0)
    phases = Phases()
    phases.mark("interpreter", 99.0)
    phases.mark("imports")
    assert (phases.born, phases.seconds) == (98.0, {"interpreter": 1.0, "imports": 7.5})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere known to a second only")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    """Not from its first line, nor from a second before."""
    code = "import sys; from runtime.process import os_process; print(os_process.age(), flush=True)"
    before = time.monotonic()
    told = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    most = time.monotonic() - before  # the process lived within it; its start is known to a tick of the kernel's
    assert 0 < told <= most + 1 / os.sysconf("SC_CLK_TCK")
    assert os_process.age() > told


def test_nothing_is_collected_while_an_engine_is_made() -> None:
    frozen = gc.get_freeze_count()
    try:
        with startup.uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_run_that_a_program_starts_is_counted_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the program's start: it may have trained others before."""
    jobs = []

    async def run(self: train._TrainJob) -> None:
        jobs.append(self)

    monkeypatch.setattr(train._TrainJob, "run", run)
    called = time.monotonic()
    sluice.train(Config(run=Run(name="a")))
    (job,) = jobs
    assert job.started == job.launched >= called
