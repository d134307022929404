"""Checkpoints in the layout of Megatron-LM's own files, which MindSpeed-LLM's converter writes too. Needs no megatron.

latest_checkpointed_iteration.txt                     the number of an iteration, or `release`
iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt   of tensor rank TT, pipeline stage PPP and expert rank EEE, if there
                                                      are several: args, iteration, `model`, or `model0`, `model1` ... with
                                                      virtual stages; the rest (optimizers, generators) is not read

Chunk V of stage P of S is pipeline stage V · S + P of a layout without virtual stages, in the order in which tokens pass them.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from launcher.conversion.arguments import DECISIVE, arguments_of, noop_layers, require_types
from launcher.conversion.parts import HfModel, ParameterReader, Progress
from launcher.conversion.torch_archive import ArchiveTensor, read_archive
from runtime.errors import UserError
from runtime.models.families import Family, Layout, Parameter
from runtime.models.families.family import EMBEDDING, HEAD, WORDS, require_same
from runtime.models.families.naming import (
    REWARD_BIAS,
    REWARD_HEAD,
    ExpertStorage,
    LatentStorage,
    Naming,
    Place,
    latent_stored,
    place,
    places,
    reward_headed,
)
from runtime.models.families.parameter import Sliceable
from runtime.models.families.shape import ModelShape
from runtime.trainer.megatron.core_checkpoint import CoreFile, columns
from runtime.weights.plain_pickle import Attributes, excerpt
from runtime.weights.plan import TensorSpec

# ---- The ranks with a file, and what each of them holds

Coordinates = tuple[int, int, int]  # tensor rank, pipeline stage (not a virtual one), expert rank


class ClassicGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of parallelism, and the distribution of experts."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int  # the number of ranks over which an expert is cut: `tensor`, or 1
    extended: bool = False  # MindSpeed's moe_tp_extend_ep: each tensor rank has whole experts of its own

    @property
    def whole_experts(self) -> bool:
        return self.tensor > 1 and (self.extended or self.expert_tensor == 1)

    @property
    def groups(self) -> int:
        """The number of groups that the experts of a layer are spread over."""
        return self.expert * self.tensor if self.extended else self.expert

    @property
    def count(self) -> int:
        """The number of ranks with a file."""
        return self.tensor * self.expert // self._step * self.pipeline

    def ranks(self) -> Iterator[Coordinates]:
        """Yield the ranks with a file. If experts are not cut, tensor and expert ranks are counted together: rank r is tensor
        rank r mod `tensor` and expert rank r mod `expert`. These differ by multiples of the greatest common divisor."""
        for tensor in range(self.tensor):
            for expert in range(tensor % self._step, self.expert, self._step):
                yield from ((tensor, stage, expert) for stage in range(self.pipeline))

    @property
    def _step(self) -> int:
        return math.gcd(self.tensor, self.expert) if self.whole_experts and not self.extended else 1

    def name(self, rank: Coordinates) -> str:
        tensor, stage, expert = rank
        name = f"mp_rank_{tensor:02d}"
        name += f"_{stage:03d}" if self.pipeline > 1 else ""
        return name + (f"_{expert:03d}" if self.expert > 1 else "")

    def group(self, rank: Coordinates) -> int:
        """Return the group of experts that a rank holds."""
        return rank[2] * self.tensor + rank[0] if self.extended else rank[2]

    def holds(self, rank: Coordinates, part: CoreFile) -> bool:
        """Return whether a rank holds the part. `part`: of a layout with this grid's groups, of a stage of this rank."""
        if part.expert is None:
            return part.tensor == rank[0]
        return part.expert == self.group(rank) and (self.whole_experts or part.tensor == rank[0])

    def described(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.expert}"


def grid_of(arguments: Mapping[str, Any], found: Coordinates, where: str) -> ClassicGrid:
    """Return the grid by Megatron-LM's arguments; missing ones are as `found`. Raises UserError for invalid sizes."""
    sizes = []
    for kind, other in zip(("tensor", "pipeline", "expert"), found, strict=True):
        key = f"{kind}_model_parallel_size"
        size = other if arguments.get(key) is None else arguments[key]
        if not isinstance(size, int) or not 1 <= size <= 65536:
            raise UserError(f"{where}: args.{key} is {size!r}; must be a positive integer")
        sizes.append(size)
    tensor, pipeline, expert = sizes
    each = arguments.get("expert_tensor_parallel_size") or tensor
    extended = bool(arguments.get("moe_tp_extend_ep")) and tensor > 1
    sparse = bool(arguments.get("num_experts"))
    if sparse and each not in (1, tensor):
        raise UserError(f"{where}: args.expert_tensor_parallel_size is {each!r}; must be 1, or {tensor}, as for all else")
    return ClassicGrid(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=each if sparse and not extended else tensor,
        extended=extended and sparse,
    )


