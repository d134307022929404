"""A part of the packed tokens attends to all of them as it would among them, and every part has its share of the work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.models.passes import Packing, packed_attention
from runtime.trainer.attention_rows import attention_rows
from runtime.trainer.megatron import context
from runtime.trainer.megatron.context import packing_of, part_of, tokens_of
from runtime.trainer.micro_batch import pack
from runtime.trainer.prefix_tree import tree_paths
from runtime.trainer.rows import Needs, decode_groups, starts
from tests.unit.training_cases import VOCAB, make_groups

pytestmark = pytest.mark.numeric

HEADS, KV_HEADS, SIZE = 4, 2, 3
CPU = torch.device("cpu")


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[tokens, heads, size] each."""
    shaped = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return packed_attention(torch.nn.Module(), *shaped, None, packing=packing)[0][0]


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: np.ndarray, sequences: np.ndarray
) -> torch.Tensor:
    """Token by token."""
    out = torch.zeros_like(query)
    for begin, shared, own in sequences:
        for at in range(begin + shared, begin + shared + own):
            token, seen = paths[at], paths[begin : at + 1]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = torch.softmax(key[seen, kv_head] @ query[token, head] / SIZE**0.5, 0)
                out[token, head] = weights @ value[seen, kv_head]
    return out


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=9),
    count=st.integers(2, 3),
    seed=st.integers(0, 99),
)
def test_the_parts_together_are_the_whole(sizes: list[tuple[int, int]], count: int, seed: int) -> None:
    """Rows of a tree: each shares at most so many tokens with the one before, and has so many of its own."""
    lengths, known = [], []
    for shared, own in sizes:
        known.append(min(shared, lengths[-1] if lengths else 0))
        lengths.append(known[-1] + own)
    if not sum(lengths):
        return
    length, shares = np.array(lengths), np.array(known)
    paths, total = tree_paths(length, shares), int((length - shares).sum())
    padding = -total % (2 * count)
    found = np.concatenate([np.stack([starts(length), shares, length - shares], 1), [[len(paths), 0, padding]]])
    paths = np.concatenate([paths, np.arange(total, total + padding)])
    total += padding

    torch.manual_seed(seed)
    query, key, value = (torch.randn(total, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    order = np.concatenate([tokens_of(rank, count, total) for rank in range(count)])
    assert sorted(order) == list(range(total))
    expected = naive(query, key, value, paths, found)
    whole = attend(query, key, value, attention_rows(paths, found, CPU))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
    for rank in range(count):
        own = tokens_of(rank, count, total)
        packing = packing_of(paths, found, own, np.argsort(order), CPU)
        part = attend(query[own], key[order], value[order], packing)
        torch.testing.assert_close(part, expected[own], rtol=0, atol=1e-12)


def test_of_one_long_sequence_every_part_has_the_same_work() -> None:
    total, count = 64, 4
    work = [sum(token + 1 for token in tokens_of(rank, count, total)) for rank in range(count)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_has_of_a_column_what_it_predicts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(context.dist, "get_world_size", lambda group: 2)
    rows = decode_groups(make_groups(3), VOCAB, Needs())
    columns = {"temperature": np.arange(len(rows.tokens), dtype=np.float32)}
    whole = pack(rows, np.flatnonzero(rows.trained()), columns, CPU)
    part = part_of(whole, None)  # type: ignore[arg-type]
    assert 0 < len(part.targets) < len(whole.targets)
    assert part.of_tokens("temperature").tolist() == whole.places[part.chosen.numpy()].tolist()
