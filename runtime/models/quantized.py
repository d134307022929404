"""Read weights stored in float8 by blocks as float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

A matrix `NAME` of float8_e4m3fn comes with `NAME_scale_inv`: one number for each block of the matrix, by which the block is
multiplied. Blocks at the lower and the right edge may be cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError
from runtime.models.families.parameter import Sliceable

if TYPE_CHECKING:
    import torch

SCALES = "_scale_inv"
KEY = "quantization_config"
STORED = "float8_e4m3fn"

Blocks = tuple[int, int]  # rows and columns of a block


def blocks_of(config: Mapping[str, Any], where: str) -> Blocks | None:
    """Return the block size of a model's weights, by its config.json; None: not quantised. `where` is the file's name in
    messages. Raises UserError for another kind of quantisation."""
    if fault := fault_of(config):
        raise UserError(f"{where}: {fault}")
    found = config.get(KEY)
    return None if found is None else (found["weight_block_size"][0], found["weight_block_size"][1])


def fault_of(config: Mapping[str, Any]) -> str:
    """Return what is unsupported about the quantisation of a config.json; "" if nothing is, or it has none."""
    found = config.get(KEY)
    if found is None:
        return ""
    given: dict[str, Any] = found if isinstance(found, dict) else {}
    method, number, size = given.get("quant_method"), given.get("fmt", "e4m3"), given.get("weight_block_size")
    sound = isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
    if (method, number) == ("fp8", "e4m3") and sound:
        return ""
    return (
        f"{KEY}: quant_method {method!r}, fmt {number!r}, weight_block_size {size!r} is not supported; must be fp8, e4m3 and "
        "two positive integers, such as [128, 128], or the weights not quantised"
    )


def scales_of(name: str, shapes: Mapping[str, tuple[int, ...]], blocks: Blocks, where: str) -> str:
    """Return the name of the scales of the quantised matrix `name`. Raises UserError unless `shapes` has one per block."""
    scales, size = name + SCALES, shapes[name]
    needed = tuple(-(-length // block) for length, block in zip(size, blocks, strict=False))
    if shapes.get(scales) != needed or len(size) != 2:
        found = list(shapes[scales]) if scales in shapes else "missing"
        raise UserError(f"{where}: {name} is of {STORED}, and {scales} {found}; must be {list(needed)}")
    return scales


class Dequantized:
    """A quantised matrix with parts that are read as float32."""

    def __init__(self, stored: Sliceable, scales: Sliceable, shape: tuple[int, ...], blocks: Blocks):
        self._stored, self._scales, self._shape, self._blocks = stored, scales, shape, blocks

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        rows, columns = (*given, *(slice(None),) * (2 - len(given)))
        part: torch.Tensor = self._stored[rows, columns]
        spans = [each.indices(size)[:2] for each, size in zip((rows, columns), self._shape, strict=True)]
        held = tuple(slice(start // block, -(-stop // block)) for (start, stop), block in zip(spans, self._blocks, strict=True))
        factors: torch.Tensor = self._scales[held].float()
        for dimension, ((start, stop), block) in enumerate(zip(spans, self._blocks, strict=True)):
            factors = factors.repeat_interleave(block, dimension).narrow(dimension, start % block, max(0, stop - start))
        return part.float().mul_(factors)
