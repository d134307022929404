"""`sluice bench shards`: what a weight sync of deltas costs the ranks of a trainer, and what slices from shard to shard would.

Ranks of a gloo group hold rows of float32 weights, as FSDP has them. In turn they gather every tensor whole, which rank 0 casts
into its buckets and compares with the version before; and find what changed in their shards, of which rank 0 is told. Both end
with the bytes that leave for the rollouts.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.weight_sync.slices import Parts, parts, plan, size
from runtime.errors import ServiceFault
from runtime.models.families import Family, Layout, family_for
from runtime.telemetry.shown import LiteralTable
from runtime.trainer.backend import full, local, local_rows
from runtime.weights.delta import DeltaLink, Shard, ShardDelta
from runtime.weights.plan import TRAILER

PATIENCE = 300.0  # seconds
WHOLE, BY_SHARD = "whole", "by shard"
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # of Qwen2.5-7B's sizes


class ShardsSettings(Struct, frozen=True):
    ranks: tuple[int, ...] = (2, 4)
    tensors: int = 24
    shape: tuple[int, int] = (1024, 2048)
    changed: float = 0.01  # of the elements, from one version to the next
    rounds: int = 7


QUICK = ShardsSettings(ranks=(2,), rounds=3)


class VersionCosts(Struct):
    """Of one version: seconds until rank 0 has what leaves, processor seconds of all ranks, bytes of rank 0's memory."""

    seconds: float
    cpu: float
    held: int


class ShardsReport(Struct):
    """`costs`: by ranks and way, medians; `ratios`: by shard to whole, the median of the rounds with the lowest and highest, of
    seconds and processor seconds. `slices`: by layouts, gigabytes."""

    costs: dict[int, dict[str, VersionCosts]]
    ratios: dict[int, dict[str, tuple[float, float, float]]]
    slices: dict[str, dict[str, float]]


class ShardRank:
    """One rank: its rows of the weights, and what rank 0 keeps for either way."""

    def __init__(self, rank: int, count: int, settings: ShardsSettings):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Rows

        self._rank, self._settings = rank, settings
        self._random = torch.Generator().manual_seed(rank)
        mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), "cpu")
        rows, columns = settings.shape
        made = (torch.randn(rows // count, columns, generator=self._random) for _ in range(settings.tensors))
        self._parameters: list[Any] = [DTensor.from_local(local, mesh, [Rows(0)]) for local in made]
        self._delta = ShardDelta(rank, torch.device("cpu"), [0] * settings.tensors)
        nbytes = 2 * rows * columns + TRAILER.size
        self.buffers = {
            way: [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(settings.tensors)] for way in (WHOLE, BY_SHARD)
        }
        nowhere: Any = None  # nothing is sent
        self._encoders = {way: DeltaLink(nowhere, 1 << 30) for way in (WHOLE, BY_SHARD)}

    def change(self) -> None:
        for parameter in self._parameters:
            own = local(parameter).view(-1)
            at = torch.randint(0, len(own), (int(self._settings.changed * len(own)),), generator=self._random)
            own[at] += 1.0

    def publish(self, way: str) -> None:
        """Until rank 0 has what leaves."""
        changes = self._delta.find(self._shards(), current=True) if way == BY_SHARD else None
        for place, parameter in enumerate(self._parameters):
            buffer = self.buffers[way][place]
            view = buffer[: -TRAILER.size].view(torch.bfloat16).view(self._settings.shape)
            told = None
            if changes is None:
                whole = full(parameter)
                if self._rank == 0:
                    view.copy_(whole)
            elif self._rank == 0:
                told = np.sort(next(changes).apply(view))
            if self._rank == 0:
                if way == BY_SHARD:
                    self._encoders[way].set_changed(place, told)
                self._encoders[way].encode(place, buffer)

    def held(self, way: str) -> int:
        """Bytes of copies, the buckets aside."""
        copies = self._delta._published if way == BY_SHARD else self._encoders[way]._last
        return sum(words.nbytes for words in copies.values())

    def _shards(self) -> list[Shard]:
        return [
            Shard(place, (local_rows(each),), local(each).to(torch.bfloat16)) for place, each in enumerate(self._parameters)
        ]


def measure(settings: ShardsSettings, show: Callable[[str], None]) -> ShardsReport:
    """Raises ServiceFault when a rank fails."""
    costs, ratios = {}, {}
    for count in settings.ranks:
        show(f"{count} ranks")
        rounds = _rounds(count, settings)
        costs[count] = {way: _middle([each[way] for each in rounds]) for way in (WHOLE, BY_SHARD)}
        ratios[count] = {
            "seconds": _spread([each[BY_SHARD].seconds / each[WHOLE].seconds for each in rounds]),
            "cpu": _spread([each[BY_SHARD].cpu / each[WHOLE].cpu for each in rounds]),
        }
    return ShardsReport(costs, ratios, slices())


def _middle(found: list[VersionCosts]) -> VersionCosts:
    return VersionCosts(median(each.seconds for each in found), median(each.cpu for each in found), found[-1].held)


def _spread(found: list[float]) -> tuple[float, float, float]:
    return median(found), min(found), max(found)


def _rounds(count: int, settings: ShardsSettings) -> list[dict[str, VersionCosts]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_work, args=(rank, count, settings, folder)) for rank in range(count)]
        give_up = time.monotonic() + PATIENCE
        try:
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(max(0.0, give_up - time.monotonic()))
            if any(each.exitcode != 0 for each in ranks):
                codes = [each.exitcode for each in ranks]
                raise ServiceFault("bench shards", "measure", f"the ranks ended with {codes}")
        finally:
            for each in ranks:
                each.kill()
                each.join()
        return msgspec.json.decode((Path(folder) / "rounds.json").read_bytes(), type=list[dict[str, VersionCosts]])


def _work(rank: int, count: int, settings: ShardsSettings, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE))
    here, rounds = ShardRank(rank, count, settings), []
    for number in range(settings.rounds + 1):
        here.change()
        found = {}
        for way in (WHOLE, BY_SHARD) if number % 2 else (BY_SHARD, WHOLE):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            here.publish(way)
            seconds = time.perf_counter() - began
            spent = torch.tensor([time.process_time() - cpu])
            dist.all_reduce(spent)
            found[way] = VersionCosts(seconds, spent.item(), here.held(way))
        if number:  # the first version is whole either way
            rounds.append(found)
            assert all(map(torch.equal, *here.buffers.values()))
    if rank == 0:
        (Path(folder) / "rounds.json").write_bytes(msgspec.json.encode(rounds))
    dist.destroy_process_group()


