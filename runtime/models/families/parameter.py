"""One parameter of megatron-core on one rank, and the Hugging Face tensors that make it.

All of megatron-core's layouts for these models are one operation with different numbers:

1. cut: of each Hugging Face tensor, the rank takes its block of `split` (0: rows, column-parallel layers; 1: columns,
   row-parallel ones; None: the whole, replicated). Vocabulary rows are first padded with zeros at the end.
2. fuse: the blocks are interleaved by `groups`. One group means concatenation: `[gate; up]`. Attention's q, k and v are
   interleaved by key-value head: `[q heads of the group; its k; its v]` for each group in turn.

The cut comes first: each half of `[gate; up]` is sharded on its own, and a rank never holds more than its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from runtime.errors import InvariantViolated, UserError

if TYPE_CHECKING:
    import torch


class Sliceable(Protocol):
    """A torch.Tensor, or a reader of a part of one in a file, such as `safetensors.safe_open(...).get_slice(name)`."""

    def __getitem__(self, index: Any) -> Any: ...


class SourceTensor(msgspec.Struct, frozen=True):
    """The name and whole shape of a Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter as one rank of a layout holds it. `from_hf` makes it from Hugging Face tensors; `to_hf` makes these again
    from the pieces of the tensor-parallel ranks."""

    name: str  # megatron-core's on this rank: layers and experts count from 0 on each pipeline stage and expert rank
    sources: tuple[SourceTensor, ...]
    split: int | None  # dimension of the sources that tensor parallelism cuts; None: every tensor rank holds the same
    groups: int = 1  # groups on this rank by which the sources are interleaved
    tensor: int = 1  # ranks of tensor parallelism
    tensor_rank: int = 0
    padded: int = 0  # number of rows of sources[0] after padding, before the cut; 0: no padding
    expert: bool = False  # part of one expert: only one expert rank holds it; otherwise all do
    copy: bool = False  # copy of a parameter of another stage (tied embeddings): is loaded, but not exported

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on this rank."""
        blocks = [self.block_shape(source) for source in self.sources]
        return (sum(block[0] for block in blocks), *blocks[0][1:])

    @property
    def pieces(self) -> int:
        """Number of tensor ranks' pieces that `to_hf` takes: all, or one if they hold the same."""
        return 1 if self.split is None else self.tensor

    def from_hf(self, read: Callable[[str], Sliceable]) -> torch.Tensor:
        """Return this rank's piece. Of each source that `read` returns by name, only the rank's part is taken. The sources
        must have the declared shapes (`Family.require_tensors`). The piece has their dtype, and may share memory with the
        sources. Raises UserError if the sources have several dtypes."""
        import torch

        blocks: list[torch.Tensor] = [self._cut(source, read(source.name)) for source in self.sources]
        if len({block.dtype for block in blocks}) > 1:
            dtypes = ", ".join(f"{source.name} {block.dtype}" for source, block in zip(self.sources, blocks, strict=True))
            raise UserError(f"{self.name}: its tensors are of several dtypes ({dtypes})")
        if len(blocks) == 1:
            return blocks[0]
        grouped = [block.unflatten(0, (self.groups, -1)) for block in blocks]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_hf(self, pieces: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the sources, whole, by name, from the pieces of tensor ranks 0, 1, ...: `self.pieces` of them. They may share
        memory with the pieces. Raises InvariantViolated if number or shape of the pieces differ."""
        import torch

        if len(pieces) != self.pieces or any(tuple(piece.shape) != self.shape for piece in pieces):
            found = ", ".join(str(list(piece.shape)) for piece in pieces)
            raise InvariantViolated(f"{self.name}: needs {self.pieces} pieces of {list(self.shape)}, found {found}")
        of_ranks = [self._parted(piece) for piece in pieces]
        for source, blocks in zip(self.sources, zip(*of_ranks, strict=True), strict=True):
            whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=self.split or 0)
            yield source.name, whole[: source.shape[0]] if self.padded else whole

    def blocks(self, piece: torch.Tensor) -> Iterator[tuple[SourceTensor, tuple[slice, ...], torch.Tensor]]:
        """Yield this rank's block of each source: `source[index] == block`, without the padding."""
        for source, block in zip(self.sources, self._parted(piece), strict=True):
            index = self._index(source)
            yield source, index, block[: index[0].stop - index[0].start] if self.padded else block

    def block_shape(self, source: SourceTensor) -> tuple[int, ...]:
        """Return the shape of this rank's block of a source, with the padding."""
        shape = list(source.shape)
        if self.padded:
            shape[0] = self.padded
        if self.split is not None:
            shape[self.split] //= self.tensor
        return tuple(shape)

    def _cut(self, source: SourceTensor, whole: Sliceable) -> torch.Tensor:
        """Return the rank's block of a source."""
        block: torch.Tensor = whole[self._index(source)]
        missing = self.block_shape(source)[0] - block.shape[0]
        if missing == 0:
            return block
        import torch

        return torch.cat([block, block.new_zeros(missing, *block.shape[1:])])

    def _index(self, source: SourceTensor) -> tuple[slice, ...]:
        """Return the slices of the rank's block within a source."""
        if self.split is None:
            return (slice(0, source.shape[0]),)
        size, end = self.block_shape(source)[self.split], source.shape[self.split]
        start = self.tensor_rank * size
        held = slice(min(start, end), min(start + size, end))
        return (held,) if self.split == 0 else (slice(0, source.shape[0]), held)

    def _parted(self, piece: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the rank's block of each source, taken from its piece."""
        if len(self.sources) == 1:
            yield piece
            return
        sizes = [self.block_shape(source)[0] // self.groups for source in self.sources]
        for block in piece.unflatten(0, (self.groups, -1)).split(sizes, dim=1):
            yield block.flatten(0, 1)
