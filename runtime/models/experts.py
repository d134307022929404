"""The MLP of a mixture of experts, all experts at once: tokens are sorted by expert, so that each expert's products are of
its tokens alone, and all else is done to every token in one go. Plain torch, with gradients.

m tokens, each with k of E experts; H hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.models.families.shape import ExpertShape

Weights = torch.Tensor | Sequence[torch.Tensor]
"""[E, out, in], or E of [out, in]."""

Routed = tuple[torch.Tensor, torch.Tensor]
"""Of each token the weights of its experts, and which ones they are: [m, k] each."""

_grouped_mm: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None)  # which older versions of torch lack
_GROUPED = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}  # dtypes that it takes
_LIMIT, _STEEPNESS = 7.0, 1.702  # of gpt-oss's MLP
_BAGS = {"cpu"}  # devices on which embedding_bag is faster than index_add


def route(logits: torch.Tensor, per_token: int, normalized: bool, taken: torch.Tensor | None = None) -> Routed:
    """From the router's `logits` [m, E] each token's experts and their float32 weights, [m, k] each. The weights are those of a
    softmax over all experts, `normalized` to a sum of 1 or not. `taken` [m, k]: the experts, whatever the logits say."""
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    weights, chosen = scores.topk(per_token, -1) if taken is None else (scores.gather(1, taken), taken)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights), chosen


def route_corrected(
    logits: torch.Tensor, correction: torch.Tensor, shape: ExpertShape, taken: torch.Tensor | None = None
) -> Routed:
    """DeepSeek-V3's (arXiv:2412.19437, section 2.1.2, equations 12 to 16): scores are the sigmoids of `logits` [m, E]. By their
    sums with `correction` [E] the groups are chosen whose two best experts have the largest sum, and out of these the experts;
    weights are the scores alone, [m, k], float32, normalised and multiplied by `shape.scale`. `taken`: as of `route`."""
    scores = torch.sigmoid(logits.float())
    choice = scores.detach() + correction
    if shape.groups > 1:
        grouped = choice.unflatten(1, (shape.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(shape.groups_per_token, -1).indices
        left_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = choice.topk(shape.per_token, -1).indices if taken is None else taken
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.scale, chosen


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2 · I], first all gates, to [n, I] (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2 · I], gates and others in turn, to [n, I], as gpt-oss has it (arXiv:2508.10925)."""
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
    """[m, H] to the sum [m, H] of what each token's `chosen` experts [m, k] make of it, by `weights` [m, k].

    `gate_up` are E of [2 · I, H], `down` E of [H, I]; `biases` [E, 2 · I] and [E, H] are added to their products.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token, counts = order // chosen.shape[1], torch.bincount(flat, minlength=len(down))
    inner = _products(F.embedding(token, x), gate_up, counts)
    made = _products(gated(inner if biases is None else inner + F.embedding(flat[order], biases[0])), down, counts)
    made = (made if biases is None else made + F.embedding(flat[order], biases[1])).to(x.dtype)
    weights = weights.to(x.dtype)
    if x.device.type not in _BAGS:
        return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order].unsqueeze(1))
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    return F.embedding_bag(place.view(chosen.shape), made, per_sample_weights=weights, mode="sum")


def _products(x: torch.Tensor, weights: Weights, counts: torch.Tensor) -> torch.Tensor:
    """The rows of `x`, `counts` [E] of each expert one behind the other, by the weights of their experts."""
    if isinstance(weights, torch.Tensor) and _grouped_mm is not None and _is_grouped(x):
        return _grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, weights[index]) for index, part in enumerate(parts) if len(part)])


def _is_grouped(x: torch.Tensor) -> bool:
    """Whether the grouped product takes rows as these, which have to begin at multiples of 16 bytes."""
    return x.dtype in _GROUPED.get(x.device.type, ()) and x.shape[1] * x.itemsize % 16 == 0


_APART = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", "DeepseekV3MoE", "Glm4MoeMoE"}  # their experts are modules


class RouterWatch:
    """What the router of one block is told before a pass, and tells of it."""

    keeps = False  # whether it keeps the logits
    taken: torch.Tensor | None = None  # int64 [m, k]: the experts that tokens are given to; None: those that it chooses
    logits: torch.Tensor | None = None  # [m, E]
    chosen: torch.Tensor | None = None  # int64 [m, k], those that tokens were given to
    own: torch.Tensor | None = None  # and those that it would have chosen

    def through(self, logits: torch.Tensor, choose: Callable[..., Routed]) -> Routed:
        """`choose(taken=...)` makes of `logits` what `route` does."""
        weights, chosen = choose(taken=self.taken)
        with torch.no_grad():
            self.own = chosen if self.taken is None else choose()[1]
        self.chosen, self.logits = chosen, logits if self.keeps else None
        return weights, chosen


def join_experts(model: nn.Module) -> None:
    """Have transformers' blocks of experts, which go from one expert to the next, compute as `mixture`, each
    with a RouterWatch as its `watch`. Names stay."""
    module: Any
    for module in model.modules():
        kind = type(module).__name__
        if kind == "GptOssMLP":
            module.watch, module.forward = RouterWatch(), partial(_joined_block, module)
        elif kind in _APART and "SiLU" in type(module.experts[0].act_fn).__name__:
            module.watch, module.jitter_noise = RouterWatch(), 0.0  # Mixtral's; the policy must be the one that sampled
            module.forward = partial(_corrected_block if hasattr(module, "shared_experts") else _block, module, module.forward)


def _block(block: Any, apart: Callable[..., Any], hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's forward pass. `apart`: its own, one expert after the other, for experts that are more than three matrices:
    those with adapters."""
    if not _are_plain(block.experts):
        found: tuple[torch.Tensor, torch.Tensor] = apart(hidden_states)
        return found
    x = hidden_states.flatten(0, -2)
    logits = block.gate(x)
    routing: Routed = block.watch.through(logits, partial(route, logits, block.top_k, getattr(block, "norm_topk_prob", True)))
    return mixture(x, *routing, *_stacked(block.experts)).view_as(hidden_states), logits


def _corrected_block(block: Any, apart: Callable[..., Any], hidden_states: torch.Tensor) -> torch.Tensor:
    """The same of DeepSeek-V3's and GLM-4.5's, with corrected scores and shared experts. The router computes in float32."""
    gate = block.gate
    if not _are_plain(block.experts) or not gate.norm_topk_prob:
        found: torch.Tensor = apart(hidden_states)
        return found
    x = hidden_states.flatten(0, -2)
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.float(), gate.weight.float())
    shape = ExpertShape(
        count=gate.n_routed_experts,
        intermediate_size=block.config.moe_intermediate_size,
        per_token=gate.top_k,
        normalized=True,
        layers=frozenset(),
        groups=gate.n_group,
        groups_per_token=gate.topk_group,
        scale=gate.routed_scaling_factor,
    )
    routing: Routed = block.watch.through(logits, partial(route_corrected, logits, gate.e_score_correction_bias, shape))
    made: torch.Tensor = mixture(x, *routing, *_stacked(block.experts)).view_as(hidden_states)
    return made + block.shared_experts(hidden_states)


def _joined_block(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of gpt-oss's, whose experts are joined already, and which gives the weights for the logits."""
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
    """Gate and up, and down. Not as one tensor for one grouped product: the copy of all weights would be kept until the
    backward pass."""
    names = ("w1", "w3", "w2") if hasattr(experts[0], "w1") else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([getattr(expert, name).weight for expert in experts] for name in names)
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)], down
