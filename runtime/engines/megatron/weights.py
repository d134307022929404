"""A model's weights in Hugging Face names: into a rank's part when training starts, and out of all ranks' parts afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.engines.families import Family, Parameter, family_for
from runtime.engines.hf_weights import WeightFiles
from runtime.engines.megatron.grid import Grid
from runtime.errors import UserError


def read_family(path: str, value_head: bool) -> Family:
    """The mapping of the model in folder `path`. Raises UserError."""
    file = Path(path) / "config.json"
    try:
        return family_for(json.loads(file.read_text(encoding="utf-8")), str(file), value_head=value_head)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"model {file}: cannot be read: {error}") from error


class ModelWeights:
    """The weights of this rank's `model`. Every method is a collective over the ranks that hold the model first; the
    others pass it by."""

    def __init__(self, family: Family, model: torch.nn.Module, grid: Grid):
        self._family, self._grid = family, grid
        self._parameters = dict(model.named_parameters())
        for each in self.parameters(grid.pipeline_rank):
            # Of what the ranks hold the same, the gradient counts once in the norm. megatron-core says so only where it
            # initialises the weights.
            self._parameters[each.name].tensor_model_parallel = each.split is not None  # type: ignore[attr-defined]
        self.shapes = family.tensors()
        """Of the Hugging Face tensors, in the order in which `wholes` gives them."""

    def parameters(self, stage: int) -> list[Parameter]:
        """As the ranks of pipeline stage `stage` hold them."""
        grid = self._grid
        return self._family.parameters(grid.layout, tensor_rank=grid.tensor_rank, pipeline_rank=stage)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Read this rank's part from the Hugging Face folder `path`, and no more. Raises UserError when it does not fit."""
        files = WeightFiles(path)
        self._family.require_tensors(files.shapes, f"model {path}")
        mine = self.parameters(self._grid.pipeline_rank)
        assert {each.name for each in mine} == self._parameters.keys()
        with files.slices() as read:
            for each in mine:
                known = all(
                    source.name in files.shapes for source in each.sources
                )  # but for a value head that is to begin at 0
                self._parameters[each.name].copy_(each.from_hf(read) if known else torch.zeros(each.shape))

    @torch.no_grad()
    def wholes(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 each Hugging Face tensor in `dtype`, one at a time; nothing on the others, which send their pieces."""
        if self._grid.data_rank:
            return
        for stage in range(self._grid.layout.pipeline):
            for each in self.parameters(stage):
                if not each.copy:
                    yield from self._whole(each, stage, dtype)

    def _whole(self, each: Parameter, stage: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        grid = self._grid
        pieces: list[torch.Tensor] = []
        if grid.pipeline_rank == stage:
            pieces = self._pieces(each, self._parameters[each.name].to(dtype))
        if grid.tensor_rank or grid.pipeline_rank not in (0, stage):
            return
        if stage == 0:
            yield from each.to_hf(pieces)
        elif grid.pipeline_rank == stage:
            for _, whole in each.to_hf(pieces):
                dist.send(whole.contiguous(), grid.stages[0], group=grid.pipeline_group)
        else:
            for source in each.sources:
                whole = torch.empty(source.shape, dtype=dtype, device=grid.device)
                dist.recv(whole, grid.stages[stage], group=grid.pipeline_group)
                yield source.name, whole

    def _pieces(self, each: Parameter, own: torch.Tensor) -> list[torch.Tensor]:
        """Those of the tensor-parallel ranks."""
        if each.pieces == 1:
            return [own]
        pieces = [torch.empty_like(own) for _ in range(each.pieces)]
        dist.all_gather(pieces, own.contiguous(), group=self._grid.tensor_group)
        return pieces
