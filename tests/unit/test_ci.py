"""What `.ci/run` makes of failed tests, of steps that hang and of costs, with a small suite of its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import ci

CONFTEST = """
import os
from pathlib import Path
from tests import record
from tests.conftest import pytest_collection_modifyitems

def pytest_configure(config):
    record.start_counting()
    config.pluginmanager.register(record.Recorder(Path(os.environ[record.FILE]), writes=True))
    config.addinivalue_line("markers", "long: ")
"""
TESTS = """
import subprocess, sys
from pathlib import Path
import pytest

def test_passes():
    for _ in range(2):
        subprocess.run([sys.executable, "-c", ""])

@pytest.mark.long
def test_long():
    assert False

@pytest.mark.parametrize("word", ["a b::c"])
def test_flaky(word):
    again = Path("again")
    there = again.exists()
    again.touch()
    assert there

def test_fails():
    assert False
"""
MAKEFILE = """
test:
	{python} -m pytest -q -p no:cacheprovider $(or $(TESTS),test_all.py)
test-ranks:
	@setsid --wait sh -c 'echo $$$$ > run; exec sleep 60'
test-vllm:
	exit 3
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a Makefile whose tests pass, fail, and fail once."""
    import sys

    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(ci.ROOT))
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.setattr(ci, "FOLDER", tmp_path)
    monkeypatch.setattr(ci, "PAGE", tmp_path / "page.md")
    return tmp_path


def set_limits(monkeypatch: pytest.MonkeyPatch, seconds: float, **counts: int) -> None:
    monkeypatch.setattr(ci, "LIMITS", {"seconds": dict.fromkeys(ci.TARGETS, seconds), "counts": {"test": counts}})


def test_a_test_that_fails_once_is_flaky_and_one_that_fails_twice_fails_the_command(
    suite: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_limits(monkeypatch, 100.0, tests=3, runs=0, processes=1)
    (step,) = ci.run_steps(["test"])
    assert sorted(step.failed) == ["test_all.py::test_fails", "test_all.py::test_flaky[a b::c]"]
    assert step.count() == {"tests": 3, "runs": 0, "processes": 2}  # the long test is left out
    assert ci.run_again(step) == ["test: failed twice: test_all.py::test_fails"]
    assert "flaky: test_all.py::test_flaky[a b::c]\n" in capfd.readouterr().out
    assert ci.check_costs([step]) == ["test: 2 processes, tests/limits.yaml allows 1"]
    assert "slowest tests\n" in capfd.readouterr().out

    (suite / "steps.json").write_text('{"test": 12.3}')
    ci.PAGE.write_text(f"before\n{ci.BEGIN}old\n{ci.END}after\n")
    ci.write_tables()
    page = ci.PAGE.read_text()
    assert "| test | 12 | 100.0 |" in page and "| `test_all.py` | " in page and "old" not in page
    assert page.startswith("before\n") and page.endswith("after\n")


def test_a_step_that_hangs_is_ended_and_a_step_without_tests_is_not_repeated(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, 0.25)
    (hangs,) = ci.run_steps(["ranks"])
    assert hangs.output.endswith("error: ranks did not end within 1 s\n")
    run = int((suite / "run").read_text())  # of a session of its own, as whole runs are
    assert not psutil.pid_exists(run) or psutil.Process(run).status() == psutil.STATUS_ZOMBIE
    assert ci.run_again(hangs) == ["ranks: failed"]
    (over,) = ci.check_costs([hangs])
    assert over.startswith("ranks: 1 s, more than twice its limit of 0.25 s")
    set_limits(monkeypatch, 100.0)
    (breaks,) = ci.run_steps(["vllm"])
    assert ci.run_again(breaks) == ["vllm: failed"]
