"""Files of torch.save: tensors and plain values are read, and nothing of a pickle is ever run."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import pathlib
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engines.torch_archive import ArchiveTensor, Attributes, Inert, read_archive
from runtime.errors import UserError

BUFFER = torch.arange(100.0)
TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "bfloat16": torch.arange(6).view(2, 3).to(torch.bfloat16),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "view": BUFFER[10:30].view(4, 5),  # of memory that others share, as with a distributed optimizer
    "column": BUFFER.view(10, 10)[:, 3],
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(5),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


def write(path: Path, value: Any, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_archive(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_what_was_saved(protocol: int, tmp_path: Path) -> None:
    found = read_archive(write(tmp_path / "a.pt", TENSORS, protocol))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert isinstance(found[name], ArchiveTensor)
        assert (found[name].shape, f"torch.{found[name].dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        read = found[name][...]
        assert torch.equal(read, tensor), name
        assert read.is_contiguous()
    assert torch.equal(found["matrix"][1:3], TENSORS["matrix"][1:3])


def test_a_part_of_a_tensor_and_its_transpose(tmp_path: Path) -> None:
    found = read_archive(write(tmp_path / "a.pt", TENSORS))
    whole = TENSORS["view"].flatten()
    assert torch.equal(found["view"].part(6, (2, 3))[:], whole[6:12].view(2, 3))
    assert torch.equal(found["view"].part(6, (2, 3), transposed=True)[:], whole[6:12].view(3, 2).t())
    with pytest.raises(UserError, match="is not contiguous"):
        found["transposed"].part(0, (2, 2))


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_and_what_megatron_saves_beside_them(protocol: int, tmp_path: Path) -> None:
    model = collections.defaultdict(dict, weight=torch.ones(2))
    saved = {
        "args": argparse.Namespace(
            layers=4, dtype=torch.bfloat16, path=pathlib.PosixPath("/a"), signal=signal.SIGTERM, few={1}
        ),
        "model": model,
        "ordered": torch.nn.Linear(2, 3).state_dict(),
        "extra": io.BytesIO(b"state"),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "rng": [np.random.get_state(), torch.get_rng_state(), torch.Size([1, 2]), torch.device("cpu"), (1.5, None, "text")],
    }
    found = read_archive(write(tmp_path / "a.pt", saved, protocol))
    assert isinstance(found["args"], Attributes)
    plain = {key: value for key, value in found["args"].values.items() if not isinstance(value, Inert)}
    assert {key: list(value) if key == "few" else value for key, value in plain.items()} == {
        "layers": 4,
        "dtype": "bfloat16",
        "few": [1],
    }
    assert type(found["model"]) is dict
    assert torch.equal(found["model"]["weight"][:], torch.ones(2))
    assert list(found["ordered"]) == ["weight", "bias"]
    assert isinstance(found["extra"], Inert)
    assert isinstance(found["fp8"], Inert)
    assert found["rng"][2:3] + found["rng"][4:] == [(1, 2), (1.5, None, "text")]


class Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class TestNothingIsRun:
    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize(
        "function,name",
        [
            (os.system, f"{os.system.__module__}.system"),
            (eval, "builtins.eval"),
            (exec, "builtins.exec"),
            (functools.partial, "functools.partial"),
            (os.path.join, "posixpath.join"),
            (torch.load, "torch.serialization.load"),
            (__import__, "builtins.__import__"),
        ],
    )
    def test_a_call_is_refused_by_name(self, function: Callable[..., Any], name: str, protocol: int, tmp_path: Path) -> None:
        told = refused(write(tmp_path / "a.pt", {"model": {}, "args": Call(function, "touch here")}, protocol))
        assert f"its pickle wants {name}, which no checkpoint needs; nothing of it was run" in told

    def test_not_even_what_a_shell_would_do(self, tmp_path: Path) -> None:
        refused(write(tmp_path / "a.pt", [Call(os.system, f"touch {tmp_path / 'done'}")]))
        assert not (tmp_path / "done").exists()
        torch.load(tmp_path / "a.pt", weights_only=False)
        assert (tmp_path / "done").exists()  # which the file would have done

    def test_known_names_are_not_followed(self, tmp_path: Path) -> None:
        """What is named like a part of Megatron is not imported, and getattr gets no attribute."""
        code = b"\x80\x02cmegatron.nothing\nsystem\n(X\x04\x00\x00\x00textt\x85R."
        found = read_archive(raw(tmp_path / "a.pt", code.replace(b"\x85R", b"R")))
        assert isinstance(found, Inert)
        assert "megatron.nothing" not in sys.modules
        found = read_archive(
            raw(tmp_path / "b.pt", b"\x80\x02c__builtin__\ngetattr\n(cargparse\nNamespace\nX\x04\x00\x00\x00__mrtR.")
        )
        assert isinstance(found, Inert)

    def test_what_is_called_cannot_be_changed(self, tmp_path: Path) -> None:
        """A pickle may set attributes of what it got: not of functions, which the next file would get too."""
        state = b"(N}X\x05\x00\x00\x00_workNst"
        told = refused(raw(tmp_path / "a.pt", b"\x80\x02ctorch\nSize\n" + state + b"b."))
        assert "is not a whole file of torch.save: it sets _work of a function" in told
        assert read_archive(write(tmp_path / "b.pt", torch.Size([2]))) == (2,)

    def test_another_storage_than_the_file_has(self, tmp_path: Path) -> None:
        told = refused(
            raw(tmp_path / "a.pt", b"\x80\x02(X\x06\x00\x00\x00modulectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x01tQ.")
        )
        assert "it wants 'module' from outside" in told


def raw(path: Path, code: bytes) -> Path:
    """A file with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", code)
    return path


