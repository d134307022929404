"""Policy losses, divergences, corrections and aggregations against plain Python, in float64, gradients included."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.interfaces import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AggregationOptions,
    CorrectionOptions,
    LossInputs,
    LossOptions,
    PolicyLoss,
    StepTokens,
    own_part,
    policy_loss,
)
from runtime.algorithms.interfaces import advantage as advantage_estimator
from runtime.algorithms.losses import (
    KlControl,
    absolute,
    beyond_second_moment,
    cispo,
    clip_cov,
    clipped_surrogate,
    clipped_value_loss,
    covariances,
    decoupled,
    dppo_kl,
    dppo_tv,
    dr_grpo,
    drawn_within,
    gmpo,
    gpg,
    gspo,
    highest,
    importance_weighted,
    interpolated_proximal,
    k1,
    k2,
    k3,
    k3_clamped,
    kl_cov,
    largest,
    m2po,
    masked_sample,
    ppo,
    sapo,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_logprobs,
    token_mean,
    topr,
    unbounded_positive,
    vespo,
)
from runtime.errors import UserError

pytestmark = pytest.mark.numeric

CLIPPED, LOWER = "actor/pg_clipfrac", "actor/pg_clipfrac_lower"
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
        assert KlControl(0.1).after(5.0, 1000) == KlControl(0.1)
        control = KlControl(coefficient=0.1, target=0.02, horizon=1000)
        assert control.after(0.02, 500).coefficient == 0.1
        assert control.after(0.022, 500).coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.5))
        assert control.after(1.0, 500).coefficient == pytest.approx(0.1 * 1.1)  # clipped at +0.2
        assert control.after(-3.0, 500).coefficient == pytest.approx(0.1 * 0.9)
        assert control.after(0.018, 500).after(0.018, 500).coefficient == pytest.approx(0.1 * 0.95**2)

    @pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3_plain", "abs"])
    def test_gradients(self, name: str):
        x = f64(0.7, -0.4, 1.3).requires_grad_()
        assert torch.autograd.gradcheck(KL_ESTIMATORS.find(name), (x,))


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
        outputs = decoupled(loss_inputs(logp, proximal, behaviour, f64(1, 1, -1)), LossOptions(), weight_cap=2.0)
        weights = f64(1.0, math.exp(0.3), 2.0)
        torch.testing.assert_close(outputs.loss, weights * f64(-1.1, -1.1, 1.1), rtol=1e-13, atol=0)
        assert outputs.metrics["actor/behaviour_capfrac"].tolist() == [0.0, 0.0, 1.0]
        (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)
        torch.testing.assert_close(gradient, weights * f64(-1.1, -1.1, 1.1), rtol=1e-13, atol=0)
        inputs = loss_inputs(logp, proximal, behaviour, f64(1, 1, -1))
        dropped = decoupled(inputs, LossOptions(), weight_cap=2.0, weight_over="drop")
        torch.testing.assert_close(dropped.loss, weights * f64(-1.1, -1.1, 0.0), rtol=1e-13, atol=0)
        assert dropped.metrics["actor/behaviour_capfrac"].tolist() == [0.0, 0.0, 1.0]

    def test_a_weight_at_its_cap_is_not_beyond_it(self):
        inputs = loss_inputs(f64(-1.0), f64(-1.0), f64(-1.0), f64(2.0))
        outputs = decoupled(inputs, LossOptions(), weight_cap=1.0, weight_over="drop")
        assert (outputs.loss.item(), outputs.metrics["actor/behaviour_capfrac"].item()) == (-2.0, 0.0)

    def test_decoupled_weight_carries_no_gradient(self):
        # With the proximal policy being the one under training, the weight would contribute if it were not detached.
        logp = f64(-1.0).requires_grad_()
        outputs = decoupled(loss_inputs(logp, logp, f64(-1.2), f64(1.0)), LossOptions())
        (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)
        assert gradient.item() == pytest.approx(0.0, abs=1e-15)

    @pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
    def test_what_is_declared_zero_without_advantage_is(self, name: str):
        loss = POLICY_LOSSES.find(name)
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

    def test_an_episode_of_several_rows_counts_once(self):
        options = replace(self.options, counts=matrix([1.0], [0.0], [0.0]))
        assert dr_grpo(self.values, self.mask, options).count == 8.0

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
        got = AGGREGATIONS.find(name)(self.values, torch.tensor([[0.0, 1.0, 0.0]]).double().expand(3, 3), AggregationOptions())
        assert (got.total.item(), got.count.item(), got.count.dtype) == (132.0, 3.0, torch.float64)

    @pytest.mark.parametrize("name", sorted(AGGREGATIONS))
    def test_parts_add_up_to_the_whole(self, name: str):
        aggregation = AGGREGATIONS.find(name)
        whole = aggregation(self.values, self.mask, self.options)
        parts = [aggregation(self.values[rows], self.mask[rows], self.options) for rows in ([0], [1, 2])]
        assert sum(part.total for part in parts).item() == pytest.approx(whole.total.item())
        assert sum(part.count for part in parts).item() == whole.count.item()

    @pytest.mark.parametrize("name", sorted(AGGREGATIONS))
    def test_gradient_reaches_masked_in_tokens_alone(self, name: str):
        values = self.values.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda v: AGGREGATIONS.find(name)(v, self.mask, self.options).total, (values,))
        (gradient,) = torch.autograd.grad(AGGREGATIONS.find(name)(values, self.mask, self.options).total, values)
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
            POLICY_LOSSES.find("decopled")
        message = str(caught.value)
        assert message.startswith("algorithm.loss: unknown name 'decopled'; did you mean 'decoupled'?")
        assert "ppo" in message and "\n" not in message

    @pytest.mark.parametrize("needs_values", [False, True])
    def test_what_is_declared_with_a_function_is_found_with_it(self, monkeypatch: pytest.MonkeyPatch, needs_values: bool):
        for registry in (ADVANTAGES, POLICY_LOSSES):
            monkeypatch.setattr(registry, "_entries", {})

        @advantage_estimator("own", streamable=False, **({"needs_values": True} if needs_values else {}))
        def estimate(inputs, options):
            return inputs.rewards

        more: dict[str, Any] = {"chooses": highest, "by_start": True} if needs_values else {}

        @policy_loss("own", zero_without_advantage=needs_values, **more)
        def loss(inputs, options):
            return inputs.logp

        assert ADVANTAGES.find("own") == AdvantageEstimator(estimate, False, needs_values)
        assert POLICY_LOSSES.find("own") == PolicyLoss(loss, needs_values, **more)

    def test_a_name_belongs_to_one_function(self):
        with pytest.raises(ValueError, match="registered twice"):
            KL_ESTIMATORS.register("k1")(k2)

    def test_names_are_known_without_torch(self):
        code = (
            "import sys; import runtime.algorithms; from runtime.algorithms.interfaces import ADVANTAGES; "
            "assert 'group_norm' in ADVANTAGES; sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


# ------------------------------------------------------------------ corrections, losses of sequences and the value loss

MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_inputs(seed: int, spread: float = 0.5) -> LossInputs:
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(rng.normal(-1.5, 0.5, (3, 4)))
    logp = (old + torch.from_numpy(rng.normal(0, spread, (3, 4)))).requires_grad_()
    behaviour = old + torch.from_numpy(rng.normal(0, spread, (3, 4)))
    chosen = MASK * (torch.arange(4) == 2)  # of a loss that chooses
    return LossInputs(logp, old, old, behaviour, torch.from_numpy(rng.normal(size=(3, 1))), MASK, chosen)


def total(loss: torch.Tensor) -> torch.Tensor:
    return (loss * MASK).sum()


class TestGspo:
    @pytest.mark.parametrize("seed", range(4))
    def test_one_loss_a_row(self, seed: int):
        inputs, options = random_inputs(seed), LossOptions(clip_low=0.1, clip_high=0.15)
        outputs = gspo(inputs, options)
        for i in range(2):
            kept = [t for t in range(4) if MASK[i, t]]
            s = math.exp(sum((inputs.logp[i, t] - inputs.old_logp[i, t]).item() for t in kept) / len(kept))
            a = float(inputs.advantages[i])
            expected = max(-s * a, -min(max(s, 0.9), 1.15) * a)
            np.testing.assert_allclose(outputs.loss[i].detach().numpy(), [expected] * 4, rtol=1e-12)
        assert outputs.loss.shape == MASK.shape

    def test_gradient_of_a_row_is_shared_by_its_tokens(self):
        inputs = random_inputs(0, 0.01)
        outputs = gspo(inputs, LossOptions())
        row_means = (outputs.loss * MASK).sum(1) / MASK.sum(1).clamp(min=1)
        (gradient,) = torch.autograd.grad(row_means.sum(), inputs.logp)
        for i, n in ((0, 3), (1, 2)):
            s = float(((inputs.logp - inputs.old_logp) * MASK)[i].detach().sum() / n)
            expected = -math.exp(s) * float(inputs.advantages[i]) / n
            torch.testing.assert_close(gradient[i], expected * MASK[i], rtol=1e-12, atol=1e-15)


class TestCispo:
    def test_value_and_gradient(self):
        logp, old = matrix([-1.0, -1.0, -1.0, -1.0]).requires_grad_(), matrix([-1.0, -1.5, -0.5, -1.1])
        inputs = LossInputs(logp, old, old, old, matrix([2.0]), torch.ones(1, 4, dtype=torch.float64))
        outputs = cispo(inputs, LossOptions(clip_low=0.2, clip_high=0.28))
        weight = matrix([1.0, 1.28, 0.8, math.exp(0.1)])
        torch.testing.assert_close(outputs.loss, -weight * 2.0 * logp, rtol=1e-14, atol=0)
        assert outputs.metrics["actor/pg_clipfrac"].tolist() == [[0, 1, 1, 0]]
        (gradient,) = torch.autograd.grad(outputs.loss.sum(), logp)  # no token loses it
        torch.testing.assert_close(gradient, -2.0 * weight, rtol=1e-14, atol=0)

    def test_no_lower_bound(self):
        logp, old = matrix([-9.0]), matrix([-1.0])
        inputs = LossInputs(logp, old, old, old, matrix([1.0]), torch.ones(1, 1, dtype=torch.float64))
        assert cispo(inputs, LossOptions(clip_low=1.0)).loss.item() == pytest.approx(9 * math.exp(-8))


class TestSapo:
    def test_value(self):
        logp, old = matrix([math.log(1.5), math.log(0.5)]), matrix([0.0, 0.0])
        inputs = LossInputs(logp, old, old, old, matrix([0.2, -0.3]), torch.ones(1, 2, dtype=torch.float64))
        got = sapo(inputs, LossOptions(), tau_positive=1.0, tau_negative=2.0).loss
        expected = matrix([-4 / (1 + math.exp(-0.5)) * 0.2, 2 / (1 + math.exp(1.0)) * 0.3])
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)

    def test_on_policy_gradient_is_the_policy_gradient(self):
        old = matrix([-1.0, -2.0])
        logp = old.clone().requires_grad_()
        inputs = LossInputs(logp, old, old, old, matrix([2.0, -3.0]), torch.ones(1, 2, dtype=torch.float64))
        loss = sapo(inputs, LossOptions(), tau_positive=1.3, tau_negative=0.7).loss
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        torch.testing.assert_close(gradient, matrix([-2.0, 3.0]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"cispo", "topr", "vespo"}))
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences(name: str, seed: int):
    inputs = random_inputs(seed)
    compute = POLICY_LOSSES.find(name).compute
    options = LossOptions(clip_low=0.1, clip_high=0.2, dual_clip=1.5)
    assert torch.autograd.gradcheck(lambda logp: total(compute(replace(inputs, logp=logp), options).loss), (inputs.logp,))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_rows_do_not_touch_each_other(name: str):
    """What lets a step be cut into micro-batches: each row's loss and gradient are its own."""
    inputs = random_inputs(5)
    compute = POLICY_LOSSES.find(name).compute
    (whole,) = torch.autograd.grad(total(compute(inputs, LossOptions()).loss), inputs.logp)
    for row in range(3):
        part = LossInputs(*(getattr(inputs, field)[row : row + 1] for field in inputs.__dataclass_fields__))
        alone = (compute(part, LossOptions()).loss * part.mask).sum()
        (gradient,) = torch.autograd.grad(alone, inputs.logp)
        torch.testing.assert_close(gradient[row], whole[row], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_float64_and_one_value_a_token(name: str):
    outputs = POLICY_LOSSES.find(name).compute(random_inputs(1), LossOptions())
    assert (outputs.loss.dtype, outputs.loss.shape) == (torch.float64, MASK.shape)
    assert all(metric.dtype == torch.float64 and not metric.requires_grad for metric in outputs.metrics.values())


def test_ppo_is_against_the_old_policy():
    inputs = replace(random_inputs(2), proximal_logp=torch.zeros(3, 4), behaviour_logp=torch.zeros(3, 4))
    ratio = (inputs.logp - inputs.old_logp).exp()
    plain = torch.maximum(-ratio * inputs.advantages, -ratio.clamp(0.8, 1.28) * inputs.advantages)
    torch.testing.assert_close(ppo(inputs, LossOptions()).loss, plain, rtol=1e-14, atol=0)


class TestCorrections:
    options = CorrectionOptions(cap=2.0, low=0.5, high=1.6)

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    def test_what_is_at_a_bound_is_within_it(self, name: str):
        options = CorrectionOptions(cap=1.0, low=1.0, high=1.0)
        got = CORRECTIONS.find(name)(matrix([0.0, 0.0]), matrix([1.0, 1.0]), options)
        assert (got.weight.unique().tolist(), bool(got.altered.any())) == ([1.0], False)

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    @given(seed=st.integers(0, 2**32 - 1))
    def test_against_plain_python(self, name: str, seed: int):
        """Rows without a trained token among them. What is not trained has no say, however large its weight."""
        rng = np.random.default_rng(seed)
        mask = rng.random((3, 5)) < rng.choice([0.2, 0.6])
        log_weight = np.where(mask, rng.normal(0, 1, (3, 5)), 50)
        got = CORRECTIONS.find(name)(torch.from_numpy(log_weight), torch.from_numpy(mask.astype(np.float64)), self.options)
        weight, altered = got.weight.expand(3, 5).numpy(), got.altered.expand(3, 5).numpy()
        for i in range(3):
            own = np.exp(log_weight[i, mask[i]])
            whole, mean = np.full(len(own), own.prod()), np.full(len(own), own.prod() ** (1 / max(len(own), 1)))
            within = {"icepop": (own >= 0.5) & (own <= 1.6), "geometric_mask": (mean >= 0.5) & (mean <= 1.6)}
            expected = {
                "token_tis": (own.clip(max=2.0), own > 2),
                "icepop": (own * within["icepop"], ~within["icepop"]),
                "sequence_tis": (whole.clip(max=2.0), whole > 2),
                "geometric_mask": (within["geometric_mask"], ~within["geometric_mask"]),
            }[name]
            np.testing.assert_allclose(weight[i, mask[i]], expected[0], rtol=1e-11)
            assert altered[i, mask[i]].tolist() == expected[1].tolist()
            if not len(own) and got.weight.shape[1] == 1:
                assert (got.weight[i].item(), got.altered[i].item()) == (1.0, False)

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    def test_no_gradient_and_no_overflow(self, name: str):
        log_weight = torch.full((1, 4), 800.0).requires_grad_()
        got = CORRECTIONS.find(name)(log_weight, torch.ones(1, 4), CorrectionOptions())
        assert not got.weight.requires_grad
        assert bool(got.weight.isfinite().all())


class TestValueLoss:
    def test_by_hand(self):
        values, old, returns = matrix([1.0, 1.0, 0.1, -1.0]), matrix([0.0, 0.9, 0.0, 0.0]), matrix([0.9, 2.0, 0.0, -0.9])
        loss, clipped = clipped_value_loss(values, old, returns, 0.2)
        torch.testing.assert_close(loss, matrix([0.5 * 0.49, 0.5, 0.005, 0.5 * 0.49]), rtol=1e-13, atol=0)
        assert clipped.tolist() == [[True, False, False, True]]

    def test_gradients(self):
        rng = np.random.default_rng(0)
        values = torch.from_numpy(rng.normal(size=(2, 5))).requires_grad_()
        old, returns = (torch.from_numpy(rng.normal(size=(2, 5))) for _ in range(2))
        assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, 0.3)[0].sum(), (values,))


