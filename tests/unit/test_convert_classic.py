"""`sluice convert` between Hugging Face folders and Megatron-LM's own checkpoints: there and back the same, by any names; what
cannot be is refused in a line, and leaves nothing.
"""

from __future__ import annotations

import argparse
import collections
import filecmp
import io
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.family_cases import CONFIGS, session_folder, write_folder
from tests.unit.test_convert import Tensors, change_json, cut, load_folder, refused, same, sluice
from tests.unit.test_torch_archive import Call

FILE = "model_optim_rng.pt"
LAYER = "decoder.layers.0"


def to_megatron(source: Path, target: Path, options: str = "") -> int:
    return sluice("hf2megatron", "--in", source, "--out", target, *options.split())


def to_hf(source: Path, target: Path, config: Path | None = None) -> int:
    return sluice("megatron2hf", "--in", source, "--out", target, *(("--hf-config", config) if config else ()))


def ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """What each rank's file holds, by the rank's folder, loaded as Megatron-LM does it."""
    return {path.parent.name: torch.load(path, weights_only=False) for path in sorted(folder.glob(f"*/*/{FILE}"))}


def change(folder: Path, rank: str, by: Callable[[dict[str, Any]], object]) -> None:
    """Change one rank's file."""
    (path,) = folder.glob(f"*/{rank}/{FILE}")
    state = torch.load(path, weights_only=False)
    by(state)
    torch.save(state, path)


@cache
def _made(case: str, options: str) -> Path:
    folder = session_folder("megatron") / f"{case}{options}".replace(" ", "")
    write_folder(folder / "hf", case)
    assert to_megatron(folder / "hf", folder / "core", options) == 0
    return folder


def made(folder: Path, capsys: pytest.CaptureFixture[str], case: str, options: str = "") -> Path:
    """A checkpoint to spoil, beside the folder that it was converted from."""
    shutil.copytree(_made(case, options), folder, dirs_exist_ok=True)
    capsys.readouterr()
    return folder / "core"


# Each option with models of different kinds: with a tied head, layers without experts, shared experts, latent attention.
CASES = {
    "llama": ["--tensor-parallel 4 --pipeline-parallel 2 --layers-per-stage 1,3"],
    "mistral": [""],
    "qwen2": ["--tensor-parallel 2 --pipeline-parallel 2 --layers-per-virtual-stage 1 --make-vocab-size-divisible-by 64"],
    "qwen2-tied": [
        "--tensor-parallel 2 --pipeline-parallel 2",
        "--tensor-parallel 2 --pipeline-parallel 2 --layers-per-virtual-stage 1 --make-vocab-size-divisible-by 64",
        "--pipeline-parallel 2 --noop-layers 0,5",
    ],
    "qwen3": [
        "--tensor-parallel 2 --transformer-impl transformer_engine",
        "--pipeline-parallel 2 --noop-layers 1,3,6,7 --layers-per-virtual-stage 2",
    ],
    "qwen3_moe": [
        "--tensor-parallel 2 --transformer-impl transformer_engine",
        "--expert-parallel 2 --moe-grouped-gemm --transformer-impl transformer_engine",
        "--expert-parallel 2 --tensor-parallel 2 --expert-tensor-parallel 1",
        "--expert-parallel 2 --tensor-parallel 4 --expert-tensor-parallel 1 --moe-grouped-gemm",
        "--expert-parallel 2 --tensor-parallel 2 --moe-tp-extend-ep --moe-grouped-gemm",
    ],
    "mixtral": [
        "--expert-parallel 2 --tensor-parallel 2 --pipeline-parallel 2",
        "--expert-parallel 4 --pipeline-parallel 2 --layers-per-virtual-stage 1",
    ],
    "deepseek_v3": [
        "--tensor-parallel 2 --transformer-impl transformer_engine",
        "--pipeline-parallel 2 --noop-layers 1,3,6,7 --layers-per-virtual-stage 2",
        "--expert-parallel 2 --moe-grouped-gemm --transformer-impl transformer_engine",
        "--expert-parallel 4 --tensor-parallel 2 --expert-tensor-parallel 1 --pipeline-parallel 2",
        "--tensor-parallel 2 --pipeline-parallel 2 --layers-per-virtual-stage 1 --mindspeed-mla",
        "--expert-parallel 2 --tensor-parallel 2 --moe-grouped-gemm --mindspeed-mla",
        "--expert-parallel 2 --tensor-parallel 2 --moe-tp-extend-ep --moe-grouped-gemm --mindspeed-mla",
    ],
    "glm4_moe": [
        "--pipeline-parallel 2 --noop-layers 0,5",
        "--expert-parallel 4 --pipeline-parallel 2 --layers-per-virtual-stage 1",
        "--expert-parallel 2 --tensor-parallel 2 --moe-grouped-gemm",
    ],
}


