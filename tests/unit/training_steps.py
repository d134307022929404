"""Steps of the training engine and the weights that they leave, for its tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from runtime.config import Optimizer
from runtime.models.adapters import merged
from runtime.models.hf_folder import WeightFiles
from runtime.rollout.engine import are_adapters
from runtime.trainer.backend import BINS_PER_OCTAVE
from runtime.trainer.step import ModelTrainer
from runtime.types import StepResult, TrainGroup
from runtime.weights.group import indexed
from runtime.weights.plan import Manifest, Piece, Sharding, Span, parts, plan_buckets
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import make_groups

BUCKET = 1 << 11  # small, so that a plan has many
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "gather", "scatter"),
)
LOSS_TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def run_step(engine: ModelTrainer, *batches: list[TrainGroup], probes: Sequence[bytes] = ()) -> StepResult:
    engine.begin_step(engine.step)
    for batch in batches:
        engine.accumulate(batch)
    gaps = engine.compare(probes) if probes else []
    return replace(engine.apply(), probes=gaps)


def make_probes(seed: int) -> list[bytes]:
    """Encoded groups, with log-probabilities of nobody's."""
    return [group.payload for group in make_groups(seed, (2, 1, 1), longest=16)]


def comparable(result: StepResult) -> dict[str, float]:
    """What a step reports, but for what tells how it was packed."""
    return {name: value for name, value in result.metrics.items() if name != "padding_waste"}


def weights(engine: ModelTrainer) -> dict[str, torch.Tensor]:
    """As they are published; with adapters, what rollouts make of them."""
    found = published(engine)
    return rolled_out(engine, found) if are_adapters(found) else found


def published(engine: ModelTrainer) -> dict[str, torch.Tensor]:
    """Return the tensors that the ranks' shards make by the plan, on each rank. All ranks call this.

    Every holder of a part has it, the same to the bit, and nobody has anything else; and a rank needs no other for its own."""
    backend = engine.backend
    specs, cuts, ranks = backend.tensor_specs(), backend.cuts(), backend.rank_info.world_size
    manifest = Manifest(tuple(specs), BUCKET, Sharding.of(ranks, cuts))
    with alone():
        own = [(shard.tensor, shard.span, shard.block.to("cpu", copy=True)) for shard in backend.shards()]
    assert [index for index, _, _ in own] == sorted(
        (index for index, _, _ in own), key=lambda index: len(specs[index].shape) < 2
    )
    of_ranks: list[Any] = [(manifest, own)]
    if ranks > 1:
        of_ranks = [None] * ranks
        dist.all_gather_object(of_ranks, (manifest, own))
    assert all(told == manifest for told, _ in of_ranks)
    held = [_by_tensor(shards) for _, shards in of_ranks]
    _assert_held(manifest, held)
    found = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
    missing = [tensor.numel() for tensor in found]
    for bucket in plan_buckets(manifest):
        for piece in bucket.pieces:
            part = indexed(found[piece.tensor], piece.span)
            part.copy_(_piece(held[bucket.root][piece.tensor], piece, specs[piece.tensor].shape))
            missing[piece.tensor] -= part.numel()
    assert not any(missing)
    return {spec.name: tensor for spec, tensor in zip(specs, found, strict=True)}


def _by_tensor(shards: Sequence[tuple[int, Span, torch.Tensor]]) -> dict[int, dict[Span, torch.Tensor]]:
    found: dict[int, dict[Span, torch.Tensor]] = {}
    for index, span, block in shards:
        assert span not in found.setdefault(index, {})
        found[index][span] = block
    return found


def _assert_held(manifest: Manifest, held: Sequence[Mapping[int, Mapping[Span, torch.Tensor]]]) -> None:
    expected: list[dict[int, set[Span]]] = [{} for _ in held]
    for index in range(len(manifest.tensors)):
        for span, holders in parts(manifest.tensors[index], manifest.source.cut(index)):
            first = held[holders[0]][index][span]
            for holder in holders:
                expected[holder].setdefault(index, set()).add(span)
                assert torch.equal(held[holder][index][span], first), f"{manifest.tensors[index].name} of {holder}"
    assert [{index: set(spans) for index, spans in each.items()} for each in held] == expected


def _piece(shards: Mapping[Span, torch.Tensor], piece: Piece, shape: Sequence[int]) -> torch.Tensor:
    """The piece, out of the shard that it lies in."""
    wanted = [*piece.span, *((0, size) for size in shape[len(piece.span) :])]
    for span, block in shards.items():
        bounds = [*span, *((0, size) for size in shape[len(span) :])]
        pairs = list(zip(wanted, bounds, strict=True))
        if all(low <= first and last <= high for (first, last), (low, high) in pairs):
            return block[tuple(slice(first - low, last - low) for (first, last), (low, _) in pairs)]
    raise AssertionError(f"{piece} is not in a shard of its sender")


@contextmanager
def alone() -> Iterator[None]:
    """No rank begins a collective here."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a rank waits for another")

    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, refused)
        yield


def rolled_out(engine: ModelTrainer, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rollout makes of the model folder and `adapters`, in their dtype."""
    (dtype,) = {tensor.dtype for tensor in adapters.values()}
    return {name: tensor.to(dtype) for name, tensor in merged(WeightFiles(engine._config.model.path), adapters)}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def assert_metrics(got: Mapping[str, float], expected: Mapping[str, float], *, steps: int = 1) -> None:
    """But for the rounding of so many steps, each of which begins with what the last one left. Of the share of tokens beyond a
    limit, a token that lies at the limit may be on either side. The 99th percentile is the edge of a bin, and a number at that
    edge may be in either bin."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "mismatch/over_0.1":
            assert abs(got[name] - value) <= 1.5 / expected["mismatch/tokens"], name
            continue
        if name.endswith("_p99") and got[name] != value:
            assert abs(math.log2(got[name] / value)) * BINS_PER_OCTAVE <= 1.01, name
            continue
        assert_close(got[name], value, terms=steps * STEP, scale=_summands(name, abs(value)), what=name)


def _summands(name: str, mean: float) -> float:
    """How large the numbers are that a metric is the mean of, where they cancel.

    Losses and advantages are about 1. k3 of a difference x of log-probabilities is about x² / 2, and its error x times theirs.
    """
    if name.endswith(("pg_loss", "ppo_kl", "advantages/mean")):
        return max(mean, 1.0)
    return max(mean, math.sqrt(2 * mean)) if name in ("actor/kl", "actor/kl_loss") else mean


def assert_updated(
    left: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    *,
    steps: int = 1,
    norm: float | None = None,
) -> None:
    """Weights after so many steps of Adam are the same but for rounding.

    Adam moves a weight by rate · m / (√v + eps). Where a gradient is small against eps, an error δ in it moves the weight
    by rate · δ / eps more, and where it is large by less. δ is relative to `norm`, of all gradients: what they are clipped
    to, unless it is given. The weight is rounded too, once a step. With an eps near 0 the rounding of a gradient near 0
    decides the sign of its update, and no two orders of addition agree on that.
    """
    assert optimizer.eps >= 1e-3
    assert left.keys() == right.keys()
    moved = optimizer.learning_rate * (optimizer.max_grad_norm if norm is None else norm) / optimizer.eps
    for name, tensor in right.items():
        stored = float(tensor.abs().max()) / STEP
        assert_close(left[name], tensor, terms=STEP, scale=steps * (moved + stored), what=name)
