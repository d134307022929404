"""`sluice convert mcore2hf` of a trainer's checkpoint, as torch stores it. That the trainer does so, its own tests show."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint

from runtime.models.families import Layout
from runtime.trainer.megatron.core_checkpoint import read_index
from tests.unit.family_cases import CONFIGS, make_family, make_tensors
from tests.unit.test_convert import refused, same, sluice

Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is one process
PADDING = 3  # rows of the vocabulary
FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def stored(case: str, tensors: Tensors, value_head: bool = False) -> Tensors:
    """What megatron-core makes of a model: its parameters stacked by layer where all are alike, and experts by their
    number within each."""
    found: Tensors = {}
    of_layers: dict[str, dict[int, dict[int, torch.Tensor]]] = {}
    family = make_family(case, value_head=value_head)
    for parameter in family.parameters(Layout(), tensor_rank=0, pipeline_rank=0, expert_rank=0):
        piece = parameter.from_hf(tensors.__getitem__)
        if (layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", parameter.name)) is None:
            padded = piece.shape[0] == family.shape.vocab_size
            found[parameter.name] = torch.cat([piece, piece.new_zeros(PADDING, piece.shape[1])]) if padded else piece
            continue
        expert = re.search(r"local_experts\.(\d+)\.", layer[2])
        rest = layer[2].replace(expert[0], "experts.") if expert else layer[2]
        for own, fused in FUSED.items():
            rest = rest.replace(own, fused)
        of_layers.setdefault(rest, {}).setdefault(int(layer[1]), {})[int(expert[1]) if expert else 0] = piece
    alike = all(len(layers) == family.shape.layers for layers in of_layers.values())
    for rest, layers in of_layers.items():
        rows = {
            number: torch.stack(list(experts.values())) if "mlp.experts." in rest else experts[0]
            for number, experts in layers.items()
        }
        if alike:
            found[f"decoder.layers.{rest}"] = torch.stack(list(rows.values()))
        else:
            found.update((f"decoder.layers.{number}.{rest}", row) for number, row in rows.items())
    return found


def save(folder: Path, case: str, tensors: Tensors, engine: str | None = "megatron") -> Path:
    (folder / "megatron").mkdir(parents=True)
    more = {f"optimizer.master.{name}": tensor + 1 for name, tensor in tensors.items()}
    checkpoint.save(tensors | more, storage_writer=checkpoint.FileSystemWriter(folder / "megatron"), no_dist=True)
    (folder / "trainer.json").write_text(json.dumps({"step": 3} | ({"engine": engine} if engine else {})))
    (folder / "megatron" / "config.json").write_text(json.dumps(CONFIGS[case] | {"torch_dtype": "float16"}))
    (folder / "megatron" / "metadata.json").write_text("{}")
    return folder


def convert(source: Path, target: Path) -> int:
    return sluice("mcore2hf", "--in", source, "--out", target)


@pytest.mark.parametrize("case", ["llama", "qwen2-tied", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_the_model_is_what_the_checkpoint_holds(case: str, tmp_path: Path) -> None:
    tensors = make_tensors(make_family(case), dtype=torch.bfloat16)
    assert convert(save(tmp_path / "saved", case, stored(case, tensors)), tmp_path / "hf") == 0
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), tensors)
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_critics_is_one_again(tmp_path: Path) -> None:
    tensors = make_tensors(make_family("qwen2-tied", value_head=True))
    saved = save(tmp_path / "saved", "qwen2-tied", stored("qwen2-tied", tensors, value_head=True))
    assert convert(saved, tmp_path / "hf") == 0
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), tensors)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]


class Running:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def places(index: Any, **changed: object) -> None:
    """All tensors lie elsewhere."""
    for place in index.storage_data.values():
        vars(place).update(changed)


def of_norm(index: Any) -> Any:
    return index.state_dict_metadata["decoder.final_layernorm.weight"]


def test_what_is_read_of_an_index_is_what_torch_reads(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", "qwen2", stored("qwen2", make_tensors(make_family("qwen2"))))
    index = saved / "megatron" / ".metadata"
    expected, found = pickle.loads(index.read_bytes()), read_index(index)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


OTHER = CONFIGS["qwen2"] | {"num_hidden_layers": 5, "vocab_size": 200}


class TestRefused:
    def refuse(self, folder: Path, capsys: pytest.CaptureFixture[str], saved: Path, *told: str) -> None:
        assert convert(saved, folder / "hf") == 2
        (folder / "core").mkdir()
        saved.rename(folder / "core" / "saved")
        refused(capsys, folder, *told)

    def plain(self, folder: Path) -> Path:
        return save(folder / "saved", "qwen2", stored("qwen2", make_tensors(make_family("qwen2"))))

    def test_missing_and_extra_tensors(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tensors = stored("qwen2", make_tensors(make_family("qwen2")))
        del tensors["decoder.final_layernorm.weight"]
        tensors |= {f"more.{number:02d}": torch.zeros(1) for number in range(12)}
        saved = save(tmp_path / "saved", "qwen2", tensors)
        told = ("1 tensors are missing: decoder.final_layernorm.weight", "12 tensors are unexpected: more.00, ", "more.09, ...")
        self.refuse(tmp_path, capsys, saved, *told)

    def test_another_engines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saved = save(tmp_path / "saved", "qwen2", {}, engine=None)
        self.refuse(tmp_path, capsys, saved, "is a checkpoint of engine torch, whose folder model is")

    @pytest.mark.parametrize(
        ("name", "written", "told"),
        [
            ("config.json", json.dumps(OTHER).encode(), "linear_fc2.weight [4, 32, 48] instead of [5, 32, 48]"),
            ("config.json", json.dumps(OTHER).encode(), "embedding.word_embeddings.weight [104, 32]"),
            (".metadata", b"\x80\x02}q", "megatron/.metadata: is not a complete checkpoint index: "),
            (".metadata", pickle.dumps(Running(Path("run"))), "megatron/.metadata: its pickle wants posix.system"),
            ("__0_0.distcp", bytes(100), "cannot be read: "),
        ],
    )
    def test_files(self, name: str, written: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saved = self.plain(tmp_path)
        (saved / "megatron" / name).write_bytes(written)
        self.refuse(tmp_path, capsys, saved, told)
        assert not Path("run").exists()

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda index: setattr(index, "planner_data", Running(Path("run"))), "wants posix.system"),
            (lambda index: places(index, relative_path="../../elsewhere"), "it refers to '../../elsewhere'"),
            (lambda index: places(index, transform_descriptors=("zstd",)), "it refers to '__0_0.distcp'"),
            (lambda index: places(index, offset="0"), "has '0' instead of a int"),
            (lambda index: index.storage_data.clear(), "more parts of tensors than positions"),
            (lambda index: of_norm(index).chunks.clear(), r"parts of a tensor [32] do not fill it"),
            (lambda index: of_norm(index).chunks.extend(of_norm(index).chunks * 10**5), "more parts of tensors than positions"),
            (lambda index: setattr(of_norm(index).chunks[0], "offsets", torch.Size([1])), "lies beyond its tensor [32]"),
            (lambda index: setattr(of_norm(index).chunks[0], "offsets", torch.Size([0, 0])), "lies beyond its tensor [32]"),
            (lambda index: setattr(of_norm(index), "properties", None), "has None instead of a TensorProperties"),
            (lambda index: setattr(index, "storage_data", None), "has None instead of a dict"),
            (lambda index: index.__dict__.pop("storage_data"), "KeyError: 'storage_data'"),
        ],
    )
    def test_an_index_of_other_things(
        self, change: Callable[[Any], object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        saved = self.plain(tmp_path)
        index = pickle.loads((saved / "megatron" / ".metadata").read_bytes())
        change(index)
        (saved / "megatron" / ".metadata").write_bytes(pickle.dumps(index))
        self.refuse(tmp_path, capsys, saved, "megatron/.metadata: ", told)

    def test_neither_kind_of_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "saved").mkdir()
        self.refuse(tmp_path, capsys, tmp_path / "saved", "is not a model in megatron-core's layout")
