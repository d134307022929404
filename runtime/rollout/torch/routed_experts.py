"""The MLP of a layer with a mixture of experts, where each token goes through some of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.models.families.shape import ExpertShape


def routed(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: ExpertShape
) -> torch.Tensor:
    """[m, H] to the weighted sum [m, H] of what each token's `experts.per_token` experts make of it.

    `router` [E, H]; `gate_up` [E · 2 · I, H] and `down` [E · H, I], one expert's after the other. The weights are those of a
    float32 softmax over all experts. Experts are computed one after the other, those without tokens not at all.
    """
    probabilities = torch.softmax(F.linear(x, router), -1, dtype=torch.float32)
    weights, chosen = probabilities.topk(experts.per_token, -1)  # [m, k] each
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(x.dtype)
    gates, downs = gate_up.view(experts.count, -1, x.shape[1]), down.view(experts.count, x.shape[1], -1)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert)
        gate, up = F.linear(x[rows], gates[expert]).chunk(2, 1)
        made = F.linear(F.silu(gate).mul_(up), downs[expert])
        out.index_add_(0, rows, made.mul_(weights[rows, place].unsqueeze(1)))
    return out
