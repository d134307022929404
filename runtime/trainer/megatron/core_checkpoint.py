"""Read the model in a checkpoint of the trainer on megatron-core, a tensor at a time, without megatron.

trainer.json             the checkpoint's engine
megatron/                torch's distributed checkpoint: whole tensors; every rank has written its part of them
megatron/config.json ... files of the Hugging Face folder

Tensors have GPTModel's names without the numbers of layers and experts, which are their first dimensions. If layers differ from
each other, names have the layers' numbers. A norm may have the name of a norm fused with the matrix after it. Tensors of the
optimizer are named `optimizer.*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runtime.errors import UserError
from runtime.models.families import Family, Layout, Parameter
from runtime.models.families.family import HEAD, WORDS, require_same
from runtime.models.families.naming import FUSED
from runtime.run_files import read_object
from runtime.weights import plain_pickle
from runtime.weights.delta import TensorReader
from runtime.weights.plain_pickle import FAULTS, Attributes, Function, Malformed, Opaque, RefusedPickle
from runtime.weights.plan import TensorSpec

# ---- Core folder
# A model in megatron-core's layout on disk, readable without megatron: layout.json (`Description`), config.json, tokenizer and
# so on from the Hugging Face folder, and per tensor rank TT and pipeline stage PP
#     tp_TT_pp_PP.safetensors        the tensors that all expert ranks hold
#     tp_TT_pp_PP_ep_EE.safetensors  the experts of expert rank EE, if there are any
# Tensors have the names of megatron-core's GPTModel on that rank: a rank loads the union of its one or two files.

FORMAT = 1
LAYOUT = "layout.json"


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of layout.json."""

    format: int = FORMAT
    layout: Layout
    value_head: bool


class CoreFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file, with parameters of one rank."""

    tensor: int
    stage: int
    expert: int | None  # None: the parameters that all expert ranks hold
    parameters: list[Parameter]

    @property
    def name(self) -> str:
        return f"tp_{self.tensor:02d}_pp_{self.stage:02d}{'' if self.expert is None else f'_ep_{self.expert:02d}'}.safetensors"


def columns(family: Family, layout: Layout) -> Iterator[list[CoreFile]]:
    """Yield all files of a folder, those of experts last in each stage. A column has the files of the tensor ranks 0, 1, ... at
    one stage and expert rank: together they hold whole tensors."""
    for stage in range(layout.pipeline):
        yield [_core_file(family, layout, tensor, stage, None) for tensor in range(layout.tensor)]
        for expert in range(layout.expert):
            cuts = 1 if layout.whole_experts else layout.tensor
            column = [_core_file(family, layout, tensor, stage, expert) for tensor in range(cuts)]
            if column[0].parameters:
                yield column


def _core_file(family: Family, layout: Layout, tensor: int, stage: int, expert: int | None) -> CoreFile:
    held = family.parameters(layout, tensor_rank=tensor, pipeline_rank=stage, expert_rank=expert or 0)
    parameters = [parameter for parameter in held if parameter.expert == (expert is not None)]
    return CoreFile(tensor=tensor, stage=stage, expert=expert, parameters=parameters)


def write_description(folder: Path, description: Description) -> None:
    text = msgspec.json.format(msgspec.json.encode(description), indent=2)
    (folder / LAYOUT).write_bytes(text + b"\n")


def read_description(folder: Path) -> Description:
    """Read layout.json. Raises UserError if `folder` has no such file or the file has another format."""
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
    """The files of a folder. Only headers are read at first."""

    def __init__(self, folder: Path, family: Family, layout: Layout):
        """Read headers. Raises UserError, which names the tensors, if a file is missing, torn or of another model."""
        self._readers: dict[str, TensorReader] = {}
        for part in chain.from_iterable(columns(family, layout)):
            reader = TensorReader(folder / part.name)
            needed = {parameter.name: parameter.shape for parameter in part.parameters}
            require_same(str(folder / part.name), needed, {name: spec.shape for name, spec in reader.specs.items()})
            self._readers[part.name] = reader

    def part(self, part: CoreFile) -> TensorReader:
        return self._readers[part.name]


# ---- Core index: that of torch's distributed checkpoint, `.metadata`, is a pickle. No code of the pickle runs.
# torch would unpickle the index, and everything in a checkpoint that is not a tensor. Here `plain_pickle` reads the index, and
# only tensors are read. An object of torch's is first read as `Attributes`; the object is made once they are checked.

INDEX = ".metadata"
_SCALE = 8  # a part of a tensor takes about 85 steps and 205 bytes: this allows 370,000 parts
_STATES: dict[str, tuple[type, Any]] = {  # each class, and its attributes before they are set
    f"{kind.__module__}.{kind.__qualname__}": (kind, () if kind is TensorProperties else {})
    for kind in (
        *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta),
        *(TensorProperties, _StorageInfo),
    )
}
_UNUSED = {  # not used: the layout in memory, and where the checkpoint was written
    *("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout"),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath")),  # in Python 3.13
}


class CoreReader(FileSystemReader):
    """torch's reader of a checkpoint's folder, without unpickling. The index is read once."""

    _index: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index. Raises UserError as `read_index` does."""
        if self._index is None:
            self._index = read_index(Path(self.path) / INDEX)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read the plan's tensors. Raises UserError for an object in place of a tensor, which torch would unpickle."""
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise UserError(f"{self.path}: {plain_pickle.excerpt(item.storage_index.fqn)} is not a tensor; it was not read")
        return super().read_data(plan, planner)


