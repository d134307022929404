"""`sluice convert` of Megatron-LM's own checkpoints: what cannot be is refused in a line, and leaves nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.family_cases import CONFIGS, write_folder
from tests.unit.test_convert import refused
from tests.unit.test_convert_classic import FILE, LAYER, change, ranks, to_hf, to_megatron
from tests.unit.test_torch_archive import Call

TRACKER = "latest_checkpointed_iteration.txt"


class TestRefusedToMegatron:
    @pytest.mark.parametrize(
        "options,told",
        [
            ("--tensor-parallel 3", "tensor parallel is 3; must divide attention heads (8)"),
            ("--layers-per-virtual-stage 1", "--layers-per-virtual-stage: is 1; needs --pipeline-parallel of at least 2"),
            ("--pipeline-parallel 2 --layers-per-virtual-stage 2", "--layers-per-virtual-stage: is 2; a multiple of it"),
            ("--noop-layers 0,6", "--noop-layers: are 0,6; must be different numbers from 0 to 5"),
            ("--noop-layers 1,1", "--noop-layers: are 1,1; must be different numbers from 0 to 5"),
            ("--noop-layers first", "--noop-layers: 'first' is not a list of numbers such as 9,10,9"),
            ("--noop-layers 1 --pipeline-parallel 2", "--noop-layers: are 1: 5 layers with them; must be a multiple of"),
            (
                "--tensor-parallel 4 --expert-tensor-parallel 2",
                "--expert-tensor-parallel: is 2; must be 1, or --tensor-para",
            ),
            ("--tensor-parallel 2 --expert-tensor-parallel 1", "--expert-tensor-parallel: is for models with experts"),
            ("--tensor-parallel 2 --moe-tp-extend-ep", "--moe-tp-extend-ep: is for models with experts"),
            ("--pipeline-parallel 2 --layers-per-virtual-stage 0", "--layers-per-virtual-stage: is 0; a multiple of it"),
            (
                "--pipeline-parallel 2 --layers-per-stage 1,3 --layers-per-virtual-stage 1",
                "not together with --layers-per-stage",
            ),
        ],
    )
    def test_layouts(self, options: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        assert to_megatron(tmp_path / "hf", tmp_path / "core", options) == 2
        refused(capsys, tmp_path, told)

    def test_a_target_that_exists(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        assert to_megatron(tmp_path / "hf", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "hf: exists; must be a new folder")


REWARD = {"rm_head.weight": torch.zeros(1, 32)}
NORM = f"{LAYER}.input_layernorm.weight"


def set_argument(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: setattr(state["args"], key, value)


def set_tensor(name: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["model"].update({name: by(state["model"][name])})


def add_tensors(state: dict[str, Any]) -> None:
    state["model"] |= {f"more.{number:02d}": torch.zeros(1) for number in range(12)}


def twice(depth: int) -> tuple[object, ...]:
    """A tuple that holds one twice, and so on."""
    found: tuple[object, ...] = (1,)
    for _ in range(depth):
        found = (found, found)
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


class TestRefusedToHf:
    def test_layers_with_gaps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(tmp_path / "hf", "qwen2-tied")
        assert to_megatron(tmp_path / "hf", tmp_path / "core", "--noop-layers 1") == 0
        change(tmp_path / "core", "mp_rank_00", set_argument("noop_layers", None))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "args.num_layers is 5; by config.json, num_hidden_layers 4, it is 4")
        change(tmp_path / "core", "mp_rank_00", set_argument("num_layers", 4))
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "has the layers 0, 2, 3, 4; must be numbered from 0 on")

    @pytest.mark.parametrize(
        "rank,by,told",
        [
            ("mp_rank_01_001", set_argument("num_layers", 5), "args.num_layers is 5, on another rank 4"),
            (
                "mp_rank_01_000",
                lambda state: state.update(iteration=7),
                "mp_rank_01_000/model_optim_rng.pt: iteration is 7, on ano",
            ),
            ("mp_rank_00_000", lambda state: state.update(checkpoint_version=2.0), "checkpoint_version is 2.0; must be 3.0"),
            (
                "mp_rank_01_000",
                lambda state: state.update(checkpoint_version=twice(9)),
                "checkpoint_version is a tuple; must be",
            ),
            ("mp_rank_01_000", lambda state: state.update(iteration=twice(9)), "iteration is a tuple; must be an integer"),
            ("mp_rank_01_000", set_argument("swiglu", twice(9)), "args.swiglu is a tuple; must be a boolean"),
            ("mp_rank_01_001", lambda state: state["model"].update({"a\nb": [1]}), "model has 'a\\nb', which is no name of a"),
            ("mp_rank_00_000", lambda state: state.pop("args"), "mp_rank_00_000/model_optim_rng.pt: has no args"),
            ("mp_rank_00_000", lambda state: state.pop("model"), "has no model; must have model, or model0, model1"),
            (
                "mp_rank_01_001",
                lambda state: state.update(model0=state.pop("model"), model1={}),
                "has 2 virtual stages, another rank 1",
            ),
            ("mp_rank_01_000", set_tensor(NORM, torch.neg), f"{NORM} differs from what another rank has"),
            (
                "mp_rank_00_001",
                set_tensor("output_layer.weight", torch.neg),
                "output_layer.weight differs from what another rank has",
            ),
            ("mp_rank_01_000", set_tensor(NORM, torch.Tensor.bfloat16), f"{NORM} is bfloat16, on another rank float32"),
            (
                "mp_rank_01_000",
                set_tensor(NORM, lambda tensor: tensor[:8]),
                f"1 tensors are of another shape: {NORM} [8] instead of [32]",
            ),
            ("mp_rank_01_001", lambda state: state["model"].pop(NORM), f"1 tensors are missing: {NORM}"),
            ("mp_rank_01_001", add_tensors, "12 tensors are too many: more.00, "),
            ("mp_rank_01_001", lambda state: state["model"].update(odd=[1]), "odd of model is no tensor"),
            ("mp_rank_00_000", lambda state: state["model"].pop(NORM.replace(".0.", ".1.")), "1 tensors are missing"),
            (
                "mp_rank_01_001",
                lambda state: state.update(opt=Call(os.system, "exit")),
                "its pickle wants posix.system, which no",
            ),
        ],
    )
    def test_ranks(
        self, rank: str, by: Callable[[dict[str, Any]], object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.make(tmp_path, capsys)
        change(tmp_path / "core", rank, by)
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, told)

    @pytest.mark.parametrize(
        "spoil,told",
        [
            (
                lambda core: (core / "release/mp_rank_01_001" / FILE).unlink(),
                "1 ranks' files are missing, of 2 x 2 x 1 by args: mp_ra",
            ),
            (lambda core: (core / "release/mp_rank_02_000").mkdir(), "mp_rank_02_000 is of no rank, of 2 x 2 x 1"),
            (
                lambda core: cut(core / "release/mp_rank_01_000" / FILE),
                "mp_rank_01_000/model_optim_rng.pt: is not a whole file",
            ),
            (
                lambda core: (core / TRACKER).unlink(),
                "core: has no latest_checkpointed_iteration.txt",
            ),
            (
                lambda core: (core / TRACKER).write_text("../.."),
                "is '../..'; must be the number of an",
            ),
            (
                lambda core: (core / TRACKER).write_text("7"),
                "names iter_0000007, of which there is no fold",
            ),
            (lambda core: (core / "layout.json").write_text("{}"), "has layout.json, which is for sluice convert mcore2hf"),
            (lambda core: (core / "trainer.json").write_text("{}"), "has trainer.json, which is for sluice convert mcore2hf"),
        ],
    )
    def test_folders(
        self, spoil: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.make(tmp_path, capsys)
        spoil(tmp_path / "core")
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, told)

    @pytest.mark.parametrize("tracked", [True, False])
    def test_a_distributed_checkpoint(self, tracked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "core" / ("iter_0000010" if tracked else "")
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"")
        if tracked:
            (tmp_path / "core" / "latest_checkpointed_iteration.txt").write_text("10")
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, "has .metadata: it is a distributed checkpoint", "sluice convert mcore2hf")

    @pytest.mark.parametrize(
        "config,told",
        [
            ({"rope_theta": 1e6}, "args.rotary_base is 10000.0; by config.json, rope_theta 1000000.0, it is 1000000.0"),
            ({"num_hidden_layers": 5}, "args.num_layers is 4; by config.json, num_hidden_layers 5, it is 5"),
            ({"num_key_value_heads": 8}, "args.num_query_groups is 4; by config.json, num_key_value_heads 8, it is 8"),
            (
                {"tie_word_embeddings": False},
                "args.untie_embeddings_and_output_weights is False; by config.json, tie_word_embeddings",
            ),
            ({"model_type": "llama"}, "args.add_qkv_bias is True; by config.json, model_type 'llama', it is False"),
            ({"vocab_size": 500}, "has 51 rows on each of 2 ranks; must be at least vocab_size 500"),
            ({"model_type": "gpt_oss"}, "must be one of llama, qwen2, qwen3, qwen3_moe"),
        ],
    )
    def test_another_config(
        self, config: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.make(tmp_path, capsys)
        (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIGS["qwen2-tied"] | config))
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, told)

    @pytest.mark.parametrize(
        "key,value,told",
        [
            ("noop_layers", "0,3", "args.num_layers is 4; by config.json, num_hidden_layers 4, it is 6"),
            ("schedules_method", "dualpipev", "args.schedules_method is 'dualpipev', which is not supported"),
            (
                "multi_latent_attention",
                True,
                "args.multi_latent_attention is True; by config.json, model_type 'qwen2', it is False",
            ),
            ("mtp_num_layers", 1, "args.mtp_num_layers is 1, which is not supported; must be 0"),
            (
                "tensor_model_parallel_size",
                4,
                "4 ranks' files are missing, of 4 x 2 x 1 by args: mp_rank_02_000/model_optim_rng.pt",
            ),
            ("tensor_model_parallel_size", 0, "args.tensor_model_parallel_size is 0; must be a positive integer"),
            ("expert_model_parallel_size", "two", "args.expert_model_parallel_size is 'two'; must be a positive integer"),
        ],
    )
    def test_arguments(self, key: str, value: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.make(tmp_path, capsys)
        for rank in ranks(tmp_path / "core"):
            change(tmp_path / "core", rank, set_argument(key, value))
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(capsys, tmp_path, told)

    def test_arguments_that_do_not_tell(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.make(tmp_path, capsys)
        for rank in ranks(tmp_path / "core"):
            change(tmp_path / "core", rank, set_argument("vocab_size", None))
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, "has no args.vocab_size; --hf-config DIR, the original Hugging Face folder, tells it")
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 0

    @pytest.mark.parametrize(
        "key,value,told",
        [
            ("moe_layer_freq", 0, "args.moe_layer_freq is 0; must be a positive integer, or a list of integers"),
            ("moe_layer_freq", [1], "args.moe_layer_freq has 1 entries; must have one for each of 4 layers"),
            ("rotary_base", "text", "args.rotary_base is 'text'; must be a positive number"),
            ("rotary_base", 10**400, "; must be a positive number"),
            ("num_layers", 10**12, "args.num_layers is 1000000000000; must be a positive integer, at most 10000"),
            ("num_experts", "eight", "args.num_experts is 'eight'; must be an integer from 0 to 10000"),
            ("hidden_size", 32.0, "args.hidden_size is 32.0; must be a positive integer"),
            ("vocab_size", [1], "args.vocab_size is a list; must be a positive integer"),
            ("norm_epsilon", float("nan"), "args.norm_epsilon is nan; must be a positive number"),
            ("noop_layers", {"0": 1}, "args.noop_layers is a dict; must be a text such as 0,3, or a list of integers"),
        ],
    )
    def test_arguments_of_another_type(
        self, key: str, value: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_folder(tmp_path / "hf", "qwen3_moe")
        assert to_megatron(tmp_path / "hf", tmp_path / "core") == 0
        change(tmp_path / "core", "mp_rank_00", set_argument(key, value))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, told)

    def test_sizes_that_the_files_cannot_have(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A few bytes may ask for a list of billions of ranks."""
        write_folder(tmp_path / "hf", "qwen2")
        assert to_megatron(tmp_path / "hf", tmp_path / "core") == 0
        for kind in ("tensor", "pipeline"):
            change(tmp_path / "core", "mp_rank_00", set_argument(f"{kind}_model_parallel_size", 200))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, "10000 or more ranks' files are missing, of 200 x 200 x 1 by args: mp_rank_00_000/model_opt")

    @pytest.mark.parametrize("bias", [torch.zeros(()), torch.zeros(1).expand(1 << 43), torch.zeros(2)])
    def test_a_reward_head_with_another_bias(
        self, bias: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_folder(tmp_path / "hf", "qwen2")
        assert to_megatron(tmp_path / "hf", tmp_path / "core") == 0
        change(tmp_path / "core", "mp_rank_00", lambda state: state["model"].update(REWARD, **{"rm_head.bias": bias}))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back") == 2
        refused(capsys, tmp_path, f"rm_head.bias has the shape {list(bias.shape)}; must be [1]")

    def test_expert_ranks_that_disagree(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(tmp_path / "hf", "qwen3_moe")
        assert to_megatron(tmp_path / "hf", tmp_path / "core", "--expert-parallel 2") == 0
        change(tmp_path / "core", "mp_rank_00_001", set_tensor(f"{LAYER}.self_attention.linear_qkv.weight", torch.neg))
        capsys.readouterr()
        assert to_hf(tmp_path / "core", tmp_path / "back", tmp_path / "hf") == 2
        refused(
            capsys, tmp_path, "mp_rank_00_001/model_optim_rng.pt: decoder.layers.0.self_attention.linear_qkv.weight differs"
        )

    def test_a_target_that_exists(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.make(tmp_path, capsys)
        assert to_hf(tmp_path / "core", tmp_path / "hf", tmp_path / "hf") == 2
        refused(capsys, tmp_path, "hf: exists; must be a new folder")

    def make(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_folder(folder / "hf", "qwen2-tied")
        assert to_megatron(folder / "hf", folder / "core", "--tensor-parallel 2 --pipeline-parallel 2") == 0
        capsys.readouterr()
