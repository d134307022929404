"""Model folders between Hugging Face's layout and megatron-core's: a tensor at a time, checked before they get their name.

No more is held in memory than one parameter of one rank, or, of a layer's row-parallel matrix, the whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime import checkpoint
from runtime.engines import hf_policy, value_model
from runtime.engines.conversion_check import Reader, require_same_bits
from runtime.engines.core_checkpoint import OWN, CoreCheckpoint, is_checkpoint
from runtime.engines.core_folder import (
    LAYOUT,
    Column,
    CoreFolder,
    Description,
    columns,
    read_description,
    write_description,
)
from runtime.engines.families import Family, Layout, Parameter, family_for
from runtime.engines.families.family import EMBEDDING
from runtime.engines.families.parameter import Sliceable
from runtime.engines.hf_weights import weight_paths
from runtime.engines.tensor_files import TensorFolder, TensorWriter
from runtime.errors import UserError
from runtime.weights.plan import TensorSpec

Show = Callable[[str, int, int], None]  # phase, bytes done, bytes in all
Comparison = Callable[[Path, Path], float]  # of a folder in megatron-core's layout and a Hugging Face folder
_BUFFER = "rotary_emb.inv_freq"  # which old checkpoints stored; it follows from config.json


class Report(msgspec.Struct, kw_only=True):
    """`seconds` are of the conversion, without the check."""

    nbytes: int
    files: int
    tensors: int  # Hugging Face's, all of them checked
    seconds: float
    left_out: list[str]  # tensors of the source that the target has no place for
    difference: float | None  # of the logits, where they were compared


def to_core(
    source: Path,
    folder: Path,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    check_logits: bool = False,
    show: Show,
) -> Report:
    """Convert the Hugging Face folder `source` into the new folder `folder`, then check that it gives the source again.

    The parameters get `dtype`; None: that of their tensors. `check_logits` needs memory for both models whole. Raises
    UserError, before anything is allocated, for a model or layout that is not supported, tensors that are missing or too
    many, a folder that exists, and too little room.
    """
    _require_new(folder)
    family = family_for(_read_config(source), str(source / "config.json"), value_head=value_head)
    layout.require(family.shape)
    compare = _comparison(family) if check_logits else None
    tensors = TensorFolder(weight_paths(source))
    found = {name: spec.shape for name, spec in tensors.specs.items() if not name.endswith(_BUFFER)}
    family.require_tensors(found, str(source))
    model = _Source(tensors, dtype)
    parts = [part for column in columns(family, layout) for part in column.parts]
    specs = {part.name: [model.spec(parameter) for parameter in part.parameters] for part in parts}
    progress = _Progress(show, sum(spec.nbytes for part in specs.values() for spec in part))
    _require_room(folder, progress.total)
    with checkpoint.atomic_folder(folder) as partial:
        started = time.monotonic()
        hf_policy.write_description(source, partial, dtype)
        write_description(partial, Description(layout=layout, value_head=value_head))
        for part in parts:
            with TensorWriter(partial / part.name, specs[part.name]) as writer:
                for parameter in part.parameters:
                    writer.write(parameter.name, parameter.from_hf(model.read))
                    progress.add("converting", writer.specs[parameter.name].nbytes)
        seconds = time.monotonic() - started
        require_same_bits(_pieces(family, layout, CoreFolder(partial, family, layout)), model.read, progress.add)
        difference = _compare(compare, partial, source, show)
    return Report(
        nbytes=progress.total,
        files=len(parts),
        tensors=len(family.tensors()),
        seconds=seconds,
        left_out=[name for name in found if name not in family.tensors()],
        difference=difference,
    )


def to_hf(source: Path, folder: Path, *, check_logits: bool = False, show: Show) -> Report:
    """Convert `source`, which is in any of megatron-core's layouts, or a checkpoint of the trainer on megatron-core, into the
    new Hugging Face folder `folder`, and check it.

    Raises UserError, before anything is allocated, when a file of `source` is missing, torn or of another model, for a folder
    that exists, and too little room; and afterwards when ranks that should hold the same do not.
    """
    _require_new(folder)
    model, own, family, layout, core = _open_core(source)
    if check_logits and model != source:
        raise UserError(f"--check-logits: is for folders with {LAYOUT}; {source} is a checkpoint")
    compare = _comparison(family) if check_logits else None
    pieces = list(_pieces(family, layout, core))
    specs = _hf_specs(family, pieces)
    progress = _Progress(show, sum(reader.specs[parameter.name].nbytes for parameter, reader in pieces))
    _require_room(folder, sum(spec.nbytes for spec in specs))
    with checkpoint.atomic_folder(folder) as partial:
        started = time.monotonic()
        # A trainer computes, and saves, in a dtype of its own.
        hf_policy.write_description(model, partial, None if model == source else getattr(torch, specs[0].dtype), but=(own,))
        if family.value_head:
            value_model.describe(partial, f"{family.architecture}ForSequenceClassification")
        with hf_policy.ShardWriter(partial, "model", specs) as writer:
            for column in columns(family, layout):
                _join(column, core, writer, progress)
        seconds = time.monotonic() - started
        files = weight_paths(partial)
        require_same_bits(pieces, TensorFolder(files).get, progress.add)
        difference = _compare(compare, source, partial, show)
    return Report(
        nbytes=sum(spec.nbytes for spec in specs),
        files=len(files),
        tensors=len(specs),
        seconds=seconds,
        left_out=[],
        difference=difference,
    )


def _open_core(source: Path) -> tuple[Path, str, Family, Layout, CoreFolder | CoreCheckpoint]:
    """What `source` is by its contents: the folder that describes its model, the one file there that is not Hugging Face's, and
    where the parameters of which layout are read."""
    if is_checkpoint(source):
        core = CoreCheckpoint(source)
        family = family_for(_read_config(core.path), str(core.path / "config.json"), value_head=core.has_value_head)
        core.require(family)
        return core.path, OWN, family, Layout(), core
    description = read_description(source)
    family = family_for(_read_config(source), str(source / "config.json"), value_head=description.value_head)
    description.layout.require(family.shape)
    return source, LAYOUT, family, description.layout, CoreFolder(source, family, description.layout)


def _comparison(family: Family) -> Comparison:
    """Raises UserError when logits cannot be compared."""
    from runtime.engines.megatron import logits

    logits.require(family)
    return logits.largest_difference


def _compare(compare: Comparison | None, core: Path, hf: Path, show: Show) -> float | None:
    if compare is None:
        return None
    show("comparing", 0, 0)
    return compare(core, hf)


class _Source:
    """A Hugging Face folder's tensors as they are to be stored."""

    def __init__(self, tensors: TensorFolder, dtype: torch.dtype | None):
        self._tensors = tensors
        self._dtype = dtype

    def spec(self, parameter: Parameter) -> TensorSpec:
        """As megatron-core holds it. Raises UserError when what makes it is of several dtypes, and none is asked for."""
        dtypes = {source.name: self._declared(source.name).dtype for source in parameter.sources}
        if self._dtype is None and len(set(dtypes.values())) > 1:
            told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise UserError(f"{parameter.name} is made of tensors of several dtypes ({told}); --params-dtype makes them one")
        return TensorSpec(parameter.name, _name(self._dtype) if self._dtype else dtypes.popitem()[1], parameter.shape)

    def read(self, name: str) -> Sliceable:
        if name in self._tensors.specs:
            return _Cast(self._tensors.get(name), self._dtype)
        like = self._declared(name)
        return torch.zeros(1, like.shape[1], dtype=self._dtype or getattr(torch, like.dtype))

    def _declared(self, name: str) -> TensorSpec:
        """A critic's head that the folder has not begins at 0, and is like the embedding otherwise."""
        return self._tensors.specs[name if name in self._tensors.specs else EMBEDDING]


