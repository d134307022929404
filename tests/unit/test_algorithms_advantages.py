"""Advantages and returns against loops in plain Python, with masks that have gaps and rows that are fully masked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.advantages import (
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
from runtime.algorithms.evaluation import pass_at_k
from runtime.algorithms.interfaces import ADVANTAGES, AdvantageInputs, AdvantageOptions
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


class TestTokenRewards:
    def test_reward_at_the_last_trained_token_less_penalties(self):
        mask = matrix([1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])
        penalties = matrix([0.1, 9, 0.2, 9], [0.1, 0.2, 0.3, 0.4], [9, 9, 9, 9])
        got = token_rewards(f64(2, 3, 4), mask, penalties)
        torch.testing.assert_close(got, matrix([-0.1, 0, 1.8, 0], [-0.1, -0.2, -0.3, 2.6], [0, 0, 0, 0]), rtol=1e-14, atol=0)
        assert token_rewards(f64(2, 3, 4), mask).sum() == 5


class TestReturns:
    def test_by_hand_with_a_gap(self):
        rewards, mask = matrix([1, 100, 2, 4]), matrix([1, 0, 1, 1])
        assert returns_to_go(rewards, mask, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 0, 4, 4]]

    @settings(max_examples=60)
    @given(batches(), st.floats(0, 1))
    def test_is_the_discounted_sum_of_later_masked_rewards(self, batch, gamma: float):
        rewards, _, mask = batch
        got = returns_to_go(rewards, mask, gamma)
        for row in range(len(mask)):
            expected, _ = plain_gae(rewards[row].tolist(), [0.0] * mask.shape[1], mask[row].tolist(), gamma, 1.0)
            np.testing.assert_allclose(got[row].numpy(), expected, rtol=1e-12, atol=1e-12)


class TestGae:
    def test_by_hand(self):
        advantages, returns = token_gae(matrix([0, 0, 1]), matrix([0.5, 0.4, 0.2]), matrix([1, 1, 1]), gamma=0.9, lam=0.8)
        last = 1 - 0.2
        middle = 0.9 * 0.2 - 0.4 + 0.72 * last
        first = 0.9 * 0.4 - 0.5 + 0.72 * middle
        torch.testing.assert_close(advantages, matrix([first, middle, last]), rtol=1e-14, atol=0)
        torch.testing.assert_close(returns, matrix([first + 0.5, middle + 0.4, 1.0]), rtol=1e-14, atol=0)

    @settings(max_examples=60)
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
        options = AdvantageOptions(gamma=0.9, gae_lambda=0.8, gae_whitened=False)
        advantages, returns = plain_gae(*(rows[0].tolist() for rows in (token_rewards, values, mask)), 0.9, 0.8)
        np.testing.assert_allclose(ADVANTAGES.find("gae").compute(inputs, options)[0], advantages, rtol=1e-12)
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
        estimator = ADVANTAGES.find("gae")
        for whitened, expected in ((True, whiten(plain, mask)), (False, plain)):
            options = AdvantageOptions(gae_lambda=0.9, gae_whitened=whitened)
            assert torch.equal(estimator.compute(inputs, options), expected)
            assert torch.equal(value_targets(inputs, options), returns)
            assert estimator.streams(options) is not whitened


class TestWhitening:
    @settings(max_examples=60)
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
        groups, lengths = torch.tensor([0, 0, 0, 1, 2, 2]), f64(3, 3, 7, 9, 0, 0)
        got = opo(f64(0.1, 0.1, 0.1, 2.0, 1.0, 3.0), groups, lengths)
        assert got.tolist() == [0.0, 0.0, 0.0, 2.0, 1.0, 3.0]

    def test_an_episodes_length_is_that_of_all_its_rows(self):
        mask = matrix([1, 1, 0], [1, 0, 0], [1, 0, 1])
        inputs = AdvantageInputs(
            f64(1, 1, 4), torch.tensor([0, 0, 0]), torch.ones(3).bool(), mask, mask, leads=torch.tensor([True, False, True])
        )
        got = ADVANTAGES.get("opo").compute(inputs, AdvantageOptions())
        baseline = (3 * 1 + 2 * 4) / 5
        torch.testing.assert_close(got, f64(1 - baseline, 1 - baseline, 4 - baseline)[:, None], rtol=1e-14, atol=0)


class TestGpg:
    def test_groups_without_signal_do_not_shrink_the_gradient(self):
        rewards, groups = f64(1, 0, 0, 0.1, 0.1, 0.1, 2, 4), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
        valid = torch.tensor([True, True, False, True, True, True, True, True])
        inputs = AdvantageInputs(rewards, groups, valid, torch.ones(8, 2).double(), torch.zeros(8, 2).double())
        got = ADVANTAGES.get("gpg").compute(inputs, AdvantageOptions())
        scale = 7 / 4  # valid samples over those of the first and the last group
        expected = scale * f64(0.5, -0.5, 0, 0, 0, 0, -1, 1)
        torch.testing.assert_close(got, expected[:, None], rtol=1e-14, atol=0)

    def test_a_batch_without_signal_is_worth_nothing(self):
        mask = torch.ones(2, 1).double()
        inputs = AdvantageInputs(f64(0.3, 0.3), torch.tensor([0, 0]), torch.ones(2).bool(), mask, mask)
        assert ADVANTAGES.get("gpg").compute(inputs, AdvantageOptions()).tolist() == [[0.0], [0.0]]


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
        got = ADVANTAGES.get("reinforce_plus_plus").compute(inputs, AdvantageOptions(gamma=0.9)).numpy()
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
        got = ADVANTAGES.get("reinforce_plus_plus_baseline").compute(inputs, AdvantageOptions()).numpy()
        per_token = np.repeat([0.5, -0.5, -2.0], [2, 3, 2])  # the fourth row has no token, yet is in its group's mean
        low, deviation = per_token.mean(), math.sqrt(per_token.var(ddof=1) + 1e-8)
        expected = (np.array([[0.5], [-0.5], [-2.0], [2.0]]) - low) / deviation * self.mask.numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)

    def test_rloo_takes_the_reward_with_its_penalties(self):
        inputs = advantage_inputs(self.rewards, self.groups, self.mask, self.penalties)
        got = ADVANTAGES.get("rloo").compute(inputs, AdvantageOptions())
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
        estimator = ADVANTAGES.get(name)
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
        estimator = ADVANTAGES.get(name)
        assert (
            estimator.compute(advantage_inputs(self.rewards, self.groups, self.mask), AdvantageOptions()).dtype == torch.float64
        )
        empty = advantage_inputs(f64(), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.float64))
        assert len(estimator.compute(empty, AdvantageOptions())) == 0

    def test_group_of_one_in_every_scale(self):
        one = torch.tensor([0])
        for scale in ("group", "none"):
            assert group_norm(f64(2.0), one, scale=scale, eps=0.0).tolist() == [2.0]
        assert rloo(f64(2.0), one).tolist() == [2.0]


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