class TestInterpolatedProximal:
    def test_fresh_tokens_are_their_own_and_stale_ones_one_version_back(self):
        logp, behaviour = matrix([-1.0] * 5).requires_grad_(), matrix([-3.0] * 5)
        got = interpolated_proximal(logp, behaviour, torch.tensor([[0, 1, 2, 4, 3]]))
        torch.testing.assert_close(got, matrix([-1.0, -3.0, -2.0, -1.5, -5 / 3]), rtol=1e-14, atol=0)
        assert not got.requires_grad


# ------------------------------------------------------------ losses beside PPO's clip, and the tokens that they choose

MASK4 = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.float64)


def batch(seed: int, spread: float = 0.6) -> LossInputs:
    """Rows of advantages of either sign, some of ratios far from 1, and one without a trained token."""
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(-rng.exponential(1.0, (4, 4)) - 1e-3)
    logp = (old + torch.from_numpy(rng.normal(0, spread, (4, 4)))).clamp(max=-1e-4).requires_grad_()
    advantages = torch.tensor([[0.8], [-0.7], [-1.1], [0.4]], dtype=torch.float64)
    chosen = torch.from_numpy((rng.random((4, 4)) < 0.4).astype(np.float64))
    return LossInputs(logp, old, old, old - 0.1, advantages, MASK4, chosen)


