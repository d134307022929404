"""Whether every weight that is published finds a place in vLLM's model, and every parameter of that model gets one. Its loaders
pass over names that they do not know, and say nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.errors import UserError


class Reads(TorchDispatchMode):
    """While it is entered: which of the tensors that came through `of` no operator has read."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        self.left: dict[int, tuple[str, torch.Tensor]] = {}  # by address; held, so that no other tensor gets this one
        self._counts = False  # what is done now is done by who was given the tensors

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            start = tensor.data_ptr()
            if tensor.numel() and start not in self.left:  # a head may be the embedding
                insort(self._starts, start)
                self.left[start] = name, tensor
            self._counts = True
            yield name, tensor
            self._counts = False
        self._counts = True  # what was put off

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for each in tree_leaves((args, kwargs)) if self._counts else ():
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                place = bisect_right(self._starts, address := each.data_ptr()) - 1  # it may be that of a part
                if place >= 0 and address < self._starts[place] + self.left[self._starts[place]][1].nbytes:
                    del self.left[self._starts.pop(place)]
        return func(*args, **(kwargs or {}))


def require_delivered(unread: Collection[str], empty: Collection[str]) -> None:
    """`unread`: of what is published, `empty`: of vLLM's model. Raises UserError that names all."""
    faults = (
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (("published weights have no place in it", unread), ("of its parameters get none", empty))
        if names
    )
    if told := "; ".join(faults):
        raise UserError(
            f"vLLM's model is not the trainer's: {told}; must be of the same names in transformers and in this vLLM"
        )
