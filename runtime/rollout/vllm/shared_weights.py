"""What vLLM's workers load at the next swap: a whole set of weights in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from runtime.errors import InvalidMessage
from runtime.models.adapters import are_adapters, merged
from runtime.models.families.family import dtype_of
from runtime.models.hf_weights import WeightFiles, misfit
from runtime.weights.group import Location, arena, locate

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = Mapping[str, torch.Tensor]


class SharedWeights:
    def __init__(self, files: WeightFiles, tied: bool, dtype: torch.dtype):
        """`files`: of the model folder. `tied`: whether the model's head is its embedding. `dtype`: the engine's."""
        self._files, self._is_tied, self._dtype = files, tied, dtype
        self._whole: dict[str, torch.Tensor] = {}  # what `_merged` gives; {} before the first time

    def prepare(self, tensors: Tensors) -> tuple[list[Location], list[torch.Tensor]]:
        """Where they lie, and what of them was made here: to be kept until they have been read.

        Raises InvalidMessage for what is no whole set of weights, nor adapters to those of the folder.
        """
        if are_adapters(tensors):
            tensors = self._merged(tensors)
        else:
            self._check(tensors)
        return locate({**self._tied(tensors), **tensors})

    def _merged(self, adapters: Tensors) -> Tensors:
        """The policy, in memory that is used again. It is made here, beside generation: each worker would read all of the base,
        and nothing is generated while they load."""
        if not self._whole:
            shapes = self._files.shapes
            dtypes = {name: dtype_of(name, self._dtype) for name in shapes}
            buffers = arena([math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes])
            self._whole = {name: one.view(dtypes[name]).view(shapes[name]) for name, one in zip(shapes, buffers, strict=True)}
        for name, weight in merged(self._files, adapters):
            self._whole[name].copy_(weight)
        return self._whole

    def _tied(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The head of a model that ties it to its embedding, by its own name: vLLM may keep a converted copy of it, which it
        renews only when it is told to, and ignores the name otherwise."""
        return {_HEAD: tensors[_EMBEDDING]} if self._is_tied and _EMBEDDING in tensors else {}

    def _check(self, tensors: Tensors) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        head = {name: shapes[name] for name in shapes if name == _HEAD and self._is_tied}
        fault = misfit(head | self._files.shapes, shapes, _HEAD if self._is_tied else "")
        if fault:
            raise InvalidMessage(f"weights do not fit the model: {fault}")