def tokens(inputs: LossInputs) -> list[tuple[int, int, float, float, float]]:
    """Row, place, log-probability, old log-probability and advantage of each trained token."""
    return [
        (i, t, float(inputs.logp.detach()[i, t]), float(inputs.old_logp[i, t]), float(inputs.advantages[i, 0]))
        for i in range(4)
        for t in range(4)
        if MASK4[i, t]
    ]


def assert_tokens(values: torch.Tensor, expected: dict[tuple[int, int], float]) -> None:
    for (i, t), number in expected.items():
        assert float(values.detach()[i, t]) == pytest.approx(number, rel=1e-11, abs=1e-14), (i, t)


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    (found,) = torch.autograd.grad((loss * MASK4).sum(), inputs.logp)
    return found


def surrogate(ratio: float, advantage: float, low: float = 0.9, high: float = 1.15) -> float:
    return max(-ratio * advantage, -min(max(ratio, low), high) * advantage)


CLIPPING = {"clip_low": 0.1, "clip_high": 0.15}
# By loss: its options, and what it and its metrics are of a token, by its ratio r, its log-probability, its advantage a, and
# whether it is chosen.
FORMULAS: dict[str, tuple[Any, dict[str, float], dict[str, Any]]] = {
    "gpg": (gpg, {}, {"": lambda r, logp, a, chosen: -a * logp}),
    "unbounded_positive": (
        unbounded_positive,
        {**CLIPPING, "dual_clip": 1.2},
        {
            "": lambda r, logp, a, chosen: -a * logp if a > 0 else min(surrogate(r, a), -1.2 * a),
            CLIPPED: lambda r, logp, a, chosen: a < 0 and r < 0.9,
            LOWER: lambda r, logp, a, chosen: a < 0 and surrogate(r, a) > -1.2 * a,
        },
    ),
    "clip_cov": (
        clip_cov,
        CLIPPING,
        {
            "": lambda r, logp, a, chosen: 0.0 if chosen else surrogate(r, a),
            "actor/covariance_chosen": lambda r, logp, a, chosen: chosen,
        },
    ),
    "kl_cov": (partial(kl_cov, kl=0.7), {}, {"": lambda r, logp, a, chosen: -r * a + 0.7 * chosen * abs(math.log(r))}),
    "m2po": (m2po, {}, {"": lambda r, logp, a, chosen: 0.0 if chosen else -r * a}),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(4))
