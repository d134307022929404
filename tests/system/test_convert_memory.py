"""A conversion's peak of memory stays below 1.5 times the largest shard and a little, whatever the model's size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.family_cases import write_folder

ROOT = Path(__file__).parents[2]
ALLOCATOR = 32 << 20  # bytes that it keeps of what was freed, and that do not grow with the model
# The kernel's count begins with the program; that of `getrusage` begins with what the parent held.
CODE = """
import sys
from launcher import cli
try:
    cli.main(sys.argv[1:])
finally:
    print(open("/proc/self/status").read())
"""


def peak(direction: str, source: Path, target: Path, *options: str) -> int:
    """Bytes that the process held at most."""
    command = [sys.executable, "-c", CODE, "convert", direction, "--in", str(source), "--out", str(target), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize(
    "there,back,files", [("hf2mcore", "mcore2hf", "*.safetensors"), ("hf2megatron", "megatron2hf", "*/*/*.pt")]
)
def test_peak_of_memory(there: str, back: str, files: str, tmp_path: Path) -> None:
    options = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    write_folder(tmp_path / "small", "qwen2")
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "vocab_size": 8_000}
    write_folder(tmp_path / "large", "qwen2", **sizes)
    interpreter = peak(there, tmp_path / "small", tmp_path / "small-core", *options)
    to_core = peak(there, tmp_path / "large", tmp_path / "core", *options) - interpreter
    to_hf = peak(back, tmp_path / "core", tmp_path / "back") - interpreter
    largest = max(path.stat().st_size for path in (tmp_path / "core").glob(files))
    print(f"{there}: {to_core / largest:.2f} of the largest shard ({largest / 1e6:.0f} MB), {back}: {to_hf / largest:.2f}")
    assert largest > 40e6
    assert max(to_core, to_hf) < 1.5 * largest + ALLOCATOR
