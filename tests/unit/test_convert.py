"""`sluice convert`: there and back bit for bit the same, in any layout; what cannot be is refused, and leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from launcher import cli
from runtime.models import hf_policy
from runtime.models.families import Layout
from runtime.weights.delta import TensorWriter
from tests.unit.family_cases import make_family, write_folder

Tensors = dict[str, torch.Tensor]


def sluice(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", *map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def to_core(source: Path, target: Path, *options: str) -> int:
    return sluice("hf2mcore", "--in", source, "--out", target, *options)


def to_hf(source: Path, target: Path) -> int:
    return sluice("mcore2hf", "--in", source, "--out", target)


def load_folder(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in folder.glob("model*.safetensors"):
        found.update(load_file(path))
    return found


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *told: str) -> None:
    """One line that says so, and nothing is left in the folder that was to hold the result."""
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for text in told:
        assert text in error
    assert "Traceback" not in error
    assert {path.name for path in folder.iterdir()} <= {"hf", "core"}


HALVES, QUARTERS = "--tensor-parallel 2", "--tensor-parallel 4 --pipeline-parallel 2"
UNEVEN = "--tensor-parallel 2 --pipeline-parallel 3 --layers-per-stage 1,2,1"
PADDED = "--tensor-parallel 2 --make-vocab-size-divisible-by 64"
CASES = [("llama", QUARTERS), ("mistral", ""), ("qwen2", UNEVEN), ("qwen2-tied", QUARTERS), ("qwen2-tied", PADDED)]
CASES += [("qwen3", HALVES), ("qwen3_moe", UNEVEN), ("qwen3_moe", PADDED), ("mixtral", QUARTERS), ("deepseek_v3", HALVES)]
CASES += [("deepseek_v3", UNEVEN), ("glm4_moe", PADDED), ("glm4_moe", QUARTERS)]


@pytest.mark.parametrize("case,options", CASES)
def test_there_and_back_is_bit_for_bit_the_same(case: str, options: str, tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", case, torch.bfloat16)
    assert to_core(tmp_path / "hf", tmp_path / "core", *options.split()) == 0
    assert to_hf(tmp_path / "core", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), tensors)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}


def test_each_rank_reads_its_own_files(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", "qwen3_moe")
    options = ("--tensor-parallel", "2", "--pipeline-parallel", "2", "--expert-parallel", "2")
    assert to_core(tmp_path / "hf", tmp_path / "core", *options) == 0
    family, layout = make_family("qwen3_moe"), Layout(tensor=2, pipeline=2, expert=2)
    for tensor, stage, expert in ((0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0)):
        stem = f"tp_{tensor:02d}_pp_{stage:02d}"
        held = load_file(tmp_path / "core" / f"{stem}.safetensors")
        experts = load_file(tmp_path / "core" / f"{stem}_ep_{expert:02d}.safetensors")
        assert experts
        assert not any("experts" in name for name in held)
        share = family.parameters(layout, tensor_rank=tensor, pipeline_rank=stage, expert_rank=expert)
        assert same(held | experts, {parameter.name: parameter.from_hf(tensors.__getitem__) for parameter in share})
    assert to_hf(tmp_path / "core", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), tensors)


def test_several_files_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.models.hf_policy.SHARD_BYTES", 30_000)
    tensors = write_folder(tmp_path / "hf", "qwen2")
    assert to_core(tmp_path / "hf", tmp_path / "core", "--tensor-parallel", "2") == 0
    assert to_hf(tmp_path / "core", tmp_path / "sharded") == 0
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "sharded" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    assert to_core(tmp_path / "sharded", tmp_path / "again") == 0
    assert to_hf(tmp_path / "again", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), tensors)


def test_params_dtype(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", "llama")
    assert to_core(tmp_path / "hf", tmp_path / "core", "--tensor-parallel", "2", "--params-dtype", "bf16") == 0
    assert to_hf(tmp_path / "core", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_old_buffers_and_a_tied_head_that_is_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = write_folder(tmp_path / "hf", "qwen2-tied")
    more = {
        **tensors,
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(more, tmp_path / "hf" / "model.safetensors")
    assert to_core(tmp_path / "hf", tmp_path / "core", "--pipeline-parallel", "2") == 0
    assert "left out, as the target has no place for them: lm_head.weight" in capsys.readouterr().out
    assert to_hf(tmp_path / "core", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), tensors)


class TestValueHead:
    def test_of_a_language_model_begins_at_zero(self, tmp_path: Path) -> None:
        tensors = write_folder(tmp_path / "hf", "qwen2", torch.bfloat16)
        assert to_core(tmp_path / "hf", tmp_path / "core", "--value-head", "--tensor-parallel", "2") == 0
        assert to_hf(tmp_path / "core", tmp_path / "back") == 0
        head = {"score.weight": torch.zeros(1, 32, dtype=torch.bfloat16)}
        assert same(load_folder(tmp_path / "back"), {k: v for k, v in tensors.items() if k != "lm_head.weight"} | head)
        config = json.loads((tmp_path / "back" / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForSequenceClassification"]
        assert len(config["id2label"]) == 1

    @pytest.mark.parametrize("case", ["qwen2", "qwen2-tied"])
    def test_of_a_critic_is_kept_and_comes_back_as_one(self, case: str, tmp_path: Path) -> None:
        tensors = write_folder(tmp_path / "hf", case) | {"score.weight": torch.randn(1, 32)}
        tensors.pop("lm_head.weight", None)
        save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        assert to_core(tmp_path / "hf", tmp_path / "core", "--value-head", "--pipeline-parallel", "2") == 0
        head = load_file(tmp_path / "core" / "tp_00_pp_01.safetensors")["output_layer.weight"]
        assert torch.equal(head, tensors["score.weight"])
        assert to_hf(tmp_path / "core", tmp_path / "back") == 0
        assert same(load_folder(tmp_path / "back"), tensors)
        assert torch.equal(hf_policy.load_critic(str(tmp_path / "back")).score.weight, tensors["score.weight"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def change(path: Path, name: str, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    tensors[name] = by(tensors[name])
    save_file(tensors, path)


def change_json(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


NORM = "decoder.layers.0.input_layernorm.weight"


def spoil_tensors(hf: Path) -> None:
    tensors = load_file(hf / "model.safetensors") | {f"more.{number:02d}": torch.zeros(1) for number in range(12)}
    del tensors["model.norm.weight"]
    save_file(tensors, hf / "model.safetensors")


def halve(hf: Path) -> None:
    """The dtype of one of several tensors that become one."""
    change(hf / "model.safetensors", "model.layers.1.self_attn.k_proj.weight", torch.Tensor.bfloat16)


MISSING = "1 tensors are missing: model.norm.weight", "12 tensors are unexpected: more.00, ", "more.09, ..."
DTYPES = "linear_qkv.weight is made of tensors of several dtypes", "k_proj.weight bfloat16"


class TestRefusedToCore:
    @pytest.mark.parametrize(
        "spoil,options,told",
        [
            (None, "--tensor-parallel 3", "tensor parallel is 3; must divide attention heads (8)"),
            (None, "--pipeline-parallel 2 --layers-per-stage two", "--layers-per-stage: 'two' is not a list of numbers"),
            (None, "--expert-parallel 2", "must be 1 for a model without experts"),
            (shutil.rmtree, "", "/hf is not a folder"),
            (
                lambda hf: change_json(hf / "config.json", model_type="gpt_oss"),
                "",
                "must be one of llama, qwen2, qwen3, qwen3_moe",
            ),
            (lambda hf: cut(hf / "model.safetensors"), "", "is not a whole safetensors file: it has"),
            (spoil_tensors, "", MISSING),
            (halve, "", DTYPES),
        ],
    )
    def test_folders_and_layouts(
        self,
        spoil: Callable[[Path], object] | None,
        options: str,
        told: str | tuple[str, ...],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        if spoil is not None:
            spoil(tmp_path / "hf")
        assert to_core(tmp_path / "hf", tmp_path / "core", *options.split()) == 2
        refused(capsys, tmp_path, *((told,) if isinstance(told, str) else told))

    def test_a_target_that_exists(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tensors = write_folder(tmp_path / "hf", "qwen2")
        assert to_core(tmp_path / "hf", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "hf: exists; must be a new folder")
        assert same(load_folder(tmp_path / "hf"), tensors)

    def test_several_dtypes_may_become_one_that_is_given(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        halve(tmp_path / "hf")
        assert to_core(tmp_path / "hf", tmp_path / "core", "--params-dtype", "fp32") == 0

    def test_too_little_room(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        assert to_core(tmp_path / "hf", tmp_path / "core") == 2
        refused(capsys, tmp_path, "core: needs 0.0 GB, but only 0.0 GB are free")

    def test_what_was_written_wrongly_is_found_and_removed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(writer: TensorWriter, name: str, tensor: torch.Tensor, row: int = 0) -> None:
            plain(writer, name, tensor.flip(0) if name.endswith("layers.1.mlp.linear_fc1.weight") else tensor, row)

        plain = TensorWriter.write
        write_folder(tmp_path / "hf", "qwen2")
        monkeypatch.setattr(TensorWriter, "write", write)
        assert to_core(tmp_path / "hf", tmp_path / "core") == 1
        refused(capsys, tmp_path, "linear_fc1.weight does not give model.layers.1.mlp.gate_proj.weight again")


def first(core: Path) -> Path:
    return core / "tp_01_pp_00.safetensors"


def last(core: Path) -> Path:
    return core / "tp_01_pp_01.safetensors"


class TestRefusedToHf:
    @pytest.mark.parametrize(
        "spoil,told",
        [
            (lambda core: (core / "layout.json").unlink(), "is not a model in megatron-core's layout: layout.json"),
            (lambda core: (core / "layout.json").write_text("{}"), "layout.json: Object missing required field `layout`"),
            (lambda core: change_json(core / "layout.json", format=2), "layout.json: format is 2; must be 1"),
            (lambda core: change_json(core / "layout.json", layout={"tensor": 4}), "15 tensors are missing: "),
            (lambda core: last(core).unlink(), "tp_01_pp_01.safetensors: cannot be read: No such file"),
            (lambda core: cut(first(core)), "tp_01_pp_00.safetensors: is not a whole safetensors file"),
            (
                lambda core: change_json(core / "config.json", model_type="qwen3"),
                "tp_00_pp_00.safetensors: 2 tensors are unexpected: decoder.layers.0.self_attention.linear_qkv.bias",
            ),
            (
                lambda core: change_json(core / "config.json", intermediate_size=64),
                "decoder.layers.0.mlp.linear_fc1.weight [48, 32] instead of [64, 32]",
            ),
            (lambda core: change(first(core), NORM, torch.neg), f"pp_00.safetensors: {NORM} differs from another rank's"),
            (
                lambda core: change(last(core), "decoder.final_layernorm.weight", torch.neg),
                "decoder.final_layernorm.weight differs from another rank's part of model.norm.weight",
            ),
            (
                lambda core: change(core / "tp_00_pp_01.safetensors", "output_layer.weight", torch.neg),
                "tp_00_pp_01.safetensors: output_layer.weight differs from another rank's part of model.embed_tokens.weight",
            ),
            (lambda core: change(first(core), NORM, torch.Tensor.bfloat16), f"{NORM} is bfloat16, on another rank float32"),
        ],
    )
    def test_folders(
        self, spoil: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_folder(tmp_path / "hf", "qwen2-tied")
        assert to_core(tmp_path / "hf", tmp_path / "core", "--tensor-parallel", "2", "--pipeline-parallel", "2") == 0
        spoil(tmp_path / "core")
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, told)

    def test_what_padding_holds_does_not_matter(self, tmp_path: Path) -> None:
        def spoil(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[:-1], torch.ones_like(rows[-1:])])

        tensors = write_folder(tmp_path / "hf", "qwen2")
        assert to_core(tmp_path / "hf", tmp_path / "core", "--tensor-parallel", "2") == 0
        change(tmp_path / "core" / "tp_01_pp_00.safetensors", "output_layer.weight", spoil)
        assert to_hf(tmp_path / "core", tmp_path / "back") == 0
        assert same(load_folder(tmp_path / "back"), tensors)