def test_formulas_of_single_tokens(name: str, seed: int):
    inputs, (loss, options, formulas) = batch(seed), FORMULAS[name]
    outputs = loss(inputs, LossOptions(**options))
    for part, formula in formulas.items():
        expected = {
            (i, t): float(formula(math.exp(logp - old), logp, advantage, bool(inputs.chosen[i, t])))
            for i, t, logp, old, advantage in tokens(inputs)
        }
        assert_tokens(outputs.metrics[part] if part else outputs.loss, expected)


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
        assert outputs.loss.shape == MASK4.shape

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
    inputs = replace(inputs, old_logp=inputs.logp.detach(), chosen=0 * MASK4)
    share = 1 / MASK4.sum(1, keepdim=True).clamp(min=1) if loss is gmpo else 1.0  # a row's loss, on each of its tokens
    found = gradient(loss(inputs, LossOptions()).loss * share, inputs)
    torch.testing.assert_close(found, -inputs.advantages * MASK4 * share, rtol=1e-12, atol=1e-15)


def test_vespo_stands_ratios_that_overflow():
    inputs = batch(0)
    for far in (400.0, -400.0):
        outputs = vespo(replace(inputs, old_logp=inputs.logp.detach() - far), LossOptions())
        assert (outputs.loss * MASK4).abs().sum() == 0


