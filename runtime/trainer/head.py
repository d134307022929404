"""From what the head of a language model takes to numbers of tokens, in chunks of these: logits of all tokens at once are never
in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from runtime.models.families.memory import CHUNK_ELEMENTS
from runtime.models.passes import exact_on_cpu

if TYPE_CHECKING:
    from runtime.trainer.micro_batch import MicroBatch

CPU_CHUNK_ELEMENTS = 1 << 24  # of one chunk on a CPU, which needs no large ones to be busy: 64 MiB
LEFT_OUT = -1e30  # a logit without probability: finite at any temperature, so that 0 times it is 0

PerToken = tuple[torch.Tensor, torch.Tensor]


def token_numbers(
    numbers: Callable[[torch.Tensor, torch.Tensor], PerToken],
    outputs: torch.Tensor,
    weight: torch.Tensor | None,
    width: int,
    batch: MicroBatch,
    start: int = 0,
) -> PerToken:
    """`numbers(logits, tokens)`, [N] each, of the trained tokens of `batch` and the logits that the head's `weight` [v, H]
    makes of `outputs` [N, H]. Without `weight` the outputs are the logits. These, whose first is that of token `start`, are
    `confined` to what each token was sampled from, and divided by a column "temperature" where there is one.

    `width`: the logits of a token, by which chunks are cut; of ranks that share a vocabulary the same. Where there are several
    chunks, each one's logits are computed again in the backward pass. Few tokens, or a small vocabulary, are one chunk, whose
    logits are kept.
    """
    temperature = batch.of_tokens("temperature") if "temperature" in batch.columns else None

    def of_chunk(logits: torch.Tensor, own: slice) -> PerToken:
        scaled = logits if temperature is None else logits.float() / temperature[own, None]
        kept = None if batch.kept is None else batch.kept[own]
        return numbers(confined(scaled, kept, start), batch.targets[own])

    if weight is not None:
        outputs, weight = exact_on_cpu(outputs, weight)
    size = max(1, (CPU_CHUNK_ELEMENTS if outputs.device.type == "cpu" else CHUNK_ELEMENTS) // max(1, width))
    if len(outputs) <= size:
        return of_chunk(_logits(outputs, weight), slice(None))
    found: PerToken = _InChunks.apply(outputs, weight, of_chunk, size)
    return found


def _logits(outputs: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return outputs if weight is None else F.linear(outputs, weight)


class _InChunks(torch.autograd.Function):
    """The gradient of the weight is added up in one buffer, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        weight: torch.Tensor | None,
        of_chunk: Callable[[torch.Tensor, slice], PerToken],
        size: int,
    ) -> PerToken:
        ctx.save_for_backward(outputs, weight)
        ctx.asked = of_chunk, size
        found = [of_chunk(_logits(outputs[own], weight), own) for own in _chunks(outputs, size)]
        logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        of_chunk, size = ctx.asked
        of_outputs, of_weight = torch.empty_like(outputs), None
        for own in _chunks(outputs, size):
            logits = _logits(outputs[own], weight).detach().requires_grad_()
            with torch.enable_grad():
                found = of_chunk(logits, own)
            asked = [(each, gradient[own]) for each, gradient in zip(found, gradients, strict=True) if each.requires_grad]
            (of_logits,) = torch.autograd.grad([each for each, _ in asked], logits, [gradient for _, gradient in asked])
            del logits, found, asked
            of_outputs[own] = of_logits if weight is None else of_logits @ weight
            if ctx.needs_input_grad[1]:
                if of_weight is None:
                    of_weight = torch.zeros_like(weight, dtype=torch.float32)
                if weight.dtype == torch.float32:
                    of_weight.addmm_(of_logits.T, outputs[own])
                else:
                    of_weight += of_logits.T @ outputs[own]
        return of_outputs, of_weight if of_weight is None else of_weight.to(weight.dtype), None, None


def _chunks(outputs: torch.Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, len(outputs), size)]


def confined(logits: torch.Tensor, kept: torch.Tensor | None, start: int = 0) -> torch.Tensor:
    """`logits` [N, v] of the vocabulary, or of its part from `start` on, with those of tokens that the sampler's filters left
    out so low that they have no probability, nor a gradient.

    `kept`: uint8 [N, bytes], a bit for each token of the vocabulary, the lowest of a byte first; None: all are there.
    """
    if kept is None:
        return logits
    width, first = logits.shape[1], start // 8
    bits = kept[:, first : -(-(start + width) // 8), None] >> torch.arange(8, dtype=torch.uint8, device=kept.device) & 1
    begin = start - 8 * first
    return logits.masked_fill(bits.flatten(1)[:, begin : begin + width] == 0, LEFT_OUT)
