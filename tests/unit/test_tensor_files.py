"""safetensors files by parts: what the package writes is read, and it reads what is written."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import InvariantViolated, UserError
from runtime.weights.delta import TensorReader, TensorWriter
from runtime.weights.plan import TensorSpec

TENSORS = {
    "odd": torch.arange(3).to(torch.bfloat16),
    "wide": torch.arange(12.0, dtype=torch.float64).reshape(3, 4),
    "matrix": torch.arange(30.0).reshape(5, 6),
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
}


def specs(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with TensorWriter(path, specs(TENSORS)) as writer:
        for name in reversed(TENSORS):
            if name == "matrix":
                writer.write(name, TENSORS[name][3:], row=3)
                writer.write(name, TENSORS[name][:3])
            else:
                writer.write(name, TENSORS[name])
    found = load_file(path)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_parts_are_read_of_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    reader = TensorReader(path)
    assert {spec.name: spec for spec in specs(TENSORS)} == reader.specs
    for name, tensor in TENSORS.items():
        if tensor.ndim:
            assert torch.equal(reader.get(name)[:], tensor)
    matrix, whole = reader.get("matrix"), TENSORS["matrix"]
    for index in (slice(1, 4), slice(4, 99), slice(5, 5), (slice(0, 5), slice(2, 3)), (slice(2, 4), slice(0, 6))):
        assert torch.equal(matrix[index], whole[index])
        assert matrix[index].is_contiguous()
    with pytest.raises(InvariantViolated, match="matrix: is read with a step of 2 between rows"):
        matrix[0:4:2]


ODD = TENSORS["odd"]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([], "1 tensors were not written once: odd"),
        ([ODD[:1]], "1 tensors were not written once: odd"),
        ([ODD, ODD], "1 tensors were not written once: odd"),
        ([torch.zeros(3)], "written as bfloat16"),
        ([torch.zeros(3, 1, dtype=torch.bfloat16)], "written as bfloat16"),
    ],
)
def test_a_tensor_that_is_not_written_once_as_it_is_is_told(tmp_path: Path, parts: list[torch.Tensor], told: str) -> None:
    with pytest.raises(InvariantViolated, match=told), TensorWriter(tmp_path / "a", specs({"odd": ODD})) as writer:
        for part in parts:
            writer.write("odd", part)


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 7,
        b"\xff" * 100,
        with_header([]),
        with_header({"a": 1}),
        with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        with_header({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        struct.pack("<Q", 4) + b"\xff{}\xff",
    ],
)
def test_files_that_are_torn_or_of_another_format_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        TensorReader(tmp_path / "a")
    with pytest.raises(UserError, match="b: cannot be read: No such file"):
        TensorReader(tmp_path / "b")