def slices() -> dict[str, dict[str, float]]:
    """Gigabytes for one version in bfloat16, by layouts of a trainer on megatron-core and of one rollout on one machine."""
    family = family_for(MODEL, "config.json")
    found = {}
    for source in (Layout(tensor=2, pipeline=2), Layout(tensor=4), Layout(tensor=4, pipeline=4)):
        for target in (Layout(), Layout(tensor=2), Layout(tensor=4)):
            held, needed = parts(family, source), parts(family, target)
            transfers = plan(held, needed)
            loads = [sum(each.elements for each in transfers if each.source == rank) for rank in range(len(held))]
            name = f"{source.tensor} x {source.pipeline} to {target.tensor}"
            found[name] = {
                "gathered": 2e-9 * _gathered(family, source, held),
                "whole": 2e-9 * sum(size(tuple((0, length) for length in shape)) for shape in family.tensors().values()),
                "slices": 2e-9 * sum(loads),
                "most": 2e-9 * max(loads),
            }
    return found


def _gathered(family: Family, layout: Layout, held: list[Parts]) -> int:
    """Elements that move within the trainer until rank 0 has every tensor whole: over tensor ranks, then between stages."""
    moved = 0
    for name, shape in family.tensors().items():
        whole = tuple((0, length) for length in shape)
        stage = next(rank // layout.tensor for rank, mine in enumerate(held) if name in mine)
        split = held[stage * layout.tensor][name] != whole
        moved += size(whole) * ((layout.tensor - 1) * split + (stage > 0))
    return moved


def compared(report: ShardsReport) -> list[Compared]:
    """The median of the rounds, and the lowest and highest."""
    return [
        Compared(f"{name} of a delta, by shard / whole, {count} ranks", list(found))
        for count, by_name in report.ratios.items()
        for name, found in by_name.items()
    ]


def render(report: ShardsReport) -> list[LiteralTable]:
    costs = LiteralTable("ranks", "way", "s", "ratio", "CPU s", "ratio", "MB kept at rank 0", title="One version, as a delta")
    for count, ways in report.costs.items():
        for way, each in ways.items():
            seconds, cpu = (_told(report.ratios[count][name]) if way == BY_SHARD else "" for name in ("seconds", "cpu"))
            costs.add_row(str(count), way, f"{each.seconds:.3f}", seconds, f"{each.cpu:.3f}", cpu, f"{each.held / 1e6:.0f}")
    table = LiteralTable(
        *("trainer to rollout", "gathered in the trainer", "sent whole", "sent as slices", "most by one rank"),
        title="Gigabytes of a whole version of 7 B",
    )
    for name, moved in report.slices.items():
        table.add_row(name, *(f"{moved[key]:.2f}" for key in ("gathered", "whole", "slices", "most")))
    return [costs, table]


def _told(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
