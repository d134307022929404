"""The MLP of a mixture of experts, all experts at once. Tokens are sorted by expert, so that each expert multiplies only its
own tokens, and everything else is one operation over all tokens. Plain torch, with gradients.

m tokens, each with k of E experts; H hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Weights = torch.Tensor | Sequence[torch.Tensor]
"""[E, out, in], or E tensors of [out, in]."""

Routed = tuple[torch.Tensor, torch.Tensor]
"""For each token the weights and the numbers of its experts: [m, k] each."""

_grouped_mm: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None)  # missing in older versions of torch
_GROUPED = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}  # dtypes that grouped_mm supports
_LIMIT, _STEEPNESS = 7.0, 1.702  # of gpt-oss's MLP
_BAGS = {"cpu"}  # devices on which embedding_bag is faster than index_add


def route(logits: torch.Tensor, per_token: int, normalized: bool, taken: torch.Tensor | None = None) -> Routed:
    """Return each token's experts and their float32 weights, [m, k] each, from the router's `logits` [m, E]. The weights are a
    softmax over all experts, with `normalized` scaled to a sum of 1. `taken` [m, k]: use these experts instead."""
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    weights, chosen = scores.topk(per_token, -1) if taken is None else (scores.gather(1, taken), taken)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights), chosen


def route_corrected(
    logits: torch.Tensor,
    correction: torch.Tensor,
    per_token: int,
    groups: int,
    groups_per_token: int,
    scale: float,
    taken: torch.Tensor | None = None,
) -> Routed:
    """Route as DeepSeek-V3 does (arXiv:2412.19437, section 2.1.2, equations 12 to 16). Scores are sigmoids of `logits` [m, E];
    `correction` [E] is added only for the choice. The groups with the largest sums of their two best experts are chosen, and
    the experts from them. Weights [m, k] are float32 scores, normalised, times `scale`. `taken`: as in `route`."""
    scores = torch.sigmoid(logits.float())
    choice = scores.detach() + correction
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(groups_per_token, -1).indices
        left_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = choice.topk(per_token, -1).indices if taken is None else taken
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, chosen


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return [n, I] from [n, 2 · I], all gates first (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return [n, I] from [n, 2 · I], gates and ups in turn, as in gpt-oss (arXiv:2508.10925)."""
    gate, up = gate_up[:, ::2].clamp(max=_LIMIT), gate_up[:, 1::2].clamp(-_LIMIT, _LIMIT)
    return (up + 1) * (gate * torch.sigmoid(_STEEPNESS * gate))


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    gated: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """Return the outputs of each token's `chosen` experts [m, k], summed with `weights` [m, k]: [m, H] from `x` [m, H].
    `gate_up` are E of [2 · I, H], `down` E of [H, I]; `biases` [E, 2 · I] and [E, H] are added to the products."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token, counts = order // chosen.shape[1], torch.bincount(flat, minlength=len(down))
    inner = _products(F.embedding(token, x), gate_up, counts)
    made = _products(gated(inner if biases is None else inner + F.embedding(flat[order], biases[0])), down, counts)
    made = (made if biases is None else made + F.embedding(flat[order], biases[1])).to(x.dtype)
    weights = weights.to(x.dtype)
    if x.device.type not in _BAGS:
        return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order].unsqueeze(1))
    position = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    return F.embedding_bag(position.view(chosen.shape), made, per_sample_weights=weights, mode="sum")


def _products(x: torch.Tensor, weights: Weights, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of `x`, sorted by expert, `counts` [E] for each expert, by the weights of their experts."""
    if isinstance(weights, torch.Tensor) and _grouped_mm is not None and _is_grouped(x):
        return _grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, weights[index]) for index, part in enumerate(parts) if len(part)])


def _is_grouped(x: torch.Tensor) -> bool:
    """Return whether the grouped product supports such rows, which must begin at multiples of 16 bytes."""
    return x.dtype in _GROUPED.get(x.device.type, ()) and x.shape[1] * x.itemsize % 16 == 0


