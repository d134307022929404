"""Policy losses beside PPO's clip, and the tokens that Clip-Cov, KL-Cov and M2PO choose: float64, against plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.covariance import (
    beyond_second_moment,
    clip_cov,
    covariances,
    drawn_within,
    highest,
    kl_cov,
    largest,
    m2po,
)
from runtime.algorithms.interfaces import LossInputs, LossOptions, StepTokens, own_part
from runtime.algorithms.variants import dppo_kl, dppo_tv, gmpo, gpg, topr, unbounded_positive, vespo

pytestmark = pytest.mark.numeric

MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.float64)


def batch(seed: int, spread: float = 0.6) -> LossInputs:
    """Rows of advantages of either sign, some of ratios far from 1, and one without a trained token."""
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(-rng.exponential(1.0, (4, 4)) - 1e-3)
    logp = (old + torch.from_numpy(rng.normal(0, spread, (4, 4)))).clamp(max=-1e-4).requires_grad_()
    advantages = torch.tensor([[1.3], [-0.7], [-1.1], [0.4]], dtype=torch.float64)
    chosen = torch.from_numpy((rng.random((4, 4)) < 0.4).astype(np.float64))
    return LossInputs(logp, old, old, old - 0.1, advantages, MASK, chosen)


def tokens(inputs: LossInputs) -> list[tuple[int, int, float, float, float]]:
    """Row, place, log-probability, old log-probability and advantage of each trained token."""
    return [
        (i, t, float(inputs.logp.detach()[i, t]), float(inputs.old_logp[i, t]), float(inputs.advantages[i, 0]))
        for i in range(4)
        for t in range(4)
        if MASK[i, t]
    ]


def assert_tokens(values: torch.Tensor, expected: dict[tuple[int, int], float]) -> None:
    for (i, t), number in expected.items():
        assert float(values.detach()[i, t]) == pytest.approx(number, rel=1e-11, abs=1e-14), (i, t)


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    (found,) = torch.autograd.grad((loss * MASK).sum(), inputs.logp)
    return found


@pytest.mark.parametrize("seed", range(4))
class TestFormulas:
    def test_gmpo_is_the_geometric_mean_of_clipped_ratios(self, seed: int):
        inputs, low, high = batch(seed), 0.3, 0.2
        outputs = gmpo(inputs, LossOptions(clip_low=low, clip_high=high))
        expected, clipped = {}, {}
        for i, t, logp, old, advantage in tokens(inputs):
            clipped[i, t] = float(logp - old > high if advantage > 0 else logp - old < -low)
            product, length = 1.0, 0
            for j, _, other, other_old, _ in tokens(inputs):
                if j == i:
                    ratio = math.exp(other - other_old)
                    product *= min(ratio, math.exp(high)) if advantage > 0 else max(ratio, math.exp(-low))
                    length += 1
            expected[i, t] = -advantage * product ** (1 / length)
        assert_tokens(outputs.loss, expected)
        assert_tokens(outputs.metrics["actor/pg_clipfrac"], clipped)
        assert outputs.loss.shape == MASK.shape

    def test_gpg_is_the_policy_gradient(self, seed: int):
        inputs = batch(seed)
        outputs = gpg(inputs, LossOptions())
        assert_tokens(outputs.loss, {(i, t): -a * logp for i, t, logp, _, a in tokens(inputs)})
        torch.testing.assert_close(gradient(outputs.loss, inputs), -inputs.advantages * MASK, rtol=1e-14, atol=0)

    def test_up_clips_negative_advantages_alone(self, seed: int):
        inputs, options = batch(seed), LossOptions(clip_low=0.1, clip_high=0.15, dual_clip=1.2)
        outputs = unbounded_positive(inputs, options)
        expected, clipped, beyond = {}, {}, {}
        for i, t, logp, old, advantage in tokens(inputs):
            ratio = math.exp(logp - old)
            clip = max(-ratio * advantage, -min(max(ratio, 0.9), 1.15) * advantage)
            expected[i, t] = -advantage * logp if advantage > 0 else min(clip, -1.2 * advantage)
            clipped[i, t] = float(advantage < 0 and ratio < 0.9)
            beyond[i, t] = float(advantage < 0 and clip > -1.2 * advantage)
        assert_tokens(outputs.loss, expected)
        assert_tokens(outputs.metrics["actor/pg_clipfrac"], clipped)
        assert_tokens(outputs.metrics["actor/pg_clipfrac_lower"], beyond)

    @pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
    def test_dppo_leaves_out_what_moves_on_beyond_its_divergence(self, seed: int, loss):
        inputs, low, high = batch(seed), 0.04, 0.06
        outputs = loss(inputs, LossOptions(clip_low=low, clip_high=high))
        expected, outside = {}, {}
        for i, t, logp, old, advantage in tokens(inputs):
            p, m = math.exp(logp), math.exp(old)
            divergence = abs(p - m) if loss is dppo_tv else m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
            away = p > m if advantage > 0 else p < m
            outside[i, t] = float(away and divergence > (high if advantage > 0 else low))
            expected[i, t] = 0.0 if outside[i, t] else -p / m * advantage
        assert_tokens(outputs.loss, expected)
        assert_tokens(outputs.metrics["actor/pg_clipfrac"], outside)
        found = gradient(outputs.loss, inputs)
        assert_tokens(found, expected)  # of -r A it is -r A

    def test_vespo_weighs_samples_by_their_whole_ratio(self, seed: int):
        inputs = batch(seed)
        options = {"power_positive": 1.5, "decay_positive": 2.5, "power_negative": 2.2, "decay_negative": 1.7}
        outputs = vespo(inputs, LossOptions(), **options)
        weights, expected = {}, {}
        for i, t, logp, _, advantage in tokens(inputs):
            whole = math.exp(sum(other - old for j, _, other, old, _ in tokens(inputs) if j == i))
            power, decay = (1.5, 2.5) if advantage > 0 else (2.2, 1.7)
            weights[i, t] = whole**power * math.exp(decay * (1 - whole))
            expected[i, t] = -weights[i, t] * advantage * logp
        assert_tokens(outputs.loss, expected)
        assert_tokens(outputs.metrics["actor/vespo_weight"], weights)
        assert_tokens(
            gradient(outputs.loss, inputs), {(i, t): -w * float(inputs.advantages[i, 0]) for (i, t), w in weights.items()}
        )

    def test_clip_cov_leaves_out_the_chosen(self, seed: int):
        inputs, options = batch(seed), LossOptions(clip_low=0.1, clip_high=0.15)
        outputs = clip_cov(inputs, options)
        expected = {}
        for i, t, logp, old, advantage in tokens(inputs):
            ratio = math.exp(logp - old)
            plain = max(-ratio * advantage, -min(max(ratio, 0.9), 1.15) * advantage)
            expected[i, t] = 0.0 if inputs.chosen[i, t] else plain
        assert_tokens(outputs.loss, expected)
        assert torch.equal(outputs.metrics["actor/covariance_chosen"], inputs.chosen)

    def test_kl_cov_holds_the_chosen(self, seed: int):
        inputs = batch(seed)
        outputs = kl_cov(inputs, LossOptions(covariance_kl=0.7))
        expected = {
            (i, t): -math.exp(logp - old) * advantage + 0.7 * float(inputs.chosen[i, t]) * abs(logp - old)
            for i, t, logp, old, advantage in tokens(inputs)
        }
        assert_tokens(outputs.loss, expected)

    def test_m2po_leaves_out_the_chosen(self, seed: int):
        inputs = batch(seed)
        expected = {
            (i, t): 0.0 if inputs.chosen[i, t] else -math.exp(logp - old) * advantage
            for i, t, logp, old, advantage in tokens(inputs)
        }
        assert_tokens(m2po(inputs, LossOptions()).loss, expected)

    def test_topr_weighs_bad_samples_by_their_whole_ratio(self, seed: int):
        inputs, whole = batch(seed), [0.0] * 4
        for i, _, logp, old, _ in tokens(inputs):
            whole[i] += logp - old
        weights = {(i, t): 1.0 if advantage > 0 else min(1.0, math.exp(whole[i])) for i, t, _, _, advantage in tokens(inputs)}
        outputs = topr(inputs, LossOptions())
        assert_tokens(outputs.metrics["actor/topr_weight"], weights)
        slopes = {(i, t): -weight * float(inputs.advantages[i, 0]) for (i, t), weight in weights.items()}
        assert_tokens(gradient(outputs.loss, inputs), slopes)


@pytest.mark.parametrize("loss", [gmpo, gpg, unbounded_positive, dppo_tv, dppo_kl, vespo, topr, clip_cov, kl_cov, m2po])
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(loss):
    inputs = batch(0)
    inputs = replace(inputs, old_logp=inputs.logp.detach(), chosen=0 * MASK)
    share = 1 / MASK.sum(1, keepdim=True).clamp(min=1) if loss is gmpo else 1.0  # a row's loss, on each of its tokens
    found = gradient(loss(inputs, LossOptions()).loss * share, inputs)
    torch.testing.assert_close(found, -inputs.advantages * MASK * share, rtol=1e-12, atol=1e-15)


def test_vespo_stands_ratios_that_overflow():
    inputs = batch(0)
    for far in (400.0, -400.0):
        outputs = vespo(replace(inputs, old_logp=inputs.logp.detach() - far), LossOptions())
        assert (outputs.loss * MASK).abs().sum() == 0


def test_dppo_kl_leaves_out_what_has_become_certain():
    ones = torch.zeros(4, 4, dtype=torch.float64)
    inputs = replace(batch(0), logp=ones, old_logp=ones - 0.5)
    outputs = dppo_kl(inputs, LossOptions(clip_high=1.0, clip_low=1.0))
    expected = -math.exp(0.5) * inputs.advantages.clamp(max=0).expand(4, 4)
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------------------------ the choice of tokens


def step(seed: int, count: int = 400) -> StepTokens:
    rng = np.random.default_rng(seed)
    advantages, logp, draws, moved = (
        torch.from_numpy(each)
        for each in (rng.normal(0.2, 2, count), -rng.exponential(1, count), rng.random(count), rng.normal(0, 0.3, count))
    )
    return StepTokens(advantages, logp, draws, logp + moved)


def plain_covariances(one: StepTokens) -> np.ndarray:
    advantages, logp = one.advantages.numpy(), one.logp.numpy()
    return (advantages - advantages.sum() / len(advantages)) * (logp - logp.sum() / len(logp))


def in_parts(one: StepTokens, cuts: list[int], choose) -> torch.Tensor:
    """What `choose` gives for parts of `one`, each of which is asked with sums over all: each part asks for every sum,
    in turns, so that they have to ask alike."""
    import threading

    bounds = [0, *cuts, len(one.logp)]
    parts, found, sums, lock = len(bounds) - 1, {}, {}, threading.Barrier(len(bounds) - 1)

    def run(index: int) -> None:
        rounds = iter(range(10**6))

        def batch_sum(part: torch.Tensor) -> torch.Tensor:
            sums[number := next(rounds), index] = part
            lock.wait(timeout=60)
            return sum(sums[number, other] for other in range(parts))

        own = slice(bounds[index], bounds[index + 1])
        part = StepTokens(one.advantages[own], one.logp[own], one.draws[own], one.start[own])
        found[index] = choose(part, batch_sum)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([found[index] for index in range(parts)])


class TestChoice:
    @settings(max_examples=60)
    @given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), st.floats(0, 1))
    def test_the_largest_and_their_equals(self, values: list[float], share: float):
        got = largest(torch.tensor(values, dtype=torch.float64), share, own_part)
        ordered = sorted((value + 0.0 for value in values), reverse=True)  # 0 for -0, which is not below it
        wanted = max(1, int(share * len(values)))
        assert got.sum() >= min(wanted, len(values))
        if values:
            last = ordered[wanted - 1]
            chosen = [value for value, is_chosen in zip(values, got.tolist(), strict=True) if is_chosen]
            assert all(value >= last for value in chosen)
            assert last == 0 or sorted(chosen, reverse=True) == [value for value in ordered if value >= last]

    def test_covariances_are_about_the_means_of_the_step(self):
        one = step(0)
        np.testing.assert_allclose(covariances(one, own_part).numpy(), plain_covariances(one), rtol=1e-12)

    def test_kl_cov_takes_the_highest(self):
        one, options = step(1), LossOptions(covariance_share=0.02)
        got = highest(one, options, own_part).numpy()
        assert got.sum() == 8
        assert set(np.flatnonzero(got)) == set(np.argsort(plain_covariances(one))[-8:])

    def test_clip_cov_draws_between_its_bounds(self):
        one, options = step(2), LossOptions(covariance_share=0.02, covariance_low=0.5, covariance_high=1.5)
        got, covariance = drawn_within(one, options, own_part).numpy(), plain_covariances(one)
        within = np.flatnonzero((covariance > 0.5) & (covariance < 1.5))
        assert len(within) > 8
        assert set(np.flatnonzero(got)) == set(within[np.argsort(one.draws.numpy()[within])[-8:]])

    def test_clip_cov_takes_no_more_than_there_are(self):
        one, options = step(3), LossOptions(covariance_share=1.0, covariance_low=2.0, covariance_high=3.0)
        covariance = plain_covariances(one)
        assert np.array_equal(drawn_within(one, options, own_part).numpy(), (covariance > 2) & (covariance < 3))

    def test_one_token_at_least_is_chosen_and_none_of_none(self):
        assert highest(step(4), LossOptions(covariance_share=0.0), own_part).sum() == 1
        assert len(highest(step(4, 0), LossOptions(), own_part)) == 0

    @pytest.mark.parametrize("limit", [0.0, 0.01, 0.04, 0.2])
    def test_m2po_takes_the_furthest_until_the_others_are_near_enough(self, limit: float):
        one = step(6)
        moments = (one.start - one.logp).square().numpy()
        may_go = ((one.start - one.logp) * one.advantages > 0).numpy()
        kept = np.ones(len(moments), bool)
        for index in sorted(np.flatnonzero(may_go & (moments > limit)), key=lambda index: -moments[index]):
            if moments[kept].mean() <= limit:
                break
            kept[index] = False
        got = beyond_second_moment(one, LossOptions(m2_threshold=limit), own_part).numpy()
        assert np.array_equal(got, ~kept)
        assert got.any() == (moments.mean() > limit)

    def test_m2po_keeps_what_goes_back(self):
        one = step(7)
        back = StepTokens((one.logp - one.start).sign(), one.logp, one.draws, one.start)
        assert not beyond_second_moment(back, LossOptions(m2_threshold=0.0), own_part).any()

    @pytest.mark.parametrize("cuts", [[150], [0, 399], [400]])
    def test_parts_measure_the_second_moment_together(self, cuts: list[int]):
        one, options = step(8), LossOptions()
        got = in_parts(one, cuts, lambda part, batch_sum: beyond_second_moment(part, options, batch_sum))
        assert torch.equal(got, beyond_second_moment(one, options, own_part)) and 0 < got.sum() < 200

    @pytest.mark.parametrize("choose", [highest, drawn_within])
    @pytest.mark.parametrize("cuts", [[150], [0, 399], [400]])
    def test_parts_choose_together_what_the_whole_does(self, choose, cuts: list[int]):
        one, options = step(5), LossOptions(covariance_share=0.03, covariance_low=0.5, covariance_high=4.0)
        got = in_parts(one, cuts, lambda part, batch_sum: choose(part, options, batch_sum))
        assert torch.equal(got, choose(one, options, own_part))
        assert got.sum() == 12
