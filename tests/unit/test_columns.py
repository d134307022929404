"""Sets of tokens as they travel: what is packed comes out again, whatever its size, and what does not fit is told."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import codec
from runtime.columns import KeptSets, encode_set

VOCABULARY = 75  # not a multiple of 8


def made(sizes: list[int], vocabulary: int = VOCABULARY) -> tuple[KeptSets, np.ndarray, np.ndarray]:
    """Sets of random tokens, the masks that they are [n, vocabulary], and a token of each."""
    rng = np.random.default_rng(3)
    ids = [rng.permutation(vocabulary)[:size].astype(np.int32) for size in sizes]
    masks = np.zeros((len(ids), vocabulary), bool)
    for mask, each in zip(masks, ids, strict=True):
        mask[each] = True
    tokens = np.array([each[-1] for each in ids], np.int32)
    return KeptSets.of([encode_set(each, vocabulary) for each in ids], vocabulary), masks, tokens


def unpacked(sets: KeptSets, which: np.ndarray) -> np.ndarray:
    return np.unpackbits(sets.bitmaps(which), axis=1, bitorder="little")[:, : sets.vocabulary] != 0


SIZES = [1, 2, 3, VOCABULARY, 40, 74, 1, 2]


def test_sets_of_all_sizes_come_out_as_they_were() -> None:
    sets, masks, tokens = made(SIZES)
    read = codec.decode(KeptSets, codec.encode(sets))
    assert (unpacked(read, np.arange(len(SIZES))) == masks).all()
    some = np.array([7, 3, 5, 0])
    assert (unpacked(read, some) == masks[some]).all()
    assert read.fault(tokens, VOCABULARY) == ""


def test_a_set_takes_four_bytes_a_token_or_a_bit_a_token_of_the_vocabulary_and_nothing_where_it_is_all() -> None:
    vocabulary = 1 << 15
    for size, nbytes in ((1, 4), (1023, 4092), (1024, 4096), (20000, 4096), (vocabulary, 0)):
        assert len(made([size], vocabulary)[0].data) == nbytes


def test_parts_of_sets_join_to_what_they_were() -> None:
    sets, masks, _ = made(SIZES)
    parts = [sets.part(slice(0, 3)), None, sets.part(slice(3, None))]
    joined = KeptSets.joined(parts, [3, 2, 5])
    assert joined is not None
    found = unpacked(joined, np.arange(10))
    assert found[3:5].all()
    assert (np.delete(found, [3, 4], 0) == masks).all()
    assert KeptSets.joined([None, None], [3, 2]) is None


def test_sets_are_spread_among_tokens_that_were_not_drawn() -> None:
    sets, masks, _ = made([1, 40])
    spread = sets.spread(np.array([False, True, False, True]))
    assert (unpacked(spread, np.array([1, 3])) == masks).all()
    assert unpacked(spread, np.array([0, 2])).all()


@pytest.mark.parametrize("size", [2, 40])
def test_a_token_outside_of_its_set_is_a_fault(size: int) -> None:
    sets, masks, tokens = made([3, size, 3])
    tokens[1] = np.flatnonzero(~masks[1])[0]
    assert sets.fault(tokens, VOCABULARY) == "token 1 is not in its kept set"


def test_what_does_not_fit_is_a_fault() -> None:
    sets, _, tokens = made([3, 2])
    assert "the vocabulary has 80" in sets.fault(tokens, 80)
    assert "not 1 in" in sets.fault(tokens[:1], VOCABULARY)
    assert "in 19 bytes" in KeptSets(VOCABULARY, sets.sizes, sets.data[:-1]).fault(tokens, VOCABULARY)
    assert "outside of 0..74" in KeptSets.of([encode_set(np.array([3, 75], np.int32), VOCABULARY)], VOCABULARY).fault(
        np.array([3], np.int32), VOCABULARY
    )