@pytest.mark.parametrize("case,options", [(case, options) for case, several in CASES.items() for options in several])
def test_there_and_back_is_the_same(case: str, options: str, tmp_path: Path) -> None:
    """Bit for bit by tensors; and byte for byte by files, once a folder was written by the converter."""
    tensors = write_folder(tmp_path / "hf", case, torch.bfloat16)
    again = case in ("qwen2-tied", "mixtral")
    source = tmp_path / "hf"
    for number in range(1 + again):
        assert to_megatron(source, tmp_path / f"megatron-{number}", options) == 0
        assert to_hf(tmp_path / f"megatron-{number}", tmp_path / f"back-{number}", source) == 0
        source = tmp_path / f"back-{number}"
    assert same(load_folder(tmp_path / "back-0"), tensors)
    for name in ("config.json", "tokenizer.json"):
        assert filecmp.cmp(tmp_path / "hf" / name, source / name, shallow=False)
    assert filecmp.cmp(tmp_path / "back-0" / "model.safetensors", source / "model.safetensors", shallow=False)
    assert {path.name for path in source.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen2-tied", "qwen3", "qwen3_moe"])
def test_the_arguments_alone_describe_the_model(case: str, tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", case)
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--tensor-parallel 2") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    assert same(load_folder(tmp_path / "back"), tensors)
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: found[key] for key in CONFIGS[case] if key in found} == {k: v for k, v in CONFIGS[case].items() if k in found}
    assert CONFIGS[case].keys() - found.keys() == set()


@pytest.mark.parametrize(
    "case,told",
    [
        ("mistral", "args.window_size is (15, 0); needs --hf-config DIR, the original folder"),
        ("deepseek_v3", "args.multi_latent_attention is True; needs --hf-config DIR, the original folder"),
        ("glm4_moe", "args.rotary_percent is 0.5; needs --hf-config DIR, the original folder"),
        ("mixtral", "args.num_experts is 4 without qk_layernorm; needs --hf-config DIR"),
    ],
)
def test_families_that_the_arguments_do_not_tell(
    case: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "hf", case)
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 2
    assert told in capsys.readouterr().err


def test_what_the_arguments_do_not_tell_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    tensors = write_folder(tmp_path / "hf", "llama", rope_scaling=scaling)
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 2
    assert "args.use_rope_scaling is True; needs --hf-config DIR" in capsys.readouterr().err
    assert to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "hf") == 0
    assert same(load_folder(tmp_path / "back"), tensors)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert to_hf(tmp_path / "megatron", tmp_path / "other", tmp_path / "hf") == 2
    assert "args.use_rope_scaling is True; by config.json, rope_scaling None, it is False" in capsys.readouterr().err


