"""`sluice convert` between Hugging Face folders and Megatron-LM's own checkpoints: there and back the same, by any names."""

from __future__ import annotations

import argparse
import collections
import filecmp
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.family_cases import CONFIGS, write_folder
from tests.unit.test_convert import Tensors, load_folder, refused, same, sluice

FILE = "model_optim_rng.pt"
LAYER = "decoder.layers.0"
LAYOUTS = [
    "",
    "--tensor-parallel 2 --pipeline-parallel 2",
    "--tensor-parallel 4 --pipeline-parallel 2 --layers-per-stage 1,3",
    "--tensor-parallel 2 --pipeline-parallel 2 --layers-per-virtual-stage 1 --make-vocab-size-divisible-by 64",
    "--tensor-parallel 2 --transformer-impl transformer_engine",
    "--pipeline-parallel 2 --noop-layers 0,5",
    "--pipeline-parallel 2 --noop-layers 1,3,6,7 --layers-per-virtual-stage 2",
]
SPARSE = [
    "--expert-parallel 2 --tensor-parallel 2 --pipeline-parallel 2",
    "--expert-parallel 2 --tensor-parallel 2 --moe-grouped-gemm",
    "--expert-parallel 2 --moe-grouped-gemm --transformer-impl transformer_engine",
    "--expert-parallel 4 --pipeline-parallel 2 --layers-per-virtual-stage 1",
    "--expert-parallel 2 --tensor-parallel 2 --expert-tensor-parallel 1",
    "--expert-parallel 2 --tensor-parallel 4 --expert-tensor-parallel 1 --moe-grouped-gemm",
    "--expert-parallel 4 --tensor-parallel 2 --expert-tensor-parallel 1 --pipeline-parallel 2",
    "--expert-parallel 2 --tensor-parallel 2 --moe-tp-extend-ep --moe-grouped-gemm",
]


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


UNTOLD = ("mistral", "mixtral", "deepseek_v3", "glm4_moe")  # by the arguments
CASES = [
    (case, options)
    for case in CONFIGS
    for options in LAYOUTS + (SPARSE if case in ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe") else [])
]
CASES += [("deepseek_v3", f"{options} --mindspeed-mla") for options in (LAYOUTS[3], *SPARSE[:2], SPARSE[-1])]


@pytest.mark.parametrize("case,options", CASES)
def test_there_and_back_is_the_same(case: str, options: str, tmp_path: Path) -> None:
    """Bit for bit by tensors; and byte for byte by files, once a folder was written by the converter."""
    tensors = write_folder(tmp_path / "hf", case, torch.bfloat16)
    source = tmp_path / "hf"
    for number in range(2):
        assert to_megatron(source, tmp_path / f"megatron-{number}", options) == 0
        assert to_hf(tmp_path / f"megatron-{number}", tmp_path / f"back-{number}", source) == 0
        source = tmp_path / f"back-{number}"
    assert same(load_folder(tmp_path / "back-0"), tensors)
    for name in ("config.json", "tokenizer.json"):
        assert filecmp.cmp(tmp_path / "hf" / name, tmp_path / "back-1" / name, shallow=False)
    assert filecmp.cmp(tmp_path / "back-0" / "model.safetensors", tmp_path / "back-1" / "model.safetensors", shallow=False)
    assert {path.name for path in tmp_path.joinpath("back-1").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("case", [case for case in CONFIGS if case not in UNTOLD])
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
        ("mistral", "args.window_size is (15, 0); --hf-config DIR, the original folder, tells all of it"),
        ("deepseek_v3", "args.multi_latent_attention is True; --hf-config DIR, the original folder, tells all of it"),
        ("glm4_moe", "args.rotary_percent is 0.5; --hf-config DIR, the original folder, tells all of it"),
        ("mixtral", "args.num_experts is 4 without qk_layernorm; --hf-config DIR tells the family"),
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
    assert "args.use_rope_scaling is True; --hf-config DIR" in capsys.readouterr().err
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
    expected = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16,
        "group_query_attention": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "padded_vocab_size": 112,
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "params_dtype": torch.bfloat16,
        "rotary_base": 10000.0,
        "norm_epsilon": 1e-6,
        "swiglu": True,
    }
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

    def test_weights_that_lie_in_one_buffer(self, tmp_path: Path) -> None:
        """As those of a distributed optimizer do."""

        def join(state: dict[str, Any]) -> None:
            buffer = torch.cat([tensor.flatten() for tensor in state["model"].values()])
            parts = buffer.split([tensor.numel() for tensor in state["model"].values()])
            named = zip(state["model"].items(), parts, strict=True)
            state["model"] = {name: part.view(tensor.shape) for (name, tensor), part in named}

        tensors = write_folder(tmp_path / "hf", "qwen3")
        assert to_megatron(tmp_path / "hf", tmp_path / "megatron") == 0
        change(tmp_path / "megatron", "mp_rank_00", join)
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

    def test_a_bias_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        assert to_megatron(tmp_path / "hf", tmp_path / "core", "--value-head") == 0
        change(tmp_path / "core", "mp_rank_00", lambda state: state["model"]["rm_head.bias"].fill_(0.5))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "rm_head.bias is [0.5]; must be 0")


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


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_mindspeeds_names_are_for_ranks_of_queries(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", case, **({"q_lora_rank": None} if case == "deepseek_v3" else {}))
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--mindspeed-mla") == 2
    refused(capsys, tmp_path, "--mindspeed-mla: is for latent attention with a q_lora_rank, and not with --transformer-impl")


def test_projections_that_mindspeed_splits_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", "deepseek_v3")
    assert to_megatron(tmp_path / "hf", tmp_path / "megatron", "--mindspeed-mla") == 0
    change(tmp_path / "megatron", "mp_rank_00", lambda state: setattr(state["args"], "mla_mm_split", True))
    assert to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "hf") == 2
    assert "args.mla_mm_split is True, which is not supported; must be False" in capsys.readouterr().err
