"""Checks that the two folders of a conversion hold the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from runtime.errors import InvariantViolated, UserError
from runtime.models.families import Parameter
from runtime.models.families.parameter import Sliceable
from runtime.weights.plan import TensorSpec

AT_ONCE = 16 << 20  # bytes compared at once


class ParameterReader(Protocol):
    """Reads a rank's parameters by name."""

    @property
    def path(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def get(self, name: str) -> Sliceable: ...


def require_same_bits(
    pieces: Iterable[tuple[Parameter, ParameterReader]],
    read: Callable[[str], Sliceable],
    checked: Callable[[str, int], None],
) -> None:
    """Check that the blocks of every piece of every rank equal the Hugging Face tensors, bit for bit.

    Calls `checked` with the phase and the bytes of each piece. Raises UserError if ranks that should hold the same do not, and
    InvariantViolated for any other difference, since the conversion has not written such a piece.
    """
    for parameter, reader in pieces:
        if (wrong := _first_difference(parameter, reader, read)) is not None:
            where = f"{reader.path}: {parameter.name}"
            if parameter.copy or (parameter.split is None and parameter.tensor_rank > 0):
                raise UserError(f"{where} differs from another rank's part of {wrong}")
            raise InvariantViolated(f"{where} does not give {wrong} again")
        checked("checking", reader.specs[parameter.name].nbytes)


def _first_difference(parameter: Parameter, reader: ParameterReader, read: Callable[[str], Sliceable]) -> str | None:
    """Return the name of the first source that differs from the parameter's block."""
    for source, index, block in parameter.blocks(reader.get(parameter.name)[:]):
        step = max(1, AT_ONCE * block.shape[0] // max(1, block.nbytes))
        for start in range(0, block.shape[0], step):
            first = index[0].start + start
            part = (slice(first, min(first + step, index[0].stop)), *index[1:])
            if not _same_bits(block[start : start + step], read(source.name)[part]):
                return source.name
    return None


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and bits are equal. Equal bits of NaN are equal here."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
