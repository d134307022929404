"""A mixture of experts computed at once is the one of experts one after the other: values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.models import experts
from runtime.models.experts import join_experts, mixture, route
from tests.closeness import BFLOAT16, assert_close

pytestmark = pytest.mark.numeric

HIDDEN, INNER = 8, 6


def one_after_the_other(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows = []
    for token, picks, shares in zip(x, chosen.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, share in zip(picks, shares, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            row = row + share * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture(params=["grouped", "grouped, odd", "apart", "apart, no bags"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "grouped" and experts._grouped_mm is None:
        pytest.skip("this torch has no grouped product")
    if request.param == "apart, no bags":  # as on accelerators
        monkeypatch.setattr(experts, "_BAGS", set())
    return request.param


@settings(max_examples=40)
@given(data=st.data(), tokens=st.integers(1, 12), count=st.integers(1, 6), normalized=st.booleans(), seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_one_expert_after_the_other(
    data: st.DataObject, tokens: int, count: int, normalized: bool, seed: int
):
    """In float64; experts without tokens are among them."""
    torch.manual_seed(seed)
    per_token = data.draw(st.integers(1, count))
    inputs = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((tokens, HIDDEN), (tokens, count), (count, 2 * INNER, HIDDEN), (count, HIDDEN, INNER))
    ]
    results = []
    for compute in (mixture, one_after_the_other):
        x, logits, gate_up, down = inputs
        weights = torch.softmax(logits, -1).topk(per_token).values
        weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
        out = compute(x, weights, logits.topk(per_token).indices, gate_up, down)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_computes_the_same(way: str, dtype: torch.dtype):
    torch.manual_seed(0)
    x, logits, inner = torch.randn(30, HIDDEN, dtype=dtype), torch.randn(30, 5), INNER if "odd" in way else 2 * INNER - 4
    gate_up, down = torch.randn(5, 2 * inner, HIDDEN, dtype=dtype), torch.randn(5, HIDDEN, inner, dtype=dtype)
    weights, chosen = route(logits, 2, normalized=True)
    expected = one_after_the_other(x.double(), weights.double(), chosen, gate_up.double(), down.double())
    given = (gate_up, down) if "grouped" in way else (list(gate_up), list(down))
    unit = {"unit": BFLOAT16} if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        assert_close(mixture(x, weights, chosen, *given), expected, terms=HIDDEN + inner + 2, **unit)
    assert_close(mixture(x, weights, chosen, *given), expected, terms=HIDDEN + inner + 2, **unit)


def block(**options: Any) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(1)
    shape = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 16, "num_experts_per_tok": 2}
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**shape | options)).double()


@pytest.mark.parametrize("normalized", [False, True])
def test_transformers_block_has_the_same_outputs_router_logits_and_gradients(normalized: bool):
    theirs, ours = block(norm_topk_prob=normalized), block(norm_topk_prob=normalized)
    join_experts(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)  # 18 picks of 16 experts: some have none
    found = []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        out, logits = module(given)
        (out.square().sum() + logits.square().sum()).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append({"out": out, "logits": logits, "x": given.grad, **gradients})
    assert any(gradient is None for gradient in found[1].values())
    for name, expected in found[1].items():
        if expected is None:
            assert found[0][name] is None or not found[0][name].any(), name
        else:
            torch.testing.assert_close(found[0][name], expected, rtol=1e-6, atol=1e-7, msg=name)  # weights are float32


def test_experts_are_computed_together(monkeypatch: pytest.MonkeyPatch):
    """Not by the block's own forward pass."""
    ours, called = block(), []
    join_experts(ours)
    monkeypatch.setattr(type(ours.experts[0]), "forward", lambda *_: called.append(1))
    ours(torch.randn(1, 4, HIDDEN, dtype=torch.float64))
    assert not called


def test_an_adapter_in_one_expert_is_heeded():
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    ours, theirs = block(), block()
    for module in (ours, theirs):
        old, module.experts[7].down_proj = module.experts[7].down_proj, Doubled(INNER, HIDDEN, bias=False).double()
        module.experts[7].down_proj.weight = old.weight
    join_experts(ours)
    x = torch.randn(1, 40, HIDDEN, dtype=torch.float64)
    assert torch.equal(ours(x)[0], theirs(x)[0])


def test_another_activation_is_left_to_the_block():
    ours, theirs = block(hidden_act="gelu"), block(hidden_act="gelu")
    join_experts(ours)
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    assert torch.equal(ours(x)[0], theirs(x)[0])


# ------------------------------------------------------------------------------------------------ other blocks of transformers


def mixtral_block() -> torch.nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(1)
    shape = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": 16, "num_experts_per_tok": 2}
    return MixtralSparseMoeBlock(MixtralConfig(**shape, router_jitter_noise=0.5)).double()


def gpt_oss_block() -> torch.nn.Module:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    torch.manual_seed(1)
    shape = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": 16, "num_experts_per_tok": 2}
    made = GptOssMLP(GptOssConfig(**shape)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=3.0)  # so that some gates and some of the others are clamped
    return made


@pytest.mark.parametrize("make", [mixtral_block, gpt_oss_block])
def test_other_blocks_have_the_same_outputs_and_gradients(make: Any):
    ours, theirs = make(), make().eval()  # without jitter
    theirs.load_state_dict(ours.state_dict())
    join_experts(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, found = torch.randn(1, 9, HIDDEN, dtype=torch.float64), []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        out = module(given)[0]
        out.square().sum().backward()
        found.append({"out": out, "x": given.grad, **{name: each.grad for name, each in module.named_parameters()}})
    for name, expected in found[1].items():
        if expected is None:
            assert found[0][name] is None or not found[0][name].any(), name
        else:
            assert_close(found[0][name], expected, terms=64, what=name)  # the weights of the experts are float32


def test_gpt_oss_clamps() -> None:
    """gate · σ(1.702 gate) · (other + 1), of at most 7, and of -7 to 7: in turn, one gate and one other."""
    found = experts.clamped_swiglu(torch.tensor([[9.0, 9.0, -9.0, -9.0, 1.0, 2.0]], dtype=torch.float64))
    sigma = [1 / (1 + math.exp(-1.702 * gate)) for gate in (7, -9, 1)]
    assert found.tolist() == [pytest.approx([7 * sigma[0] * 8, -9 * sigma[1] * -6, sigma[2] * 3])]
