"""Converts model folders between Hugging Face's layout and megatron-core's, one tensor at a time. Checks them before renaming.
Memory holds at most one parameter of one rank, or the whole of a layer's row-parallel matrix. In Megatron-LM's own layout it
holds a rank's whole file while that is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from launcher.conversion import classic_folder
from launcher.conversion.arguments import config_of, require_arguments
from launcher.conversion.classic_folder import ClassicCheckpoint, has_value_head, rank_parameters, target_for, write_ranks
from launcher.conversion.parts import (
    ConversionReport,
    HfModel,
    ParameterReader,
    Progress,
    Show,
    counted,
    dtype_name,
    open_hf,
    require_new,
    require_room,
    require_same_bits,
)
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.models import hf_policy, quantized
from runtime.models.families import Family, Layout, Parameter, family_for
from runtime.models.families.naming import Naming
from runtime.models.hf_folder import read_family, read_raw, weight_paths
from runtime.trainer.megatron import logits
from runtime.trainer.megatron.core_checkpoint import (
    LAYOUT,
    OWN,
    CoreCheckpoint,
    CoreFile,
    CoreFolder,
    Description,
    columns,
    is_checkpoint,
    read_description,
    write_description,
)
from runtime.weights.delta import TensorReader, TensorWriter
from runtime.weights.plan import TensorSpec

_PLAIN = Naming()
Pieces = list[tuple[Parameter, ParameterReader]]


class _Core(Struct, frozen=True):
    """A model in one of megatron-core's layouts. Its tensors are not read yet."""

    family: Family
    columns: list[list[CoreFile]]  # as of `core_checkpoint.columns`
    source: CoreFolder | CoreCheckpoint | ClassicCheckpoint
    describe: Callable[[Path, torch.dtype], None]  # writes the other files of a Hugging Face folder, for weights of a dtype
    copies: Pieces = []  # the same parameters on further ranks
    left_out: list[str] = []

    def pieces(self) -> Pieces:
        """Return every parameter of every file, and its reader."""
        parts = chain.from_iterable(self.columns)
        return [(parameter, self.source.part(part)) for part in parts for parameter in part.parameters] + self.copies


def to_core(
    source: Path,
    folder: Path,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    check_logits: bool = False,
    show: Show,
) -> ConversionReport:
    """Convert the Hugging Face folder `source` into the new folder `folder`, then check that it gives the source again.
    `dtype`: None for that of the tensors. `check_logits` needs memory for both models. Raises UserError, before it allocates
    memory, for an unsupported model or layout, missing or unknown tensors, an existing folder, and too little room."""
    require_new(folder)
    model = open_hf(source, dtype, value_head)
    layout.require(model.family.shape)
    parts = [*chain.from_iterable(columns(model.family, layout))]
    specs = {part.name: [model.tensors.spec(parameter) for parameter in part.parameters] for part in parts}

    def write(unfinished: Path, progress: Progress) -> None:
        hf_policy.write_description(source, unfinished, dtype)
        write_description(unfinished, Description(layout=layout, value_head=value_head))
        for part in parts:
            with TensorWriter(unfinished / part.name, specs[part.name]) as writer:
                for parameter in part.parameters:
                    writer.write(parameter.name, parameter.from_hf(model.tensors.read))
                    progress("converting", writer.specs[parameter.name].nbytes)

    nbytes = sum(spec.nbytes for part in specs.values() for spec in part)
    return _from_hf(source, folder, model, nbytes, len(parts), write, _open_folder, check_logits, show)


def to_megatron(
    source: Path,
    folder: Path,
    layout: Layout,
    naming: Naming = _PLAIN,
    *,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    check_logits: bool = False,
    show: Show,
    **options: Any,
) -> ConversionReport:
    """Convert as `to_core`, into a release in Megatron-LM's layout with names by `naming`. `options`: those of `target_for`."""
    require_new(folder)
    model = open_hf(source, dtype, value_head)
    target = target_for(layout, model.family.shape, naming, **options)
    ranks = list(target.grid.ranks())
    held = chain.from_iterable(parameters for rank in ranks for parameters in rank_parameters(model, target, rank))
    nbytes = sum(model.tensors.spec(parameter).nbytes for parameter in held)
    write, reopen = partial(write_ranks, model, target), partial(_open_classic, hf_config=source)
    return _from_hf(source, folder, model, nbytes, len(ranks), write, reopen, check_logits, show)


