"""Samples follow the tempered, filtered distribution; streams depend on (seed, sample) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.rollout.torch.slots import RowSampling, as_row, sample, sets_of, uniforms
from runtime.types import EncodedSet, SamplingParams, TokenSets
from tests.closeness import assert_close

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def params(**options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, **options)  # type: ignore[arg-type]


def draw(logits: np.ndarray, u: np.ndarray, rows: list[SamplingParams]) -> tuple[np.ndarray, np.ndarray]:
    return draw_with_sets(logits, u, rows)[:2]


def draw_with_sets(
    logits: np.ndarray, u: np.ndarray, rows: list[SamplingParams]
) -> tuple[np.ndarray, np.ndarray, dict[int, EncodedSet]]:
    sampling = RowSampling(np.array([as_row(row) for row in rows], np.float32), CPU)
    drawn = sample(torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(u.astype(np.float32)), sampling)
    return drawn.tokens.numpy(), drawn.logprobs.numpy(), sets_of(drawn.kept)


def reference(logits: np.ndarray, row: SamplingParams) -> np.ndarray:
    """The distribution to draw from, in float64, filter by filter."""
    scaled = logits.astype(np.float64) / row.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < row.min_p * p.max()] = 0
    if row.top_k:
        p[np.argsort(-p, kind="stable")[row.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    if row.top_p < 1:
        p[order[before >= row.top_p]] = 0
    return p / p.sum()


FILTERS = [
    params(),
    params(temperature=0.6),
    params(temperature=1.7, top_k=3),
    params(top_p=0.7),
    params(min_p=0.2),
    params(temperature=0.8, top_p=0.8, top_k=5, min_p=0.02),
    params(top_p=1e-6),
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_tokens_follow_the_distribution(row: SamplingParams) -> None:
    """Evenly spaced uniforms hit each token in proportion to its probability, to within one."""
    logits, count = np.random.default_rng(3).normal(0, 2, 11), 20000
    expected = reference(logits, row)
    tokens, logprobs = draw(np.tile(logits, (count, 1)), (np.arange(count) + 0.5) / count, [row] * count)
    frequency = np.bincount(tokens, minlength=11) / count
    np.testing.assert_allclose(frequency, expected, atol=2 / count)
    largest = np.abs(logits).max() / row.temperature
    assert_close(
        logprobs, np.log(expected[tokens]), terms=2 * len(logits), scale=largest
    )  # the softmax, and that of what is kept


@given(st.integers(0, 2**32), st.sampled_from(FILTERS), st.sampled_from([0.0, 1.0 - 2.0**-23]))
@settings(max_examples=60)
def test_the_extreme_uniforms_draw_possible_tokens(seed: int, row: SamplingParams, u: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 30, 40).astype(np.float32)
    token, logprob = draw(logits[None], np.array([u]), [row])
    assert reference(logits, row)[token[0]] > 2.0**-151  # from half of 2^-149 on, float32 rounds to what is above 0
    assert np.isfinite(logprob).all()


def test_greedy_takes_the_best_and_reports_the_untempered_log_softmax() -> None:
    logits = np.array([[0.5, 2.0, -1.0, 1.9]])
    tokens, logprobs = draw(logits, np.array([0.99]), [params(temperature=0.0, top_k=2)])
    assert tokens.tolist() == [1]
    assert_close(logprobs, logits[:, 1] - np.log(np.exp(logits).sum()), terms=logits.size, scale=2.0)


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    rng = np.random.default_rng(5)
    rows = [*FILTERS, params(temperature=0.0), params()]
    logits, u = rng.normal(0, 2, (len(rows), 300)), rng.random(len(rows))
    together = draw(logits, u, rows)
    for index, row in enumerate(rows):
        token, logprob = draw(logits[index : index + 1], u[index : index + 1], [row])
        assert token[0] == together[0][index]
        assert_close(logprob[0], together[1][index], terms=300, scale=20.0)


def test_the_kept_sets_are_the_tokens_that_can_be_drawn() -> None:
    """Of the rows that ask for them, whatever others are among them."""
    rng = np.random.default_rng(8)
    asked = [
        params(keep_sets=True, top_p=0.7),
        params(keep_sets=True, temperature=0.8, top_k=5),
        params(keep_sets=True, min_p=0.2),
    ]
    rows = [params(), asked[0], params(temperature=0.0, keep_sets=True), params(top_k=2), asked[1], asked[2]]
    logits = rng.normal(0, 2, (len(rows), 300))
    tokens, _, sets = draw_with_sets(logits, rng.random(len(rows)), rows)
    assert sorted(sets) == [1, 4, 5]
    for index, found in sets.items():
        bitmap = TokenSets.of([found], 300).bitmaps(np.array([0]))[0]
        kept = np.flatnonzero(np.unpackbits(bitmap, bitorder="little")[:300])
        np.testing.assert_array_equal(kept, np.flatnonzero(reference(logits[index], rows[index])))
        assert tokens[index] in kept


def test_streams_are_reproducible_prefixes_and_unlike() -> None:
    stream = uniforms(7, 3, 100)
    assert stream.dtype == np.float32
    assert np.array_equal(stream[:40], uniforms(7, 3, 40))
    others = [uniforms(7, 4, 100), uniforms(8, 3, 100), uniforms(3, 7, 100), uniforms(-7, 3, 100), uniforms(2**63 + 7, 3, 100)]
    assert all(abs(np.corrcoef(stream, other)[0, 1]) < 0.4 for other in others)
    many = uniforms(1, 0, 200_000)
    assert many.min() >= 0 and many.max() < 1
    assert np.bincount((many * 10).astype(int)).std() < 300  # 20000 a tenth, 134 expected
