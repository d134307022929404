"""Gathering and summing parts of different sizes over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from runtime.trainer.megatron import facade
from tests.loopback.ranks import run_two

SIZES = ((3, 2), (0, 4), (2, 2), (0, 0))  # rows of the two ranks


def part(owner: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 2, dtype=torch.float64).view(rows, 2) + 10 * (owner + 1)


def two_ranks(rank: int, folder: Path) -> None:
    found = []
    for sizes in SIZES:
        flat = torch.full((sum(sizes), 2), torch.nan, dtype=torch.float64)
        facade.gather_uneven(list(flat.split(sizes)), part(rank, sizes[rank]), group=dist.group.WORLD)
        given = [part(rank, rows) for rows in sizes]
        kept = [each.clone() for each in given]
        own = torch.full((sizes[rank], 2), torch.nan, dtype=torch.float64)
        facade.reduce_scatter_uneven(own, given, group=dist.group.WORLD)
        assert all(torch.equal(each, before) for each, before in zip(given, kept, strict=True))
        found.append((flat, own))
    torch.save(found, folder / f"{rank}.pt")


def test_parts_of_different_sizes(tmp_path: Path) -> None:
    run_two(two_ranks, tmp_path)
    for rank in range(2):
        for sizes, (gathered, own) in zip(SIZES, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert torch.equal(gathered, torch.cat([part(owner, rows) for owner, rows in enumerate(sizes)]))
            assert torch.equal(own, part(0, sizes[rank]) + part(1, sizes[rank]))
