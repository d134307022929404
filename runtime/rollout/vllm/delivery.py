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
    """While it is entered: which of the tensors that came through `of` no operator has read, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        self._left: dict[int, tuple[str, torch.Tensor]] = {}  # by address; held, so that no other tensor gets this one
        self._taken = False  # the last one was handed out: what is done now is done by who was given it

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            start = tensor.data_ptr()
            if tensor.numel() and start not in self._left:  # a head may be the embedding
                insort(self._starts, start)
                self._left[start] = name, tensor
            self._taken = True
            yield name, tensor
            self._taken = False
        self._taken = True  # what was put off

    @property
    def left(self) -> list[str]:
        return [name for name, _ in self._left.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if self._taken and self._starts and isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._take(each.data_ptr())
        return func(*args, **(kwargs or {}))

    def _take(self, address: int) -> None:
        """Also when it is the address of a part."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            tensor = self._left[self._starts[place]][1]
            if address < self._starts[place] + tensor.nbytes:
                del self._left[self._starts.pop(place)]


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
