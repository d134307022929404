"""What the suite says of a test that leaves something behind, or that is skipped: by the rules of `tests/conftest.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leftovers

ROOT = Path(__file__).parents[2]
CARELESS = """
import os, pytest, subprocess, tempfile

def test_good(tmp_path):
    with tempfile.TemporaryDirectory():
        (tmp_path / "own").write_text("")

def test_file():
    tempfile.mkdtemp(prefix="mine-")
    assert os.environ["TMPDIR"] == tempfile.gettempdir()

@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number):
    pytest.skip("no engine: make install-engine")
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leftovers, "GRACE", 0.0)
    yield


def test_a_file_fails_its_test_by_name_and_the_folder_goes_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "test_careless.py").write_text(CARELESS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:randomly", "-rN"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    run = subprocess.run([*command, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "test_careless.py::test_file left behind file mine-" in run.stdout
    assert run.stdout.count("left behind") == 1
    assert run.stdout.splitlines()[-1] == "skipped 2: 2 × no engine: make install-engine"
    assert list(temporary.iterdir()) == []


def test_a_process_is_told_and_ended(impatient: None) -> None:
    before = leftovers.directly()
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            (told,) = leftovers.left(before, leftovers.directly)
            assert told.startswith(f"process {process.pid}: ")
            leftovers.end([told])
            process.wait(60)
        finally:
            process.kill()
    assert leftovers.left(before, leftovers.directly) == []


def test_a_process_whose_parent_has_ended_is_found_and_whose_it_is(impatient: None) -> None:
    module = leftovers.Module()
    module.began += [(0.0, "first"), (1e18, "after it was started")]
    subprocess.run(["sh", "-c", "sleep 600 &"], check=True)
    found: list[str] = []
    while not any(": sleep 600" in one for one in found):  # a process has no environment while it becomes another program
        found = leftovers.left(module.before, leftovers.thoroughly)
    (told,) = found
    assert module.culprit(told) == "first"
    leftovers.end([told])


def test_a_port_is_told(impatient: None) -> None:
    before = leftovers.directly()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert leftovers.left(before, leftovers.directly) == [f"port {server.getsockname()[1]}"]
    assert leftovers.left(before, leftovers.directly) == []


def test_a_file_is_told_at_once() -> None:
    before = leftovers.directly()
    with tempfile.NamedTemporaryFile(prefix="mine-") as file:
        assert leftovers.left(before, leftovers.directly) == [f"file {Path(file.name).name}"]
