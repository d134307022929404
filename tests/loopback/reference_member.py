"""One rank of a reference on megatron-core: `python -m tests.loopback.reference_member FOLDER RANK COUNT TENSOR PIPELINE SEQUENCE`.

It scores its share of the requests, twice, with the model FOLDER/policy; each data leader writes what it found to
FOLDER/logprobs-RANK.npz, by group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from runtime.config import Config, Parallel, ReferenceScorer
from runtime.engines.group_rank import use_megatron
from runtime.topology import data_leaders
from runtime.types import LogprobRequest
from tests.loopback.ranks import as_rank, run_ranks
from tests.unit.training_cases import make_config, make_groups

BUDGET = 60
TEMPERATURES = (0.7, 1.0, 1.3, 1.0, 1.0)
CPU = torch.device("cpu")


def requests() -> list[LogprobRequest]:
    """Replies some of whose tokens are an environment's, in groups that were sampled at several temperatures."""
    groups = make_groups(7, (5, 4, 6, 3, 1), longest=30)
    return [
        LogprobRequest(group_id=group.group_id, payload=group.payload, temperature=temperature)
        for group, temperature in zip(groups, TEMPERATURES, strict=True)
    ]


def spread(folder: Path, processes: int, tensor: int = 1, pipeline: int = 1, sequence: bool = False) -> dict[int, np.ndarray]:
    """The values that a reference of this layout finds, by group."""
    for old in folder.glob("logprobs-*.npz"):
        old.unlink()
    run_ranks(__name__, folder, processes, str(tensor), str(pipeline), str(int(sequence)))
    found: dict[int, np.ndarray] = {}
    for file in folder.glob("logprobs-*.npz"):
        found |= {int(name): values for name, values in np.load(file).items()}
    return found


def alone(folder: Path) -> dict[int, np.ndarray]:
    """What the torch engine finds."""
    from runtime.engines.scorer_torch import TorchScorer

    scorer = TorchScorer(str(folder / "policy"), device=CPU, dtype=torch.float32, max_tokens_per_microbatch=BUDGET)
    return {result.group_id: result.values for result in scorer.logprobs(requests())}


def config_of(folder: Path, processes: int, tensor: int, pipeline: int, sequence: bool) -> Config:
    config = make_config(str(folder / "policy"))
    settings = ReferenceScorer(
        processes=processes,
        engine="megatron",
        parallel=Parallel(tensor=tensor, pipeline=pipeline, sequence=sequence),
        max_tokens_per_microbatch=BUDGET,
    )
    return replace(config, services=replace(config.services, reference=settings))


def member(rank: int, folder: Path) -> None:
    count, tensor, pipeline, sequence = map(int, sys.argv[3:7])
    config = config_of(folder, count, tensor, pipeline, bool(sequence))
    use_megatron(config.services.reference, CPU)
    from runtime.engines.scorer_megatron import MegatronScorer

    scorer = MegatronScorer(config, rank, count, CPU)
    assert not any(parameter.requires_grad for parameter in scorer._model.parameters())
    leaders = data_leaders(config.services.reference)
    share: Sequence[Any] = requests()[leaders.index(rank) :: len(leaders)] if rank in leaders else []
    first, again = scorer.logprobs(share), scorer.logprobs(share)
    assert [result.group_id for result in first] == [request.group_id for request in share]
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.values, other.values)
    assert scorer.logprobs([]) == []
    if share:
        np.savez(folder / f"logprobs-{rank}.npz", **{str(result.group_id): result.values for result in first})


if __name__ == "__main__":
    as_rank(member)
