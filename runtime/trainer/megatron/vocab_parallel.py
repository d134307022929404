"""Log-probability and entropy from logits whose vocabulary is spread over the ranks of a group; nobody sees a whole row.

With x the logits of one token, divided by the temperature, m their maximum, Z = Σ exp(x − m) and p = exp(x − m) / Z:
log p_t = x_t − m − log Z, H = m + log Z − Σ p x, ∂ log p_t / ∂x_j = [j = t] − p_j, ∂H / ∂x_j = −p_j (log p_j + H).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    *,
    group: dist.ProcessGroup,
    start: int,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `algorithms.losses.token_logprobs` computes, of the logits [N, v] of the tokens `start` … `start + v - 1`.

    tokens int64 [N] -> log-probabilities [N], entropies [N], on every rank of `group`; half precision is computed in float32.
    Two collectives in the forward pass and none in the backward one: the gradient is that of this rank's logits.
    """
    scaled = logits if logits.dtype.itemsize >= 4 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(scaled, tokens - start, group)
    logp, entropy = result
    return logp, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`local`: the tokens, counted from this rank's first."""
        size = logits.shape[1]
        largest = logits.amax(1) if size else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        mine = (local >= 0) & (local < size)
        index = torch.where(mine, local, 0)[:, None]
        chosen = torch.where(mine, shifted.gather(1, index)[:, 0], 0.0) if size else torch.zeros_like(largest)
        weights = shifted.exp()
        sums = torch.stack([chosen, weights.sum(1), (weights * shifted).sum(1)])
        dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(shifted.sub_(log_total[:, None]), index, mine, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of_logp, of_entropy = gradients
        logp, index, mine, entropy = ctx.saved_tensors
        out = logp.exp()
        out.mul_(-of_logp[:, None] - of_entropy[:, None] * (logp + entropy[:, None]))
        if logp.shape[1]:
            out.scatter_add_(1, index, torch.where(mine, of_logp, 0.0)[:, None])
        return out, None, None