# ---- The model: each parameter of each rank by its name in the table


def has_value_head(ranks: RankFiles) -> bool:
    """Return whether the model gives one number a token: by MindSpeed's reward head, or instead of the vocabulary's head."""
    last = ranks.stored(0, ranks.stages - 1, 0)[1]
    return REWARD_HEAD in last or (HEAD in last and last[HEAD].shape[:1] == (1,))


def layout_of(ranks: RankFiles, vocab_size: int) -> Layout:
    """Return the layout of the files. Raises UserError if the layers have gaps, or the vocabulary has more rows than stored."""
    tensor = ranks.grid.tensor
    path, stored = ranks.stored(0, 0, 0)
    rows = stored[WORDS].shape[0] if WORDS in stored and stored[WORDS].shape else 0
    if 0 < rows * tensor < vocab_size:
        raise UserError(
            f"{path}: {WORDS} has {rows} rows on each of {tensor} ranks; must be at least vocab_size {vocab_size} in all"
        )
    return Layout(
        tensor=tensor,
        pipeline=ranks.stages,
        expert=ranks.grid.groups,
        whole_experts=ranks.grid.whole_experts,
        empty_stages=True,
        layers_per_stage=ranks.layers_per_stage(),
        make_vocab_size_divisible_by=max(rows, 1),
    )


class ClassicCheckpoint:
    """The files of all ranks. Their tensors are not read yet."""

    def __init__(self, ranks: RankFiles, family: Family):
        """Find each part's ranks. Raises UserError, which names the tensors, for another model or a reward head's bias."""
        layout = layout_of(ranks, family.shape.vocab_size)
        layout.require(family.shape)
        _, last = ranks.stored(0, ranks.stages - 1, 0)
        reward = REWARD_HEAD in last
        self.left_out = [HEAD] if reward and HEAD in last else []
        storage = _latent_storage(ranks, family)
        self.columns = [
            [replace(part, parameters=as_stored(part.parameters, storage, reward)) for part in column]
            for column in columns(family, layout)
        ]
        self._holders: dict[str, list[RankReader]] = {}  # by part, the ranks that hold it
        of_stages: dict[int, list[CoreFile]] = {}
        for column in self.columns:
            of_stages.setdefault(column[0].stage, []).extend(column)
        for rank, stage in ((rank, stage) for stage in of_stages for rank in ranks.grid.ranks()):
            if stage % ranks.grid.pipeline == rank[1]:
                path, stored = ranks.stored(rank[0], stage, rank[2])
                parts = [part for part in of_stages[stage] if ranks.grid.holds(rank, part)]
                reader = RankReader(path, stored, parts, {HEAD, REWARD_BIAS} if reward else set())
                _require_zero(path, stored.get(REWARD_BIAS))
                for part in parts:
                    self._holders.setdefault(part.name, []).append(reader)

    def part(self, part: CoreFile) -> RankReader:
        return self._holders[part.name][0]

    def copies(self) -> Iterator[tuple[Parameter, ParameterReader]]:
        """Yield the same parameters on further ranks."""
        for part in (part for column in self.columns for part in column):
            for reader in self._holders[part.name][1:]:
                yield from ((replace(parameter, copy=True), reader) for parameter in part.parameters)


def as_stored(held: Sequence[Parameter], storage: LatentStorage, reward_head: bool) -> list[Parameter]:
    """Return a rank's parameters as the files have them."""
    return latent_stored([reward_headed(each) for each in held] if reward_head else held, storage)


def _latent_storage(ranks: RankFiles, family: Family) -> LatentStorage:
    """Return the storage of latent attention, by the first rank's tensors on the first stage with layers."""
    latent = family.shape.latent
    for stage in range(ranks.stages if latent is not None else 0):
        for name, tensor in ranks.stored(0, stage, 0)[1].items():
            if name.endswith("self_attention.linear_qkv.weight"):
                return LatentStorage.JOINED
            if latent is not None and name.endswith("linear_kv_down_proj.weight"):
                return LatentStorage.WHOLE if tensor.shape[:1] == (latent.cached,) else LatentStorage.CUT
    return LatentStorage.CUT


