"""Which of the tensors that a model was given to load nothing has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from runtime.errors import UserError
from runtime.rollout.vllm.delivery import Reads, require_delivered

BUFFER = torch.arange(40.0)  # which they all lie in, as those of a publication do


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    for index, name in enumerate("abcd"):
        yield name, BUFFER[10 * index : 10 * index + 10].view(2, 5)
    yield "head", BUFFER[:10].view(2, 5)  # tied to a
    yield "empty", BUFFER[:0]


Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


def all_but_c(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [torch.zeros_like(tensor).copy_(tensor) for name, tensor in given if name != "c"]


def parts(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [torch.zeros(5).copy_(tensor[1]) for name, tensor in given if name in "bc"]


def put_off(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    kept = dict(given)
    return torch.stack([kept["a"], kept["d"]])


def only_shapes(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [(tensor.shape, tensor.dtype) for _, tensor in given]


@pytest.mark.parametrize(("load", "left"), [(all_but_c, "c"), (parts, "ad"), (put_off, "bc"), (only_shapes, "abcd")])
def test_what_nothing_has_read_is_left(load: Load, left: str) -> None:
    with Reads() as reads:
        load(reads.of(weights()))
    assert [name for name, _ in reads.left.values()] == list(left)


def test_what_is_not_delivered_is_told_by_name() -> None:
    require_delivered([], [])
    with pytest.raises(UserError, match="2 published weights have no place in it: a, b; 1 of its parameters get none: c; "):
        require_delivered(["a", "b"], ["c"])
