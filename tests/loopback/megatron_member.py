"""One rank of a trainer in some layout: `python -m tests.loopback.megatron_member FOLDER RANK COUNT TENSOR PIPELINE SEQUENCE
[RESUMED]`.

It trains FOLDER/policy for some steps, from the beginning or from what the layout RESUMED saved in the middle; rank 0 writes
what it found to FOLDER/NAME.pt. Tensor 0 is the torch engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.config import Config, Parallel, Trainer
from runtime.engines import train_rank, train_rows
from runtime.topology import data_leaders
from runtime.types import TrainGroup
from tests.loopback.ranks import as_rank, run_ranks
from tests.unit.training_cases import make_config, make_groups
from tests.unit.training_steps import run_step

STEPS, SAVED = 5, 3
SECTIONS = {
    "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "optimizer": {"learning_rate": 1e-5, "max_grad_norm": 0.5, "weight_decay": 0.1},
    "training": {"max_tokens_per_microbatch": 40},
}


class Layout(NamedTuple):
    tensor: int
    pipeline: int = 1
    sequence: bool = False
    processes: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    def config(self, folder: Path) -> Config:
        parallel = Parallel(tensor=max(1, self.tensor), pipeline=self.pipeline, sequence=self.sequence)
        engine: Any = "megatron" if self.tensor else "torch"
        trainer = Trainer(processes=self.processes, engine=engine, parallel=parallel)
        return make_config(str(folder / "policy"), trainer=trainer, **SECTIONS)


def train(folder: Path, layout: Layout, resumed: str = "") -> dict[str, Any]:
    """What rank 0 found: log-probabilities before each step, metrics, and the tensors published in the end, by name."""
    arguments = (str(layout.tensor), str(layout.pipeline), str(int(layout.sequence)), *([resumed] if resumed else []))
    run_ranks(__name__, folder, layout.processes, *arguments)
    found: dict[str, Any] = torch.load(folder / f"{layout.name}.pt")
    return found


def groups_of(step: int) -> list[TrainGroup]:
    return make_groups(step, (5, 4, 6, 3), step=step)


def member(rank: int, folder: Path) -> None:
    tensor, pipeline, sequence = map(int, sys.argv[4:7])
    layout = Layout(tensor, pipeline, bool(sequence), int(sys.argv[3]))
    config = layout.config(folder)
    device = torch.device("cpu")
    engine: Any = train_rank.engine_type(config, device)(config, rank=rank, world_size=layout.processes, device=device)
    # Fixed, and their sum is not 0.
    engine._advantages = lambda rows, *_: rows.rewards[:, None].astype(np.float64) + 0.5
    resumed = sys.argv[7:]
    if resumed:
        engine.load(str(folder / f"saved-by-{resumed[0]}"))
    leaders = data_leaders(config.services.trainer)
    logprobs, metrics = [], []
    for step in range(SAVED if resumed else 0, STEPS):
        if step == SAVED and not resumed:
            (folder / f"saved-by-{layout.name}").mkdir(exist_ok=True)
            engine.save(str(folder / f"saved-by-{layout.name}"))
        groups = groups_of(step)
        logprobs.append(
            torch.from_numpy(engine._forward_only(train_rows.decode_groups(groups, engine._vocab_size, engine._needs)))
        )
        share = groups[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        metrics.append(run_step(engine, share[:1], share[1:]).metrics)
    specs = engine.tensor_specs()
    out = [torch.full(spec.shape, torch.nan) for spec in specs]
    engine.snapshot(out if rank == 0 else None)
    export = folder / f"export-{layout.name}"
    export.mkdir(exist_ok=True)
    engine.export(str(export))
    if rank == 0:
        published = {spec.name: tensor for spec, tensor in zip(specs, out, strict=True)}
        torch.save({"logprobs": logprobs, "metrics": metrics, "published": published}, folder / f"{layout.name}.pt")


if __name__ == "__main__":
    as_rank(member)