def test_the_files_are_as_megatron_wants_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "qwen3_moe", torch.bfloat16)
    options = "--tensor-parallel 2 --pipeline-parallel 2 --expert-parallel 2 --make-vocab-size-divisible-by 8"
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", options) == 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = ranks(tmp_path / "megatron")
    assert list(found) == [f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in range(2) for p in range(2) for e in range(2)]
    state = found["mp_rank_01_000_001"]
    assert isinstance(state["args"], argparse.Namespace)
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 0)
    expected = (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
        | {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 16}
        | {"group_query_attention": True, "qk_layernorm": True, "add_qkv_bias": False, "padded_vocab_size": 112}
        | {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_router_pre_softmax": False}
        | {"params_dtype": torch.bfloat16, "rotary_base": 10000.0, "norm_epsilon": 1e-6, "swiglu": True}
    )
    assert {key: getattr(state["args"], key) for key in expected} == expected
    assert state["model"]["embedding.word_embeddings.weight"].shape == (56, 32)
    experts = [name for name in state["model"] if name.startswith(f"{LAYER}.mlp.experts.")]
    assert len(experts) == 4  # two of them, two matrices each
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state["model"].values())


def test_virtual_stages_follow_each_other_around_the_ranks(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", "qwen3")
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--pipeline-parallel 2 --layers-per-virtual-stage 1") == 0
    for layer, (rank, chunk) in enumerate([("000", 0), ("001", 0), ("000", 1), ("001", 1)]):
        stored = ranks(tmp_path / "megatron")[f"mp_rank_00_{rank}"][f"model{chunk}"]
        assert torch.equal(stored[f"{LAYER}.mlp.linear_fc2.weight"], tensors[f"model.layers.{layer}.mlp.down_proj.weight"])
        assert ("embedding.word_embeddings.weight" in stored, "output_layer.weight" in stored) == (layer == 0, layer == 3)


def test_layers_without_weights_are_counted(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "hf", "qwen3")
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--pipeline-parallel 2 --noop-layers 0,4") == 0
    found = ranks(tmp_path / "megatron")
    assert {state["args"].num_layers for state in found.values()} == {6}
    for rank, local, layer in (("000", 1, 0), ("000", 2, 1), ("001", 0, 2), ("001", 2, 3)):
        stored = found[f"mp_rank_00_{rank}"]["model"][f"decoder.layers.{local}.mlp.linear_fc2.weight"]
        assert torch.equal(stored, tensors[f"model.layers.{layer}.mlp.down_proj.weight"])


def test_where_whole_experts_are(tmp_path: Path) -> None:
    """As Megatron-LM and MindSpeed-LLM spread them: by counting ranks, or over the tensor ranks of an expert rank."""
    tensors = write_folder(tmp_path / "hf", "qwen3_moe")

    def held(options: str) -> dict[str, list[int]]:
        folder = tmp_path / options.replace(" ", "")
        assert to_megatron(tmp_path / "hf", folder, f"--expert-parallel 2 {options}") == 0
        wholes = [tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(4)]
        found: dict[str, list[int]] = {}
        for rank, state in ranks(folder).items():
            stored = [state["model"].get(f"{LAYER}.mlp.experts.local_experts.{local}.linear_fc2.weight") for local in range(2)]
            found[rank] = [[torch.equal(one, whole) for whole in wholes].index(True) for one in stored if one is not None]
        return found

    assert held("--tensor-parallel 2 --expert-tensor-parallel 1") == {"mp_rank_00_000": [0, 1], "mp_rank_01_001": [2, 3]}
    four = {f"mp_rank_{tensor:02d}_{tensor % 2:03d}": [0, 1] if tensor % 2 == 0 else [2, 3] for tensor in range(4)}
    assert held("--tensor-parallel 4 --expert-tensor-parallel 1") == four
    extended = {"mp_rank_00_000": [0], "mp_rank_01_000": [1], "mp_rank_00_001": [2], "mp_rank_01_001": [3]}
    assert held("--tensor-parallel 2 --moe-tp-extend-ep") == extended


class TestOtherWriters:
    def test_mindspeeds_converter(self, tmp_path: Path) -> None:
        """It writes protocol 4 of pickle, a defaultdict, an iteration, and Hugging Face's keys among the arguments."""
        tensors = write_folder(tmp_path / "hf", "qwen2", torch.bfloat16)
        assert to_megatron(tmp_path / "hf", tmp_path / "ours", "--tensor-parallel 2 --make-vocab-size-divisible-by 51") == 0
        for rank, state in ranks(tmp_path / "ours").items():
            path = tmp_path / "theirs" / "iter_0000001" / rank / FILE
            path.parent.mkdir(parents=True)
            args = argparse.Namespace(
                **CONFIGS["qwen2"] | {"num_layers": 4, "group_query_attention": False, "add_qkv_bias": True}
            )
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size = 2, 1, 1
            args.untie_embeddings_and_output_weights, args.normalization, args.swiglu = True, "RMSNorm", True
            theirs = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 1,
                "model": collections.defaultdict(dict, state["model"]),
            }
            torch.save(theirs, path, pickle_protocol=4)
        (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("1")
        assert to_hf(tmp_path / "theirs", tmp_path / "back", tmp_path / "hf") == 0
        assert same(load_folder(tmp_path / "back"), tensors)

    def test_what_modules_have_besides_their_weights_is_left(self, tmp_path: Path) -> None:
        def add(state: dict[str, Any]) -> None:
            state["model"][f"{LAYER}.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"state")
            state["model"][f"{LAYER}.self_attention.linear_proj._extra_state"] = torch.zeros(3)
            state["model"][f"{LAYER}.mlp.linear_fc1._extra_state"] = None
            state["model"]["rotary_pos_emb.inv_freq"] = torch.zeros(3)

        tensors = write_folder(tmp_path / "hf", "llama")
        assert to_megatron(tmp_path / "hf", tmp_path / "megatron") == 0
        change(tmp_path / "megatron", "mp_rank_00", add)
        (tmp_path / "megatron" / "release" / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"not read")
        assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
        assert same(load_folder(tmp_path / "back"), tensors)

    def test_transformer_engines_names(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "hf", "qwen3_moe", mlp_only_layers=[1])
        assert to_megatron(tmp_path / "hf", tmp_path / "local") == 0
        assert to_megatron(tmp_path / "hf", tmp_path / "te", "--transformer-impl transformer_engine --moe-grouped-gemm") == 0
        local, theirs = (ranks(tmp_path / name)["mp_rank_00"]["model"] for name in ("local", "te"))
        renamed = {
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "mlp.experts.local_experts.3.linear_fc1.weight": "mlp.experts.linear_fc1.weight3",
            "mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.linear_fc2.weight3",
            "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",  # before experts it stays
        }
        for own, other in renamed.items():
            assert torch.equal(theirs[f"{LAYER}.{other}"], local[f"{LAYER}.{own}"])
        single = "decoder.layers.1"
        assert torch.equal(theirs[f"{single}.mlp.linear_fc1.layer_norm_weight"], local[f"{single}.pre_mlp_layernorm.weight"])
        assert f"{single}.pre_mlp_layernorm.weight" not in theirs
        assert len(theirs) == len(local)

    def test_grouped_experts(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "hf", "qwen3_moe")
        assert to_megatron(tmp_path / "hf", tmp_path / "local", "--tensor-parallel 2") == 0
        assert to_megatron(tmp_path / "hf", tmp_path / "grouped", "--tensor-parallel 2 --moe-grouped-gemm") == 0
        local, theirs = (ranks(tmp_path / name)["mp_rank_01"]["model"] for name in ("local", "grouped"))
        for matrix, shape in ((1, (4, 32, 24)), (2, (4, 12, 32))):
            stacked = theirs[f"{LAYER}.mlp.experts.weight{matrix}"].view(shape)
            for expert in range(4):
                alone = local[f"{LAYER}.mlp.experts.local_experts.{expert}.linear_fc{matrix}.weight"]
                assert torch.equal(stacked[expert].t(), alone)


class TestValueHead:
    @pytest.mark.parametrize("head", ["rm_head", "output_layer"])
    def test_there_and_back(self, head: str, tmp_path: Path) -> None:
        tensors = write_folder(tmp_path / "hf", "qwen2-tied") | {"score.weight": torch.randn(1, 32)}
        save_file(tensors, tmp_path / "hf" / "model.safetensors")
        options = f"--value-head {head} --tensor-parallel 2 --pipeline-parallel 2"
        assert to_megatron(tmp_path / "hf", tmp_path / "megatron", options) == 0
        found = ranks(tmp_path / "megatron")["mp_rank_01_001"]["model"]
        if head == "rm_head":  # a row-parallel layer's, with a bias
            assert torch.equal(found["rm_head.weight"], tensors["score.weight"][:, 16:])
            assert torch.equal(found["rm_head.bias"], torch.zeros(1))
            assert "output_layer.weight" not in found
        else:
            assert torch.equal(found["output_layer.weight"], tensors["score.weight"])
        assert to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "hf") == 0
        assert same(load_folder(tmp_path / "back"), tensors)
        config = json.loads((tmp_path / "back" / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForSequenceClassification"]


def test_padding_is_cut_off(tmp_path: Path) -> None:
    """Whatever it holds: Megatron-LM trains it along."""

    def fill(state: dict[str, Any]) -> None:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            state["model"][name][101 - 64 :] = 7.0

    tensors: Tensors = write_folder(tmp_path / "hf", "qwen2")
    options = "--tensor-parallel 2 --make-vocab-size-divisible-by 64"
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", options) == 0
    change(tmp_path / "megatron", "mp_rank_01", fill)
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    assert same(load_file(tmp_path / "back" / "model.safetensors"), tensors)


def test_latent_attention_has_the_names_and_shapes_of_whoever_reads_it(tmp_path: Path) -> None:
    """Its down-projections are cut over tensor ranks, whole, or one; whole, all ranks have the same."""
    tensors = write_folder(tmp_path / "hf", "deepseek_v3")
    own = "model.layers.0.self_attn."
    downs = tensors[f"{own}q_a_proj.weight"], tensors[f"{own}kv_a_proj_with_mqa.weight"]
    found = {}
    for options in ("", "--transformer-impl transformer_engine", "--mindspeed-mla"):
        target = tmp_path / f"megatron{len(found)}"
        assert to_megatron(tmp_path / "hf", target, f"--tensor-parallel 2 {options}") == 0
        found[options] = [rank["model"] for rank in ranks(target).values()]
    name = f"{LAYER}.self_attention."
    cut, whole, joined = found.values()
    assert torch.equal(torch.cat([rank[f"{name}linear_q_down_proj.weight"] for rank in cut]), downs[0])
    for rank in whole:
        assert torch.equal(rank[f"{name}linear_kv_down_proj.weight"], downs[1])
        assert torch.equal(rank[f"{name}linear_kv_up_proj.layer_norm_weight"], tensors[f"{own}kv_a_layernorm.weight"])
        assert f"{LAYER}.input_layernorm.weight" in rank  # one with no matrix there
    for rank in joined:
        assert torch.equal(rank[f"{name}linear_qkv.weight"], torch.cat(downs))
        assert torch.equal(rank[f"{name}k_layernorm.weight"], tensors[f"{own}kv_a_layernorm.weight"])
    assert torch.equal(torch.cat([rank[f"{name}linear_qb.weight"] for rank in joined]), tensors[f"{own}q_b_proj.weight"])
    assert torch.equal(torch.cat([rank[f"{name}linear_kvb.weight"] for rank in joined]), tensors[f"{own}kv_b_proj.weight"])


def test_mindspeeds_names_are_for_ranks_of_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", "deepseek_v3", q_lora_rank=None)
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--mindspeed-mla") == 2
    refused(capsys, tmp_path, "--mindspeed-mla: is for latent attention with a q_lora_rank, and not with --transformer-impl")


# ------------------------------------------------------------------------------------------------ refused

TRACKER = "latest_checkpointed_iteration.txt"
NORM = f"{LAYER}.input_layernorm.weight"
TIED = ("qwen2-tied", "--tensor-parallel 2 --pipeline-parallel 2")
By = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "options,told",
    [
        ("--tensor-parallel 3", "tensor parallel is 3; must divide attention heads (8)"),
        ("--layers-per-virtual-stage 1", "--layers-per-virtual-stage: is 1; needs --pipeline-parallel of at least 2"),
        ("--pipeline-parallel 2 --layers-per-virtual-stage 2", "--layers-per-virtual-stage: is 2; a multiple of it"),
        ("--noop-layers 0,6", "--noop-layers: are 0,6; must be different numbers from 0 to 5"),
        ("--noop-layers first", "--noop-layers: 'first' is not a list of numbers such as 9,10,9"),
        ("--noop-layers 1 --pipeline-parallel 2", "--noop-layers: are 1: 5 layers with them; must be a multiple of"),
        ("--tensor-parallel 4 --expert-tensor-parallel 2", "--expert-tensor-parallel: is 2; must be 1, or --tensor-para"),
        ("--tensor-parallel 2 --expert-tensor-parallel 1", "--expert-tensor-parallel: is for models with experts"),
        ("--tensor-parallel 2 --moe-tp-extend-ep", "--moe-tp-extend-ep: is for models with experts"),
        ("--pipeline-parallel 2 --layers-per-stage 1,3 --layers-per-virtual-stage 1", "not together with --layers-per-stage"),
        ("--mindspeed-mla", "--mindspeed-mla: is for latent attention with a q_lora_rank, and not with --transformer-impl"),
    ],
)
def test_layouts_are_refused(options: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", "qwen2")
    assert to_megatron(tmp_path / "hf", tmp_path / "core", options) == 2
    refused(capsys, tmp_path, told)


def test_a_target_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = made(tmp_path, capsys, *TIED)
    for convert in (lambda: to_megatron(tmp_path / "hf", tmp_path / "hf"), lambda: to_hf(core, tmp_path / "hf")):
        assert convert() == 2
        refused(capsys, tmp_path, "hf: exists; must be a new folder")


def set_argument(key: str, value: object) -> By:
    return lambda state: setattr(state["args"], key, value)


def set_tensor(name: str, by: Callable[[torch.Tensor], torch.Tensor]) -> By:
    return lambda state: state["model"].update({name: by(state["model"][name])})


def put(**changes: object) -> By:
    return lambda state: state.update(changes)


def put_tensors(changes: dict[str, object]) -> By:
    return lambda state: state["model"].update(changes)


def twice(depth: int) -> tuple[object, ...]:
    """A tuple that holds one twice, and so on."""
    found: tuple[object, ...] = (1,)
    for _ in range(depth):
        found = (found, found)
    return found


RANKS: list[tuple[str, By, str]] = [
    ("01_001", set_argument("num_layers", 5), "args.num_layers is 5, on another rank 4"),
    ("01_000", put(iteration=7), "mp_rank_01_000/model_optim_rng.pt: iteration is 7, on ano"),
    ("00_000", put(checkpoint_version=2.0), "checkpoint_version is 2.0; must be 3.0"),
    ("01_000", put(checkpoint_version=twice(9)), "checkpoint_version is a tuple; must be"),
    ("01_001", put_tensors({"a\nb": [1]}), "model has 'a\\nb', which is no name of a"),
    ("00_000", lambda state: state.pop("args"), "mp_rank_00_000/model_optim_rng.pt: has no args"),
    ("00_000", lambda state: state.pop("model"), "has no model; must have model, or model0, model1"),
    ("01_001", lambda state: state.update(model0=state.pop("model"), model1={}), "has 2 virtual stages, another rank 1"),
    ("01_000", set_tensor(NORM, torch.neg), f"{NORM} differs from another rank's part"),
    ("00_001", set_tensor("output_layer.weight", torch.neg), "output_layer.weight differs from another rank's part"),
    ("01_000", set_tensor(NORM, torch.Tensor.bfloat16), f"{NORM} is bfloat16, on another rank float32"),
    ("01_000", set_tensor(NORM, lambda whole: whole[:8]), f"1 tensors are of another shape: {NORM} [8] instead of [32]"),
    ("01_001", lambda state: state["model"].pop(NORM), f"1 tensors are missing: {NORM}"),
    ("01_001", put_tensors({f"more.{n:02d}": torch.zeros(1) for n in range(12)}), "12 tensors are unexpected: more.00, "),
    ("01_001", put_tensors({"odd": [1]}), "odd of model is no tensor"),
    ("00_000", lambda state: state["model"].pop(NORM.replace(".0.", ".1.")), "1 tensors are missing"),
    ("01_001", put(opt=Call(os.system, "exit")), "its pickle wants posix.system, which no"),
]


def one(rank: str, by: By) -> Callable[[Path], object]:
    return lambda core: change(core, f"mp_rank_{rank}", by)


def argument(key: str, value: object) -> Callable[[Path], None]:
    """The same on every rank."""

    def spoil(core: Path) -> None:
        for rank in ranks(core):
            change(core, rank, set_argument(key, value))

    return spoil


def config(**changes: object) -> Callable[[Path], None]:
    """Of the folder that was converted."""
    return lambda core: change_json(core.parent / "hf" / "config.json", **changes)


FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda core: (core / "release/mp_rank_01_001" / FILE).unlink(), "1 ranks' files are missing, of 2 x 2 x 1 by args"),
    (lambda core: (core / "release/mp_rank_02_000").mkdir(), "mp_rank_02_000 is of no rank, of 2 x 2 x 1"),
    (lambda core: cut(core / "release/mp_rank_01_000" / FILE), "mp_rank_01_000/model_optim_rng.pt: is not a whole file"),
    (lambda core: (core / TRACKER).unlink(), "core: has no latest_checkpointed_iteration.txt"),
    (lambda core: (core / TRACKER).write_text("../.."), "is '../..'; must be the number of an"),
    (lambda core: (core / TRACKER).write_text("7"), "names iter_0000007, but there is no such folder"),
    (lambda core: (core / "layout.json").write_text("{}"), "has layout.json, which is for sluice convert mcore2hf"),
    (config(rope_theta=1e6), "args.rotary_base is 10000.0; by config.json, rope_theta 1000000.0, it is 1000000.0"),
    (config(model_type="llama"), "args.add_qkv_bias is True; by config.json, model_type 'llama', it is False"),
    (config(vocab_size=500), "has 51 rows on each of 2 ranks; must be at least vocab_size 500"),
    (argument("noop_layers", "0,3"), "args.num_layers is 4; by config.json, num_hidden_layers 4, it is 6"),
    (argument("schedules_method", "dualpipev"), "args.schedules_method is 'dualpipev', which is not supported"),
    (argument("multi_latent_attention", True), "args.multi_latent_attention is True; by config.json, model_type 'qwen2'"),
    (argument("mtp_num_layers", 1), "args.mtp_num_layers is 1, which is not supported; must be 0"),
    (argument("tensor_model_parallel_size", 4), "4 ranks' files are missing, of 4 x 2 x 1 by args: mp_rank_02_000"),
    (argument("expert_model_parallel_size", "two"), "args.expert_model_parallel_size is 'two'; must be a positive integer"),
]


def reward(bias: torch.Tensor) -> By:
    return put_tensors({"rm_head.weight": torch.zeros(1, 32), "rm_head.bias": bias})


def sizes(state: dict[str, Any]) -> None:
    state["args"].tensor_model_parallel_size = state["args"].pipeline_model_parallel_size = 200


MATRIX = f"{LAYER}.self_attention.linear_qkv.weight"


OTHERS: list[tuple[str, str, str, By, str]] = [
    ("qwen2", "", "00", reward(torch.zeros(1).expand(1 << 43)), f"rm_head.bias has the shape [{1 << 43}]; must be [1]"),
    ("qwen2", "", "00", reward(torch.full((1,), 0.5)), "rm_head.bias is [0.5]; must be 0"),
    # A few bytes may ask for a list of billions of ranks.
    ("qwen2", "", "00", sizes, "10000 or more ranks' files are missing, of 200 x 200 x 1 by args: mp_rank_00_000"),
    ("qwen3_moe", "--expert-parallel 2", "00_001", set_tensor(MATRIX, torch.neg), f"_001/{FILE}: {MATRIX} differs"),
    ("deepseek_v3", "--mindspeed-mla", "00", set_argument("mla_mm_split", True), "args.mla_mm_split is True, which is not"),
]


@pytest.mark.parametrize(
    "checkpoint,spoil,told",
    [
        *((TIED, one(rank, by), told) for rank, by, told in RANKS),
        *((TIED, spoil, told) for spoil, told in FOLDERS),
        *(((case, options), one(rank, by), told) for case, options, rank, by, told in OTHERS),
    ],
)
def test_checkpoints_are_refused(
    checkpoint: tuple[str, str], spoil: Callable[[Path], object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = made(tmp_path, capsys, *checkpoint)
    spoil(core)
    assert to_hf(core, tmp_path / "back", tmp_path / "hf") == 2
    refused(capsys, tmp_path, told)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_distributed_checkpoint_is_refused(tracked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "core" / ("iter_0000010" if tracked else "")
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    if tracked:
        (tmp_path / "core" / TRACKER).write_text("10")
    assert to_hf(tmp_path / "core", tmp_path / "back") == 2
    refused(capsys, tmp_path, "has .metadata: it is a distributed checkpoint", "sluice convert mcore2hf")


def test_layers_with_gaps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = made(tmp_path, capsys, "qwen2-tied", "--noop-layers 1")
    change(core, "mp_rank_00", set_argument("noop_layers", None))
    assert to_hf(core, tmp_path / "back", tmp_path / "hf") == 2
    refused(capsys, tmp_path, "args.num_layers is 5; by config.json, num_hidden_layers 4, it is 4")
    change(core, "mp_rank_00", set_argument("num_layers", 4))
    assert to_hf(core, tmp_path / "back", tmp_path / "hf") == 2
    refused(capsys, tmp_path, "has the layers 0, 2, 3, 4; must be numbered from 0 on")


def test_arguments_that_do_not_tell_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = made(tmp_path, capsys, *TIED)
    argument("vocab_size", None)(core)
    assert to_hf(core, tmp_path / "back") == 2
    refused(capsys, tmp_path, "has no args.vocab_size; needs --hf-config DIR, the original Hugging Face folder")
    assert to_hf(core, tmp_path / "back", tmp_path / "hf") == 0


@pytest.mark.parametrize(
    "key,value,told",
    [
        ("moe_layer_freq", 0, "args.moe_layer_freq is 0; must be a positive integer, or a list of integers"),
        ("moe_layer_freq", [1], "args.moe_layer_freq has 1 entries; must have one for each of 4 layers"),
        ("rotary_base", "text", "args.rotary_base is 'text'; must be a positive number"),
        ("rotary_base", 10**400, "; must be a positive number"),
        ("num_layers", 10**12, "args.num_layers is 1000000000000; must be a positive integer, at most 10000"),
        ("num_experts", "eight", "args.num_experts is 'eight'; must be an integer from 0 to 10000"),
        ("noop_layers", {"0": 1}, "args.noop_layers is a dict; must be a text such as 0,3, or a list of integers"),
    ],
)
def test_arguments_of_another_type_are_refused(
    key: str, value: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = made(tmp_path, capsys, "qwen3_moe")
    change(core, "mp_rank_00", set_argument(key, value))
    assert to_hf(core, tmp_path / "back") == 2
    refused(capsys, tmp_path, told)