def to_hf(source: Path, folder: Path, *, check_logits: bool = False, show: Show) -> ConversionReport:
    """Convert `source`, in any of megatron-core's layouts or a checkpoint of the trainer on it, into the new folder `folder`,
    and check it. Raises UserError, before it allocates memory, if a file is missing, torn or of another model, for an existing
    folder, and too little room; and later if ranks that should hold the same do not."""
    require_new(folder)
    if check_logits and is_checkpoint(source):
        raise UserError(f"--check-logits: is for folders with {LAYOUT}; {source} is a checkpoint")
    return _to_hf(_open_checkpoint(source) if is_checkpoint(source) else _open_folder(source), folder, check_logits, show)


def megatron_to_hf(
    source: Path, folder: Path, hf_config: Path | None, *, check_logits: bool = False, show: Show
) -> ConversionReport:
    """Convert as `to_hf` does, from a checkpoint in Megatron-LM's own layout. `hf_config` has the model's config.json and
    tokenizer; None: config.json is made from the checkpoint's arguments, without a tokenizer. Raises UserError also if
    config.json and the arguments disagree, or the arguments do not suffice."""
    require_new(folder)
    return _to_hf(_open_classic(source, hf_config), folder, check_logits, show)


def _from_hf(
    source: Path,
    folder: Path,
    model: HfModel,
    nbytes: int,
    files: int,
    write: Callable[[Path, Progress], None],
    reopen: Callable[[Path], _Core],
    check_logits: bool,
    show: Show,
) -> ConversionReport:
    """Write `files` files of `nbytes` bytes, and check them. Return the report."""
    if check_logits and model.config.get(quantized.KEY) is not None:
        raise UserError(f"--check-logits: the weights of {source} are quantised; must be a folder whose weights are not")
    if check_logits:
        logits.require(model.family)
    require_room(folder, nbytes)
    progress = counted(show, nbytes)
    with checkpoint.atomic_folder(folder) as unfinished:
        started = time.monotonic()
        write(unfinished, progress)
        seconds = time.monotonic() - started
        core = reopen(unfinished)
        require_same_bits(core.pieces(), model.tensors.read, progress)
        difference = _difference(core, source, show) if check_logits else None
    return ConversionReport(
        nbytes=nbytes,
        files=files,
        tensors=len(model.family.tensors()),
        seconds=seconds,
        left_out=model.left_out,
        difference=difference,
    )


def _to_hf(core: _Core, folder: Path, check_logits: bool, show: Show) -> ConversionReport:
    if check_logits:
        logits.require(core.family)
    pieces = core.pieces()
    specs = _hf_specs(core.family, pieces)
    progress = counted(show, sum(reader.specs[parameter.name].nbytes for parameter, reader in pieces))
    nbytes = sum(spec.nbytes for spec in specs)
    require_room(folder, nbytes)
    with checkpoint.atomic_folder(folder) as unfinished:
        started = time.monotonic()
        core.describe(unfinished, getattr(torch, specs[0].dtype))
        if core.family.value_head:
            hf_policy.describe_critic(unfinished, f"{core.family.architecture}ForSequenceClassification")
        with hf_policy.ShardWriter(unfinished, "model", specs) as writer:
            _join(core, writer, progress)
        seconds = time.monotonic() - started
        files = weight_paths(unfinished)
        require_same_bits(pieces, TensorReader(*files).get, progress)
        difference = _difference(core, unfinished, show) if check_logits else None
    return ConversionReport(
        nbytes=nbytes, files=len(files), tensors=len(specs), seconds=seconds, left_out=core.left_out, difference=difference
    )


