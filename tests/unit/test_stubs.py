"""The generated stubs are those of proto/."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "proto").glob("*.proto"))


def test_the_stubs_are_those_of_the_protocol_files(tmp_path: Path) -> None:
    if find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools, to generate the stubs again: make install-dev")
    options = ["-I", "services/rpc/generated=proto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *PROTOS], cwd=ROOT, timeout=60, check=True)
    generated = {file.name: file.read_bytes() for file in (tmp_path / "services" / "rpc" / "generated").iterdir()}
    kept = {file.name: file.read_bytes() for file in (ROOT / "services" / "rpc" / "generated").glob("*_pb2.py*")}
    assert len(generated) == 2 * len(PROTOS)
    assert generated.keys() == kept.keys()
    different = sorted(name for name in generated if generated[name] != kept[name])
    assert different == [], "`make proto` generates them again"