_APART = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", "DeepseekV3MoE", "Glm4MoeMoE"}  # each expert is a module


class RouterWatch:
    """Input and record of one block's router in a pass."""

    keeps = False  # whether it keeps the logits
    taken: torch.Tensor | None = None  # int64 [m, k]: the experts to use, set before a pass; None: the router chooses
    logits: torch.Tensor | None = None  # [m, E]
    chosen: torch.Tensor | None = None  # int64 [m, k], the experts that tokens went to
    own: torch.Tensor | None = None  # int64 [m, k], the experts that the router chose or would have chosen

    def through(self, logits: torch.Tensor, choose: Callable[..., Routed]) -> Routed:
        """Route by `choose(taken=...)`, which routes as `route` does, and record the choice."""
        weights, chosen = choose(taken=self.taken)
        with torch.no_grad():
            self.own = chosen if self.taken is None else choose()[1]
        self.chosen, self.logits = chosen, logits if self.keeps else None
        return weights, chosen


def join_experts(model: nn.Module) -> None:
    """Make transformers' blocks of experts, which loop over the experts, compute with `mixture`. Each block gets a RouterWatch
    as its `watch`. Names do not change."""
    module: Any
    for module in model.modules():
        kind = type(module).__name__
        if kind == "GptOssMLP":
            module.watch, module.forward = RouterWatch(), partial(_joined_block, module)
        elif kind in _APART and "SiLU" in type(module.experts[0].act_fn).__name__:
            module.watch, module.jitter_noise = RouterWatch(), 0.0  # Mixtral's noise would make it another policy
            module.forward = partial(_block, module, module.forward)


def _block(block: Any, apart: Callable[..., Any], hidden_states: torch.Tensor) -> Any:
    """Run the block, and return what it returns. `apart` is its own forward pass, one expert after the other. It is used if
    experts are more than three matrices: experts with adapters. Blocks with shared experts, of DeepSeek-V3 and GLM-4.5, have
    corrected scores, and a router that computes in float32."""
    gate, is_corrected = block.gate, hasattr(block, "shared_experts")
    if not _are_plain(block.experts) or (is_corrected and not gate.norm_topk_prob):
        return apart(hidden_states)
    x = hidden_states.flatten(0, -2)
    if is_corrected:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), gate.weight.float())
        sizes = gate.top_k, gate.n_group, gate.topk_group, gate.routed_scaling_factor
        choose = partial(route_corrected, logits, gate.e_score_correction_bias, *sizes)
    else:
        logits = gate(x)
        choose = partial(route, logits, block.top_k, getattr(block, "norm_topk_prob", True))
    routing: Routed = block.watch.through(logits, choose)
    made = mixture(x, *routing, *_stacked(block.experts)).view_as(hidden_states)
    return made + block.shared_experts(hidden_states) if is_corrected else (made, logits)


def _joined_block(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a block of gpt-oss, whose experts are joined tensors. Its second result is the weights, not the logits."""
    x, experts = hidden_states.flatten(0, -2), block.experts
    logits = F.linear(x, block.router.weight, block.router.bias)
    weights, chosen = block.watch.through(logits, partial(route, logits, block.router.top_k, True))
    gate_up, down = (each.transpose(1, 2).unbind() for each in (experts.gate_up_proj, experts.down_proj))
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    made = mixture(x, weights, chosen, gate_up, down, biases, clamped_swiglu)
    return made.view_as(hidden_states), weights


def _are_plain(experts: Any) -> bool:
    parts = (part for expert in experts for part in expert.children())
    return all(type(part) is nn.Linear for part in parts if hasattr(part, "weight"))


def _stacked(experts: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return gate and up, and down, of each expert. One tensor for a grouped product would keep a copy of all weights until the
    backward pass."""
    names = ("w1", "w3", "w2") if hasattr(experts[0], "w1") else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([getattr(expert, name).weight for expert in experts] for name in names)
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)], down
