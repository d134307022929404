"""The wheel and the source distribution: they hold all that the source tree's packages hold, and a command from the wheel needs
no clone. `make dist` builds them as these tests do: the wheel from the source distribution."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sluice.start import PACKAGES

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    """Of our packages, with what links lead to; `folder` holds them."""
    return {
        path.removeprefix(f"{folder}/")
        for package in PACKAGES
        for parent, _, names in os.walk(folder / package, followlinks=True)
        for path in (f"{parent}/{name}" for name in names)
        if "__pycache__" not in path
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist/ and wheel/, both unpacked."""
    folder = tmp_path_factory.mktemp("package")
    source, unpacked = folder / "source", folder / "unpacked"
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-c", BUILD, "build_sdist", str(folder), cwd=source)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(unpacked, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(unpacked)
    (folder / "sdist").symlink_to(next(unpacked.iterdir()))
    run(sys.executable, "-c", BUILD, "build_wheel", str(folder), cwd=folder / "sdist")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "wheel")
    return folder


def test_both_hold_what_the_packages_hold(built: Path) -> None:
    there = files(ROOT)
    assert {"launcher/quickstart.yaml", "runtime/config/presets/grpo.yaml", "sluice/agents/worker.py"} <= there
    assert files(built / "wheel") == there
    shutil.rmtree(built / "sdist" / "build")  # the wheel's
    assert files(built / "sdist") == there
    assert not [path for path in (built / "sdist").rglob("*") if path.is_symlink()]
    for name in there:
        if not name.endswith(".py"):
            assert (built / "wheel" / name).read_bytes() == (ROOT / name).read_bytes()


def test_both_hold_the_licenses(built: Path) -> None:
    (about,) = (built / "wheel").glob("*.dist-info")
    for name in ("LICENSE", "NOTICE"):
        assert (about / "licenses" / name).read_bytes() == (built / "sdist" / name).read_bytes() == (ROOT / name).read_bytes()
    metadata = (about / "METADATA").read_text()
    assert "License-Expression: Apache-2.0\n" in metadata
    needed = {name for name, rest in re.findall(r"^Requires-Dist: ([\w-]+)(.*)", metadata, re.MULTILINE) if '"dev"' not in rest}
    page = set(re.findall(r"[\w-]+", (ROOT / "docs" / "licenses.md").read_text()))
    assert "torch" in needed
    assert needed - page == set()


def test_a_command_of_the_wheel_needs_no_clone(built: Path, tmp_path: Path) -> None:
    def sluice(*arguments: str) -> str:
        return run(sys.executable, "-m", "sluice", *arguments, cwd=tmp_path, PYTHONPATH=str(built / "wheel"))

    assert sluice("quickstart", "--write", "my.yaml").splitlines() == ["written: my.yaml", "next: sluice train my.yaml"]
    assert (tmp_path / "my.yaml").read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()
    assert "my.yaml: valid" in sluice("validate", "my.yaml", "algorithm.preset=dapo", "data.prompt_type=qwen")
    command, env = [sys.executable, "-m", "sluice", "bench", "startup"], {**os.environ, "PYTHONPATH": str(built / "wheel")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "bench startup: the benchmarks are not installed" in done.stderr