def edit(path: Path, name: str, data: bytes | None, compression: int = zipfile.ZIP_STORED) -> None:
    """Replace an entry, or take it away."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    full = next(entry for entry in entries if entry.endswith(f"/{name}"))
    with zipfile.ZipFile(path, "w", compression) as archive:
        for entry, content in entries.items():
            if entry != full:
                archive.writestr(entry, content)
            elif data is not None:
                archive.writestr(entry, data)


class TestTorn:
    @pytest.mark.parametrize("kept", [0, 10, 200, -1, -30])
    def test_a_file_that_ends_too_early(self, kept: int, tmp_path: Path) -> None:
        path = write(tmp_path / "a.pt", TENSORS)
        path.write_bytes(path.read_bytes()[:kept])
        assert "is not a whole file of torch.save" in refused(path)

    @pytest.mark.parametrize(
        "spoil,told",
        [
            (lambda path: edit(path, "data.pkl", None), "it has no data.pkl"),
            (lambda path: edit(path, "data.pkl", b"\x80\x02}q"), "is not a whole file of torch.save: "),
            (lambda path: edit(path, "byteorder", b"big"), "its bytes are in the order of another machine"),
            (lambda path: edit(path, "data/0", b"\0" * 8), "data/0 has 8 bytes"),
            (lambda path: edit(path, "data/0", None), "KeyError: 'data/0'"),
            (lambda path: edit(path, "version", b"3", zipfile.ZIP_DEFLATED), "data/0 has 48 bytes"),
        ],
    )
    def test_a_file_that_is_not_as_torch_writes_it(self, spoil: Callable[[Path], None], told: str, tmp_path: Path) -> None:
        path = write(tmp_path / "a.pt", TENSORS)
        spoil(path)
        assert told in refused(path)

    def test_a_tensor_beyond_its_memory(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a tensor \[3, 4\] lies beyond its memory"):
            ArchiveTensor(tmp_path, 0, 11, "float32", 0, (3, 4), (4, 1))
        with pytest.raises(ValueError, match="lies beyond"):
            ArchiveTensor(tmp_path, 0, 11, "float32", -1, (1,), (1,))

    def test_a_file_that_is_cut_while_it_is_read(self, tmp_path: Path) -> None:
        found = read_archive(write(tmp_path / "a.pt", TENSORS))
        with (tmp_path / "a.pt").open("r+b") as file:
            file.truncate(700)
        with pytest.raises(UserError, match="ended within a tensor"):
            found["view"][:]

    def test_a_file_of_an_old_torch(self, tmp_path: Path) -> None:
        torch.save(TENSORS, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        assert "is not a whole file of torch.save: File is not a zip file" in refused(tmp_path / "a.pt")

    def test_no_file(self, tmp_path: Path) -> None:
        assert "cannot be read: No such file or directory" in refused(tmp_path / "a.pt")
