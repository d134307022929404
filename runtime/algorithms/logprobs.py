"""Log-probability of chosen tokens and entropy, at a temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / T)[token]` and `H = -Σ p log p`.

    logits [N, V], tokens int64 [N] -> log-probabilities [N], entropies [N]; half precision is computed in float32. Without
    `entropy_gradient` the entropies are detached, which saves two [N, V] buffers.
    """
    scaled = logits if logits.dtype.itemsize >= 4 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    logp = scaled.log_softmax(-1)
    spread = logp if entropy_gradient else logp.detach()
    return logp.gather(-1, tokens[:, None])[:, 0], -(spread.exp() * spread).sum(-1)