class _Cast:
    """A tensor of which the parts that are taken have another dtype."""

    def __init__(self, tensor: Sliceable, dtype: torch.dtype | None):
        self._tensor = tensor
        self._dtype = dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._tensor[index]
        return part if self._dtype is None else part.to(self._dtype)


class _Progress:
    """Counts what was converted, then what was checked."""

    def __init__(self, show: Show, total: int):
        self.total = total
        self._show = show
        self._phase = ""
        self._done = 0

    def add(self, phase: str, nbytes: int) -> None:
        if phase != self._phase:
            self._phase, self._done = phase, 0
        self._done += nbytes
        self._show(phase, self._done, self.total)


def _pieces(family: Family, layout: Layout, core: CoreFolder | CoreCheckpoint) -> Iterator[tuple[Parameter, Reader]]:
    """Every parameter of every file, and where it is read."""
    for column in columns(family, layout):
        for part in column.parts:
            for parameter in part.parameters:
                yield parameter, core.part(part)


def _hf_specs(family: Family, pieces: list[tuple[Parameter, Reader]]) -> list[TensorSpec]:
    """The tensors that the pieces make. Raises UserError when those of one tensor are of several dtypes."""
    dtypes: dict[str, str] = {}
    for parameter, reader in pieces:
        dtype = reader.specs[parameter.name].dtype
        for source in parameter.sources:
            if dtypes.setdefault(source.name, dtype) != dtype:
                raise UserError(f"{reader.path}: {parameter.name} is {dtype}, on another rank {dtypes[source.name]}")
    return [TensorSpec(name, dtypes[name], shape) for name, shape in family.tensors().items()]


def _join(column: Column, core: CoreFolder | CoreCheckpoint, writer: hf_policy.ShardWriter, progress: _Progress) -> None:
    """Write the Hugging Face tensors of one column of files."""
    readers = [core.part(part) for part in column.parts]
    for row in column.rows():
        if row[0].split == 0 and not row[0].copy:
            for parameter, reader in zip(row, readers, strict=True):
                _join_rows(parameter, reader, writer)
        elif not row[0].copy:
            pieces = [reader.get(row[0].name)[:] for reader in readers[: row[0].pieces]]
            for name, whole in row[0].to_hf(pieces):
                writer.write(name, whole)
        progress.add("converting", sum(reader.specs[row[0].name].nbytes for reader in readers))


def _join_rows(parameter: Parameter, reader: Reader, writer: hf_policy.ShardWriter) -> None:
    """Where the blocks of a piece are rows of the whole, it need not meet the other ranks' pieces."""
    for source, index, block in parameter.blocks(reader.get(parameter.name)[:]):
        writer.write(source.name, block, index[0].start)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: is not a model folder: config.json: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: is not a JSON object")
    return config


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder}: exists; must be a new folder")


def _require_room(folder: Path, nbytes: int) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise UserError(f"{folder}: needs {nbytes / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
