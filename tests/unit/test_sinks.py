"""Attention sinks by plain attention: the softmax that has one more score, written out in float64, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runtime.models.forward import with_sinks
from tests.closeness import assert_close

HEADS, KV_HEADS, DIM, KEYS, SCALE = 4, 2, 8, 9, 0.3


def inputs(asked: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, HEADS, asked, DIM), (2, KV_HEADS, KEYS, DIM), (2, KV_HEADS, KEYS, DIM), (HEADS,)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    weights = torch.where(mask, torch.exp(SCALE * query @ key.transpose(2, 3)), 0.0)
    return weights @ value / (weights.sum(-1, keepdim=True) + sinks.exp().view(1, -1, 1, 1))


@pytest.mark.parametrize("asked", [1, KEYS])
def test_outputs_and_gradients_are_those_of_the_softmax_with_one_more_score(asked: int) -> None:
    mask = torch.ones(asked, KEYS, dtype=torch.bool).tril(KEYS - asked)
    found = []
    for computed in (True, False):
        given = [each.clone().requires_grad_() for each in inputs(asked)]
        if computed:
            query, key, value, own = with_sinks(*given, SCALE, mask)
            out = F.scaled_dot_product_attention(query, key, value, own, scale=SCALE, enable_gqa=True)[..., :DIM]
        else:
            out = written_out(*given, mask)
        out.square().sum().backward()
        found.append([out.detach(), *(each.grad for each in given)])
    for own, expected in zip(*found, strict=True):
        assert expected is not None and expected.any()
        assert_close(own, expected, terms=8 * KEYS * DIM, unit=2.0**-53)
