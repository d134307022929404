"""One of two ranks that each hold the whole model: `python -m tests.loopback.megatron_overlap_member FOLDER RANK 2`.

They train FOLDER/policy with and without overlap, and with all of it off its device between steps, and compare in place: what
they find is equal to the last bit.
"""

from __future__ import annotations

import resource
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Trainer
from runtime.errors import ServiceFault
from runtime.trainer.step import policy_trainer
from tests.unit.training_cases import make_config, make_groups
from tests.unit.training_steps import comparable, make_probes, weights

STEPS, BLOCKS = 4, 2
BUCKET = 2000  # weights, about: the model has several
SECTIONS: dict[str, Any] = {
    "algorithm": {"kl_coefficient": 0.1},
    "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.0, "weight_decay": 0.1},
    "training": {"max_tokens_per_microbatch": 40},
}


def make_engine(folder: Path, rank: int, overlap: bool, dtype: str, **training: Any) -> Any:
    away = {f"offload_train_{kind}": overlap for kind in ("optimizer", "grad", "param")}
    settings = Trainer(processes=BLOCKS, engine="megatron", overlap=overlap, **away)
    sections = SECTIONS | {"training": SECTIONS["training"] | training}
    config = make_config(str(folder / "policy"), dtype=dtype, trainer=settings, **sections)
    device = torch.device("cpu")
    return policy_trainer(config, rank=rank, world_size=BLOCKS, device=device)


def run(engine: Any, rank: int) -> list[dict[str, Any]]:
    """What each step reports, but for the norm, and the weights after every other one, which is published. The norm's last
    digits depend on how buckets lie across the ranks.
    """
    found = []
    for step in range(STEPS):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        if step == STEPS - 1:  # no gradient comes of the last groups: their rewards are the same
            for group in groups[2:]:
                group.rewards[:] = 1.0
        engine.begin_step(step)
        engine.accumulate(groups[rank:2:2])
        engine.accumulate(groups[2 + rank :: 2], last=True)
        gaps = engine.compare(make_probes(step))
        assert len(gaps) == (0 if rank else 3)
        result = comparable(engine.apply())
        assert result.pop("actor/grad_norm") > 0
        found.append({"metrics": result, "gaps": gaps, "weights": published(engine, rank) if step % 2 else {}})
        if engine.backend.on_host:
            lend_device(engine)
    return found


def published(engine: Any, rank: int) -> dict[str, torch.Tensor]:
    """This rank's weights; what rank 0 publishes is no other."""
    if rank:
        assert list(engine.backend.gather()) == []
    else:
        sent = weights(engine)
        assert torch.equal(sent["model.norm.weight"], engine.backend.model.decoder.final_layernorm.weight)
    return {name: parameter.detach().clone() for name, parameter in engine.backend.model.named_parameters()}


def lend_device(engine: Any) -> None:
    engine.backend.optimizer.settle()
    held = [tensor for kind in ("param", "grad", "optimizer") for tensor in engine.backend.optimizer.tensors(kind)]
    weights = {parameter: parameter.clone() for parameter in engine.backend.model.parameters()}
    engine.offload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*held, *weights, *engine.backend.gradients()))
    engine.onload()
    assert all(torch.equal(parameter, before) for parameter, before in weights.items())


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for own, other in zip(left, right, strict=True):
        assert own["metrics"] == other["metrics"]
        assert own["weights"].keys() == other["weights"].keys()
        for name, tensor in own["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


class Watch:
    """Of every update, how often each bucket was reduced, and how many of them before the update was finished."""

    def __init__(self, engine: Any):
        self.updates: list[tuple[Counter[int], int]] = []
        self._begun: Counter[int] = Counter()
        updates = engine.backend.optimizer
        self.buckets = len(updates.model.bucket_groups)
        for number, bucket in enumerate(updates.model.bucket_groups):
            bucket.start_grad_sync = partial(self._start, number, bucket, bucket.start_grad_sync)
        self._finish = updates.finish
        updates.finish = self._finished

    def _start(self, number: int, bucket: Any, start: Any, **options: Any) -> None:
        if bucket.grad_reduce_handle is None:
            self._begun[number] += 1
        start(**options)

    def _finished(self) -> float:
        early = len(self._begun)
        squared: float = self._finish()
        self.updates.append((self._begun, early))
        self._begun = Counter()
        return squared


def member(rank: int, folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        plain = run(make_engine(folder, rank, False, dtype), rank)
        use_small_buckets()
        overlapping = make_engine(folder, rank, True, dtype)
        watch = Watch(overlapping)
        assert watch.buckets > 2
        assert_same(run(overlapping, rank), plain)
        assert all(set(begun.values()) == {1} and len(begun) == watch.buckets for begun, _ in watch.updates)
        # megatron-core learns in the first update which gradients to wait for.
        assert [early for _, early in watch.updates] == [0] + [watch.buckets] * (STEPS - 1)
    fail_to_save(engine=overlapping, rank=rank, folder=folder)
    several: dict[str, Any] = {"epochs": 2, "mini_batch_size": 2, "groups_per_step": 4}
    assert_same(
        run(make_engine(folder, rank, True, "float32", **several), rank),
        run(make_engine(folder, rank, False, "float32", **several), rank),
    )


def fail_to_save(engine: Any, rank: int, folder: Path) -> None:
    """What rank 0 cannot write is told on every rank, by its file."""
    if rank == 0:
        (folder / "saved").mkdir(exist_ok=True)
    write = engine.begin_save(str(folder / "saved"))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(ServiceFault, match=r"trainer rank 0: save: .*saved/megatron/__0_0\.distcp: ") as told:
        write()
    assert "File too large" in str(told.value) or "file write failed" in str(told.value)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def use_small_buckets() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from runtime.trainer.megatron import optimizer

    optimizer.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
