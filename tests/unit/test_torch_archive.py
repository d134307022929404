"""Files of torch.save: tensors and plain values are read, and nothing of a pickle is ever run."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import pathlib
import signal
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.conversion.torch_archive import ArchiveMemory, ArchiveTensor, read_archive
from runtime.errors import UserError
from runtime.weights import plain_pickle
from runtime.weights.plain_pickle import Attributes, Opaque

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
    plain = {key: value for key, value in found["args"].values.items() if not isinstance(value, Opaque)}
    assert {key: list(value) if key == "few" else value for key, value in plain.items()} == {
        "layers": 4,
        "dtype": "bfloat16",
        "few": [1],
    }
    assert type(found["model"]) is dict
    assert torch.equal(found["model"]["weight"][:], torch.ones(2))
    assert list(found["ordered"]) == ["weight", "bias"]
    assert isinstance(found["extra"], Opaque)
    assert isinstance(found["fp8"], Opaque)
    assert found["rng"][2:3] + found["rng"][4:] == [(1, 2), (1.5, None, "text")]


class Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


REBUILD, WITH_STATE = (name("torch._utils", f"_rebuild_parameter{more}") for more in ("", "_with_state"))
MEMORY = b"(" + text("storage") + name("torch", "ByteStorage") + text("0") + text("cpu") + b"K\x40tQ"  # data/0, 64 elements
TENSOR = name("torch._utils", "_rebuild_tensor_v2") + b"(" + MEMORY + b"K\x00(K\x40t(K\x01ttR"
ELSEWHERE = name("torch._tensor", "_rebuild_from_type_v2") + b"(" + REBUILD + b"N" + MEMORY + b"NtR"  # what its memory was
ELSEWHERE += b"N}" + text("_str") + text("/secret") + b"s\x86b"
MODULE = b"(" + text("module") + name("torch", "FloatStorage") + text("0") + b"NK\x01tQ"
PUT = b"N}" + text("_any") + b"Ns\x86b"  # an attribute


def raw(path: Path, code: bytes, memory: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file with this pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", code)
        for key, data in (memory or {}).items():
            archive.writestr(f"a/data/{key}", data)
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


def poke(path: Path, at: int, data: bytes) -> Path:
    """Overwrite bytes, counted from the last entry in the zip's directory."""
    found = bytearray(path.read_bytes())
    start = found.rindex(b"PK\x01\x02") + at
    found[start : start + len(data)] = data
    path.write_bytes(found)
    return path


