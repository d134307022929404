"""Which ranks have a file in a checkpoint of Megatron-LM's own layout, and what each of them holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from runtime.errors import UserError
from runtime.trainer.megatron.core_folder import CoreFile

Coordinates = tuple[int, int, int]  # tensor rank, pipeline stage (not a virtual one), expert rank


class ClassicGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of parallelism, and where experts are."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int  # over how many ranks an expert is cut: `tensor`, or 1
    extended: bool = False  # MindSpeed's moe_tp_extend_ep: tensor ranks have different experts, whole ones

    @property
    def whole_experts(self) -> bool:
        return self.tensor > 1 and (self.extended or self.expert_tensor == 1)

    @property
    def groups(self) -> int:
        """That the experts of a layer are spread over."""
        return self.expert * self.tensor if self.extended else self.expert

    @property
    def count(self) -> int:
        """Ranks that have a file."""
        return self.tensor * self.expert // self._step * self.pipeline

    def ranks(self) -> Iterator[Coordinates]:
        """Those that have a file. Where experts are not cut over them, tensor ranks are counted along with expert ranks: rank r
        is tensor rank r mod `tensor`, and expert rank r mod `expert`, which differ by multiples of what divides both."""
        for tensor in range(self.tensor):
            for expert in range(tensor % self._step, self.expert, self._step):
                yield from ((tensor, stage, expert) for stage in range(self.pipeline))

    @property
    def _step(self) -> int:
        return math.gcd(self.tensor, self.expert) if self.whole_experts and not self.extended else 1

    def name(self, rank: Coordinates) -> str:
        """Of the rank's folder."""
        tensor, stage, expert = rank
        name = f"mp_rank_{tensor:02d}"
        name += f"_{stage:03d}" if self.pipeline > 1 else ""
        return name + (f"_{expert:03d}" if self.expert > 1 else "")

    def group(self, rank: Coordinates) -> int:
        """Whose experts a rank has."""
        return rank[2] * self.tensor + rank[0] if self.extended else rank[2]

    def holds(self, rank: Coordinates, part: CoreFile) -> bool:
        """Whether a rank has a part of a layout with this grid's groups, of one of its own stages."""
        if part.expert is None:
            return part.tensor == rank[0]
        return part.expert == self.group(rank) and (self.whole_experts or part.tensor == rank[0])

    def told(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.expert}"


def grid_of(arguments: Mapping[str, Any], found: Coordinates, where: str) -> ClassicGrid:
    """By Megatron-LM's arguments; what they do not tell is as `found`. Raises UserError for sizes that are none."""
    sizes = []
    for kind, other in zip(("tensor", "pipeline", "expert"), found, strict=True):
        key = f"{kind}_model_parallel_size"
        size = other if arguments.get(key) is None else arguments[key]
        if not isinstance(size, int) or not 1 <= size <= 65536:
            raise UserError(f"{where}: args.{key} is {size!r}; must be a positive integer")
        sizes.append(size)
    tensor, pipeline, expert = sizes
    each = arguments.get("expert_tensor_parallel_size") or tensor
    extended = bool(arguments.get("moe_tp_extend_ep")) and tensor > 1
    sparse = bool(arguments.get("num_experts"))
    if sparse and each not in (1, tensor):
        raise UserError(f"{where}: args.expert_tensor_parallel_size is {each!r}; must be 1, or {tensor}, as for all else")
    return ClassicGrid(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=each if sparse and not extended else tensor,
        extended=extended and sparse,
    )