def read_index(path: Path) -> Metadata:
    """Return torch's form of an index, without attributes other than a tensor's dtype, shape and position in the files. Raises
    UserError if the file is missing or torn, or if it names a class that does not belong in an index."""
    try:
        with path.open("rb") as file:
            found = plain_pickle.load(file.read(_SCALE * plain_pickle.MOST_BYTES + 1), _Names(), _SCALE)
        return _metadata(found)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RefusedPickle as error:
        raise UserError(f"{path}: {error}") from error
    except FAULTS as error:
        raise UserError(f"{path}: is not a complete checkpoint index: {plain_pickle.line(error)}") from error


class _Names:
    """The names that an index may mention."""

    def named(self, full: str) -> Any:
        """Return what stands for the object `full`. Raises RefusedPickle for an unknown name."""
        module, _, name = full.rpartition(".")
        if full in _STATES:
            return Function(full, lambda *_: Attributes(full, _STATES[full][1]))
        if full == "torch.Size":
            return Function(full, _sizes)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if full in _UNUSED:
            return Function(full, lambda *_: Opaque(full))
        raise RefusedPickle(full)

    def outside(self, identity: Any) -> Any:
        raise Malformed(f"it refers to external data: {plain_pickle.excerpt(identity)}")


def _metadata(found: Any) -> Metadata:
    top = _state(found, Metadata)
    places = _typed(top["storage_data"], dict)
    stored = {_key(key): _place(place) for key, place in places.items()}
    tensors: dict[str, Any] = {}
    left = len(stored)  # remaining parts: tensors may share one list of parts, so that a short file would have very many
    for name, entry in _typed(top["state_dict_metadata"], dict).items():
        tensors[_typed(name, str)] = tensor = _tensor(entry, left)
        if isinstance(tensor, TensorStorageMetadata):
            left -= len(tensor.chunks)
            if not all(MetadataIndex(name, part.offsets) in stored for part in tensor.chunks):
                raise Malformed(f"it lacks positions of parts of {plain_pickle.excerpt(name)}")
    return Metadata(tensors, storage_data=stored, storage_meta=StorageMeta(), version=str(top.get("version"))[:20])


def _tensor(entry: Any, most_parts: int) -> TensorStorageMetadata | BytesStorageMetadata:
    """Return a tensor's entry. Raises Malformed unless its parts fill the tensor, so that no element stays uninitialised."""
    if isinstance(entry, Attributes) and _STATES[entry.name][0] is BytesStorageMetadata:
        return BytesStorageMetadata()
    state = _state(entry, TensorStorageMetadata)
    dtype = getattr(torch, _typed(_state(state["properties"], TensorProperties)[0], str))
    size, listed = _typed(state["size"], torch.Size), _typed(state["chunks"], list)
    if len(listed) > most_parts:
        raise Malformed("it has more parts of tensors than positions")
    parts = [_chunk(part, size) for part in listed]
    if sum(part.sizes.numel() for part in parts) != size.numel():
        raise Malformed(f"the parts of a tensor {list(size)} do not fill it")
    return TensorStorageMetadata(TensorProperties(dtype=_typed(dtype, torch.dtype)), size, parts)


def _chunk(part: Any, size: torch.Size) -> ChunkStorageMetadata:
    """Return a part of a tensor. Raises Malformed if the part lies beyond a tensor of `size`."""
    state = _state(part, ChunkStorageMetadata)
    first, sizes = _typed(state["offsets"], torch.Size), _typed(state["sizes"], torch.Size)
    if len(first) != len(size) or any(start + count > most for start, count, most in zip(first, sizes, size, strict=True)):
        raise Malformed(f"a part {list(sizes)} at {list(first)} lies beyond its tensor {list(size)}")
    return ChunkStorageMetadata(first, sizes)


def _key(key: Any) -> MetadataIndex:
    state = _state(key, MetadataIndex)
    offset = state.get("offset")
    return MetadataIndex(_typed(state["fqn"], str), None if offset is None else _typed(offset, torch.Size))


def _place(place: Any) -> _StorageInfo:
    """Return a part's file and offset. Raises Malformed unless it lies unencoded in the checkpoint's own folder: torch would
    read it from elsewhere, or decompress it."""
    state = _state(place, _StorageInfo)
    name, first, count = _typed(state["relative_path"], str), _typed(state["offset"], int), _typed(state["length"], int)
    if Path(name).name != name or "\0" in name or min(first, count) < 0 or state.get("transform_descriptors") is not None:
        raise Malformed(f"it refers to {plain_pickle.excerpt(name)} at {first}, not to plain data in its folder")
    return _StorageInfo(name, first, count)


