"""A model's weights under Hugging Face names: read into a rank's part before training, and assembled from all ranks after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, repeat

import torch
import torch.distributed as dist

from runtime.models.families import Family, Parameter
from runtime.models.families.adapters import AdapterTable
from runtime.models.families.parameter import SourceTensor
from runtime.models.forward import dtype_of
from runtime.models.hf_folder import WeightFiles
from runtime.trainer.megatron.grid import ProcessGrid
from runtime.weights.group import Shard
from runtime.weights.plan import Cut

_CORRECTION = "router.expert_bias"  # a buffer in megatron-core, not a parameter


def held_by(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the mapping's parameters in `model`, by their names. The router's score correction becomes float32."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTION):
            buffer.data = buffer.data.float()
            found[name] = buffer
    return found


class ModelWeights:
    """This rank's part of a model, or of the adapters on it. Collectives are over the ranks that hold the model once."""

    def __init__(self, family: Family | AdapterTable, held: Mapping[str, torch.Tensor], grid: ProcessGrid):
        """Hold the tensors `held`, by name: what `family` says that this rank has."""
        self._family, self._grid, self._parameters = family, grid, held
        self.merged: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        """Functions that change parameters before they are sent or exported, by the parameters' names."""
        for each in self.parameters(grid.pipeline_rank, grid.expert_rank):
            # The gradient of a parameter that all ranks hold counts once in the norm. megatron-core sets this mark only when it
            # initialises the weights.
            self._parameters[each.name].tensor_model_parallel = each.split is not None  # type: ignore[attr-defined]
        self.shapes = family.tensors()  # shapes of the Hugging Face tensors, in the order of `wholes`

    def parameters(self, stage: int, expert_rank: int) -> list[Parameter]:
        """Return the parameters that the ranks of pipeline stage `stage` with expert rank `expert_rank` hold."""
        grid = self._grid
        coordinates = {"tensor_rank": grid.tensor_rank, "pipeline_rank": stage, "expert_rank": expert_rank}
        return self._family.parameters(grid.layout, **coordinates)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Read only this rank's part from the Hugging Face folder `path`. Raises UserError if the folder does not fit."""
        files = WeightFiles(path)
        assert isinstance(self._family, Family)
        self._family.require_tensors(files.shapes, f"model {path}")
        mine = self.parameters(self._grid.pipeline_rank, self._grid.expert_rank)
        assert {each.name for each in mine} == self._parameters.keys()
        with files.slices() as read:
            for each in mine:
                # A new value head is not known, and begins at 0.
                known = all(source.name in files.shapes for source in each.sources)
                self._parameters[each.name].copy_(each.from_hf(read) if known else torch.zeros(each.shape))

    def cuts(self) -> list[Cut]:
        """Return the layout of each of `shapes` over all ranks."""
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, (tensor_rank, stage, expert_rank) in enumerate(self._grid.places):
            places.setdefault((stage, expert_rank), []).append((rank, tensor_rank))
        found: dict[str, tuple[Parameter, SourceTensor, list[list[int]]]] = {}  # with the holders of each part
        for place, ranks in places.items():
            for each in self.parameters(*place):
                for source in () if each.copy else each.sources:
                    _, _, holders = found.setdefault(source.name, (each, source, [[] for _ in range(each.pieces)]))
                    for rank, tensor_rank in ranks:
                        holders[tensor_rank % each.pieces].append(rank)
        return [_cut(*found[name]) for name in self.shapes]

    @torch.no_grad()
    def shards(self) -> Iterator[Shard]:
        """Yield this rank's parts of the Hugging Face tensors, as `cuts` has them, without empty ones. Matrices come first."""
        grid, indices = self._grid, {name: index for index, name in enumerate(self.shapes)}
        held = self.parameters(grid.pipeline_rank, grid.expert_rank)
        for each in sorted(held, key=lambda each: len(each.sources[0].shape) < 2):
            if not each.copy:
                for source, index, block in each.blocks(self._merged(each)):
                    if block.numel():
                        span = tuple((part.start, part.stop) for part in index) if each.pieces > 1 else ()
                        yield Shard(indices[source.name], span, block)

    @torch.no_grad()
    def wholes(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each Hugging Face tensor in `dtype`, one at a time, on rank 0. The other ranks send their pieces meanwhile."""
        for stage in range(self._grid.layout.pipeline):
            for expert_rank, each in self._rows(stage):
                if not each.copy:
                    yield from self._whole(each, stage, expert_rank, dtype)

    def _rows(self, stage: int) -> Iterator[tuple[int, Parameter]]:
        """Yield a stage's parameters with the expert rank that each is taken from: experts by number, others from the first."""
        of_ranks = [self.parameters(stage, expert_rank) for expert_rank in range(self._grid.layout.expert)]
        for expert, rows in groupby(zip(*of_ranks, strict=True), lambda row: row[0].expert):
            columns = enumerate(zip(*rows, strict=True))
            yield from ((rank, each) for rank, column in columns if expert or rank == 0 for each in column)

    def _whole(self, each: Parameter, stage: int, expert_rank: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a parameter's tensors on rank 0, sent in its replica of the model by way of the stage's first expert rank."""
        grid = self._grid
        if grid.expert_data_rank:
            return
        held: Iterator[torch.Tensor | None] = repeat(None)
        if (grid.pipeline_rank, grid.expert_rank) == (stage, expert_rank):
            pieces = self._pieces(each, self._merged(each).to(dtype_of(each.sources[0].name, dtype)))
            held = (whole for _, whole in each.to_hf(pieces)) if grid.tensor_rank == 0 else held
        if grid.tensor_rank:
            return
        for source, whole in zip(each.sources, held):  # noqa: B905 - `held` may be endless
            empty = partial(torch.empty, source.shape, dtype=dtype_of(source.name, dtype), device=grid.device)
            if grid.pipeline_rank == stage:
                whole = _to_first(whole, expert_rank, grid.expert_group, empty)
            if grid.expert_rank == 0:
                whole = _to_first(whole, stage, grid.pipeline_group, empty)
                if grid.pipeline_rank == 0 and whole is not None:
                    yield source.name, whole

    def _merged(self, each: Parameter) -> torch.Tensor:
        held = self._parameters[each.name]
        return self.merged[each.name](held) if each.name in self.merged else held

    def _pieces(self, each: Parameter, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of all tensor-parallel ranks."""
        if each.pieces == 1:
            return [own]
        pieces = [torch.empty_like(own) for _ in range(each.pieces)]
        dist.all_gather(pieces, own.contiguous(), group=self._grid.tensor_group)
        return pieces


def _cut(each: Parameter, source: SourceTensor, holders: Sequence[Sequence[int]]) -> Cut:
    of_parts = tuple(tuple(sorted(part)) for part in holders)
    if each.split is None or each.pieces == 1:
        return Cut(of_parts)
    return Cut(of_parts, each.split, each.block_shape(source)[each.split])


def _to_first(
    tensor: torch.Tensor | None, origin: int, group: dist.ProcessGroup, empty: Callable[[], torch.Tensor]
) -> torch.Tensor | None:
    """Send rank `origin`'s tensor to rank 0 of `group` and return it there; other ranks return `tensor`."""
    if origin == 0:
        return tensor
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() == ranks[origin]:
        assert tensor is not None
        dist.send(tensor.contiguous(), ranks[0], group=group)
    elif dist.get_rank() == ranks[0]:
        tensor = empty()
        dist.recv(tensor, ranks[origin], group=group)
    return tensor