def _open_folder(source: Path) -> _Core:
    description = read_description(source)
    family = read_family(source, description.value_head)
    description.layout.require(family.shape)
    core = CoreFolder(source, family, description.layout)

    def describe(folder: Path, _: torch.dtype) -> None:
        hf_policy.write_description(source, folder, None, but=(LAYOUT,))

    return _Core(family, list(columns(family, description.layout)), core, describe)


def _open_checkpoint(source: Path) -> _Core:
    core = CoreCheckpoint(source)
    family = read_family(core.path, core.has_value_head)
    core.require(family)

    def describe(folder: Path, dtype: torch.dtype) -> None:
        # A trainer computes and saves in a dtype of its own.
        hf_policy.write_description(core.path, folder, dtype, but=(OWN,))

    return _Core(family, list(columns(family, Layout())), core, describe)


def _open_classic(source: Path, hf_config: Path | None) -> _Core:
    ranks = classic_folder.read_rank_files(source)
    where, arguments = str(ranks.first.path), ranks.first.arguments
    config = config_of(arguments, where) if hf_config is None else read_raw(hf_config)
    named = where if hf_config is None else str(hf_config / "config.json")
    family = family_for(config, named, value_head=has_value_head(ranks))
    require_arguments(arguments, family, config, where)
    core = ClassicCheckpoint(ranks, family)

    def describe(folder: Path, dtype: torch.dtype) -> None:
        if hf_config is None:
            text = json.dumps({**config, "torch_dtype": dtype_name(dtype)}, indent=2, sort_keys=True)
            (folder / "config.json").write_text(text + "\n", encoding="utf-8")
            return
        declared = config.get("dtype") or config.get("torch_dtype")
        hf_policy.write_description(hf_config, folder, None if declared == dtype_name(dtype) else dtype)

    return _Core(family, core.columns, core, describe, list(core.copies()), core.left_out)


def _difference(core: _Core, hf: Path, show: Show) -> float:
    show("comparing", 0, 0)
    wholes = {name: whole for row, readers in _rows(core) for name, whole in _joined(row[0], readers)}
    return logits.largest_difference(core.family, wholes, hf)


def _joined(parameter: Parameter, readers: list[ParameterReader]) -> Iterable[tuple[str, torch.Tensor]]:
    return parameter.to_hf([reader.get(parameter.name)[:] for reader in readers[: parameter.pieces]])


def _rows(core: _Core) -> Iterator[tuple[tuple[Parameter, ...], list[ParameterReader]]]:
    """Yield each parameter as all tensor ranks have it, and the ranks' readers."""
    for column in core.columns:
        readers: list[ParameterReader] = [core.source.part(part) for part in column]
        for row in zip(*(part.parameters for part in column), strict=True):
            yield row, readers


def _hf_specs(family: Family, pieces: Pieces) -> list[TensorSpec]:
    """Return the specifications of the joined tensors. Raises UserError if the pieces of one tensor differ in dtype."""
    dtypes: dict[str, str] = {}
    for parameter, reader in pieces:
        dtype = reader.specs[parameter.name].dtype
        for source in parameter.sources:
            if dtypes.setdefault(source.name, dtype) != dtype:
                raise UserError(f"{reader.path}: {parameter.name} is {dtype}, on another rank {dtypes[source.name]}")
    return [TensorSpec(name, dtypes[name], shape) for name, shape in family.tensors().items()]


def _join(core: _Core, writer: hf_policy.ShardWriter, progress: Progress) -> None:
    """Join the pieces and write the Hugging Face tensors."""
    for row, readers in _rows(core):
        if row[0].split == 0 and not row[0].copy:
            # Blocks of whole rows need no pieces of other ranks.
            for parameter, reader in zip(row, readers, strict=True):
                for source, index, block in parameter.blocks(reader.get(parameter.name)[:]):
                    writer.write(source.name, block, index[0].start)
        elif not row[0].copy:
            for name, whole in _joined(row[0], readers):
                writer.write(name, whole)
        progress("converting", sum(reader.specs[row[0].name].nbytes for reader in readers))