def _sizes(sizes: Any = ()) -> torch.Size:
    good = isinstance(sizes, tuple) and len(sizes) <= 64 and all(type(size) is int and size >= 0 for size in sizes)
    if not good or math.prod(max(size, 1) for size in sizes) >= 1 << 63:
        raise Malformed("a tensor has an invalid shape")
    return torch.Size(sizes)


def _state(value: Any, kind: type) -> Any:
    """Return the attributes of what stands for an object of `kind`. Raises Malformed if it is of another kind."""
    if not isinstance(value, Attributes) or _STATES[value.name][0] is not kind:
        raise Malformed(f"it has {plain_pickle.excerpt(value)} instead of a {kind.__name__}")
    return value.values


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise Malformed(f"it has {plain_pickle.excerpt(value)} instead of a {kind.__name__}")
    return value


FOLDER = "megatron"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer."
OWN = "metadata.json"  # a file of megatron-core's among the files of the Hugging Face folder
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*)\.local_experts\.(\d+)\.(.*)")


def is_checkpoint(folder: Path) -> bool:
    return (folder / TRAINER).exists()


class CoreCheckpoint:
    """A checkpoint's folder, or the critic's within it. Only headers are read at first."""

    def __init__(self, folder: Path):
        """Read the index. Raises UserError if the checkpoint is of another engine or cannot be read."""
        self.path = folder / FOLDER
        path = folder / TRAINER
        description = read_object(path, str(path))
        if description.get("lora"):
            raise UserError(f"{folder}: holds only adapters, in PEFT's format; the run's folder model has them merged")
        if "engine" not in description:
            raise UserError(f"{folder}: is a checkpoint of engine torch, whose folder model is a Hugging Face folder already")
        if description["engine"] != "megatron":
            raise UserError(f"{path}: engine is {description['engine']!r}; must be megatron")
        self._reader = CoreReader(self.path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._stored = {
            key: tensor
            for key, tensor in self._metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }
        self._numbered = any(_LAYER.fullmatch(key) for key in self._stored)
        self.specs: dict[str, TensorSpec] = {}

    @property
    def has_value_head(self) -> bool:
        return HEAD in self._stored and self._stored[HEAD].size[0] == 1

    def require(self, family: Family) -> None:
        """Check that the tensors are those of `family`'s model. Raises UserError, which names the tensors, if not."""
        needed: dict[str, tuple[int, ...]] = {}
        for name, shape in _parameters(family):
            key, index = self._place(name)
            before = needed.get(key, ())
            sizes = tuple(max(size, number + 1) for size, number in zip(before or index, index, strict=False))
            needed[key] = (*sizes, *shape)
        found = {key: tuple(tensor.size) for key, tensor in self._stored.items()}
        for key in (WORDS, HEAD):  # they may have padding rows
            if key in needed and key in found:
                found[key] = (min(found[key][0], needed[key][0]), *found[key][1:])
        require_same(str(self.path), needed, found)
        for name, shape in _parameters(family):
            dtype = self._stored[self._place(name)[0]].properties.dtype
            self.specs[name] = TensorSpec(name, str(dtype).removeprefix("torch."), shape)

    def part(self, part: CoreFile) -> CoreCheckpoint:
        """Return the reader of the parameters of `part`: this one."""
        return self

    def get(self, name: str) -> torch.Tensor:
        """Return the parameter as a new tensor. Raises UserError if it cannot be read."""
        (key, index), spec = self._place(name), self.specs[name]
        tensor = torch.empty((*(1,) * len(index), *spec.shape), dtype=getattr(torch, spec.dtype))
        offsets = torch.Size((*index, *(0,) * len(spec.shape)))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=tensor.size())
        items = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _Into(tensor)).wait()
        except Exception as error:  # any error of torch's about torn files or objects; its text advises to trust the file
            raise UserError(f"{self.path}: {key} cannot be read: {type(error).__name__}") from error
        return tensor.view(spec.shape)

    def _place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the stored tensor with the parameter `name` of Layout(), and the parameter's index in its first dimensions."""
        index: tuple[int, ...] = ()
        if (layer := _LAYER.fullmatch(name)) is not None and not self._numbered:
            name, index = f"decoder.layers.{layer[2]}", (int(layer[1]),)
        for norm, fused in FUSED.items():
            if name.endswith(norm) and (other := name.removesuffix(norm) + fused) in self._stored:
                name = other
        if (expert := _EXPERT.fullmatch(name)) is not None:
            name, index = f"{expert[1]}.experts.{expert[3]}", (*index, int(expert[2]))
        return name, index


class _Into(DefaultLoadPlanner):
    """The planner that torch's reader asks where in `tensor` a part belongs."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensor


def _parameters(family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of all parameters, as a single rank would have them."""
    for column in columns(family, Layout()):
        for parameter in column[0].parameters:
            yield parameter.name, parameter.shape
