"""A checkpoint in the layout of Megatron-LM's own files, which MindSpeed-LLM's converter writes too; readable without megatron.

latest_checkpointed_iteration.txt                     the number of an iteration, or `release`
iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   of tensor rank TT, pipeline stage PPP and expert rank EEE, where there
                                                      are several: args, iteration, `model`, or `model0`, `model1` ... with
                                                      virtual stages; what else there is (optimizers, generators) is left

Chunk V of stage P of S is pipeline stage V · S + P of a layout without virtual stages, by the order in which tokens pass them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from launcher.conversion.argument_types import require_types
from launcher.conversion.arguments import DECISIVE, noop_layers
from launcher.conversion.classic_ranks import ClassicGrid, Coordinates, grid_of
from launcher.conversion.torch_archive import ArchiveTensor, read_archive
from runtime.errors import UserError
from runtime.weights.plain_pickle import Attributes, told

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
VERSION = 3.0
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")
_MOST_LISTED = 10_000  # ranks, to tell which files are missing
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class RankFile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's."""

    path: Path
    arguments: dict[str, Any]
    iteration: Any
    chunks: list[dict[str, ArchiveTensor]]  # by megatron-core's names; one, or those of virtual stages


class RankFiles(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks'."""

    grid: ClassicGrid
    files: dict[Coordinates, RankFile]

    @property
    def first(self) -> RankFile:
        return self.files[0, 0, 0]

    @property
    def stages(self) -> int:
        """With the virtual ones."""
        return self.grid.pipeline * len(self.first.chunks)

    def stored(self, tensor: int, stage: int, expert: int) -> tuple[Path, dict[str, ArchiveTensor]]:
        """What a rank holds of a stage, which may be a virtual one."""
        chunk, real = divmod(stage, self.grid.pipeline)
        file = self.files[tensor, real, expert]
        return file.path, file.chunks[chunk]

    def layers_per_stage(self) -> tuple[int, ...]:
        """Raises UserError where a stage has gaps between its layers."""
        counts = []
        for stage in range(self.stages):
            path, stored = self.stored(0, stage, 0)
            numbers = _layers(stored)
            if numbers != list(range(len(numbers))):
                raise UserError(f"{path}: has the layers {', '.join(map(str, numbers))}; must be numbered from 0 on")
            counts.append(len(numbers))
        return tuple(counts)


def read_rank_files(source: Path) -> RankFiles:
    """The newest checkpoint in `source`, by its tracker; of tensors nothing is read yet.

    Raises UserError, naming the file, when it is no such folder, a rank's file is missing, torn, or holds more than tensors and
    plain values, there is one too many, and when ranks disagree on the iteration or the arguments.
    """
    folder = _newest(source)
    names = sorted(path.name for path in folder.iterdir() if _RANK.fullmatch(path.name))
    if not names:
        _refuse_distributed(folder)
        raise UserError(f"{folder}: has no rank's folder mp_rank_00 ...")
    first = _read(folder / names[0] / FILE)
    grid = grid_of(first.arguments, _found(names), str(first.path))
    # The sizes are what the file says, and may be any.
    expected = {grid.name(rank): rank for rank in islice(grid.ranks(), max(len(names) + 1, _MOST_LISTED))}
    if missing := [name for name in expected if not (folder / name / FILE).is_file()]:
        count = len(missing) if len(expected) == grid.count else f"{len(missing)} or more"
        shown = ", ".join(f"{name}/{FILE}" for name in missing[:10])
        raise UserError(f"{folder}: {count} ranks' files are missing, of {grid.told()} by args: {shown}")
    if more := [name for name in names if name not in expected]:
        raise UserError(f"{folder}: {more[0]} is of no rank, of {grid.told()} (tensor, pipeline, expert) by args")
    files = {rank: first if name == names[0] else _read(folder / name / FILE) for name, rank in expected.items()}
    for file in files.values():
        _require_agreement(files[0, 0, 0], file)
    return RankFiles(grid=grid, files=files)


def _newest(source: Path) -> Path:
    """The folder of the checkpoint that the tracker names."""
    for name in ("layout.json", "trainer.json"):
        if (source / name).exists():
            raise UserError(f"{source}: has {name}, which is for sluice convert mcore2hf")
    tracker = source / TRACKER
    if not tracker.is_file():
        _refuse_distributed(source)
        raise UserError(
            f"{source}: has no {TRACKER}; must be the folder that megatron saved to, with it and iter_... or release"
        )
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not re.fullmatch(r"\d{1,18}", text):
        raise UserError(f"{tracker}: is {text[:40]!r}; must be the number of an iteration, or {RELEASE}")
    folder = source / (text if text == RELEASE else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise UserError(f"{tracker}: names {folder.name}, of which there is no folder")
    _refuse_distributed(folder)
    return folder


def _refuse_distributed(folder: Path) -> None:
    for name in (".metadata", "metadata.json", "common.pt"):
        if (folder / name).exists():
            raise UserError(
                f"{folder}: has {name}: it is a distributed checkpoint, without ranks' files, which Megatron-LM writes with "
                "--ckpt-format torch; sluice convert mcore2hf reads those of Sluice's trainer"
            )


def _read(path: Path) -> RankFile:
    found = read_archive(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no checkpoint: a dictionary is missing")
    if found.get("checkpoint_version") != VERSION:
        raise UserError(f"{path}: checkpoint_version is {told(found.get('checkpoint_version'))}; must be {VERSION}")
    arguments = found.get("args")
    if not isinstance(arguments, Attributes):
        raise UserError(f"{path}: has no args")
    require_types(arguments.values, str(path), DECISIVE)
    iteration = found.get("iteration")
    if not isinstance(iteration, (int, str, type(None))):
        raise UserError(f"{path}: iteration is {told(iteration)}; must be an integer")
    chunks = _chunks(path, found)
    if noop_layers(arguments.values):
        chunks = [_without_gaps(chunk) for chunk in chunks]
    return RankFile(path=path, arguments=arguments.values, iteration=iteration, chunks=chunks)


def _chunks(path: Path, found: Mapping[Any, Any]) -> list[dict[str, ArchiveTensor]]:
    names = sorted(
        (name for name in found if isinstance(name, str) and _CHUNK.fullmatch(name)), key=lambda name: (len(name), name)
    )
    if names != ["model"] and (not names or names != [f"model{number}" for number in range(len(names))]):
        raise UserError(f"{path}: has {', '.join(names) or 'no model'}; must have model, or model0, model1 and so on")
    return [_tensors(path, name, found[name]) for name in names]


def _tensors(path: Path, key: str, model: Any) -> dict[str, ArchiveTensor]:
    """Without what modules have besides: states of FP8, None, frequencies of the rotary embedding."""
    if not isinstance(model, dict):
        raise UserError(f"{path}: {key} is no dictionary of tensors")
    found: dict[str, ArchiveTensor] = {}
    for name, value in model.items():
        if not isinstance(name, str) or name.endswith(("_extra_state", ".inv_freq")) or value is None:
            continue
        if not name.isprintable():
            raise UserError(f"{path}: {key} has {told(name)}, which is no name of a tensor")
        if not isinstance(value, ArchiveTensor):
            raise UserError(f"{path}: {name} of {key} is no tensor")
        found[name] = value
    return found


def _found(names: list[str]) -> Coordinates:
    """Sizes of parallelism by the folders' names; of two numbers the second is a stage."""
    numbers = [_RANK.fullmatch(name) for name in names]
    sizes = [1 + max(int(number[group] or 0) for number in numbers if number is not None) for group in (1, 2, 3)]
    return sizes[0], sizes[1], sizes[2]


def _layers(stored: Mapping[str, ArchiveTensor]) -> list[int]:
    """Their numbers on the stage."""
    return sorted({int(layer[1]) for name in stored if (layer := LAYER.match(name)) is not None})


def _without_gaps(stored: dict[str, ArchiveTensor]) -> dict[str, ArchiveTensor]:
    """Layers numbered from 0 on: those that only pass tokens on have numbers, but no tensors."""
    numbers = {number: index for index, number in enumerate(_layers(stored))}
    return {LAYER.sub(lambda layer: f"decoder.layers.{numbers[int(layer[1])]}.", name): t for name, t in stored.items()}


def _require_agreement(first: RankFile, file: RankFile) -> None:
    for key in DECISIVE:
        if file.arguments.get(key) != first.arguments.get(key):
            value, other = file.arguments.get(key), first.arguments.get(key)
            raise UserError(f"{file.path}: args.{key} is {value!r}, on another rank {other!r}")
    if file.iteration != first.iteration:
        raise UserError(f"{file.path}: iteration is {told(file.iteration)}, on another rank {told(first.iteration)}")
    if len(file.chunks) != len(first.chunks):
        raise UserError(f"{file.path}: has {len(file.chunks)} virtual stages, another rank {len(first.chunks)}")