def test_dppo_kl_leaves_out_what_has_become_certain():
    ones = torch.zeros(4, 4, dtype=torch.float64)
    inputs = replace(batch(0), logp=ones, old_logp=ones - 0.5)
    outputs = dppo_kl(inputs, LossOptions(clip_high=1.0, clip_low=1.0))
    expected = -math.exp(0.5) * inputs.advantages.clamp(max=0).expand(4, 4)
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-14, atol=0)


def test_dppo_leaves_out_nothing_at_its_bound_nor_without_advantage():
    certain = torch.zeros(4, 4, dtype=torch.float64)
    inputs = replace(batch(0), logp=certain, old_logp=certain - 0.5)
    for advantage, bound in ((1.0, 1 - float(inputs.old_logp.exp()[0, 0])), (0.0, 0.1)):
        outputs = dppo_tv(replace(inputs, advantages=certain + advantage), LossOptions(clip_low=bound, clip_high=bound))
        assert not outputs.metrics[CLIPPED].any()


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
            assert part.dtype == torch.float64
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

    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_the_largest_is_told_from_its_neighbour(self, value: float):
        assert largest(f64(value, math.nextafter(value, -math.inf)), 0.0, own_part).tolist() == [True, False]

    def test_covariances_are_about_the_means_of_the_step(self):
        one = step(0)
        np.testing.assert_allclose(covariances(one, own_part).numpy(), plain_covariances(one), rtol=1e-12)
        assert covariances(step(0, 1), own_part).tolist() == [0.0]

    def test_kl_cov_takes_the_highest(self):
        one = step(1)
        got = highest(one, own_part, share=0.02).numpy()
        assert got.sum() == 8
        assert set(np.flatnonzero(got)) == set(np.argsort(plain_covariances(one))[-8:])

    def test_clip_cov_draws_between_its_bounds(self):
        one = step(2)
        covariance = plain_covariances(one)
        got = drawn_within(one, own_part, share=0.02, low=0.5, high=1.5).numpy()
        within = np.flatnonzero((covariance > 0.5) & (covariance < 1.5))
        assert len(within) > 8
        assert set(np.flatnonzero(got)) == set(within[np.argsort(one.draws.numpy()[within])[-8:]])

    def test_clip_cov_takes_no_more_than_there_are(self):
        one = step(3)
        covariance, got = plain_covariances(one), drawn_within(one, own_part, share=1.0, low=2.0, high=3.0).numpy()
        assert np.array_equal(got, (covariance > 2) & (covariance < 3))

    def test_clip_cov_draws_one_of_few_between_1_and_5(self):
        covariance, draws = f64(1.0, 1.5, 2.5, 5.0, 5.5), f64(0.8, 0.7, 0.6, 0.9, 0.9)
        mirrored = StepTokens(
            *(torch.cat(pair) for pair in ((covariance, -covariance), (draws**0, -(draws**0)), (draws, draws / 2)))
        )
        assert drawn_within(mirrored, own_part).nonzero().tolist() == [[1]]

    def test_one_token_at_least_is_chosen_and_none_of_none(self):
        assert highest(step(4), own_part, share=0.0).sum() == highest(step(4), own_part).sum() == 1
        assert len(highest(step(4, 0), own_part)) == 0

    @pytest.mark.parametrize("limit", [0.0, 0.04, 0.07, 0.2])
    def test_m2po_takes_the_furthest_until_the_others_are_near_enough(self, limit: float):
        one = step(6)
        moments = (one.start - one.logp).square().numpy()
        may_go = ((one.start - one.logp) * one.advantages > 0).numpy()
        kept = np.ones(len(moments), bool)
        for index in sorted(np.flatnonzero(may_go & (moments > limit)), key=lambda index: -moments[index]):
            if moments[kept].mean() <= limit:
                break
            kept[index] = False
        got = beyond_second_moment(one, own_part, threshold=limit).numpy()
        assert np.array_equal(got, ~kept)
        assert got.any() == (moments.mean() > limit)

    def test_m2po_keeps_what_goes_back(self):
        one = step(7)
        back = StepTokens((one.logp - one.start).sign(), one.logp, one.draws, one.start)
        assert not beyond_second_moment(back, own_part, threshold=0.0).any()
        assert torch.equal(beyond_second_moment(one, own_part), beyond_second_moment(one, own_part, threshold=0.04))

    @pytest.mark.parametrize(
        ("gaps", "advantages", "chosen"),
        [
            ([0.0, 0.0, 0.0, 1.0], [1, 1, 1, 1], []),  # the mean is at the threshold
            ([0.5, 1.0, 2.0], [1, 1, -1], [1]),  # the first is at the threshold: it does not help
            ([1.0], [0], []),
            ([0.0, 0.0, 0.8, 0.8000000000000002], [1, 1, 1, 1], [3]),  # their squares are neighbours
        ],
    )
    def test_m2po_takes_no_more_than_it_needs(self, gaps: list[float], advantages: list[float], chosen: list[int]):
        start = f64(*gaps)
        got = beyond_second_moment(StepTokens(f64(*advantages), 0 * start, start, start), own_part, threshold=0.25)
        assert got.nonzero()[:, 0].tolist() == chosen

    @pytest.mark.parametrize("cuts", [[150], [0, 399], [400]])
    def test_parts_measure_the_second_moment_together(self, cuts: list[int]):
        one = step(8)
        choose = partial(beyond_second_moment, threshold=0.07)
        got = in_parts(one, cuts, choose)
        assert torch.equal(got, choose(one, own_part)) and 0 < got.sum() < 100

    @pytest.mark.parametrize("choose", [partial(highest, share=0.03), partial(drawn_within, share=0.03, low=0.5, high=4.0)])
    @pytest.mark.parametrize("cuts", [[150], [0, 399], [400]])
    def test_parts_choose_together_what_the_whole_does(self, choose, cuts: list[int]):
        one = step(5)
        got = in_parts(one, cuts, choose)
        assert torch.equal(got, choose(one, own_part))
        assert got.sum() == 12