def nested(depth: int) -> bytes:
    """A tuple that holds one twice, and so on."""
    return b"N\x85" + b"q\x00h\x00\x86" * depth


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

    @pytest.mark.parametrize(
        "code",
        [
            name("megatron.nothing", "system") + b"(" + text("text") + b"t\x85R",
            name("megatron.nothing", "system") + b"(" + text("text") + b"tR",
            name("__builtin__", "getattr") + b"(" + name("argparse", "Namespace") + text("__mr") + b"tR",
        ],
    )
    def test_known_names_are_not_followed(self, code: bytes, tmp_path: Path) -> None:
        """What is named like a part of Megatron is not imported, and getattr gets no attribute."""
        assert isinstance(read_archive(raw(tmp_path / "a.pt", b"\x80\x02" + code + b".")), Opaque)
        assert "megatron.nothing" not in sys.modules

    @pytest.mark.parametrize(
        "code,told",
        [
            # What is called cannot be changed: the next file would get it too.
            (name("torch", "Size") + b"(N}" + text("_work") + b"Nstb", "its pickle sets attributes of a Function"),
            (TENSOR + PUT, "its pickle sets attributes of an ArchiveTensor"),
            (MEMORY + PUT, "its pickle sets attributes of an ArchiveMemory"),
            (REBUILD + PUT, "its pickle sets attributes of a Function"),
            (text("a") + PUT, "its pickle sets attributes of 'a'"),
            (b"]" + PUT, "its pickle sets attributes of a list"),
            # Who could set attributes of the path that a tensor holds, and of the tensor, would have any file's bytes.
            (TENSOR + b"}" + text("_memory") + b"(K\x00K\x40tsb" + ELSEWHERE, "its pickle sets attributes of an ArchiveTensor"),
            (ELSEWHERE, "its pickle calls a Function"),
            # The memory of a tensor is given to tensors alone, and not as the arguments themselves.
            (REBUILD + MEMORY + b"\x85R", "it has an ArchiveMemory as a parameter"),
            (WITH_STATE + MEMORY + b"\x85R", "it has an ArchiveMemory as a parameter"),
            (REBUILD + MEMORY + b"R", "its pickle calls a Function"),
            (WITH_STATE + MEMORY + b"R", "its pickle calls a Function"),
            (name("torch", "Size") + MEMORY + b"\x85R", "is not a whole file"),
            (MODULE, "it wants 'module' from outside"),
            # Keys that take long to find: of a tuple, the time doubles with each.
            (b"}" + nested(16) + b"Ns", "its pickle has a tuple"),
            (b"}]Ns", "its pickle has a list"),
            (b"}G" + struct.pack(">d", 2.0**61) + b"Ns", "its pickle has 2.305843009213694e+18"),
            (b"}\x8a\x08" + struct.pack("<q", (1 << 61) - 1) + b"Ns", "its pickle has 2305843009213693951"),
            (b"}" + text("x" * 1001) + b"Ns", "its pickle has 'xxx"),
            # What torch does not write.
            (b"N2", "its pickle has DUP, which torch.save"),
            (b"I1\n", "its pickle has INT, which torch.save"),
            (b"\x8b\x01\x00\x00\x00\x05", "its pickle has LONG4, which torch.save"),
            (b"(ios\nsystem\n", "its pickle has INST, which torch.save"),
            (b"\x82\x05", "its pickle has EXT1, which torch.save"),
            (b"P0\n", "its pickle has PERSID, which torch.save"),
        ],
    )
    def test_what_a_pickle_may_not(self, code: bytes, told: str, tmp_path: Path) -> None:
        assert told in refused(raw(tmp_path / "a.pt", b"\x80\x02" + code + b".", {"0": bytes(64)}))
        assert read_archive(write(tmp_path / "b.pt", torch.Size([2]))) == (2,)

    def test_torch_is_not_asked_for_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It imports parts of itself when it is."""
        asked: list[str] = []
        monkeypatch.setattr(torch, "__getattr__", asked.append)
        assert "its pickle wants torch._part, which no" in refused(raw(tmp_path / "a.pt", b"\x80\x02ctorch\n_part\n."))
        assert asked == []

    def test_what_it_wants_is_told_in_a_line(self, tmp_path: Path) -> None:
        told = refused(raw(tmp_path / "a.pt", b"\x80\x04" + text("os\nfine") + text("x" * 900) + b"\x93."))
        assert "its pickle wants 'os\\nfine.xxx" in told
        assert len(told) < 400 + len(str(tmp_path))


class TestSmallFilesTakeLittle:
    def test_a_memo_of_millions(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.pt", b"\x80\x02Nr" + struct.pack("<I", 20_000_000) + b".")
        tracemalloc.start()
        try:
            assert read_archive(path) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_nothing_is_compressed(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.pt", b"\x80\x02" + b"N0" * 1_000_000 + b"N.", compression=zipfile.ZIP_DEFLATED)
        assert path.stat().st_size < 3000
        assert "'a/data.pkl' is compressed or encrypted" in refused(path)

    @pytest.mark.parametrize(
        "key,value", [(text("a"), "a"), (b"K\x05", 5), (b"N", None), (text("a") + text("b") + b"\x86", ("a", "b"))]
    )
    def test_keys_of_checkpoints(self, key: bytes, value: object, tmp_path: Path) -> None:
        assert read_archive(raw(tmp_path / "a.pt", b"\x80\x02}" + key + b"K\x01s.")) == {value: 1}

    def test_long_pickles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = raw(tmp_path / "a.pt", b"\x80\x02" + b"N0" * 50 + b"N.")
        assert read_archive(path) is None
        monkeypatch.setattr(plain_pickle, "MOST_STEPS", 100)
        assert "its pickle has more than 100 steps" in refused(path)
        monkeypatch.setattr(plain_pickle, "MOST_NAMES", 2)
        names = b"".join(name("numpy", f"n{number}") + b"0" for number in (0, 1, 0, 1))
        assert read_archive(raw(tmp_path / "b.pt", b"\x80\x02" + names + b"N.")) is None
        names += name("numpy", "n2")
        assert "its pickle has more than 2 names" in refused(raw(tmp_path / "b.pt", b"\x80\x02" + names + b"."))
        monkeypatch.setattr(plain_pickle, "MOST_BYTES", 103)
        assert "data.pkl has 104 bytes; must be at most 103" in refused(path)


class TestTorn:
    @pytest.mark.parametrize(
        "at,data,told",
        [
            (10, struct.pack("<H", 99), "'a/data.pkl' is compressed or encrypted"),
            (10, struct.pack("<H", 8), "'a/data.pkl' is compressed or encrypted"),  # by zlib, which it is not
            (8, b"\x01", "'a/data.pkl' is compressed or encrypted"),
            (6, b"\xff", "NotImplementedError: zip file version 25.5"),
            (20, struct.pack("<II", 1 << 31, 1 << 31), "data.pkl has 2147483648 bytes; must be at most 33554432"),
        ],
    )
    def test_a_zip_of_another_kind(self, at: int, data: bytes, told: str, tmp_path: Path) -> None:
        assert told in refused(poke(raw(tmp_path / "a.pt", b"\x80\x02N."), at, data))

    def test_memory_beyond_the_file(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.pt", b"\x80\x02" + TENSOR + b".", {"0": b"few"})
        assert "data/0 has 3 bytes" in refused(path)
        assert "data/0 lies beyond its end" in refused(poke(path, 20, struct.pack("<II", 1 << 31, 1 << 31)))

    @pytest.mark.parametrize("shape,stride", [((1 << 43,), (0,)), ((1 << 20, 1 << 20), (0, 0)), ((9, 9), (1, 1))])
    def test_elements_that_share_memory(self, shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path) -> None:
        (tmp_path / "a.pt").write_bytes(bytes(80))
        tensor = ArchiveTensor(ArchiveMemory(tmp_path / "a.pt", 0, 20, "float32"), 0, shape, stride)
        with pytest.raises(UserError, match=r"elements in the memory of 20$"):
            tensor[:]

    @pytest.mark.parametrize(
        "offset,shape,stride,told",
        [
            (0, (0, 1 << 62, 1 << 62), (1, 1, 1), "has more elements than there are numbers"),
            (0, (1,), (1 << 63,), "has more elements than there are numbers"),
            (0, (1 << 63,), (0,), "has more elements than there are numbers"),
            (0, (3, 4), (4, 1), r"a tensor \[3, 4\] lies beyond its memory"),
            (-1, (1,), (1,), "lies beyond"),
        ],
    )
    def test_a_tensor_beyond_numbers_or_its_memory(
        self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], told: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=told):
            ArchiveTensor(ArchiveMemory(tmp_path, 0, 11, "float32"), offset, shape, stride)

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
            (lambda path: edit(path, "data/0", None), "it has no 'data/0'"),
            (lambda path: edit(path, "version", b"3", zipfile.ZIP_DEFLATED), "'a/data.pkl' is compressed or encrypted"),
        ],
    )
    def test_a_file_that_is_not_as_torch_writes_it(self, spoil: Callable[[Path], None], told: str, tmp_path: Path) -> None:
        path = write(tmp_path / "a.pt", TENSORS)
        spoil(path)
        assert told in refused(path)

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
