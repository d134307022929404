"""Log-probabilities from a vocabulary that is spread over two ranks, against those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.algorithms.losses import token_logprobs
from runtime.trainer.megatron import vocab_parallel
from tests.closeness import assert_close
from tests.loopback.ranks import run_two

pytestmark = pytest.mark.numeric

SHARES = (7, 4)  # of the vocabulary: the last rank has fewer, as padding is left out
TOKENS = torch.tensor([0, 6, 7, 10, 3, 8])
TEMPERATURES = (1.0, 0.7)


def logits() -> torch.Tensor:
    return 6 * torch.randn(len(TOKENS), sum(SHARES), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def weights() -> torch.Tensor:
    """Of log-probabilities and entropies in what the gradient is of."""
    return torch.randn(2, len(TOKENS), dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def two_ranks(rank: int, folder: Path) -> None:
    start = sum(SHARES[:rank])
    for temperature in TEMPERATURES:
        for entropy_gradient in (True, False):
            own = logits()[:, start : start + SHARES[rank]].requires_grad_()
            logp, entropy = vocab_parallel.token_logprobs(
                own, TOKENS, temperature, group=dist.group.WORLD, start=start, entropy_gradient=entropy_gradient
            )
            (weights() * torch.stack([logp, entropy])).sum().backward()
            torch.save((logp.detach(), entropy.detach(), own.grad), folder / f"{temperature}-{entropy_gradient}-{rank}.pt")
    nothing = torch.zeros(2, 0 if rank else 3, dtype=torch.bfloat16, requires_grad=True)
    logp, entropy = vocab_parallel.token_logprobs(nothing, torch.tensor([0, 2]), group=dist.group.WORLD, start=3 * rank)
    (logp.sum() + entropy.sum()).backward()
    torch.save((logp.detach(), entropy.detach(), nothing.grad), folder / f"nothing-{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    run_two(two_ranks, folder)
    return folder


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(
    results: Path, temperature: float, entropy_gradient: bool
) -> None:
    whole = logits().requires_grad_()
    logp, entropy = token_logprobs(whole, TOKENS, temperature, entropy_gradient=entropy_gradient)
    (weights() * torch.stack([logp, entropy])).sum().backward()
    assert whole.grad is not None
    gradients = whole.grad.split(SHARES, dim=1)
    for rank, gradient in enumerate(gradients):
        found = torch.load(results / f"{temperature}-{entropy_gradient}-{rank}.pt")
        for value, expected in zip(found, (logp.detach(), entropy.detach(), gradient), strict=True):
            assert_close(value, expected, terms=4 * sum(SHARES), unit=2.0**-53)  # sums over the vocabulary, there and back


def test_a_rank_may_have_nothing_of_the_vocabulary(results: Path) -> None:
    for rank, width in enumerate((3, 0)):
        logp, entropy, gradient = torch.load(results / f"nothing-{rank}.pt")
        assert logp.dtype == torch.float32  # half precision is computed in it
        torch.testing.assert_close(logp, torch.full((2,), -torch.log(torch.tensor(3.0)).item()))
        torch.testing.assert_close(entropy, -logp)
        assert gradient.shape == (2, width)
