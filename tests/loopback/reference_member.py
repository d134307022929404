"""One of two ranks of a reference on megatron-core: `python -m tests.loopback.reference_member FOLDER RANK COUNT`.

In each of LAYOUTS it scores its share of the requests by the model FOLDER/policy; each data leader writes what it found to
FOLDER/LAYOUT-RANK.npz, by group.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from runtime import codec
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Parallel, ReferenceScorer
from runtime.trainer.backend import use_megatron
from runtime.types import GroupPayload, LogprobRequest
from tests.loopback.ranks import run_two
from tests.unit.training_cases import make_config, make_episodes, make_groups

LAYOUTS = {
    "tensor": Parallel(tensor=2),
    "sequence": Parallel(tensor=2, sequence=True),
    "pipeline": Parallel(pipeline=2),
    "context": Parallel(context=2),
    "data": Parallel(),
}
BUDGET = 60
TEMPERATURES = (0.7, 1.0, 1.3, 1.0, 1.0, 1.0, 0.7)
CPU = torch.device("cpu")


def requests() -> list[LogprobRequest]:
    """Replies some of whose tokens are an environment's, in groups that were sampled at several temperatures; and episodes, in
    the last group without a common prompt."""
    groups = [codec.decode(GroupPayload, group.payload) for group in make_groups(7, (5, 4, 6, 3, 1), longest=30)]
    groups += [codec.decode(GroupPayload, group.payload) for group in make_episodes(7, (2, 3))]
    return [
        LogprobRequest(group_id=index, payload=codec.encode(replace(group, group_id=index)), temperature=temperature)
        for index, (group, temperature) in enumerate(zip(groups, TEMPERATURES, strict=True))
    ]


def predicted(request: LogprobRequest) -> np.ndarray:
    """bool [T]: the tokens of a group that something predicts."""
    payload = codec.decode(GroupPayload, request.payload)
    rows = [np.arange(length) + len(payload.prompt) > 0 for length in payload.lengths]
    return np.concatenate(rows)


def spread(folder: Path) -> dict[str, dict[int, np.ndarray]]:
    """The values that two ranks find, by layout and group."""
    run_two(member, folder)
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in LAYOUTS}
    for file in folder.glob("*-?.npz"):
        found[file.stem[:-2]] |= {int(group): values for group, values in np.load(file).items()}
    return found


def alone(folder: Path) -> dict[int, np.ndarray]:
    """What the torch engine finds."""
    from runtime.scoring.scorer_torch import TorchScorer

    scorer = TorchScorer(str(folder / "policy"), device=CPU, dtype=torch.float32, max_tokens_per_microbatch=BUDGET)
    return {result.group_id: result.values for result in scorer.logprobs(requests())}


def config_of(folder: Path, parallel: Parallel) -> Config:
    config = make_config(str(folder / "policy"))
    settings = ReferenceScorer(processes=2, engine="megatron", parallel=parallel, max_tokens_per_microbatch=BUDGET)
    return replace(config, services=replace(config.services, reference=settings))


def member(rank: int, folder: Path) -> None:
    for name, parallel in LAYOUTS.items():
        config = config_of(folder, parallel)
        use_megatron(config.services.reference, CPU)
        from runtime.scoring.scorer_megatron import MegatronScorer

        scorer = MegatronScorer(config, 2, CPU)
        assert not any(parameter.requires_grad for parameter in scorer._model.parameters())
        leaders = data_leaders(config.services.reference)
        share = requests()[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        found = scorer.logprobs(share)
        assert [result.group_id for result in found] == [request.group_id for request in share]
        assert scorer.logprobs([]) == []
        if share:
            np.savez(folder / f"{name}-{rank}.npz", **{str(result.group_id): result.values for result in found})
        scorer._grid.close()
