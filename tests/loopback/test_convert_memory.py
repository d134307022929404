"""A conversion's peak of memory stays below 1.5 times the largest shard, whatever the model's size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.family_cases import write_folder

ROOT = Path(__file__).parents[2]


def peak(direction: str, source: Path, target: Path, *options: str) -> int:
    """Bytes that the process held at most."""
    command = [sys.executable, "-m", "launcher.cli", "convert", direction, "--in", source, "--out", target, *options]
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_peak_of_memory(tmp_path: Path) -> None:
    options = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    write_folder(tmp_path / "small", "qwen2")
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "vocab_size": 8_000}
    write_folder(tmp_path / "large", "qwen2", **sizes)
    interpreter = peak("hf2mcore", tmp_path / "small", tmp_path / "small-core", *options)
    there = peak("hf2mcore", tmp_path / "large", tmp_path / "core", *options) - interpreter
    back = peak("mcore2hf", tmp_path / "core", tmp_path / "back") - interpreter
    largest = max(path.stat().st_size for path in (tmp_path / "core").glob("*.safetensors"))
    assert largest > 40e6
    assert max(there, back) < 1.5 * largest
