"""A model in megatron-core's layout on disk, readable without megatron.

layout.json                              format, layout, head: `Description`
config.json, tokenizer and so on         the Hugging Face folder's
tp_TT_pp_PP.safetensors                  what all expert ranks hold of tensor rank TT on pipeline stage PP
tp_TT_pp_PP_ep_EE.safetensors            the experts of expert rank EE there; only where there are any

Tensors have the names that megatron-core's GPTModel gives them on that rank, so a rank loads the union of its one or two files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from runtime.errors import UserError
from runtime.models.families import Family, Layout, Parameter
from runtime.models.families.family import require_same
from runtime.weights.tensor_files import TensorReader

FORMAT = 1
LAYOUT = "layout.json"


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What layout.json says."""

    format: int = FORMAT
    layout: Layout
    value_head: bool


class CoreFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: the parameters of a rank that lie in it."""

    tensor: int
    stage: int
    expert: int | None  # None: what all expert ranks hold
    parameters: list[Parameter]

    @property
    def name(self) -> str:
        return f"tp_{self.tensor:02d}_pp_{self.stage:02d}{'' if self.expert is None else f'_ep_{self.expert:02d}'}.safetensors"


class Column(msgspec.Struct, frozen=True):
    """The files of the tensor ranks 0, 1, ... at one stage, and expert rank: together they hold whole tensors."""

    parts: list[CoreFile]

    def rows(self) -> Iterator[tuple[Parameter, ...]]:
        """One parameter after the other, as each of the tensor ranks has it."""
        return zip(*(part.parameters for part in self.parts), strict=True)


def columns(family: Family, layout: Layout) -> Iterator[Column]:
    """All files of a folder, the last ones of each stage those of its experts."""
    for stage in range(layout.pipeline):
        yield Column([_part(family, layout, tensor, stage, None) for tensor in range(layout.tensor)])
        for expert in range(layout.expert):
            cuts = 1 if layout.whole_experts else layout.tensor
            parts = [_part(family, layout, tensor, stage, expert) for tensor in range(cuts)]
            if parts[0].parameters:
                yield Column(parts)


def _part(family: Family, layout: Layout, tensor: int, stage: int, expert: int | None) -> CoreFile:
    held = family.parameters(layout, tensor_rank=tensor, pipeline_rank=stage, expert_rank=expert or 0)
    parameters = [parameter for parameter in held if parameter.expert == (expert is not None)]
    return CoreFile(tensor=tensor, stage=stage, expert=expert, parameters=parameters)


def write_description(folder: Path, description: Description) -> None:
    text = msgspec.json.format(msgspec.json.encode(description), indent=2)
    (folder / LAYOUT).write_bytes(text + b"\n")


def read_description(folder: Path) -> Description:
    """Raises UserError when `folder` is no such folder, or of another format."""
    path = folder / LAYOUT
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Description)
    except OSError as error:
        raise UserError(f"{folder}: is not a model in megatron-core's layout: {LAYOUT}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    if found.format != FORMAT:
        raise UserError(f"{path}: format is {found.format}; must be {FORMAT}")
    return found


class CoreFolder:
    """The files of a folder, of which nothing is read yet."""

    def __init__(self, folder: Path, family: Family, layout: Layout):
        """Reads headers only. Raises UserError, naming the tensors, when a file is missing, torn or of another model."""
        self._readers: dict[str, TensorReader] = {}
        for part in (part for column in columns(family, layout) for part in column.parts):
            reader = TensorReader(folder / part.name)
            needed = {parameter.name: parameter.shape for parameter in part.parameters}
            require_same(str(reader.path), needed, {name: spec.shape for name, spec in reader.specs.items()})
            self._readers[part.name] = reader

    def part(self, part: CoreFile) -> TensorReader:
        return self._readers[part.name]
