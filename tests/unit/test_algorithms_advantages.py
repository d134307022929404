"""Advantages, returns and evaluation against loops in plain Python, with gaps, masked rows, branches and rewards of turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.advantages import (
    gae,
    group_norm,
    has_signal,
    less_divergence,
    missing_eos_penalty,
    opo,
    returns_to_go,
    rloo,
    soft_overlong_penalty,
    token_gae,
    token_rewards,
    value_targets,
    whiten,
)
from runtime.algorithms.evaluation import clustered_standard_error, maj_at_k, pass_at_k
from runtime.algorithms.interfaces import ADVANTAGES, AdvantageInputs, AdvantageOptions, TurnRewards
from runtime.algorithms.losses import k1

pytestmark = pytest.mark.numeric


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tensors of values and a mask, [B, T]."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return (*(torch.from_numpy(rng.normal(size=shape)) for _ in range(2)), torch.from_numpy(mask.astype(np.float64)))


def plain_gae(rewards: list, values: list, mask: list, gamma: float, lam: float) -> tuple[list, list]:
    """One row, its masked-out tokens taken out first; by the definition as a sum over later tokens."""
    kept = [t for t, m in enumerate(mask) if m]
    r, v = [rewards[t] for t in kept], [*(values[t] for t in kept), 0.0]
    deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(kept))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(kept):
        advantages[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
        returns[t] = advantages[t] + v[i]
    return advantages, returns


class TestGroupNorm:
    def test_two_groups_by_hand(self):
        got = group_norm(f64(1, 0, 1, 0, 2, 4), torch.tensor([0, 0, 0, 0, 1, 1]))
        first = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # mean 1/2, variance (4 · 1/4) / 3
        second = 1.0 / (math.sqrt(2) + 1e-6)  # mean 3, variance 2 / 1
        torch.testing.assert_close(got, f64(first, -first, first, -first, -second, second), rtol=1e-14, atol=0)

    def test_matches_numpy_whatever_the_order_of_rows(self):
        rng = np.random.default_rng(0)
        rewards, groups = rng.normal(size=24), rng.permutation(np.repeat(np.arange(4), 6))
        expected = np.empty(24)
        for group in range(4):
            own = rewards[groups == group]
            expected[groups == group] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
        got = group_norm(torch.from_numpy(rewards), torch.from_numpy(groups))
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)

    def test_options(self):
        rewards, groups = f64(1, 0, 3, 7), torch.tensor([0, 0, 1, 1])
        population = group_norm(rewards, groups, ddof=0, eps=0.0)
        torch.testing.assert_close(population, f64(1, -1, -1, 1), rtol=1e-14, atol=0)
        torch.testing.assert_close(group_norm(rewards, groups, scale="none"), f64(0.5, -0.5, -2, 2), rtol=1e-14, atol=0)
        whole = rewards.numpy().std(ddof=1) + 1e-6
        expected = f64(0.5, -0.5, -2, 2) / whole
        torch.testing.assert_close(group_norm(rewards, groups, scale="batch"), expected, rtol=1e-13, atol=0)

    def test_equal_rewards_give_exactly_zero(self):
        # The mean of ten times 0.1 is not 0.1 in floating point.
        assert (
            group_norm(torch.full((10,), 0.1, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)).tolist() == [0.0] * 10
        )

    def test_group_of_one_keeps_its_reward(self):
        for scale in ("group", "none"):
            assert group_norm(f64(2.0), torch.tensor([0]), scale=scale, eps=0.0).tolist() == [2.0]
        assert rloo(f64(2.0), torch.tensor([0])).tolist() == [2.0]
        torch.testing.assert_close(group_norm(f64(3.0), torch.tensor([0])), f64(3 / (1 + 1e-6)), rtol=1e-14, atol=0)

    def test_invalid_samples_count_nowhere(self):
        valid = torch.tensor([True, True, False, True])
        got = group_norm(f64(1, 2, math.nan, 6), torch.zeros(4, dtype=torch.int64), valid)
        expected = group_norm(f64(1, 2, 6), torch.zeros(3, dtype=torch.int64))
        assert got[2] == 0
        torch.testing.assert_close(got[valid], expected, rtol=1e-14, atol=0)

    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(-50, 50), st.floats(0.5, 10))
    def test_shift_leaves_and_scale_nearly_leaves_advantages(self, rewards: list[float], shift: float, scale: float):
        groups = torch.zeros(len(rewards), dtype=torch.int64)
        base = f64(*rewards)
        plain = group_norm(base, groups)
        assert abs(float(plain.sum())) < 1e-6
        if float(base.std()) > 0.1:
            torch.testing.assert_close(group_norm(base * scale + shift, groups), plain, rtol=1e-4, atol=1e-6)

    def test_every_option_reaches_the_registered_estimator(self):
        estimator = ADVANTAGES.find("group_norm")
        rewards, groups = f64(1, 0, 3, 7), torch.tensor([0, 0, 1, 1])
        mask = torch.ones(4, 2, dtype=torch.float64)
        inputs = AdvantageInputs(rewards, groups, torch.ones(4, dtype=torch.bool), mask, token_rewards(rewards, mask))
        chosen = [{}, *({"scale": scale, "ddof": 0, "eps": 0.5} for scale in ("group", "batch", "none"))]
        for values in chosen:
            options = AdvantageOptions(group_std=values.get("scale", "group"))
            expected = group_norm(rewards, groups, **values)[:, None]
            compute = partial(estimator.compute, **{name: value for name, value in values.items() if name != "scale"})
            torch.testing.assert_close(compute(inputs, options), expected, rtol=0, atol=0)
            assert estimator.streams(options) == (options.group_std != "batch")


class TestTokenRewards:
    def test_reward_at_the_last_trained_token_less_penalties(self):
        mask = matrix([1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])
        penalties = matrix([0.1, 9, 0.2, 9], [0.1, 0.2, 0.3, 0.4], [9, 9, 9, 9])
        got = token_rewards(f64(2, 3, 4), mask, penalties)
        torch.testing.assert_close(got, matrix([-0.1, 0, 1.8, 0], [-0.1, -0.2, -0.3, 2.6], [0, 0, 0, 0]), rtol=1e-14, atol=0)
        assert token_rewards(f64(2, 3, 4), mask).sum() == 5


class TestReturns:
    @given(batches(), st.floats(0, 1))
    def test_is_the_discounted_sum_of_later_masked_rewards(self, batch, gamma: float):
        rewards, _, mask = batch
        got = returns_to_go(rewards, mask, gamma)
        for row in range(len(mask)):
            expected, _ = plain_gae(rewards[row].tolist(), [0.0] * mask.shape[1], mask[row].tolist(), gamma, 1.0)
            np.testing.assert_allclose(got[row].numpy(), expected, rtol=1e-12, atol=1e-12)


class TestGae:
    @given(batches(), st.floats(0, 1), st.floats(0, 1))
    def test_tokens_outside_the_mask_are_as_if_not_there(self, batch, gamma: float, lam: float):
        rewards, values, mask = batch
        advantages, returns = token_gae(rewards, values, mask, gamma=gamma, lam=lam)
        for row in range(len(mask)):
            expected = plain_gae(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam)
            np.testing.assert_allclose(advantages[row].numpy(), expected[0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(returns[row].numpy(), expected[1], rtol=1e-12, atol=1e-12)

    def test_every_option_reaches_the_registered_estimator(self):
        token_rewards, values, mask = matrix([0, 0, 1]), matrix([0.5, 0.4, 0.2]), matrix([1, 1, 1])
        one = torch.zeros(1, dtype=torch.int64)
        inputs = AdvantageInputs(f64(1), one, one == 0, mask, token_rewards, values)
        options = AdvantageOptions(gamma=0.9, gae_lambda=0.8)
        advantages, returns = plain_gae(*(rows[0].tolist() for rows in (token_rewards, values, mask)), 0.9, 0.8)
        np.testing.assert_allclose(gae(inputs, options, whitened=False)[0], advantages, rtol=1e-12)
        np.testing.assert_allclose(value_targets(inputs, options)[0], returns, rtol=1e-12)

    def test_whitening_changes_advantages_alone(self):
        rewards, values, mask = matrix([0, 1, 0], [0, 0, 2]), matrix([0.1, 0.2, 9], [0.3, 9, 0.5]), matrix([1, 1, 0], [1, 0, 1])
        plain, returns = token_gae(rewards, values, mask, gamma=1.0, lam=0.9)
        inputs = AdvantageInputs(
            rewards=rewards.sum(1),
            groups=torch.zeros(2, dtype=torch.int64),
            valid=torch.ones(2, dtype=torch.bool),
            mask=mask,
            token_rewards=rewards * mask,
            values=values,
        )
        for whitened, expected in ((True, whiten(plain, mask)), (False, plain)):
            options = AdvantageOptions(gae_lambda=0.9)
            assert torch.equal(gae(inputs, options, whitened=whitened), expected)
            assert torch.equal(value_targets(inputs, options), returns)


class TestWhitening:
    @given(batches())
    def test_against_numpy(self, batch):
        values, _, mask = batch
        got = whiten(values, mask).numpy()
        kept = values.numpy()[mask.numpy() > 0]
        assert (got[mask.numpy() == 0] == 0).all()
        if len(kept) > 1:
            expected = (kept - kept.mean()) / math.sqrt(kept.var(ddof=1) + 1e-8)
            np.testing.assert_allclose(got[mask.numpy() > 0], expected, rtol=1e-10, atol=1e-12)

    def test_one_token_or_none(self):
        assert whiten(matrix([3.0, 5.0]), matrix([0, 1])).tolist() == [[0.0, 0.0]]
        assert whiten(matrix([3.0, 5.0]), matrix([0, 0])).tolist() == [[0.0, 0.0]]


class TestRloo:
    def test_against_the_mean_of_the_others(self):
        rng = np.random.default_rng(2)
        rewards, groups = rng.normal(size=9), np.array([0, 1, 0, 1, 0, 1, 0, 2, 0])
        expected = []
        for i in range(9):
            others = rewards[(groups == groups[i]) & (np.arange(9) != i)]
            expected.append(rewards[i] - (others.mean() if len(others) else 0.0))
        got = rloo(torch.from_numpy(rewards), torch.from_numpy(groups))
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)

    def test_equal_rewards_give_exactly_zero_and_invalid_samples_count_nowhere(self):
        groups = torch.zeros(3, dtype=torch.int64)
        assert rloo(f64(0.1, 0.1, 0.1), groups).tolist() == [0.0] * 3
        got = rloo(f64(1, math.nan, 4), groups, torch.tensor([True, False, True]))
        torch.testing.assert_close(got, f64(-3, 0, 3), rtol=1e-14, atol=0)


class TestOpo:
    @pytest.mark.parametrize("seed", range(5))
    def test_the_baseline_is_weighted_by_length(self, seed: int):
        rng = np.random.default_rng(seed)
        rewards, groups = rng.normal(size=9), np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
        lengths, valid = rng.integers(1, 50, 9).astype(float), np.arange(9) != 4
        got = opo(*map(torch.from_numpy, (rewards, groups, lengths, valid)))
        for i in range(9):
            same = [j for j in range(9) if groups[j] == groups[i] and valid[j]]
            baseline = sum(lengths[j] * rewards[j] for j in same) / sum(lengths[j] for j in same)
            assert float(got[i]) == pytest.approx(rewards[i] - baseline if valid[i] else 0.0, rel=1e-11, abs=1e-14)

    def test_equal_rewards_a_group_of_one_and_no_tokens(self):
        groups, lengths = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3]), f64(3, 3, 7, 9, 0, 0, 1, 0)
        got = opo(f64(0.1, 0.1, 0.1, 2.0, 1.0, 3.0, 4.0, 6.0), groups, lengths)
        assert got.tolist() == [0.0, 0.0, 0.0, 2.0, 1.0, 3.0, 0.0, 2.0]

    def test_an_episodes_length_is_that_of_all_its_rows(self):
        mask = matrix([1, 1, 0], [1, 0, 0], [1, 0, 1])
        inputs = AdvantageInputs(
            f64(1, 1, 4), torch.tensor([0, 0, 0]), torch.ones(3).bool(), mask, mask, leads=torch.tensor([True, False, True])
        )
        got = ADVANTAGES.find("opo").compute(inputs, AdvantageOptions())
        baseline = (3 * 1 + 2 * 4) / 5
        torch.testing.assert_close(got, f64(1 - baseline, 1 - baseline, 4 - baseline)[:, None], rtol=1e-14, atol=0)


class TestGpg:
    def test_groups_without_signal_do_not_shrink_the_gradient(self):
        rewards, groups = f64(1, 0, 0, 0.1, 0.1, 0.1, 2, 4), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
        valid = torch.tensor([True, True, False, True, True, True, True, True])
        inputs = AdvantageInputs(rewards, groups, valid, torch.ones(8, 2).double(), torch.zeros(8, 2).double())
        got = ADVANTAGES.find("gpg").compute(inputs, AdvantageOptions())
        scale = 7 / 4  # valid samples over those of the first and the last group
        expected = scale * f64(0.5, -0.5, 0, 0, 0, 0, -1, 1)
        torch.testing.assert_close(got, expected[:, None], rtol=1e-14, atol=0)

    def test_a_batch_without_signal_is_worth_nothing(self):
        mask = torch.ones(2, 1).double()
        inputs = AdvantageInputs(f64(0.3, 0.3), torch.tensor([0, 0]), torch.ones(2).bool(), mask, mask)
        assert ADVANTAGES.find("gpg").compute(inputs, AdvantageOptions()).tolist() == [[0.0], [0.0]]


def advantage_inputs(rewards: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, penalties=None) -> AdvantageInputs:
    total = rewards if penalties is None else rewards - (penalties * mask).sum(1)
    valid = torch.ones(len(rewards), dtype=torch.bool)
    values = torch.linspace(-1, 1, mask.numel(), dtype=rewards.dtype).view(mask.shape)
    return AdvantageInputs(total, groups, valid, mask, token_rewards(rewards, mask, penalties), values)


class TestDivergence:
    """Of the policy from a teacher, taken from advantages."""

    def test_each_trained_token_answers_for_its_own(self):
        divergence = matrix([0.5, -1.0, 2.0], [1.0, 3.0, -4.0])
        mask = matrix([1, 0, 1], [1, 1, 0])
        got = less_divergence(f64(1.0, -2.0)[:, None], divergence, mask, 0.5)
        assert got.tolist() == [[0.75, 0.0, 0.0], [-2.5, -3.5, 0.0]]

    @pytest.mark.parametrize("coefficient", [1.0, 0.3])
    def test_the_policy_gradient_is_that_of_the_reverse_kl_and_the_reward(self, coefficient: float):
        """Summed over all tokens by their probability, against autograd through `E_π[r] - β Σ π log(π / teacher)`."""
        random = torch.Generator().manual_seed(5)
        logits, other, rewards = torch.randn(3, 11, dtype=torch.float64, generator=random)
        logits.requires_grad_()
        teacher = other.log_softmax(0)
        logp = logits.log_softmax(0)
        sampled = logp.detach()[:, None]  # each token once, a row each
        advantages = less_divergence(rewards[:, None], k1(sampled - teacher[:, None]), torch.ones_like(sampled), coefficient)
        (got,) = torch.autograd.grad((logp.exp().detach() * advantages[:, 0] * logp).sum(), logits)
        logp = logits.log_softmax(0)
        exact = (logp.exp() * (rewards - coefficient * (logp - teacher))).sum()
        (expected,) = torch.autograd.grad(exact, logits)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


class TestRegisteredEstimators:
    mask = matrix([1, 0, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0])
    rewards, groups = f64(1, 0, 3, 7), torch.tensor([0, 0, 1, 1])
    penalties = torch.linspace(-0.2, 0.3, 12, dtype=torch.float64).view(4, 3)

    def test_reinforce_plus_plus(self):
        inputs = advantage_inputs(self.rewards, self.groups, self.mask, self.penalties)
        got = ADVANTAGES.find("reinforce_plus_plus").compute(inputs, AdvantageOptions(gamma=0.9)).numpy()
        tokens, returns = [], []
        for i in range(4):
            kept = [t for t in range(3) if self.mask[i, t]]
            r = [float(self.rewards[i]) * (t == kept[-1]) - float(self.penalties[i, t]) for t in kept]
            tokens += [(i, t) for t in kept]
            returns += [sum(0.9 ** (k - j) * r[k] for k in range(j, len(r))) for j in range(len(r))]
        expected = np.zeros((4, 3))
        white = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
        for (i, t), value in zip(tokens, white, strict=True):
            expected[i, t] = value
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)

    def test_reinforce_plus_plus_baseline_weighs_samples_by_their_tokens(self):
        inputs = advantage_inputs(self.rewards, self.groups, self.mask)
        got = ADVANTAGES.find("reinforce_plus_plus_baseline").compute(inputs, AdvantageOptions()).numpy()
        per_token = np.repeat([0.5, -0.5, -2.0], [2, 3, 2])  # the fourth row has no token, yet is in its group's mean
        low, deviation = per_token.mean(), math.sqrt(per_token.var(ddof=1) + 1e-8)
        expected = (np.array([[0.5], [-0.5], [-2.0], [2.0]]) - low) / deviation * self.mask.numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)

    def test_rloo_takes_the_reward_with_its_penalties(self):
        inputs = advantage_inputs(self.rewards, self.groups, self.mask, self.penalties)
        got = ADVANTAGES.find("rloo").compute(inputs, AdvantageOptions())
        total = self.rewards - (self.penalties * self.mask).sum(1)
        torch.testing.assert_close(got, rloo(total, self.groups)[:, None], rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("group_norm", AdvantageOptions(group_std="batch")),
            ("reinforce_plus_plus", AdvantageOptions(gamma=0.9)),
            ("reinforce_plus_plus_baseline", AdvantageOptions()),
            ("gpg", AdvantageOptions()),
        ],
    )
    def test_parts_that_share_their_sums_are_the_whole(self, name: str, options: AdvantageOptions):
        """What several ranks do: in lockstep, each sum is over what the parts give."""
        estimator = ADVANTAGES.find(name)
        assert not estimator.streams(options)
        whole = estimator.compute(advantage_inputs(self.rewards, self.groups, self.mask, self.penalties), options)
        sums: list[torch.Tensor] = []
        while True:  # each pass learns one more of the sums
            asked: list[list[torch.Tensor]] = []
            parts = [
                estimator.compute(part, options)
                for part in (self.part(slice(0, 2), sums, asked), self.part(slice(2, 4), sums, asked))
            ]
            if len(asked[0]) == len(sums):
                break
            sums.append(asked[0][len(sums)] + asked[1][len(sums)])
        assert len(sums) >= 2
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-14)

    def part(self, rows: slice, sums: list[torch.Tensor], asked: list[list[torch.Tensor]]) -> AdvantageInputs:
        own: list[torch.Tensor] = []
        asked.append(own)

        def batch_sum(part: torch.Tensor) -> torch.Tensor:
            own.append(part)
            return sums[len(own) - 1] if len(own) <= len(sums) else part

        groups = self.groups[rows] - self.groups[rows].min()
        inputs = advantage_inputs(self.rewards[rows], groups, self.mask[rows], self.penalties[rows])
        return AdvantageInputs(
            inputs.rewards, inputs.groups, inputs.valid, inputs.mask, inputs.token_rewards, batch_sum=batch_sum
        )

    @pytest.mark.parametrize("name", sorted(ADVANTAGES))
    def test_float64_in_float64_out_and_empty_batches(self, name: str):
        estimator = ADVANTAGES.find(name)
        assert (
            estimator.compute(advantage_inputs(self.rewards, self.groups, self.mask), AdvantageOptions()).dtype == torch.float64
        )
        empty = advantage_inputs(f64(), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.float64))
        assert len(estimator.compute(empty, AdvantageOptions())) == 0


class TestShaping:
    def test_signal(self):
        assert has_signal([0.0, 1.0], [True, True])
        assert not has_signal([0.5, 0.5, 0.5], [True] * 3)
        assert not has_signal(np.array([0.0, 1.0], np.float32), np.array([1, 0], np.uint8))
        assert not has_signal([], [])

    def test_soft_overlong_penalty(self):
        got = soft_overlong_penalty(f64(0, 80, 81, 90, 100, 130), 100, 20)
        torch.testing.assert_close(got, f64(0, 0, -0.05, -0.5, -1, -1), rtol=1e-14, atol=0)

    def test_missing_eos_penalty(self):
        assert missing_eos_penalty(f64(1, 0), 0.3).tolist() == [-0.3, 0.0]


class TestPassAtK:
    def test_is_the_share_of_draws_with_a_correct_one(self):
        from itertools import combinations

        for n in range(1, 7):
            for c in range(n + 1):
                for k in range(1, n + 1):
                    draws = list(combinations([True] * c + [False] * (n - c), k))
                    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)

    @pytest.mark.parametrize("case", [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
    def test_impossible_counts(self, case: tuple[int, int, int]):
        with pytest.raises(ValueError, match="1 <= k <= n"):
            pass_at_k(*case)


# ------------------------------------------------------------------ episodes of several branches, with rewards of turns


class Row(NamedTuple):
    """A branch: whether each token is trained, and what turns earned, by a token of theirs."""

    mask: list[int]
    turns: dict[int, float]


class Episode(NamedTuple):
    group: int
    reward: float
    valid: bool
    rows: list[Row]


def inputs_of(episodes: list[Episode], **more: Any) -> AdvantageInputs:
    """As the trainer makes them."""
    rows = [(episode, index, row) for episode in episodes for index, row in enumerate(episode.rows)]
    width = max(len(row.mask) for _, _, row in rows)
    mask = torch.tensor([[m * episode.valid for m in row.mask] + [0] * (width - len(row.mask)) for episode, _, row in rows])
    turns = [
        (at, token, value) for at, (episode, _, row) in enumerate(rows) for token, value in row.turns.items() if episode.valid
    ]
    where = [torch.tensor([turn[field] for turn in turns], dtype=torch.int64) for field in (0, 1)]
    values = torch.tensor([value for _, _, value in turns], dtype=torch.float64)
    rewards = torch.tensor([episode.reward if episode.valid else 0.0 for episode, _, _ in rows], dtype=torch.float64)
    return AdvantageInputs(
        rewards=rewards,
        groups=torch.tensor([episode.group for episode, _, _ in rows]),
        valid=torch.tensor([episode.valid for episode, _, _ in rows]),
        mask=mask.double(),
        token_rewards=mask.double(),  # of no use here
        leads=torch.tensor([index == 0 for _, index, _ in rows]),
        turns=TurnRewards(*where, values) if turns else None,
        **more,
    )


@st.composite
def episode_batches(draw: st.DrawFn, turns: bool = True) -> list[Episode]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.3, 0.8, 1.0]))
    episodes = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            rows = []
            for _ in range(rng.integers(1, 4)):
                mask = (rng.random(rng.integers(1, 10)) < 0.6).astype(int).tolist()
                trained = [t for t, m in enumerate(mask) if m and turns]
                rows.append(Row(mask, {t: float(rng.normal()) for t in trained if rng.random() < share}))
            episodes.append(Episode(group, float(rng.normal()), bool(rng.random() < 0.8), rows))
    return episodes


# ---------------------------------------------------------------------------------------------- the same by plain loops


def normalised(value: float, others: list[float], everything: list[list[float]], name: str, options: AdvantageOptions) -> float:
    """`value`, one of those of a group; `others`: those of its other episodes; `everything`: of the group, and the batch."""
    group, batch = everything
    if name == "rloo":
        return value - sum(others) / len(others) if others else value
    mean = sum(group) / len(group) if len(group) > 1 else 0.0
    if name != "group_norm" or options.group_std == "none":
        return value - mean
    if options.group_std == "batch":
        centre = sum(batch) / len(batch)
        return (value - mean) / (math.sqrt(sum((x - centre) ** 2 for x in batch) / max(len(batch) - 1, 1)) + 1e-6)
    spread = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1)) if len(group) > 1 else 1.0
    return (value - mean) / (spread + 1e-6)


def turn_of(mask: list[int], token: int) -> int:
    """Which run of trained tokens it is in, or the last one before it."""
    return sum(m and not (t and mask[t - 1]) for t, m in enumerate(mask[: token + 1])) - 1


def plain(episodes: list[Episode], name: str, options: AdvantageOptions) -> list[list[float]]:
    """Of each row of each episode, a number for each token; 0 where it is not trained."""
    counted = [episode for episode in episodes if episode.valid]
    found = []
    for episode in episodes:
        same = [other for other in counted if other.group == episode.group]
        others = [other for other in same if other is not episode]

        def turns(of: list[Episode]) -> list[float]:
            return [value for each in of for row in each.rows for value in row.turns.values()]

        def rewards(of: list[Episode]) -> list[float]:
            return [each.reward for each in of]

        for row in episode.rows:
            if not episode.valid:
                found.append([0.0] * len(row.mask))
                continue
            whole = normalised(episode.reward, rewards(others), [rewards(same), rewards(counted)], name, options)
            earned = {
                token: normalised(value, turns(others), [turns(same), turns(counted)], name, options)
                for token, value in row.turns.items()
            }
            numbers = []
            for t, m in enumerate(row.mask):
                later = [(turn_of(row.mask, token) - turn_of(row.mask, t), value) for token, value in earned.items()]
                numbers.append(m * (whole + sum(options.turn_discount**far * value for far, value in later if far >= 0)))
            found.append(numbers)
    return found


CASES: list[tuple[str, AdvantageOptions]] = [
    ("group_norm", AdvantageOptions()),
    ("group_norm", AdvantageOptions(group_std="none", turn_discount=0.7)),
    ("group_norm", AdvantageOptions(group_std="batch", turn_discount=0.5)),
    ("rloo", AdvantageOptions(turn_discount=0.9)),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@given(episode_batches())
def test_an_episode_counts_once_and_its_turns_reach_the_tokens_before_them(
    name: str, options: AdvantageOptions, episodes: list[Episode]
):
    got = ADVANTAGES.find(name).compute(inputs_of(episodes), options)
    mask = inputs_of(episodes).mask
    for row, expected in enumerate(plain(episodes, name, options)):
        found = (got.expand_as(mask)[row] * mask[row]).numpy()[: len(expected)]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@given(episode_batches())
def test_the_baseline_is_whitened_with_turns_and_branches(episodes: list[Episode]):
    options = AdvantageOptions(turn_discount=0.8)
    got = ADVANTAGES.find("reinforce_plus_plus_baseline").compute(inputs_of(episodes), options).numpy()
    rows = plain(episodes, "reinforce_plus_plus_baseline", options)
    masks = [[m * episode.valid for m in row.mask] for episode in episodes for row in episode.rows]
    kept = [x for numbers, mask in zip(rows, masks, strict=True) for x, m in zip(numbers, mask, strict=True) if m]
    if len(kept) < 2:
        return
    mean, deviation = np.mean(kept), math.sqrt(np.var(kept, ddof=1) + 1e-8)
    for row, (numbers, mask) in enumerate(zip(rows, masks, strict=True)):
        expected = [m * (x - mean) / deviation for x, m in zip(numbers, mask, strict=True)]
        np.testing.assert_allclose(got[row, : len(mask)], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["group_norm", "rloo"])
@given(episode_batches(turns=False), st.randoms())
def test_more_branches_of_an_episode_change_nobody_s_advantage(name: str, episodes: list[Episode], chance: Any):
    def values(of: list[Episode]) -> list[float]:
        got = ADVANTAGES.find(name).compute(inputs_of(of), AdvantageOptions())
        assert got.shape[1] == 1, "without rewards of turns a row has one advantage"
        return got[inputs_of(of).leads, 0].tolist()

    branched = [episode._replace(rows=episode.rows * chance.randint(1, 3)) for episode in episodes]
    assert values(branched) == values(episodes)


@pytest.mark.parametrize("estimator", sorted({name for name, _ in CASES} | {"reinforce_plus_plus_baseline", "opo", "gpg"}))
def test_replies_are_episodes_of_one_row(estimator: str):
    """Bit for bit, with and without the field that tells of episodes."""
    rng = np.random.default_rng(3)
    replies = [Episode(index // 3, float(rng.normal()), index != 4, [Row([1, 0, 1, 1], {})]) for index in range(9)]
    told = inputs_of(replies)
    compute: Callable[..., torch.Tensor] = ADVANTAGES.find(estimator).compute
    untold = AdvantageInputs(told.rewards, told.groups, told.valid, told.mask, told.token_rewards)
    assert torch.equal(compute(told, AdvantageOptions()), compute(untold, AdvantageOptions()))


def test_a_single_reward_of_a_turn_keeps_its_value_and_equal_ones_are_worth_nothing():
    """As an episode that is alone in its group, and as episodes of equal rewards."""
    alone = [Episode(0, 1.0, True, [Row([1, 1], {1: 0.5})]), Episode(0, 1.0, True, [Row([1, 1], {})])]
    equal = [Episode(0, 1.0, True, [Row([1, 0, 1], {0: 0.1, 2: 0.1})]), Episode(0, 1.0, True, [Row([1, 1, 1], {2: 0.1})])]
    for name in ("group_norm", "rloo"):
        got = ADVANTAGES.find(name).compute(inputs_of(alone), AdvantageOptions())
        assert got.tolist() == [[pytest.approx(0.5, rel=1e-5)] * 2, [0.0, 0.0]]
        assert not ADVANTAGES.find(name).compute(inputs_of(equal), AdvantageOptions()).any()


def test_sums_over_the_batch_are_asked_for_as_often_where_no_turn_was_rewarded():
    """Other parts may have some: each part takes part in each sum."""
    counts = []
    for turns in ({}, {1: 0.5}):
        calls: list[torch.Tensor] = []

        def batch_sum(part: torch.Tensor, calls: list[torch.Tensor] = calls) -> torch.Tensor:
            calls.append(part)
            return part

        part = inputs_of([Episode(0, float(reward), True, [Row([1, 1], turns)]) for reward in range(3)], batch_sum=batch_sum)
        if not turns:
            none = torch.zeros(0, dtype=torch.int64)
            part = replace(part, turns=TurnRewards(none, none, none.double()))
        got = ADVANTAGES.find("group_norm").compute(part, AdvantageOptions(group_std="batch"))
        assert got.shape == (3, 2 if turns else 1)
        counts.append([call.shape for call in calls])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["opo", "gpg"])
def test_turns_are_less_the_mean_of_their_group(name: str):
    """Of turns 0.5, 0.2 and 0.8; the rewards themselves tell nothing."""
    episodes = [Episode(0, 1.0, True, [Row([1, 0, 1], {0: 0.5, 2: 0.2})]), Episode(0, 1.0, True, [Row([1, 1, 0], {1: 0.8})])]
    got = ADVANTAGES.find(name).compute(inputs_of(episodes), AdvantageOptions(turn_discount=0.5))
    scale = 1.0 if name == "opo" else 2.0  # samples over at least one of a group with signal
    expected = [[0.5 * -0.3, -0.3, -0.3], [0.3, 0.3, 0.0]]
    for row, numbers in enumerate(expected):
        for token, number in enumerate(numbers):
            if episodes[row].rows[0].mask[token]:
                assert float(got[row, token]) == pytest.approx(scale * number, abs=1e-12)


# ----------------------------------------------------------------------------------------------------------- evaluation

RIGHT = {"a"}


def won_by(answers: tuple[str | None, ...]) -> str | None:
    """The winner by looking at every prefix: the first answer to have the largest final count."""
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    most = max(counts.values(), default=0)
    for end in range(1, len(answers) + 1):
        for answer, count in counts.items():
            if count == most and answers[:end].count(answer) == most:
                return answer
    return None


def test_the_majority_decides_and_a_tie_goes_to_the_first_to_reach_the_count() -> None:
    for n in range(1, 6):
        for answers in itertools.product(("a", "b", "c", None), repeat=n):
            verdicts = [answer in RIGHT for answer in answers]
            for k in range(1, n + 1):
                assert maj_at_k(answers, verdicts, k) is (won_by(answers[:k]) in RIGHT), (answers, k)


def test_nobody_votes() -> None:
    assert maj_at_k([None, None], [True, True], 2) is False


@pytest.mark.parametrize("case", [(["a"], [True], 2), (["a"], [True], 0), (["a"], [], 1), ([], [], 1)])
def test_impossible_counts_of_votes(case: tuple[list[str | None], list[bool], int]) -> None:
    with pytest.raises(ValueError, match="1 <= k <= n"):
        maj_at_k(*case)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=12))
def test_the_error_is_the_sandwich_of_a_regression_on_a_constant(samples: list[list[bool]]) -> None:
    """Cluster-robust variance (X'X)^-1 (sum over clusters of X'u u'X) (X'X)^-1, times N / (N - 1); X is a column of ones."""
    values = np.array(samples, np.float64)
    clusters = len(values)
    residuals = values - values.mean()
    meat = sum(float(np.ones(3) @ residuals[c]) ** 2 for c in range(clusters))
    variance = meat / values.size**2 * clusters / (clusters - 1)
    assert clustered_standard_error(values.mean(1).tolist()) == pytest.approx(np.sqrt(variance), rel=1e-12, abs=1e-15)


def test_samples_of_one_problem_are_no_evidence_of_their_own() -> None:
    alone = clustered_standard_error([0.0, 1.0, 1.0, 0.0])
    assert alone == pytest.approx(np.std([0, 1, 1, 0], ddof=1) / 2)
    assert clustered_standard_error([0.5] * 4) == 0.0
    assert clustered_standard_error([0.5]) is None
    assert clustered_standard_error([]) is None
