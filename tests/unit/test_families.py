"""The mapping tables: what each rank holds is what megatron-core's layout says, and all ranks together give the model again. Of
DeepSeek-V3, also what its config.json means, how it routes, and what a slot of the cache holds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from runtime.errors import InvariantViolated, UserError
from runtime.models import hf_policy, tiny_model
from runtime.models.experts import join_experts
from runtime.models.families import Family, Layout, Parameter, family_for
from runtime.models.forward import dtype_of
from runtime.models.hf_folder import WeightFiles, parse, read_config
from runtime.models.limits import kv_cache_bytes
from runtime.rollout.torch.decoder import Decoder, KVCache, kv_bytes
from runtime.rollout.torch.engine import NextWeights
from tests.closeness import assert_close
from tests.unit.family_cases import CONFIGS, make_family, make_tensors
from tests.unit.tiny_models import saved

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
DEEPSEEK = CONFIGS["deepseek_v3"]

LAYOUTS = [
    *(Layout(tensor=t, pipeline=p, expert=e) for t, p, e in [(1, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2), (4, 2, 2), (2, 1, 2)]),
    Layout(tensor=2, pipeline=3, layers_per_stage=(1, 2, 1)),
    Layout(tensor=4, pipeline=2, layers_per_stage=(3, 1), make_vocab_size_divisible_by=16),
]


# Of the layers that have experts: what holds them, and the gate, up and down projection of each.
EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "glm4_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
CORRECTED = ("deepseek_v3", "glm4_moe")
DENSE = ("gate_proj", "up_proj", "down_proj")


def suits(case: str, layout: Layout) -> bool:
    return layout.expert == 1 or case in EXPERTS


CASES = [
    pytest.param(case, layout, id=f"{case}-t{layout.tensor}p{layout.pipeline}e{layout.expert}{layout.layers_per_stage or ''}")
    for case, layout in product(CONFIGS, LAYOUTS)
    if suits(case, layout)
]


def ranks(layout: Layout) -> Iterator[tuple[int, int, int]]:
    return product(range(layout.pipeline), range(layout.expert), range(layout.tensor))


def part(whole: torch.Tensor, dim: int, rank: int, of: int) -> torch.Tensor:
    assert whole.shape[dim] % of == 0
    return whole.chunk(of, dim)[rank]


def expected(case: str, tensors: Tensors, layout: Layout, pipeline: int, expert: int, tensor: int) -> Tensors:
    """What a rank of megatron-core holds, worked out from its documented layout head by head."""
    config, t = CONFIGS[case], layout.tensor
    per_stage = layout.layers_per_stage or (4 // layout.pipeline,) * layout.pipeline
    stages = [stage for stage, count in enumerate(per_stage) for _ in range(count)]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    found: Tensors = {}

    def vocabulary(name: str) -> torch.Tensor:
        rows = tensors[name]
        while rows.shape[0] % (t * layout.make_vocab_size_divisible_by):
            rows = torch.cat([rows, torch.zeros(1, rows.shape[1])])
        return part(rows, 0, tensor, t)

    def mlp(source: str, target: str, names: tuple[str, str, str] = DENSE) -> None:
        halves = [part(tensors[f"{source}.{half}.weight"], 0, tensor, t) for half in names[:2]]
        found[f"{target}.linear_fc1.weight"] = torch.cat(halves)
        found[f"{target}.linear_fc2.weight"] = part(tensors[f"{source}.{names[2]}.weight"], 1, tensor, t)

    def attention(source: str, target: str, kind: str) -> None:
        q, k, v = (tensors[f"{source}.{name}_proj.{kind}"] for name in "qkv")
        rows = []
        for group in range(tensor * kv_heads // t, (tensor + 1) * kv_heads // t):
            its_heads = range(group * heads // kv_heads, (group + 1) * heads // kv_heads)
            rows += [q[head * head_dim : (head + 1) * head_dim] for head in its_heads]
            rows += [whole[group * head_dim : (group + 1) * head_dim] for whole in (k, v)]
        found[f"{target}.linear_qkv.{kind}"] = torch.cat(rows)

    def latent(source: str, target: str) -> None:
        downs = {"q_down": "q_a_proj", "kv_down": "kv_a_proj_with_mqa"}
        for name, own in {**downs, "q_up": "q_b_proj", "kv_up": "kv_b_proj"}.items():
            found[f"{target}.linear_{name}_proj.weight"] = part(tensors[f"{source}.{own}.weight"], 0, tensor, t)
        for name in ("q", "kv"):
            found[f"{target}.{name}_layernorm.weight"] = tensors[f"{source}.{name}_a_layernorm.weight"]

    if pipeline == 0:
        found["embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    for layer in range(4):
        if stages[layer] != pipeline:
            continue
        source, target = f"model.layers.{layer}", f"decoder.layers.{layer - stages.index(pipeline)}"
        if case == "deepseek_v3":
            latent(f"{source}.self_attn", f"{target}.self_attention")
        else:
            attention(f"{source}.self_attn", f"{target}.self_attention", "weight")
        if case.startswith(("qwen2", "glm4")):
            attention(f"{source}.self_attn", f"{target}.self_attention", "bias")
        if case.startswith(("qwen3", "glm4")):
            for name in "qk":
                found[f"{target}.self_attention.{name}_layernorm.weight"] = tensors[f"{source}.self_attn.{name}_norm.weight"]
        output = part(tensors[f"{source}.self_attn.o_proj.weight"], 1, tensor, t)
        found[f"{target}.self_attention.linear_proj.weight"] = output
        found[f"{target}.input_layernorm.weight"] = tensors[f"{source}.input_layernorm.weight"]
        found[f"{target}.pre_mlp_layernorm.weight"] = tensors[f"{source}.post_attention_layernorm.weight"]
        if case in CORRECTED and layer:
            found[f"{target}.mlp.router.expert_bias"] = tensors[f"{source}.mlp.gate.e_score_correction_bias"]
            mlp(f"{source}.mlp.shared_experts", f"{target}.mlp.shared_experts")
        if case in EXPERTS and not (case in CORRECTED and layer == 0):
            block, names = EXPERTS[case]
            found[f"{target}.mlp.router.weight"] = tensors[f"{source}.{block}.gate.weight"]
            each = 4 // layout.expert
            for local in range(each):
                own = f"{source}.{block}.experts.{expert * each + local}"
                mlp(own, f"{target}.mlp.experts.local_experts.{local}", names)
        else:
            mlp(f"{source}.mlp", f"{target}.mlp")
    if pipeline == layout.pipeline - 1:
        found["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if case != "qwen2-tied":
            found["output_layer.weight"] = vocabulary("lm_head.weight")
        elif pipeline > 0:
            found["output_layer.weight"] = vocabulary("model.embed_tokens.weight")
    return found


def parameters(family: Family, layout: Layout, pipeline: int, expert: int, tensor: int) -> list[Parameter]:
    return family.parameters(layout, tensor_rank=tensor, pipeline_rank=pipeline, expert_rank=expert)


def gathered(family: Family, layout: Layout, held: dict[tuple[int, int, int], Tensors]) -> Tensors:
    """The model, from what every rank holds, as an export does it: no tensor comes twice."""
    found: Tensors = {}
    for pipeline, expert in product(range(layout.pipeline), range(layout.expert)):
        for parameter in parameters(family, layout, pipeline, expert, 0):
            if parameter.copy or (expert > 0 and not parameter.expert):
                continue
            pieces = [held[pipeline, expert, tensor][parameter.name] for tensor in range(parameter.pieces)]
            for name, whole in parameter.to_hf(pieces):
                assert name not in found
                found[name] = whole
    return found


def assert_same(left: Tensors, right: Tensors) -> None:
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("case,layout", CASES)
def test_each_rank_holds_its_share_and_all_together_the_model(case: str, layout: Layout) -> None:
    family = make_family(case)
    assert layout.faults(family.shape) == []
    tensors = make_tensors(family)
    held = {}
    for rank in ranks(layout):
        share = parameters(family, layout, *rank)
        held[rank] = {parameter.name: parameter.from_hf(tensors.__getitem__) for parameter in share}
        assert_same(held[rank], expected(case, tensors, layout, *rank))
        for parameter in share:
            for source, index, block in parameter.blocks(held[rank][parameter.name]):
                assert torch.equal(tensors[source.name][index], block)
        assert [parameter.shape for parameter in share] == [tuple(tensor.shape) for tensor in held[rank].values()]
    assert_same(gathered(family, layout, held), tensors)


def test_layers_without_experts_among_those_with() -> None:
    family = make_family("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    names = [parameter.name for parameter in family.parameters(Layout())]
    assert {name.split(".")[2] for name in names if "experts" in name} == {"1"}
    assert {name.split(".")[2] for name in names if name.endswith("mlp.linear_fc1.weight")} == {"0", "2", "3"}


def test_value_head_takes_the_place_of_the_language_models() -> None:
    family = make_family("qwen2-tied", value_head=True)
    tensors = make_tensors(family)
    last = family.parameters(Layout(tensor=2, pipeline=2), tensor_rank=1, pipeline_rank=1)[-1]
    assert (last.name, last.shape, last.pieces, last.copy) == ("output_layer.weight", (1, 32), 1, False)
    assert torch.equal(last.from_hf(tensors.__getitem__), tensors["score.weight"])
    assert "lm_head.weight" not in tensors


def test_only_the_ranks_part_is_read() -> None:
    class Recorder:
        def __init__(self, whole: torch.Tensor):
            self.whole = whole

        def __getitem__(self, index: Any) -> torch.Tensor:
            taken = self.whole[index]
            read.append(taken.numel() / self.whole.numel())
            return taken

    family = make_family("qwen2")
    tensors = make_tensors(family)
    for parameter in family.parameters(Layout(tensor=4), tensor_rank=2):
        read: list[float] = []
        parameter.from_hf(lambda name: Recorder(tensors[name]))
        assert len(read) == len(parameter.sources)
        assert max(read) <= (0.26 if parameter.split is not None else 1.0), parameter.name


class TestRefusals:
    @pytest.mark.parametrize(
        "layout,told",
        [
            (Layout(tensor=3), "tensor parallel is 3; must divide attention heads (8)"),
            (Layout(tensor=8), "tensor parallel is 8; must divide key-value heads (4)"),
            (Layout(pipeline=3), "pipeline parallel is 3; must divide the layers (4), or give layers per stage"),
            (Layout(pipeline=2, layers_per_stage=(1, 2, 1)), "as many numbers as pipeline parallel (2)"),
            (Layout(pipeline=2, layers_per_stage=(1, 2)), "positive and add up to the layers (4)"),
            (Layout(pipeline=2, layers_per_stage=(4, 0)), "positive and add up to the layers (4)"),
            (Layout(expert=3), "expert parallel is 3; must divide the experts of a layer (4)"),
            (Layout(tensor=0), "tensor parallel is 0; must be at least 1"),
        ],
    )
    def test_layouts_that_do_not_divide(self, layout: Layout, told: str) -> None:
        with pytest.raises(UserError) as raised:
            layout.require(make_family("qwen3_moe").shape)
        assert told in str(raised.value)

    @pytest.mark.parametrize(
        "layout,family,told",
        [
            (Layout(tensor=4), make_family("llama", intermediate_size=50), "must divide the intermediate size (50)"),
            (Layout(expert=2), make_family("llama"), "must be 1 for a model without experts"),
            (Layout(tensor=8), make_family("deepseek_v3", q_lora_rank=20), "must divide q_lora_rank (20)"),
            (
                Layout(tensor=4),
                make_family("deepseek_v3", qk_rope_head_dim=10),
                "must divide kv_lora_rank and qk_rope_head_dim (26)",
            ),
        ],
    )
    def test_what_else_does_not_divide(self, layout: Layout, family: Family, told: str) -> None:
        (fault,) = layout.faults(family.shape)
        assert fault.endswith(told)

    @pytest.mark.parametrize(
        "config,told",
        [
            ({"model_type": "gemma"}, "model_type 'gemma' has no mapping to megatron-core; must be one of llama, qwen2, qwen3"),
            ({**CONFIGS["llama"], "attention_bias": True}, "attention_bias True is not supported with megatron-core"),
            ({**CONFIGS["qwen2"], "use_sliding_window": True}, "use_sliding_window True is not supported"),
            ({**CONFIGS["qwen2"], "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
            ({**CONFIGS["qwen2"], "hidden_size": "wide"}, "hidden_size is 'wide'; must be a positive integer"),
            ({**CONFIGS["qwen2"], "num_key_value_heads": 3}, "8 is not a multiple of num_key_value_heads 3"),
            ({**CONFIGS["qwen3_moe"], "num_experts": None}, "num_experts is None"),
            ({**CONFIGS["qwen3_moe"], "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
            ({**CONFIGS["qwen3_moe"], "num_experts_per_tok": 5}, "num_experts_per_tok is 5; must be at most num_experts 4"),
            ({**CONFIGS["qwen3_moe"], "num_experts_per_tok": 1}, "num_experts_per_tok 1 with weights that add up to 1 is"),
            ({**CONFIGS["mixtral"], "num_local_experts": "some"}, "num_local_experts is 'some'; must be a positive integer"),
            ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; must be 'sigmoid'"),
            ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method 'greedy' is not supported; must be 'noaux_tc'"),
            ({**DEEPSEEK, "norm_topk_prob": False}, "norm_topk_prob False is not supported"),
            ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
            ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave False is not supported"),
            ({**DEEPSEEK, "attention_bias": True}, "attention_bias True is not supported"),
            ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank is None; must be a positive integer"),
            ({**DEEPSEEK, "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; must be even"),
            ({**DEEPSEEK, "n_group": 3}, "topk_group 1 of n_group 3 for 4 n_routed_experts"),
            ({**DEEPSEEK, "topk_group": 2}, "topk_group 2 of n_group 1"),
            ({**DEEPSEEK, "num_experts_per_tok": 1}, "must be from 2 to the experts of topk_group groups (4)"),
            ({**DEEPSEEK, "n_group": 2, "num_experts_per_tok": 3}, "must be from 2 to the experts of topk_group groups (2)"),
            ({**DEEPSEEK, "n_routed_experts": 12, "n_group": 2, "num_experts_per_tok": 5}, "must be twice topk_group"),
            ({**DEEPSEEK, "routed_scaling_factor": 0}, "routed_scaling_factor is 0; must be a positive number"),
            ({**DEEPSEEK, "n_shared_experts": None}, "n_shared_experts is None"),
        ],
    )
    def test_models_without_a_mapping(self, config: dict[str, Any], told: str) -> None:
        with pytest.raises(UserError, match=r"^model/config.json: ") as raised:
            family_for(config, "model/config.json")
        assert told in str(raised.value)

    @pytest.mark.parametrize(
        "name,missing",
        [
            ("gemma3_text", "the norms behind its attention and its MLP"),
            ("gpt_oss", "its attention's sinks and its experts' biases"),
        ],
    )
    def test_families_that_megatron_core_has_no_place_for(self, name: str, missing: str) -> None:
        """Their tables have names and shapes alone, which tiny models are made by."""
        config = tiny_model.described(f"tiny:{name}")
        assert config is not None
        with pytest.raises(UserError) as raised:
            family_for(config, "config.json")
        mapped = "llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, deepseek_v3, glm4_moe"
        told = f"config.json: model_type {name!r} has no mapping to megatron-core, for {missing}; must be one of {mapped}"
        assert str(raised.value) == told
        assert family_for(config, mapped=False).tensors()

    def test_tensors_of_another_model(self) -> None:
        family = make_family("qwen2")
        with pytest.raises(UserError) as raised:
            family.require_tensors(make_family("qwen3", hidden_size=64).tensors(), "weights")
        lines = str(raised.value).splitlines()
        assert lines[0].startswith("weights: 12 tensors are missing: model.layers.0.self_attn.q_proj.bias, ")
        assert lines[0].endswith(", model.layers.3.self_attn.q_proj.bias, ...")
        assert lines[1].startswith("weights: 8 tensors are unexpected: model.layers.0.self_attn.q_norm.weight, ")
        assert "model.embed_tokens.weight [101, 64] instead of [101, 32]" in lines[2]

    def test_heads_that_are_not_needed_may_be_there(self) -> None:
        plain = make_family("qwen2").tensors()
        make_family("qwen2-tied").require_tensors(plain, "weights")
        make_family("qwen2", value_head=True).require_tensors(plain, "weights")
        with pytest.raises(UserError, match="1 tensors are missing: lm_head"):
            make_family("qwen2").require_tensors(make_family("qwen2-tied").tensors(), "weights")

    def test_pieces_of_another_layout(self) -> None:
        family = make_family("qwen2")
        parameter = family.parameters(Layout(tensor=2))[0]
        with pytest.raises(InvariantViolated, match=r"needs 2 pieces of \[51, 32\], found \[51, 32\]$"):
            list(parameter.to_hf([torch.zeros(51, 32)]))

    def test_tensors_of_several_dtypes(self) -> None:
        family = make_family("qwen2")
        tensors = make_tensors(family)
        tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].bfloat16()
        parameter = next(entry for entry in family.parameters(Layout()) if "linear_qkv.weight" in entry.name)
        with pytest.raises(UserError, match="several dtypes"):
            parameter.from_hf(tensors.__getitem__)


# ------------------------------------------------------------------------------------------------ DeepSeek-V3


class TestConfig:
    def test_without_a_rank_of_queries_these_are_projected_at_once(self) -> None:
        names = make_family("deepseek_v3", q_lora_rank=None).tensors()
        assert names["model.layers.0.self_attn.q_proj.weight"] == (8 * 20, 32)
        assert not any("q_a" in name or "q_b" in name for name in names)

    def test_all_layers_may_have_experts(self) -> None:
        for changes in ({"first_k_dense_replace": 0}, {"first_k_dense_replace": None}):
            config = {key: value for key, value in {**DEEPSEEK, **changes}.items() if value is not None}
            shape = family_for(config).shape
            assert shape.experts is not None and shape.experts.layers == {0, 1, 2, 3}

    @pytest.mark.parametrize(
        ("scaling", "scale"),
        [
            (None, 20**-0.5),
            ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, 20**-0.5 * (0.1 * math.log(40) + 1) ** 2),
            ({"type": "yarn", "factor": 40}, 20**-0.5),
        ],
    )
    def test_yarns_temperature_is_of_all_scores(self, scaling: dict[str, Any] | None, scale: float) -> None:
        config = parse({**DEEPSEEK, "rope_scaling": scaling}, "here")
        assert config.score_scale == pytest.approx(scale)
        assert config.rope.amplitude == pytest.approx(1.0 if scaling is None or "mscale" in scaling else 0.1 * math.log(40) + 1)


def moe(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "moe_intermediate_size": 6, "n_routed_experts": 16, "num_experts_per_tok": 4}
    block = DeepseekV3MoE(DeepseekV3Config(**sizes | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2} | options))
    torch.nn.init.normal_(block.gate.weight, std=0.5)
    torch.nn.init.normal_(block.gate.e_score_correction_bias, 0.6, 0.1)
    return block


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_that_do_not_add_up_to_1_stay_so(normalized: bool) -> None:
    theirs, ours = moe(norm_topk_prob=normalized), moe(norm_topk_prob=normalized)
    join_experts(ours)
    x = torch.randn(1, 9, 8)
    assert_close(ours(x), theirs(x), terms=64)


def test_the_cache_holds_one_vector_a_token() -> None:
    config = read_config(saved("deepseek_v3")[0])
    cache = KVCache(config, 3, 10, CPU, torch.float32)
    assert cache.data.shape == (4, 1, 3, 1, 10, 16 + 8)
    raw = {"num_hidden_layers": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_attention_heads": 4, "hidden_size": 32}
    assert cache.data.nbytes == kv_bytes(config, 3, 10, torch.float32) == kv_cache_bytes(raw, 3, 10, 4)


def test_what_corrects_scores_stays_float32(tmp_path: Path) -> None:
    """In half precision too: of the decoder, and in what is published and exported."""
    folder, model = saved("deepseek_v3")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    bias = model.state_dict()[name]
    decoder = Decoder.from_pretrained(folder, CPU, torch.bfloat16)
    held = decoder.weights.layers[2].score_bias
    assert held is not None and torch.equal(held, bias)
    assert decoder.weights.layers[2].router is not None and decoder.weights.layers[2].router.dtype == torch.bfloat16
    policy = hf_policy.load_policy(str(folder))
    assert torch.equal(hf_policy.fixed_tensors(policy)[name], bias)
    tensors = {**dict(policy.named_parameters()), **hf_policy.fixed_tensors(policy)}
    (tmp_path / "written").mkdir()
    hf_policy.write_model(tmp_path / "written", tensors, tensors.items(), 0, torch.bfloat16, str(folder))
    written = Decoder.from_pretrained(tmp_path / "written", CPU, torch.bfloat16).weights.layers[2].score_bias
    assert written is not None and torch.equal(written, bias)


def test_weights_of_another_dtype_are_copied_over_those_in_use() -> None:
    """Also where those that are float32 in any case come among them."""
    folder, _ = saved("deepseek_v3")
    decoder = Decoder.from_pretrained(folder, CPU, torch.float32)
    sent = {name: each.to(dtype_of(name, torch.bfloat16)) for name, each in dict(WeightFiles(folder)).items()}
    waiting = NextWeights(decoder.weights, "")
    asyncio.run(waiting.stage(sent))
    assert waiting.staged is sent
