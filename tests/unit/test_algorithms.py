"""Algorithm functions against numbers worked by hand or in numpy, in float64, gradients included."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.advantages import group_norm, token_rewards
from runtime.algorithms.interfaces import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOptions,
    AggregationOptions,
    LossInputs,
    LossOptions,
    PolicyLoss,
    advantage,
    policy_loss,
)
from runtime.algorithms.losses import (
    AdaptiveKl,
    FixedKl,
    absolute,
    clipped_surrogate,
    decoupled,
    dr_grpo,
    importance_weighted,
    k1,
    k2,
    k3,
    k3_clamped,
    masked_sample,
    ppo,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_logprobs,
    token_mean,
)
from runtime.errors import UserError

pytestmark = pytest.mark.numeric

CLIPPED, LOWER = "actor/pg_clipfrac", "actor/pg_clipfrac_lower"
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
        with pytest.raises(ValueError, match="'group', 'batch' or 'none'"):
            group_norm(rewards, groups, scale="row")

    def test_equal_rewards_give_exactly_zero(self):
        # The mean of ten times 0.1 is not 0.1 in floating point.
        assert (
            group_norm(torch.full((10,), 0.1, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)).tolist() == [0.0] * 10
        )

    def test_group_of_one_keeps_its_reward(self):
        torch.testing.assert_close(group_norm(f64(3.0), torch.tensor([0])), f64(3 / (1 + 1e-6)), rtol=1e-14, atol=0)

    def test_invalid_samples_count_nowhere(self):
        valid = torch.tensor([True, True, False, True])
        got = group_norm(f64(1, 2, math.nan, 6), torch.zeros(4, dtype=torch.int64), valid)
        expected = group_norm(f64(1, 2, 6), torch.zeros(3, dtype=torch.int64))
        assert got[2] == 0
        torch.testing.assert_close(got[valid], expected, rtol=1e-14, atol=0)

    @settings(max_examples=50)
    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(-50, 50), st.floats(0.5, 10))
    def test_shift_leaves_and_scale_nearly_leaves_advantages(self, rewards: list[float], shift: float, scale: float):
        groups = torch.zeros(len(rewards), dtype=torch.int64)
        base = f64(*rewards)
        plain = group_norm(base, groups)
        assert abs(float(plain.sum())) < 1e-6
        if float(base.std()) > 0.1:
            torch.testing.assert_close(group_norm(base * scale + shift, groups), plain, rtol=1e-4, atol=1e-6)

    def test_registered_estimator_is_per_sample_and_streamable(self):
        estimator = ADVANTAGES.get("group_norm")
        rewards, groups = f64(1, 0, 1), torch.zeros(3, dtype=torch.int64)
        mask = torch.ones(3, 5, dtype=torch.float64)
        inputs = AdvantageInputs(rewards, groups, torch.ones(3, dtype=torch.bool), mask, token_rewards(rewards, mask))
        options = AdvantageOptions()
        assert estimator.streams(options)
        torch.testing.assert_close(estimator.compute(inputs, options), group_norm(rewards, groups)[:, None])

    def test_every_option_reaches_the_registered_estimator(self):
        estimator = ADVANTAGES.get("group_norm")
        rewards, groups = f64(1, 0, 3, 7), torch.tensor([0, 0, 1, 1])
        mask = torch.ones(4, 2, dtype=torch.float64)
        inputs = AdvantageInputs(rewards, groups, torch.ones(4, dtype=torch.bool), mask, token_rewards(rewards, mask))
        for scale in ("group", "batch", "none"):
            options = AdvantageOptions(group_std=scale, ddof=0, eps=0.5)
            expected = group_norm(rewards, groups, scale=scale, ddof=0, eps=0.5)[:, None]
            torch.testing.assert_close(estimator.compute(inputs, options), expected, rtol=0, atol=0)
            assert estimator.streams(options) == (scale != "batch")


class TestKl:
    def test_values(self):
        x = f64(0.0, 0.5, -1.0)
        assert k1(x).tolist() == [0.0, 0.5, -1.0]
        assert k2(x).tolist() == [0.0, 0.125, 0.5]
        assert absolute(x).tolist() == [0.0, 0.5, 1.0]
        torch.testing.assert_close(k3(x), f64(0.0, math.exp(-0.5) - 0.5, math.e - 2), rtol=1e-14, atol=1e-16)

    def test_k3_clamps_its_argument_and_its_result(self):
        far = f64(-30.0, -2.0, 30.0)
        torch.testing.assert_close(k3_clamped(far), f64(10.0, math.exp(2) - 3, 10.0), rtol=1e-14, atol=0)
        torch.testing.assert_close(k3(far)[2], f64(29 + math.exp(-30))[0], rtol=1e-14, atol=0)

    def test_beyond_the_clamp_of_k3_there_is_no_gradient_however_far(self):
        x = torch.tensor([-1000.0, -2.0, 3.0, 1000.0], requires_grad=True)
        estimate = k3_clamped(x)
        assert estimate.tolist()[::3] == [10.0, 10.0]
        (gradient,) = torch.autograd.grad(estimate.sum(), x)
        torch.testing.assert_close(gradient, torch.tensor([0.0, 1 - math.exp(2), 1 - math.exp(-3), 0.0]), rtol=1e-5, atol=0)

    def test_k1_and_k3_are_unbiased(self):
        p, q = f64(0.2, 0.5, 0.3), f64(0.4, 0.4, 0.2)
        x = (p / q).log()
        exact = float((p * x).sum())
        for estimator in (k1, k3):
            assert float((p * estimator(x)).sum()) == pytest.approx(exact, rel=1e-12)

    def test_k3_plain_has_no_clamp(self):
        torch.testing.assert_close(k3(f64(-4.0, 30.0)), f64(math.exp(4) - 5, 29 + math.exp(-30)), rtol=1e-14, atol=0)

    def test_importance_weighted_k3_is_unbiased_off_policy_gradient_included(self):
        logits = f64(0.3, -0.2, 0.8).requires_grad_()
        behaviour, reference = f64(0.5, 0.2, 0.3), f64(0.4, 0.4, 0.2).log()
        logp = logits.log_softmax(0)
        exact = (logp.exp() * (logp - reference)).sum()
        expected = (behaviour * importance_weighted(k3(logp - reference), logp, behaviour.log())).sum()
        assert expected.item() == pytest.approx(exact.item(), rel=1e-12)
        (left,) = torch.autograd.grad(expected, logits, retain_graph=True)
        (right,) = torch.autograd.grad(exact, logits)
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)

    def test_importance_weight_is_held_within_the_exponentials_of_20(self):
        got = importance_weighted(torch.ones(4, dtype=torch.float64), f64(0, 0, 0, 0), f64(-500, -19, 19, 500))
        torch.testing.assert_close(got, f64(20, 19, -19, -20).exp(), rtol=1e-14, atol=0)

    def test_controllers(self):
        assert FixedKl(0.1).after(5.0, 1000) == FixedKl(0.1)
        control = AdaptiveKl(coefficient=0.1, target=0.02, horizon=1000)
        assert control.after(0.02, 500).coefficient == 0.1
        assert control.after(0.022, 500).coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.5))
        assert control.after(1.0, 500).coefficient == pytest.approx(0.1 * 1.1)  # clipped at +0.2
        assert control.after(-3.0, 500).coefficient == pytest.approx(0.1 * 0.9)
        assert control.after(0.018, 500).after(0.018, 500).coefficient == pytest.approx(0.1 * 0.95**2)

    @pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3_plain", "abs"])
    def test_gradients(self, name: str):
        x = f64(0.7, -0.4, 1.3).requires_grad_()
        assert torch.autograd.gradcheck(KL_ESTIMATORS.get(name), (x,))


class TestClippedSurrogate:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "decided"),
        [
            (1.0, 2.0, -2.0, False),
            (1.5, 2.0, -2.56, True),  # clipped above at 1.28
            (0.5, 2.0, -1.0, False),  # the clip at 0.8 would help the policy: not taken
            (0.5, -2.0, 1.6, True),  # clipped below at 0.8
            (1.5, -2.0, 3.0, False),
        ],
    )
    def test_each_side(self, ratio: float, advantage: float, loss: float, decided: bool):
        got, clips = clipped_surrogate(f64(math.log(ratio)), f64(0.0), f64(advantage), LossOptions(**CLIP))
        assert got.item() == pytest.approx(loss, rel=1e-14)
        assert {name: one.item() for name, one in clips.items()} == {CLIPPED: float(decided), LOWER: 0.0}

    def test_dual_clip_bounds_negative_advantages_only(self):
        logp, advantages = f64(math.log(10), math.log(2), math.log(0.1), math.log(0.1)), f64(-2.0, -2.0, 1.0, 0.5)
        got, clips = clipped_surrogate(logp, f64(0, 0, 0, 0), advantages, LossOptions(**CLIP, dual_clip=3.0))
        torch.testing.assert_close(got, f64(6.0, 4.0, -0.1, -0.05), rtol=1e-14, atol=0)
        assert clips[LOWER].tolist() == [1, 0, 0, 0]
        assert clips[CLIPPED].tolist() == [0, 0, 0, 0]  # the ratio's clip would help the policy: it decides none

    def test_both_clips_are_counted_apart(self):
        logp, advantages = f64(math.log(10), math.log(0.5), math.log(2)), f64(-2.0, -2.0, 1.0)
        _, clips = clipped_surrogate(logp, f64(0, 0, 0), advantages, LossOptions(**CLIP, dual_clip=3.0))
        assert (clips[LOWER].tolist(), clips[CLIPPED].tolist()) == ([1, 0, 0], [0, 1, 1])

    def test_what_is_at_the_dual_clip_is_not_beyond_it(self):
        logp = f64(0.0).requires_grad_()
        loss, clips = clipped_surrogate(logp, f64(0.0), f64(-2.0), LossOptions(**CLIP, dual_clip=1.0))
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        assert (loss.item(), gradient.item(), clips[LOWER].item()) == (2.0, 2.0, 0.0)

    def test_gradients(self):
        logp = f64(0.1, 0.4, -0.1, -0.5, 1.5).requires_grad_()
        advantages = f64(1.0, 2.0, -1.0, -2.0, -1.0)

        def loss(values: torch.Tensor) -> torch.Tensor:
            return clipped_surrogate(values, torch.zeros(5).double(), advantages, LossOptions(**CLIP, dual_clip=3.0))[0]

        assert torch.autograd.gradcheck(loss, (logp,))
        (gradient,) = torch.autograd.grad(loss(logp).sum(), logp)
        # Inside the clip -rA; flat where a clip decides.
        torch.testing.assert_close(gradient, f64(-math.exp(0.1), 0.0, math.exp(-0.1), 0.0, 0.0), rtol=1e-12, atol=1e-15)


def loss_inputs(logp: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> LossInputs:
    ones = torch.ones_like(logp)
    return LossInputs(logp, behaviour, proximal, behaviour, advantages, ones, chosen=0 * ones)


class TestPolicyLosses:
    def test_ppo_is_against_the_policy_that_sampled(self):
        inputs = loss_inputs(f64(-1.0)[None], f64(-1.0)[None], f64(-1.5)[None], f64(2.0)[None])
        outputs = ppo(inputs, LossOptions())
        assert outputs.loss.item() == pytest.approx(-2.56)  # exp(0.5) is beyond 1.28
        assert outputs.metrics["actor/pg_clipfrac"].item() == 1.0

    def test_decoupled_weighs_by_the_capped_age_of_the_sample(self):
        proximal, behaviour = f64(-1.0, -1.0, -1.0), f64(-1.0, -1.3, -3.0)
        logp = (proximal + math.log(1.1)).requires_grad_()
        outputs = decoupled(loss_inputs(logp, proximal, behaviour, f64(1, 1, -1)), LossOptions(behaviour_weight_cap=2.0))
        weights = f64(1.0, math.exp(0.3), 2.0)
        torch.testing.assert_close(outputs.loss, weights * f64(-1.1, -1.1, 1.1), rtol=1e-13, atol=0)
        assert outputs.metrics["actor/behaviour_capfrac"].tolist() == [0.0, 0.0, 1.0]
        (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)
        torch.testing.assert_close(gradient, weights * f64(-1.1, -1.1, 1.1), rtol=1e-13, atol=0)
        dropping = LossOptions(behaviour_weight_cap=2.0, behaviour_weight_over="drop")
        dropped = decoupled(loss_inputs(logp, proximal, behaviour, f64(1, 1, -1)), dropping)
        torch.testing.assert_close(dropped.loss, weights * f64(-1.1, -1.1, 0.0), rtol=1e-13, atol=0)
        assert dropped.metrics["actor/behaviour_capfrac"].tolist() == [0.0, 0.0, 1.0]

    def test_a_weight_at_its_cap_is_not_beyond_it(self):
        inputs = loss_inputs(f64(-1.0), f64(-1.0), f64(-1.0), f64(2.0))
        outputs = decoupled(inputs, LossOptions(behaviour_weight_cap=1.0, behaviour_weight_over="drop"))
        assert (outputs.loss.item(), outputs.metrics["actor/behaviour_capfrac"].item()) == (-2.0, 0.0)

    def test_decoupled_weight_carries_no_gradient(self):
        # With the proximal policy being the one under training, the weight would contribute if it were not detached.
        logp = f64(-1.0).requires_grad_()
        outputs = decoupled(loss_inputs(logp, logp, f64(-1.2), f64(1.0)), LossOptions())
        (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)
        assert gradient.item() == pytest.approx(0.0, abs=1e-15)

    @pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
    def test_what_is_declared_zero_without_advantage_is(self, name: str):
        loss = POLICY_LOSSES.get(name)
        logp = f64(-1.0, -2.0).requires_grad_()
        outputs = loss.compute(loss_inputs(logp, logp.detach(), f64(-3.0, -1.0), f64(0.0, 0.0)), LossOptions())
        if loss.zero_without_advantage:
            (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)
            assert outputs.loss.abs().sum() == 0
            assert gradient.abs().sum() == 0


class TestAggregation:
    def test_a_masked_sample_counts_for_dr_grpo_alone(self):
        added = {name: masked_sample(name, self.options) for name in AGGREGATIONS}
        assert added == {name: 8.0 if name == "dr_grpo" else 0.0 for name in AGGREGATIONS}

    options = AggregationOptions(norm=8.0)
    values = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 6.0], [70.0, 80.0, 90.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)

    @pytest.mark.parametrize(
        ("aggregation", "total", "count"),
        [
            (token_mean, 13.0, 4.0),
            (seq_mean_token_mean, 1.5 + 5.0, 2.0),
            (seq_mean_token_sum, 13.0, 2.0),
            (dr_grpo, 13.0, 16.0),
        ],
    )
    def test_by_hand(self, aggregation, total: float, count: float):
        got = aggregation(self.values, self.mask, self.options)
        assert (got.total.item(), got.count.item()) == (total, count)

    @pytest.mark.parametrize("name", sorted(AGGREGATIONS))
    def test_a_row_of_one_token_counts_and_a_count_has_the_values_dtype(self, name: str):
        got = AGGREGATIONS.get(name)(self.values, torch.tensor([[0.0, 1.0, 0.0]]).double().expand(3, 3), AggregationOptions())
        assert (got.total.item(), got.count.item(), got.count.dtype) == (132.0, 3.0, torch.float64)

    @pytest.mark.parametrize("name", sorted(AGGREGATIONS))
    def test_parts_add_up_to_the_whole(self, name: str):
        aggregation = AGGREGATIONS.get(name)
        whole = aggregation(self.values, self.mask, self.options)
        parts = [aggregation(self.values[rows], self.mask[rows], self.options) for rows in ([0], [1, 2])]
        assert sum(part.total for part in parts).item() == pytest.approx(whole.total.item())
        assert sum(part.count for part in parts).item() == whole.count.item()

    @pytest.mark.parametrize("name", sorted(AGGREGATIONS))
    def test_gradient_reaches_masked_in_tokens_alone(self, name: str):
        values = self.values.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda v: AGGREGATIONS.get(name)(v, self.mask, self.options).total, (values,))
        (gradient,) = torch.autograd.grad(AGGREGATIONS.get(name)(values, self.mask, self.options).total, values)
        assert ((gradient != 0) == (self.mask != 0)).all()


class TestLogprobs:
    def test_against_numpy(self):
        rng = np.random.default_rng(1)
        logits, tokens = rng.normal(size=(5, 7)) * 3, rng.integers(0, 7, 5)
        for temperature in (0.7, 1.0, 2.0):
            p = np.exp(logits / temperature)
            p /= p.sum(1, keepdims=True)
            at = () if temperature == 1.0 else (temperature,)
            logp, entropy = token_logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), *at)
            np.testing.assert_allclose(logp.numpy(), np.log(p[np.arange(5), tokens]), rtol=1e-12)
            np.testing.assert_allclose(entropy.numpy(), -(p * np.log(p)).sum(1), rtol=1e-12)

    def test_gradients(self):
        logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        tokens = torch.tensor([0, 3, 2])
        assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens, 1.3), (logits,))
        _, entropy = token_logprobs(logits, tokens)
        (gradient,) = torch.autograd.grad(entropy.sum(), logits)
        p = logits.detach().softmax(1)
        torch.testing.assert_close(gradient, -p * (p.log() + entropy.detach()[:, None]), rtol=1e-12, atol=1e-14)
        assert not token_logprobs(logits, tokens, entropy_gradient=False)[1].requires_grad

    def test_half_precision_is_computed_in_float32(self):
        logits = torch.linspace(-4, 4, 32).repeat(2, 1)
        logp, _ = token_logprobs(logits.bfloat16(), torch.tensor([3, 30]))
        expected, _ = token_logprobs(logits.bfloat16().double(), torch.tensor([3, 30]))
        assert logp.dtype == torch.float32
        torch.testing.assert_close(logp.double(), expected, rtol=1e-6, atol=1e-6)


class TestRegistries:
    def test_unknown_name_is_answered_with_the_nearest_and_all(self):
        with pytest.raises(UserError) as caught:
            POLICY_LOSSES.get("decopled")
        message = str(caught.value)
        assert message.startswith("algorithm.loss: unknown name 'decopled'; did you mean 'decoupled'?")
        assert "ppo" in message and "\n" not in message

    @pytest.mark.parametrize("needs_values", [False, True])
    def test_what_is_declared_with_a_function_is_found_with_it(self, monkeypatch: pytest.MonkeyPatch, needs_values: bool):
        for registry in (ADVANTAGES, POLICY_LOSSES):
            monkeypatch.setattr(registry, "_entries", {})

        @advantage("own", streamable=False, **({"needs_values": True} if needs_values else {}))
        def estimate(inputs, options):
            return inputs.rewards

        @policy_loss("own", zero_without_advantage=needs_values)
        def loss(inputs, options):
            return inputs.logp

        assert ADVANTAGES.get("own") == AdvantageEstimator(estimate, False, needs_values)
        assert POLICY_LOSSES.get("own") == PolicyLoss(loss, needs_values)

    def test_a_name_belongs_to_one_function(self):
        with pytest.raises(ValueError, match="registered twice"):
            KL_ESTIMATORS.register("k1")(k2)

    def test_names_are_known_without_torch(self):
        code = (
            "import sys; import runtime.algorithms; from runtime.algorithms.interfaces import ADVANTAGES; "
            "assert 'group_norm' in ADVANTAGES; sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
