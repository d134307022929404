"""Adapters as they travel, and what a rollout makes of them: its model folder's weights with the adapters in them.

An adapted matrix W [out, in] of the folder has two tensors: A [rank, in], named as W with `DOWN` behind, and B [out, rank],
with `UP`, which has the scale in it. The policy's matrix is W + B A (LoRA, arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from runtime.errors import InvalidMessage, UserError
from runtime.models.hf_weights import WeightFiles, fingerprint

DOWN, UP = ".lora_A", ".lora_B"


def are_adapters(names: Iterable[str]) -> bool:
    """Whether tensors of these names are adapters, and not a model's weights."""
    return any(name.endswith(UP) for name in names)


def base_of(names: Iterable[str], folder: str) -> str:
    """The fingerprint of what tensors of these names are added to, the weights of `folder`; "" where they are no adapters."""
    return fingerprint(folder) if are_adapters(names) else ""


def require_base(base: str, folder: str) -> None:
    """Raises UserError unless `folder` has the weights whose fingerprint `base` is."""
    if (found := fingerprint(folder)) != base:
        raise UserError(f"model.path: {folder!r} has other weights here ({found}) than where adapters are trained ({base})")


@torch.no_grad()
def merged(files: WeightFiles, adapters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's weights, one at a time, in the order of `files`: those that are adapted in float32, the others as the folder
    has them. The files are read anew, and lie in the system's cache as long as there is room: nobody holds a copy of the base.

    Raises InvalidMessage, before the first one, for adapters that do not fit.
    """
    _require_fit(files.shapes, adapters)
    for name, weight in files:
        if name + UP in adapters:
            weight = adapted(weight, adapters[name + UP].float(), adapters[name + DOWN].float())
        yield name, weight


def adapted(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """float32 [out, in]: a matrix with its adapter, which is float32."""
    return torch.addmm(weight.float(), up, down)


def _require_fit(shapes: Mapping[str, Sequence[int]], adapters: Mapping[str, torch.Tensor]) -> None:
    for name in sorted({name.removesuffix(DOWN).removesuffix(UP) for name in adapters}):
        up, down = (tuple(adapters[name + end].shape) if name + end in adapters else () for end in (UP, DOWN))
        own = tuple(shapes.get(name, ()))
        if len(own) != 2 or (*up[:1], *down[1:]) != own or up[1:] != down[:1]:
            raise InvalidMessage(f"adapters do not fit the model: {name} is {[*own]}, B {[*up]} and A {[*down]}")
