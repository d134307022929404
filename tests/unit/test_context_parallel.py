"""A part of the packed tokens attends to all of them as it would among them, and every part has its share of the work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.models.hf_policy import Packing, packed_attention
from runtime.trainer.megatron.context import packing_of, tokens_of

pytestmark = pytest.mark.numeric

HEADS, KV_HEADS, SIZE = 4, 2, 3
CPU = torch.device("cpu")


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[tokens, heads, size] each."""
    shaped = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return packed_attention(torch.nn.Module(), *shaped, None, packing=packing)[0][0]


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: np.ndarray) -> torch.Tensor:
    """Token by token."""
    out = torch.zeros_like(query)
    for begin, tokens, prompt_begin, prompt in sequences:
        for token in range(begin, begin + tokens):
            seen = [*range(prompt_begin, prompt_begin + prompt), *range(begin, token + 1)]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = torch.softmax(key[seen, kv_head] @ query[token, head] / SIZE**0.5, 0)
                out[token, head] = weights @ value[seen, kv_head]
    return out


@settings(max_examples=30)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    count=st.integers(2, 3),
    seed=st.integers(0, 99),
)
def test_the_parts_together_are_the_whole(prompts: list[tuple[int, list[int]]], count: int, seed: int) -> None:
    sequences, total = [], sum(prompt for prompt, _ in prompts)
    for index, (prompt, replies) in enumerate(prompts):
        begin = sum(each for each, _ in prompts[:index])
        sequences.append((begin, prompt, 0, 0))
        for reply in replies:
            sequences.append((total, reply, begin, prompt))
            total += reply
    padding = -total % (2 * count)
    sequences.append((total, padding, 0, 0))
    total += padding
    found = np.array(sequences)

    torch.manual_seed(seed)
    query, key, value = (torch.randn(total, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    order = np.concatenate([tokens_of(rank, count, total) for rank in range(count)])
    assert sorted(order) == list(range(total))
    expected = naive(query, key, value, found)
    for rank in range(count):
        own = tokens_of(rank, count, total)
        packing = packing_of(found, own, np.argsort(order), CPU)
        part = attend(query[own], key[order], value[order], packing)
        torch.testing.assert_close(part, expected[own], rtol=0, atol=1e-12)


def test_of_one_long_sequence_every_part_has_the_same_work() -> None:
    total, count = 64, 4
    work = [sum(token + 1 for token in tokens_of(rank, count, total)) for rank in range(count)]
    assert len(set(work)) == 1
