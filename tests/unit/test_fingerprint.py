"""A model's fingerprint: what changes it, and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import UserError
from runtime.models import fingerprint as module
from runtime.models.fingerprint import fingerprint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.zeros(0, 2), "d": torch.tensor(1.0)}


def saved(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, **metadata: str) -> Path:
    folder.mkdir()
    names = list(tensors)
    files = {f"part-{index}.safetensors": names[index::shards] for index in range(shards)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata or None)
        return folder
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_files_and_their_metadata_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(saved(tmp_path / "one", TENSORS))
    assert len(first) == 64
    assert fingerprint(saved(tmp_path / "three", TENSORS, shards=3)) == first
    assert fingerprint(saved(tmp_path / "told", dict(reversed(TENSORS.items())), format="pt")) == first
    (tmp_path / "one" / "config.json").write_text("{}")
    monkeypatch.setattr(module, "_BLOCK", 5)
    assert fingerprint(tmp_path / "one") == first


@pytest.mark.parametrize(
    "changed",
    [
        {"a": TENSORS["a"].nextafter(torch.full((2, 3), 100.0))},  # their last bits
        {"a": TENSORS["a"].reshape(3, 2)},
        {"b": TENSORS["b"].view(torch.float64)},
        {"c": torch.zeros(2, 0)},
        {"e": torch.zeros(1)},
        {"a": TENSORS["d"], "d": TENSORS["a"]},
    ],
    ids=["value", "shape", "dtype", "empty", "another", "names"],
)
def test_every_weight_matters(tmp_path: Path, changed: dict[str, torch.Tensor]) -> None:
    first = fingerprint(saved(tmp_path / "one", TENSORS))
    assert fingerprint(saved(tmp_path / "other", TENSORS | changed)) != first


def test_each_bit_of_the_tensors_matters(tmp_path: Path) -> None:
    file = saved(tmp_path / "one", TENSORS) / "model.safetensors"
    whole, found = bytearray(file.read_bytes()), {fingerprint(tmp_path / "one")}
    stored = sum(tensor.nbytes for tensor in load_file(file).values())
    for place in range(len(whole) - stored, len(whole)):
        changed = whole.copy()
        changed[place] ^= 1
        file.write_bytes(changed)
        found.add(fingerprint(tmp_path / "one"))
    assert len(found) == 1 + stored


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{", None])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = saved(tmp_path / "one", TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(UserError, match=rf"^model {tmp_path / 'one'}: its weights cannot be read: .*$"):
        fingerprint(tmp_path / "one")
    file.unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        fingerprint(tmp_path / "one")
