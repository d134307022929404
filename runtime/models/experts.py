"""The MLP of a mixture of experts, all experts at once. Tokens are sorted by expert, so that each expert multiplies only its
own tokens, and everything else is one operation over all tokens. Plain torch, with gradients.

m tokens, each with k of E experts; H hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Weights = torch.Tensor | Sequence[torch.Tensor]
"""[E, out, in]; or E tensors of [out, in]; or of each expert several, which make the [out, in] one below the other."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the experts' outputs [n, H] from rows [n, H], sorted by expert, their experts int64 [n], and each expert's number of
rows, int64 [E]."""

Routed = tuple[torch.Tensor, torch.Tensor]
"""For each token the weights and the numbers of its experts: [m, k] each."""

_grouped_mm: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None)  # missing in older versions of torch
_GROUPED = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}  # dtypes that grouped_mm supports
# Devices on which experts in matrices of their own are stacked for a grouped product. On a CPU it is a loop too, and took 0.96
# to 1.52 times as long as ours, forward and backward.
_STACKED = {"cuda"}
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
    normalized: bool = True,
) -> Routed:
    """Route as DeepSeek-V3 does (arXiv:2412.19437, section 2.1.2, equations 12 to 16). Scores are sigmoids of `logits` [m, E];
    `correction` [E] is added only for the choice. The groups with the largest sums of their two best experts are chosen, and
    the experts from them. Weights [m, k] are float32 scores, with `normalized` scaled to a sum of 1, times `scale`. `taken`: as
    in `route`."""
    scores = torch.sigmoid(logits.float())
    choice = scores.detach() + correction
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(groups_per_token, -1).indices
        left_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = choice.topk(per_token, -1).indices if taken is None else taken
    weights = scores.gather(1, chosen)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if normalized else weights) * scale, chosen


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

    def run(rows: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        inner = products(rows, gate_up, counts)
        made = products(gated(inner if biases is None else inner + F.embedding(expert, biases[0])), down, counts)
        return made if biases is None else made + F.embedding(expert, biases[1])

    return mixed(x, weights, chosen, len(down), run)


def mixed(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, count: int, run: Run) -> torch.Tensor:
    """Return what `mixture` does, of `count` experts that `run` computes."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token, counts = order // chosen.shape[1], torch.bincount(flat, minlength=count)
    made = run(F.embedding(token, x), flat[order], counts).to(x.dtype)
    weights = weights.to(x.dtype)
    if x.device.type not in _BAGS:
        return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order].unsqueeze(1))
    return F.embedding_bag(inverse(order).view(chosen.shape), made, per_sample_weights=weights, mode="sum")


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order`, int64 [n]."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def products(x: torch.Tensor, weights: Weights, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of `x`, sorted by expert, `counts` [E] for each expert, by the weights of their experts."""
    joined, kind = isinstance(weights, torch.Tensor), x.device.type
    if _grouped_mm is not None and len(x) and (joined or kind in _STACKED):
        rows = x.to(computed(x)) if kind in _STACKED else x
        if _is_grouped(rows, weights[0].shape[-2]):
            ends = counts.cumsum(0).to(torch.int32)
            if isinstance(weights, torch.Tensor) and not torch.is_grad_enabled():
                return _grouped_mm(rows, weights.transpose(1, 2), offs=ends)
            product: torch.Tensor = _Grouped.apply(rows, ends, *([weights] if joined else weights))
            return product
    per = len(weights) // len(counts)

    def whole(index: int) -> torch.Tensor:
        return weights[index] if per == 1 else torch.cat(tuple(weights[per * index : per * (index + 1)]))

    parts = [F.linear(part, whole(index)) for index, part in enumerate(x.split(counts.tolist())) if len(part)]
    return torch.cat(parts or [F.linear(x, whole(0))])


class _Grouped(torch.autograd.Function):
    """Grouped products of rows with the matrices of their experts. The matrices are stacked in each pass: between the passes
    there is no copy of them, which would be as large as all experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        assert _grouped_mm is not None
        ctx.save_for_backward(x, ends, *weights)
        return _grouped_mm(x, _stacked(weights, ends, x).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        assert _grouped_mm is not None
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = _grouped_mm(grad, _stacked(weights, ends, x), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *(None for _ in weights)
        found = _grouped_mm(grad.t(), x, offs=ends)
        found.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)  # kernels may leave it undefined
        parts = [found] if weights[0].ndim == 3 else found.flatten(0, 1).split([len(weight) for weight in weights])
        return of_x, None, *(part.to(weight.dtype) for part, weight in zip(parts, weights, strict=True))


def _stacked(weights: Sequence[torch.Tensor], ends: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the experts' matrices as one tensor [E, out, in], in the dtype of `x`."""
    if weights[0].ndim == 3:
        return weights[0].to(x.dtype)
    return torch.cat([weight.to(x.dtype) for weight in weights]).view(len(ends), -1, x.shape[1])


def computed(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products of `x` are computed."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_grouped(x: torch.Tensor, out: int) -> bool:
    """Return whether the grouped product supports such rows of `x` and [n, out], which must begin at multiples of 16 bytes."""
    fit = all(size * x.itemsize % 16 == 0 for size in (x.shape[1], out))
    return fit and x.dtype in _GROUPED.get(x.device.type, ())


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
            module.forward = partial(_block, module)


def _block(block: Any, hidden_states: torch.Tensor) -> Any:
    """Run the block, and return what transformers' does. Blocks with shared experts, of DeepSeek-V3 and GLM-4.5, have corrected
    scores, and a router that computes in float32."""
    gate, experts, is_corrected = block.gate, block.experts, hasattr(block, "shared_experts")
    x = hidden_states.flatten(0, -2)
    if is_corrected:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), gate.weight.float())
        sizes = gate.top_k, gate.n_group, gate.topk_group, gate.routed_scaling_factor
        bias, normalized = gate.e_score_correction_bias, gate.norm_topk_prob
        choose = partial(route_corrected, logits, bias, *sizes, normalized=normalized)
    else:
        logits = gate(x)
        choose = partial(route, logits, block.top_k, getattr(block, "norm_topk_prob", True))
    routing: Routed = block.watch.through(logits, choose)
    if not isinstance(experts, nn.ModuleList):
        made = experts(x, *routing)  # spread over ranks
    elif _are_plain(experts):
        made = mixture(x, *routing, *matrices(experts))
    else:
        made = mixed(x, *routing, len(experts), partial(_one_by_one, experts))
    made = made.view_as(hidden_states)
    return made + block.shared_experts(hidden_states) if is_corrected else (made, logits)


def _joined_block(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a block of gpt-oss, whose experts are joined tensors. Its second result is the weights, not the logits."""
    x, experts = hidden_states.flatten(0, -2), block.experts
    logits = F.linear(x, block.router.weight, block.router.bias)
    weights, chosen = block.watch.through(logits, partial(route, logits, block.router.top_k, True))
    gate_up, down = (each.transpose(1, 2) for each in (experts.gate_up_proj, experts.down_proj))
    if x.device.type not in _STACKED:
        gate_up, down = gate_up.unbind(), down.unbind()
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    made = mixture(x, weights, chosen, gate_up, down, biases, clamped_swiglu)
    return made.view_as(hidden_states), weights


def _are_plain(experts: Any) -> bool:
    """Return whether experts are three matrices each: no adapters."""
    parts = (part for expert in experts for part in expert.children())
    return all(type(part) is nn.Linear for part in parts if hasattr(part, "weight"))


def _one_by_one(experts: Any, rows: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Run experts with adapters, as a `Run` does."""
    return torch.cat([experts[index](part) for index, part in enumerate(rows.split(counts.tolist())) if len(part)])


def matrices(experts: Iterable[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return gate and up, and down, of each expert, as `Weights`."""
    gate_up, down = [], []
    for expert in experts:
        names = ("w1", "w3", "w2") if hasattr(expert, "w1") else ("gate_proj", "up_proj", "down_proj")
        gate, up, last = (getattr(expert, name).weight for name in names)
        gate_up += [gate, up]
        down.append(last)
    return gate_up, down
