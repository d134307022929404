"""DeepSeek-V3: what its config.json means, how it routes, and what a slot of the cache holds."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.models.experts import join_experts, route_corrected
from runtime.models.families import Layout, family_for
from runtime.models.families.family import dtype_of
from runtime.models.families.shape import ExpertShape
from runtime.models.hf_config import parse, read_config
from runtime.models.hf_weights import WeightFiles
from runtime.models.limits import kv_cache_bytes
from runtime.rollout.torch.decoder import Decoder, KVCache, kv_bytes
from runtime.rollout.torch.next_weights import NextWeights
from tests.closeness import assert_close
from tests.unit.family_cases import CONFIGS, make_family
from tests.unit.tiny_models import save_model

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
BASE = CONFIGS["deepseek_v3"]


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; must be 'sigmoid'"),
            ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; must be 'noaux_tc'"),
            ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
            ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
            ({"rope_interleave": False}, "rope_interleave False is not supported"),
            ({"attention_bias": True}, "attention_bias True is not supported"),
            ({"kv_lora_rank": None}, "kv_lora_rank is None; must be a positive integer"),
            ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; must be even"),
            ({"n_group": 3}, "topk_group 1 of n_group 3 for 4 n_routed_experts"),
            ({"topk_group": 2}, "topk_group 2 of n_group 1"),
            ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1; must be from 2 to the experts of topk_group groups (4)"),
            ({"n_group": 2, "num_experts_per_tok": 3}, "must be from 2 to the experts of topk_group groups (2)"),
            ({"n_routed_experts": 12, "n_group": 2, "num_experts_per_tok": 5}, "must be twice topk_group"),
            ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; must be a positive number"),
            ({"n_shared_experts": None}, "n_shared_experts is None"),
        ],
    )
    def test_what_has_no_counterpart_is_refused(self, changes: dict[str, Any], told: str) -> None:
        with pytest.raises(UserError, match=r"^config\.json: ") as raised:
            family_for({**BASE, **changes})
        assert told in str(raised.value)

    def test_down_projections_are_cut_too(self) -> None:
        assert Layout(tensor=8).faults(make_family("deepseek_v3", q_lora_rank=20, qk_rope_head_dim=10).shape) == [
            "tensor parallel is 8; must divide q_lora_rank (20)",
            "tensor parallel is 8; must divide kv_lora_rank and qk_rope_head_dim (26)",
        ]

    def test_without_a_rank_of_queries_these_are_projected_at_once(self) -> None:
        names = make_family("deepseek_v3", q_lora_rank=None).tensors()
        assert names["model.layers.0.self_attn.q_proj.weight"] == (8 * 20, 32)
        assert not any("q_a" in name or "q_b" in name for name in names)

    def test_all_layers_may_have_experts(self) -> None:
        for changes in ({"first_k_dense_replace": 0}, {"first_k_dense_replace": None}):
            config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
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
        config = parse({**BASE, "rope_scaling": scaling}, "here")
        assert config.score_scale == pytest.approx(scale)
        assert config.rope.amplitude == pytest.approx(1.0 if scaling is None or "mscale" in scaling else 0.1 * math.log(40) + 1)


def chosen_by_hand(scores: np.ndarray, correction: np.ndarray, shape: ExpertShape) -> tuple[dict[int, float], ...]:
    """By the paper, token by token in float64: expert to weight."""
    found = []
    for row in scores:
        corrected = row + correction
        size = shape.count // shape.groups
        worth = [sorted(corrected[group * size : (group + 1) * size])[-2:] for group in range(shape.groups)]
        groups = sorted(range(shape.groups), key=lambda group: -sum(worth[group]))[: shape.groups_per_token]
        allowed = [expert for expert in range(shape.count) if expert // size in groups]
        picked = sorted(allowed, key=lambda expert: -corrected[expert])[: shape.per_token]
        total = sum(row[expert] for expert in picked)
        found.append({expert: shape.scale * row[expert] / total for expert in picked})
    return tuple(found)


@pytest.mark.parametrize(("groups", "per_group"), [(1, 1), (4, 2), (8, 3)])
def test_experts_are_chosen_by_corrected_scores_and_weighed_by_their_own(groups: int, per_group: int) -> None:
    torch.manual_seed(groups)
    logits, correction = torch.randn(50, 24), torch.randn(24)
    shape = ExpertShape(
        count=24,
        intermediate_size=1,
        per_token=5,
        normalized=True,
        layers=frozenset(),
        groups=groups,
        groups_per_token=per_group,
        scale=2.5,
    )
    weights, chosen = route_corrected(logits, correction, shape)
    expected = chosen_by_hand(1 / (1 + np.exp(-logits.double().numpy())), correction.double().numpy(), shape)
    for row, picks, by_hand in zip(weights.tolist(), chosen.tolist(), expected, strict=True):
        assert set(picks) == by_hand.keys()
        assert_close(row, [by_hand[pick] for pick in picks], terms=10)


def moe(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "moe_intermediate_size": 6, "n_routed_experts": 16, "num_experts_per_tok": 4}
    block = DeepseekV3MoE(DeepseekV3Config(**sizes | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2} | options))
    torch.nn.init.normal_(block.gate.weight, std=0.5)
    torch.nn.init.normal_(block.gate.e_score_correction_bias, 0.6, 0.1)
    return block


def test_transformers_block_has_the_same_outputs_and_gradients() -> None:
    theirs, ours = moe(), moe()
    join_experts(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(1, 9, 8)
    found = []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        found.append({"out": out, "x": given.grad, **{name: each.grad for name, each in module.named_parameters()}})
    for name, expected in found[1].items():
        if expected is None:
            assert found[0][name] is None or not found[0][name].any(), name
        else:
            assert_close(found[0][name], expected, terms=2 * (8 + 12 + 4 + 9), what=name)


def test_weights_that_do_not_add_up_to_1_are_left_to_the_block() -> None:
    theirs, ours = moe(norm_topk_prob=False), moe(norm_topk_prob=False)
    join_experts(ours)
    x = torch.randn(1, 9, 8)
    assert torch.equal(ours(x), theirs(x))


def test_the_cache_holds_one_vector_a_token(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek_v3")
    config = read_config(tmp_path)
    cache = KVCache(config, 3, 10, CPU, torch.float32)
    assert cache.data.shape == (4, 1, 3, 1, 10, 16 + 8)
    raw = {"num_hidden_layers": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_attention_heads": 4, "hidden_size": 32}
    assert cache.data.nbytes == kv_bytes(config, 3, 10, torch.float32) == kv_cache_bytes(raw, 3, 10, 4)


def test_what_corrects_scores_stays_float32(tmp_path: Path) -> None:
    """In half precision too: of the decoder, and in what is published and exported."""
    model = save_model(tmp_path, "deepseek_v3")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    bias = model.state_dict()[name]
    decoder = Decoder.from_pretrained(tmp_path, CPU, torch.bfloat16)
    held = decoder.weights.layers[2].score_bias
    assert held is not None and torch.equal(held, bias)
    assert decoder.weights.layers[2].router is not None and decoder.weights.layers[2].router.dtype == torch.bfloat16
    policy = hf_policy.load_policy(str(tmp_path))
    assert torch.equal(hf_policy.fixed_tensors(policy)[name], bias)
    tensors = {**dict(policy.named_parameters()), **hf_policy.fixed_tensors(policy)}
    (tmp_path / "written").mkdir()
    hf_policy.write_model(tmp_path / "written", tensors, tensors.items(), 0, torch.bfloat16, str(tmp_path))
    written = Decoder.from_pretrained(tmp_path / "written", CPU, torch.bfloat16).weights.layers[2].score_bias
    assert written is not None and torch.equal(written, bias)


def test_weights_of_another_dtype_are_copied_over_those_in_use(tmp_path: Path) -> None:
    """Also where those that are float32 in any case come among them."""
    save_model(tmp_path, "deepseek_v3")
    decoder = Decoder.from_pretrained(tmp_path, CPU, torch.float32)
    sent = {name: each.to(dtype_of(name, torch.bfloat16)) for name, each in dict(WeightFiles(tmp_path)).items()}
    waiting = NextWeights(decoder.weights, "")
    asyncio.run(waiting.stage(sent))
    assert waiting.staged is sent
