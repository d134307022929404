"""Policy losses, corrections and the value loss: float64, against plain Python; gradients by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.interfaces import CORRECTIONS, POLICY_LOSSES, CorrectionOptions, LossInputs, LossOptions
from runtime.algorithms.losses import (
    cispo,
    clipped_value_loss,
    geometric_mask,
    gspo,
    icepop,
    interpolated_proximal,
    ppo,
    sapo,
    sequence_tis,
    token_tis,
)

pytestmark = pytest.mark.numeric

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
        got = sapo(inputs, LossOptions(tau_positive=1.0, tau_negative=2.0)).loss
        expected = matrix([-4 / (1 + math.exp(-0.5)) * 0.2, 2 / (1 + math.exp(1.0)) * 0.3])
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)

    def test_on_policy_gradient_is_the_policy_gradient(self):
        old = matrix([-1.0, -2.0])
        logp = old.clone().requires_grad_()
        inputs = LossInputs(logp, old, old, old, matrix([2.0, -3.0]), torch.ones(1, 2, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(sapo(inputs, LossOptions(tau_positive=1.3, tau_negative=0.7)).loss.sum(), logp)
        torch.testing.assert_close(gradient, matrix([-2.0, 3.0]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"cispo", "topr", "vespo"}))
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences(name: str, seed: int):
    inputs = random_inputs(seed)
    compute = POLICY_LOSSES.get(name).compute
    options = LossOptions(clip_low=0.1, clip_high=0.2, dual_clip=1.5)
    assert torch.autograd.gradcheck(lambda logp: total(compute(replace(inputs, logp=logp), options).loss), (inputs.logp,))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_rows_do_not_touch_each_other(name: str):
    """What lets a step be cut into micro-batches: each row's loss and gradient are its own."""
    inputs = random_inputs(5)
    compute = POLICY_LOSSES.get(name).compute
    (whole,) = torch.autograd.grad(total(compute(inputs, LossOptions()).loss), inputs.logp)
    for row in range(3):
        part = LossInputs(*(getattr(inputs, field)[row : row + 1] for field in inputs.__dataclass_fields__))
        alone = (compute(part, LossOptions()).loss * part.mask).sum()
        (gradient,) = torch.autograd.grad(alone, inputs.logp)
        torch.testing.assert_close(gradient[row], whole[row], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_float64_and_one_value_a_token(name: str):
    outputs = POLICY_LOSSES.get(name).compute(random_inputs(1), LossOptions())
    assert (outputs.loss.dtype, outputs.loss.shape) == (torch.float64, MASK.shape)
    assert all(metric.dtype == torch.float64 and not metric.requires_grad for metric in outputs.metrics.values())


def test_ppo_is_against_the_old_policy():
    inputs = replace(random_inputs(2), proximal_logp=torch.zeros(3, 4), behaviour_logp=torch.zeros(3, 4))
    ratio = (inputs.logp - inputs.old_logp).exp()
    plain = torch.maximum(-ratio * inputs.advantages, -ratio.clamp(0.8, 1.28) * inputs.advantages)
    torch.testing.assert_close(ppo(inputs, LossOptions()).loss, plain, rtol=1e-14, atol=0)


class TestCorrections:
    options = CorrectionOptions(cap=2.0, low=0.5, high=1.6)
    log_weight = matrix([math.log(3), 50, math.log(0.4), 0.0], [math.log(1.5), math.log(1.5), 50, -50], [50, -50, 50, 50])

    def test_token_tis(self):
        got = token_tis(self.log_weight, MASK, self.options)
        torch.testing.assert_close(got.weight * MASK, matrix([2, 0, 0.4, 1], [1.5, 1.5, 0, 0], [0] * 4), rtol=1e-13, atol=0)
        assert (got.altered * MASK).tolist() == [[1, 0, 0, 0], [0] * 4, [0] * 4]

    def test_icepop(self):
        got = icepop(self.log_weight, MASK, self.options)
        torch.testing.assert_close(got.weight * MASK, matrix([0, 0, 0, 1], [1.5, 1.5, 0, 0], [0] * 4), rtol=1e-13, atol=0)
        assert (got.altered * MASK).tolist() == [[1, 0, 1, 0], [0] * 4, [0] * 4]

    def test_sequence_tis(self):
        got = sequence_tis(self.log_weight, MASK, self.options)
        torch.testing.assert_close(got.weight, matrix([1.2], [2.0], [1.0]), rtol=1e-13, atol=0)
        assert got.altered.tolist() == [[False], [True], [False]]

    def test_geometric_mask(self):
        got = geometric_mask(self.log_weight, MASK, CorrectionOptions(low=0.9, high=1.2))
        assert got.weight.tolist() == [[1.0], [0.0], [1.0]]  # (3 · 0.4 · 1)^(1/3) = 1.063, 1.5, nothing
        assert got.altered.tolist() == [[False], [True], [False]]

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    def test_what_is_at_a_bound_is_within_it(self, name: str):
        options = CorrectionOptions(cap=1.0, low=1.0, high=1.0)
        got = CORRECTIONS.get(name)(matrix([0.0, 0.0]), matrix([1.0, 1.0]), options)
        assert (got.weight.unique().tolist(), bool(got.altered.any())) == ([1.0], False)

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    @settings(max_examples=25)
    @given(seed=st.integers(0, 2**32 - 1))
    def test_against_plain_python(self, name: str, seed: int):
        rng = np.random.default_rng(seed)
        log_weight = rng.normal(0, 1, (3, 5))
        mask = (rng.random((3, 5)) < 0.6).astype(np.float64)
        got = CORRECTIONS.get(name)(torch.from_numpy(log_weight), torch.from_numpy(mask), self.options).weight
        got = got.expand(3, 5).numpy()
        for i in range(3):
            own = [math.exp(log_weight[i, t]) for t in range(5) if mask[i, t]]
            geometric = math.prod(own) ** (1 / len(own)) if own else 1.0
            expected = {
                "token_tis": [min(w, 2.0) for w in own],
                "icepop": [w if 0.5 <= w <= 1.6 else 0.0 for w in own],
                "sequence_tis": [min(math.prod(own), 2.0)] * len(own),
                "geometric_mask": [float(0.5 <= geometric <= 1.6)] * len(own),
            }[name]
            np.testing.assert_allclose(got[i][mask[i] > 0], expected, rtol=1e-11)

    @pytest.mark.parametrize("name", sorted(CORRECTIONS))
    def test_no_gradient_and_no_overflow(self, name: str):
        log_weight = torch.full((1, 4), 800.0).requires_grad_()
        got = CORRECTIONS.get(name)(log_weight, torch.ones(1, 4), CorrectionOptions())
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
