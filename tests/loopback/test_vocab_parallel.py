"""Log-probabilities from a vocabulary that is spread over two ranks, against those of the whole."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime.algorithms.losses import token_logprobs
from runtime.columns import KeptSets, encode_set
from runtime.trainer.head import confined
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


def kept() -> torch.Tensor:
    """Of each token a set that it is in, as bits; of some in one rank's part alone, of one the whole vocabulary."""
    sets = ([0, 1], [0, 6, 7], [7, 10], [0, 1, 2, 3, 10], list(range(sum(SHARES))), [2, 8])
    encoded = [encode_set(np.array(each, np.int32), sum(SHARES)) for each in sets]
    return torch.from_numpy(KeptSets.of(encoded, sum(SHARES)).bitmaps(np.arange(len(sets))))


def two_ranks(rank: int, folder: Path) -> None:
    start = sum(SHARES[:rank])
    for temperature, entropy_gradient, filtered in product(TEMPERATURES, (True, False), (True, False)):
        own = logits()[:, start : start + SHARES[rank]].requires_grad_()
        left = confined(own, kept() if filtered else None, start)
        logp, entropy = vocab_parallel.token_logprobs(
            left, TOKENS, temperature, group=dist.group.WORLD, start=start, entropy_gradient=entropy_gradient
        )
        (weights() * torch.stack([logp, entropy])).sum().backward()
        name = f"{temperature}-{entropy_gradient}-{filtered}-{rank}.pt"
        torch.save((logp.detach(), entropy.detach(), own.grad), folder / name)
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
@pytest.mark.parametrize("filtered", [True, False])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(
    results: Path, temperature: float, entropy_gradient: bool, filtered: bool
) -> None:
    whole = logits().requires_grad_()
    left = whole
    if filtered:
        bits = np.unpackbits(kept().numpy(), axis=1, bitorder="little")[:, : sum(SHARES)]
        left = whole.masked_fill(torch.from_numpy(bits) == 0, -1e30)
    logp, entropy = token_logprobs(left, TOKENS, temperature, entropy_gradient=entropy_gradient)
    (weights() * torch.stack([logp, entropy])).sum().backward()
    assert whole.grad is not None
    gradients = whole.grad.split(SHARES, dim=1)
    for rank, gradient in enumerate(gradients):
        found = torch.load(results / f"{temperature}-{entropy_gradient}-{filtered}-{rank}.pt")
        for value, expected in zip(found, (logp.detach(), entropy.detach(), gradient), strict=True):
            assert_close(value, expected, terms=4 * sum(SHARES), unit=2.0**-53)  # sums over the vocabulary, there and back


def test_a_rank_may_have_nothing_of_the_vocabulary(results: Path) -> None:
    for rank, width in enumerate((3, 0)):
        logp, entropy, gradient = torch.load(results / f"nothing-{rank}.pt")
        assert logp.dtype == torch.float32  # half precision is computed in it
        torch.testing.assert_close(logp, torch.full((2,), -torch.log(torch.tensor(3.0)).item()))
        torch.testing.assert_close(entropy, -logp)
        assert gradient.shape == (2, width)