class RankReader:
    """Reads one rank's parameters of one stage. Conversion asks for parameters by the table's names."""

    def __init__(self, path: Path, stored: dict[str, ArchiveTensor], parts: list[CoreFile], beside: set[str]):
        """Check that the tensors are those of `parts`. `beside`: further allowed names. Raises UserError with the names."""
        parameters = [parameter for part in parts for parameter in part.parameters]
        self.path = path
        self._tensors: dict[str, ArchiveTensor] = {}
        used: set[str] = set()
        experts = Counter(parameter.name.partition(".local_experts.")[0] for parameter in parameters if parameter.expert)
        for parameter in parameters:
            place = next((place for _, place in places(parameter.name) if place.name in stored), None)
            if place is None:
                continue
            used.add(place.name)
            count = experts[parameter.name.partition(".local_experts.")[0]] // 2  # an expert has two matrices
            tensor = stored[place.name] if place.expert is None else _expert(stored[place.name], place, count, parameter)
            self._tensors[parameter.name] = tensor
        self.specs = {name: TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}
        further = {name: tensor for name, tensor in stored.items() if name not in used and name not in beside}
        found = {name: tensor.shape for name, tensor in (self._tensors | further).items()}
        require_same(str(path), {parameter.name: parameter.shape for parameter in parameters}, found)

    def get(self, name: str) -> Sliceable:
        return self._tensors[name]


def _expert(stored: ArchiveTensor, place: Place, count: int, parameter: Parameter) -> ArchiveTensor:
    """Return one of the `count` experts of a rank; each has an equal part of the tensor's elements."""
    rows, width = parameter.shape
    if stored.elements != count * rows * width:
        return stored
    assert place.expert is not None
    return stored.part(place.expert * rows * width, (rows, width), transposed=True)


def _require_zero(path: Path, bias: ArchiveTensor | None) -> None:
    """Raise UserError unless the bias is 0: the head of a Hugging Face classifier has no bias."""
    if bias is not None and bias.shape != (1,):
        raise UserError(f"{path}: {REWARD_BIAS} has the shape {list(bias.shape)}; must be [1]")
    if bias is not None and (value := bias[:].tolist()) != [0.0]:
        raise UserError(f"{path}: {REWARD_BIAS} is {value}; must be 0, as a Hugging Face classifier's head has no bias")


TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
VERSION = 3.0
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")
_MOST_LISTED = 10_000  # ranks that are searched for missing files
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class RankFile(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    arguments: dict[str, Any]
    iteration: Any
    chunks: list[dict[str, ArchiveTensor]]  # by megatron-core's names; one chunk for each virtual stage


class RankFiles(msgspec.Struct, frozen=True, kw_only=True):
    grid: ClassicGrid
    files: dict[Coordinates, RankFile]

    @property
    def first(self) -> RankFile:
        return self.files[0, 0, 0]

    @property
    def stages(self) -> int:
        """The number of stages, including virtual stages."""
        return self.grid.pipeline * len(self.first.chunks)

    def stored(self, tensor: int, stage: int, expert: int) -> tuple[Path, dict[str, ArchiveTensor]]:
        """Return the file and the tensors of a rank on a stage, which may be a virtual stage."""
        chunk, real = divmod(stage, self.grid.pipeline)
        file = self.files[tensor, real, expert]
        return file.path, file.chunks[chunk]

    def layers_per_stage(self) -> tuple[int, ...]:
        """Return the number of layers on each stage. Raises UserError if the layers of a stage are not numbered 0, 1, 2 ..."""
        counts = []
        for stage in range(self.stages):
            path, stored = self.stored(0, stage, 0)
            numbers = _layers(stored)
            if numbers != list(range(len(numbers))):
                raise UserError(f"{path}: has the layers {', '.join(map(str, numbers))}; must be numbered from 0 on")
            counts.append(len(numbers))
        return tuple(counts)


def read_rank_files(source: Path) -> RankFiles:
    """Read the newest checkpoint in `source`, by its tracker, without the tensors' data. Raises UserError, which names the
    file, if the folder is no such checkpoint, a rank's file is missing, torn, or holds more than tensors and plain values,
    there is one file too many, or ranks disagree on the iteration or the arguments."""
    folder = _newest(source)
    names = sorted(path.name for path in folder.iterdir() if _RANK.fullmatch(path.name))
    if not names:
        _refuse_distributed(folder)
        raise UserError(f"{folder}: has no rank's folder mp_rank_00 ...")
    first = _read(folder / names[0] / FILE)
    grid = grid_of(first.arguments, _found(names), str(first.path))
    # The file gives the sizes, so they may be huge.
    expected = {grid.name(rank): rank for rank in islice(grid.ranks(), max(len(names) + 1, _MOST_LISTED))}
    if missing := [name for name in expected if not (folder / name / FILE).is_file()]:
        count = len(missing) if len(expected) == grid.count else f"{len(missing)} or more"
        shown = ", ".join(f"{name}/{FILE}" for name in missing[:10])
        raise UserError(f"{folder}: {count} ranks' files are missing, of {grid.described()} by args: {shown}")
    if more := [name for name in names if name not in expected]:
        raise UserError(f"{folder}: {more[0]} is of no rank, of {grid.described()} (tensor, pipeline, expert) by args")
    files = {rank: first if name == names[0] else _read(folder / name / FILE) for name, rank in expected.items()}
    for file in files.values():
        _require_agreement(files[0, 0, 0], file)
    return RankFiles(grid=grid, files=files)


def _newest(source: Path) -> Path:
    """Return the folder of the checkpoint that the tracker names."""
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
        raise UserError(f"{tracker}: names {folder.name}, but there is no such folder")
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
        raise UserError(f"{path}: checkpoint_version is {excerpt(found.get('checkpoint_version'))}; must be {VERSION}")
    arguments = found.get("args")
    if not isinstance(arguments, Attributes):
        raise UserError(f"{path}: has no args")
    require_types(arguments.values, str(path), DECISIVE)
    iteration = found.get("iteration")
    if not isinstance(iteration, (int, str, type(None))):
        raise UserError(f"{path}: iteration is {excerpt(iteration)}; must be an integer")
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
    """Return a model's tensors, without other state: states of FP8, None, frequencies of the rotary embedding."""
    if not isinstance(model, dict):
        raise UserError(f"{path}: {key} is no dictionary of tensors")
    found: dict[str, ArchiveTensor] = {}
    for name, value in model.items():
        if not isinstance(name, str) or name.endswith(("_extra_state", ".inv_freq")) or value is None:
            continue
        if not name.isprintable():
            raise UserError(f"{path}: {key} has {excerpt(name)}, which is no name of a tensor")
        if not isinstance(value, ArchiveTensor):
            raise UserError(f"{path}: {name} of {key} is no tensor")
        found[name] = value
    return found


def _found(names: list[str]) -> Coordinates:
    """Return the sizes of parallelism by the folders' names. In a name with two numbers the second is a stage."""
    numbers = [_RANK.fullmatch(name) for name in names]
    sizes = [1 + max(int(number[group] or 0) for number in numbers if number is not None) for group in (1, 2, 3)]
    return sizes[0], sizes[1], sizes[2]


def _layers(stored: Mapping[str, ArchiveTensor]) -> list[int]:
    return sorted({int(layer[1]) for name in stored if (layer := _LAYER.match(name)) is not None})


def _without_gaps(stored: dict[str, ArchiveTensor]) -> dict[str, ArchiveTensor]:
    """Number the layers from 0 on: layers that only pass tokens on have numbers, but no tensors."""
    numbers = {number: index for index, number in enumerate(_layers(stored))}
    return {renumbered(name, numbers): tensor for name, tensor in stored.items()}


def renumbered(name: str, numbers: Mapping[int, int] | Sequence[int]) -> str:
    """Return a tensor's name, with the number of its layer after `numbers`."""
    return _LAYER.sub(lambda layer: f"decoder.layers.{numbers[int(layer[1])]}.", name)


def _require_agreement(first: RankFile, file: RankFile) -> None:
    for key in DECISIVE:
        if (value := file.arguments.get(key)) != (other := first.arguments.get(key)):
            raise UserError(f"{file.path}: args.{key} is {value!r}, on another rank {other!r}")
    if file.iteration != first.iteration:
        raise UserError(f"{file.path}: iteration is {excerpt(file.iteration)}, on another rank {excerpt(first.iteration)}")
    if len(file.chunks) != len(first.chunks):
        raise UserError(f"{file.path}: has {len(file.chunks)} virtual stages, another rank {len(first.chunks)}")


# ---- Writing: a release, without optimizer and generators


class FolderTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The layout and the names of the checkpoint to write."""

    grid: ClassicGrid
    layout: Layout  # cuts a rank's parameters: its stages are virtual stages, its expert ranks are groups of experts
    naming: Naming
    noops: tuple[int, ...] = ()  # numbers of the layers that only pass tokens on
    each: int | None = None  # layers of a virtual stage, including those that only pass tokens on

    @property
    def chunks(self) -> int:
        """The stages of the layout on each rank."""
        return self.layout.pipeline // self.grid.pipeline


def target_for(
    layout: Layout,
    shape: ModelShape,
    naming: Naming,
    *,
    layers_per_virtual_stage: int | None = None,
    noops: tuple[int, ...] = (),
    expert_tensor: int | None = None,
    extended: bool = False,
) -> FolderTarget:
    """Return the target. `layout` is the requested layout: its stages and expert ranks are processes. `expert_tensor`: None for
    the number of tensor ranks. Raises UserError, which names the option, if options do not fit each other or the model."""
    latent = shape.latent
    if naming.latent is LatentStorage.JOINED and (naming.fused or latent is None or latent.query_rank is None):
        raise UserError("--mindspeed-mla: is for latent attention with a q_lora_rank, and not with --transformer-impl")
    _require_options(layout, shape, layers_per_virtual_stage, noops, expert_tensor, extended)
    grid = ClassicGrid(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=expert_tensor or layout.tensor,
        extended=extended and layout.tensor > 1,
    )
    total = shape.layers + len(noops)
    stages = layout.pipeline if layers_per_virtual_stage is None else total // layers_per_virtual_stage
    counts = [sum(number not in noops for number in numbers) for numbers in _stage_numbers(total, stages)] if noops else []
    cut = msgspec.structs.replace(
        layout,
        pipeline=stages,
        expert=grid.groups,
        whole_experts=grid.whole_experts,
        empty_stages=bool(noops),
        layers_per_stage=tuple(counts) or layout.layers_per_stage,
    )
    cut.require(shape)
    return FolderTarget(grid=grid, layout=cut, naming=naming, noops=noops, each=layers_per_virtual_stage)


def _require_options(
    layout: Layout, shape: ModelShape, each: int | None, noops: tuple[int, ...], expert_tensor: int | None, extended: bool
) -> None:
    whole = extended or expert_tensor == 1
    msgspec.structs.replace(layout, whole_experts=whole, **({"pipeline": 1} if noops else {})).require(shape)
    total = shape.layers + len(noops)
    if noops:
        fault = f"--noop-layers: are {','.join(map(str, noops))}"
        if layout.layers_per_stage:
            raise UserError(f"{fault}; not together with --layers-per-stage")
        if len(set(noops)) < len(noops) or not all(0 <= number < total for number in noops):
            raise UserError(f"{fault}; must be different numbers from 0 to {total - 1}")
        if layout.pipeline < 1 or total % layout.pipeline:
            raise UserError(f"{fault}: {total} layers with them; must be a multiple of --pipeline-parallel {layout.pipeline}")
    if each is not None:
        fault = f"--layers-per-virtual-stage: is {each}"
        if layout.layers_per_stage:
            raise UserError(f"{fault}; not together with --layers-per-stage")
        if layout.pipeline < 2:
            raise UserError(f"{fault}; needs --pipeline-parallel of at least 2")
        if each < 1 or total % (each * layout.pipeline) or total == each * layout.pipeline:
            raise UserError(
                f"{fault}; a multiple of it, 2 or more times, must be the layers of a stage ({total} / {layout.pipeline})"
            )
    if expert_tensor not in (None, 1, layout.tensor):
        raise UserError(f"--expert-tensor-parallel: is {expert_tensor}; must be 1, or --tensor-parallel {layout.tensor}")
    if whole and shape.experts is None:
        option = "--moe-tp-extend-ep" if extended else "--expert-tensor-parallel"
        raise UserError(f"{option}: is for models with experts")
    if extended and expert_tensor is not None:
        raise UserError("--moe-tp-extend-ep: not together with --expert-tensor-parallel")


def _stage_numbers(total: int, stages: int) -> list[range]:
    """Return the layers of each stage, numbered in the model."""
    return [range(stage * (total // stages), (stage + 1) * (total // stages)) for stage in range(stages)]


def rank_parameters(model: HfModel, target: FolderTarget, rank: Coordinates) -> list[list[Parameter]]:
    """Return the parameters of a rank, for each of its virtual stages."""
    found = []
    for stage in range(rank[1], target.layout.pipeline, target.grid.pipeline):
        held = model.family.parameters(
            target.layout, tensor_rank=rank[0], pipeline_rank=stage, expert_rank=target.grid.group(rank)
        )
        held = as_stored(held, target.naming.latent, target.naming.reward_head)
        if target.noops:  # their numbers are left out
            numbers = _stage_numbers(model.family.shape.layers + len(target.noops), target.layout.pipeline)[stage]
            left = [local for local, number in enumerate(numbers) if number not in target.noops]
            held = [msgspec.structs.replace(each, name=renumbered(each.name, left)) for each in held]
        found.append(held)
    return found


def write_ranks(model: HfModel, target: FolderTarget, folder: Path, progress: Progress) -> None:
    """Write the files of all ranks. Memory holds all tensors of one rank at a time."""
    arguments = _arguments(model, target)
    for rank in target.grid.ranks():
        state: dict[str, Any] = {"args": arguments, "checkpoint_version": VERSION, "iteration": 0}
        for chunk, parameters in enumerate(rank_parameters(model, target, rank)):
            key = "model" if target.chunks == 1 else f"model{chunk}"
            state[key] = _state(model, target.naming, parameters, progress)
        path = folder / RELEASE / target.grid.name(rank) / FILE
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / TRACKER).write_text(RELEASE)


def _state(model: HfModel, naming: Naming, parameters: list[Parameter], progress: Progress) -> dict[str, torch.Tensor]:
    """Return a rank's tensors by their names in the checkpoint."""
    names = {parameter.name for parameter in parameters}
    state: dict[str, torch.Tensor] = {}
    grouped: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        tensor = parameter.from_hf(model.tensors.read)
        progress("converting", tensor.nbytes)
        where = place(parameter.name, naming, names)
        if where.expert is None:
            # torch saves the whole memory of a tensor.
            state[where.name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        else:
            grouped.setdefault(where.name, []).append(tensor)
    for name in list(grouped):
        whole = torch.stack([tensor.t() for tensor in grouped.pop(name)])
        hidden = model.family.shape.hidden_size
        state[name] = whole.view(hidden, -1) if name.endswith("1") else whole.view(-1, hidden)
    if REWARD_HEAD in state:
        state[REWARD_BIAS] = state[REWARD_HEAD].new_zeros(1)
    return state


def _arguments(model: HfModel, target: FolderTarget) -> argparse.Namespace:
    """Return the arguments that Megatron-LM compares with its own, or takes over with --use-checkpoint-args."""
    grid = target.grid
    layout, shape = target.layout, model.family.shape
    embedding = next(p for p in model.family.parameters(Layout()) if p.sources[0].name == EMBEDDING)
    dtype = getattr(torch, model.tensors.spec(embedding).dtype)
    numbered = target.naming.experts is ExpertStorage.NUMBERED
    found = {
        **arguments_of(model.family, model.config),
        "padded_vocab_size": layout.padded_vocab(shape),
        "make_vocab_size_divisible_by": layout.make_vocab_size_divisible_by,
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "expert_model_parallel_size": grid.expert,
        "expert_tensor_parallel_size": grid.expert_tensor,
        "moe_tp_extend_ep": grid.extended,
        "noop_layers": ",".join(map(str, target.noops)) or None,
        "virtual_pipeline_model_parallel_size": target.chunks if target.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": target.each,
        "num_layer_list": ",".join(map(str, layout.layers_per_stage)) or None if not target.noops else None,
        "moe_grouped_gemm": target.naming.experts is not ExpertStorage.SEQUENTIAL,
        "transformer_impl": "transformer_engine" if target.naming.fused or numbered else "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_mcore_models": True,
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    found["num_layers"] += len(target.noops)
    if len(layout.layers_per_stage) > 1 and not target.noops:
        found["decoder_first_pipeline_num_layers"] = layout.layers_per_stage[0]
        found["decoder_last_pipeline_num_layers"] = layout.layers_per_stage[-1]
    return argparse.Namespace(**found)
