"""The tensors of `sluice bench weight_sync`: so many MB of bfloat16 in 300 tensors of very different sizes. Pure."""

from __future__ import annotations

import random

from runtime.errors import UserError
from runtime.weights.plan import TensorSpec

TENSORS = 300
SPREAD = 1.25  # of the logarithm of a tensor's size: the largest is some 400 times the median, as an embedding is
SEED = 0


def read_sizes(text: str) -> tuple[int, ...]:
    """MB, separated by commas. Raises UserError."""
    sizes = []
    for part in text.split(","):
        if not (part.strip().isdecimal() and int(part) > 0):
            raise UserError(f"--sizes: {part.strip()!r} is not a whole number of MB, as in 64,512,2048")
        sizes.append(int(part))
    if len(set(sizes)) < len(sizes):
        raise UserError(f"--sizes: {text} names a size twice")
    return tuple(sizes)


def uneven(megabytes: int) -> tuple[TensorSpec, ...]:
    """`TENSORS` specs, bfloat16 [n], that make up exactly `megabytes` · 10⁶ bytes; the same for the same size."""
    drawn = random.Random(SEED)
    weights = [drawn.lognormvariate(0.0, SPREAD) for _ in range(TENSORS)]
    elements = megabytes * 1_000_000 // 2
    counts = [1 + int((elements - TENSORS) * weight / sum(weights)) for weight in weights]
    counts[-1] += elements - sum(counts)
    return tuple(TensorSpec(f"tensor.{index}", "bfloat16", (count,)) for index, count in enumerate(counts))
