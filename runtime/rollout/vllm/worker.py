"""Sluice's extension of vLLM's workers, which are processes of their own: they load weights from shared memory."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.errors import UserError
from runtime.models.families.family import LM_HEAD
from runtime.process import platform
from runtime.weights.group import file_of, in_memory_file

# ---- Shared buffers
#
# The tensors of a version, as the rollout's process stages them, and as its workers read them.


Buffers = dict[str, tuple[int, torch.Tensor]]  # inodes and mapped memory of files, by path


class Location(NamedTuple):
    """The place of one tensor in shared memory. Plain values, so that any codec can send it."""

    name: str
    path: str  # readable by every process of the same user, as long as the buffer lives
    offset: int  # bytes
    dtype: str  # torch's name
    shape: list[int]


def locate(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Location], list[torch.Tensor]]:
    """Return the locations of `tensors`, and copies of tensors outside shared memory. Keep the copies until they are read."""
    locations, copies = [], []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if (shared := in_memory_file(flat)) is not flat:
            copies.append(shared)
        descriptor, offset = file_of(shared)
        path, dtype = f"/proc/{os.getpid()}/fd/{descriptor}", str(tensor.dtype).removeprefix("torch.")
        locations.append(Location(name, path, offset, dtype, list(tensor.shape)))
    return locations, copies


def mapped(location: Location, buffers: Buffers, before: Buffers) -> torch.Tensor:
    """Return a view of the other process's memory. `buffers`: of that process, each mapped here once. `before`: those of the
    load before, taken over because a new mapping costs page faults. Raises OSError if that process has freed the memory."""
    held = buffers.get(location.path)
    if held is None:
        inode = Path(location.path).stat().st_ino
        held = before.get(location.path)
        if held is None or held[0] != inode:  # the descriptor's number may be of another file by now
            descriptor = os.open(location.path, os.O_RDWR)
            try:
                held = inode, torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
            finally:
                os.close(descriptor)
        buffers[location.path] = held
    _, buffer = held
    dtype: torch.dtype = getattr(torch, location.dtype)
    nbytes = math.prod(location.shape) * dtype.itemsize
    return buffer[location.offset : location.offset + nbytes].view(dtype).view(location.shape)


LOCATIONS = "SLUICE_LOCATIONS"
"""Variable of workers on another node than the engine's requests: the file with the locations on their own node."""


def write_locations(descriptor: int, locations: Sequence[Location]) -> None:
    """Write the locations into a memory file of this process."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(locations).encode(), 0)


def on_this_node(locations: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """Return where the tensors of `locations` lie on this worker's node. Raises RuntimeError if other ones are staged here."""
    if (path := os.environ.get(LOCATIONS)) is None:
        return locations
    own = {each.name: each for each in (Location(*fields) for fields in json.loads(Path(path).read_bytes() or b"[]"))}
    wanted = [Location(*fields) for fields in locations]
    shapes = {each.name: (each.dtype, list(each.shape)) for each in wanted}
    if shapes != {each.name: (each.dtype, each.shape) for each in own.values()}:
        raise RuntimeError("this node has staged other weights")
    return [own[each.name] for each in wanted]


# ---- Delivery
#
# Checks that every published weight has a place in vLLM's model, and every parameter of that model gets a weight. vLLM's
# loaders skip unknown names without a message.


class Reads(TorchDispatchMode):
    """While entered, finds the tensors from `of` that no operator has read."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        self.left: dict[int, tuple[str, torch.Tensor]] = {}  # by address; held, so that no new tensor gets the address
        self._counts = False  # whether the present operators are the loader's

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            start = tensor.data_ptr()
            if tensor.numel() and start not in self.left:  # the head may be the embedding
                insort(self._starts, start)
                self.left[start] = name, tensor
            self._counts = True
            yield name, tensor
            self._counts = False
        self._counts = True  # for work that the loader has put off

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for each in tree_leaves((args, kwargs)) if self._counts else ():
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                index = bisect_right(self._starts, address := each.data_ptr()) - 1  # the address may be within a tensor
                if index >= 0 and address < self._starts[index] + self.left[self._starts[index]][1].nbytes:
                    del self.left[self._starts.pop(index)]
        return func(*args, **(kwargs or {}))


def undelivered(unread: Collection[str] = (), empty: Collection[str] = ()) -> str:
    """Return a fault with the published weights that are `unread`, and the parameters that are `empty`; "": there are none."""
    faults = (
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (("published weights have no place in it", unread), ("of its parameters get none", empty))
        if names
    )
    same = "names must be the same in transformers and in this vLLM"
    return f"vLLM's model is not the trainer's: {listed}; {same}" if (listed := "; ".join(faults)) else ""


log = logging.getLogger("vllm.sluice")

MENDABLE = "the user's to mend: "  # prefix of a fault that would occur again

CHECK_FORMAT = "_check_nz_disabled"
"""Method of vllm-ascend's worker. Raises if weights are in the NPU format FRACTAL_NZ, which would load new weights wrongly."""


class WeightLoading:
    """Mixed into vLLM's worker class by `worker_extension_cls`; `collective_rpc` calls its methods by name."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        model_config: Any

    def sluice_load(self, locations: Sequence[Sequence[Any]], first: bool = True, last: bool = True) -> list[str]:
        """Load weights over the model's; this worker takes its share. `locations`: of a whole set, or of the `first` part of a
        set, others, and the `last`. Return the fault, or "", then the weights that this worker has not read, after the last
        part of the first set. An exception would end the call with the first worker's answer, and the other workers' answers
        would be taken for the next call's. After a fault the weights are a mixture."""
        try:
            return ["", *self._sluice_reload(locations, first, last)]
        except UserError as error:
            return [f"{MENDABLE}{error}"]
        except Exception as error:
            log.exception("sluice: the weights were not loaded")
            return [f"{type(error).__name__}: {error}"]

    def _sluice_reload(self, locations: Sequence[Sequence[Any]], first: bool, last: bool) -> list[str]:
        """Load weights layer by layer, and return those that were not read, as `sluice_load` does. Some of vLLM's layers keep
        weights in a layout of the device, so they cannot be copied into. vLLM makes layers of the checkpoint's shape, fills and
        converts each, and copies it over the old one. This is finished even if a tensor was missing, so that the next load
        finds the model in order."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

        layerwise.materialize_layer = _materialize
        refuse = getattr(self, CHECK_FORMAT, None)
        if refuse is not None:
            refuse()
        # vLLM warns of layers without weights, such as rotary embeddings, which have none.
        logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)
        model, device = self.model_runner.model, self.model_runner.device
        loading, empty = _loading(model), set[str]()
        unfinished = first and loading.under_way  # the last part of the version before never came
        if first:
            loading.begin(model)
        if first and device.type == "cpu":
            _forget_expert_kernels(model)
        where = nullcontext() if device.type == "cpu" else torch.device(device)  # as a context it slows down torch
        with set_current_vllm_config(self.vllm_config), where, nullcontext() if loading.checked else loading.reads:
            ends = last
            try:
                if unfinished:
                    finalize_layerwise_reload(model, self.model_config)
                if first:
                    initialize_layerwise_reload(model)
                weights = self.sluice_weights(locations)
                if not (first and last):  # vLLM keeps what it was given until a layer is whole, and the buffers are used again
                    weights = ((name, tensor.clone()) for name, tensor in weights)
                loading.taken |= model.load_weights(weights if loading.checked else loading.reads.of(weights)) or set()
                empty = loading.own & set(_unfilled(model)) - loading.taken
            except BaseException:
                ends = True
                raise
            finally:
                if ends:
                    loading.under_way = False
                    finalize_layerwise_reload(model, self.model_config)
        platform.synchronize(device)  # the buffers are overwritten after this
        if not last or loading.checked:
            return []
        unread = [name for name, _ in loading.reads.left.values()]
        # What this worker does not read may be another one's: an expert, or a layer.
        if fault := undelivered(unread if self.vllm_config.parallel_config.world_size_across_dp == 1 else (), sorted(empty)):
            raise UserError(fault)
        loading.checked = True
        return unread

    def sluice_weights(self, locations: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors as a checkpoint's files would give them."""
        model, loading = self.model_runner.model, _loading(self.model_runner.model)
        for fields in on_this_node(locations):
            location = Location(*fields)
            if location.name != LM_HEAD or hasattr(model, "lm_head"):  # a tied head is used for nothing else
                yield location.name, mapped(location, loading.buffers, loading.before)


@dataclass
class _Loading:
    """The state of a worker's loads, kept between the parts of a version and between versions."""

    checked: bool = False  # whether a whole version was delivered
    before: Buffers = field(default_factory=dict)  # of the version before
    buffers: Buffers = field(default_factory=dict)
    under_way: bool = False  # whether the last part of a version is to come
    own: set[str] = field(default_factory=set)  # all parameters
    taken: set[str] = field(default_factory=set)  # those that got weights
    reads: Reads = field(default_factory=Reads)

    def begin(self, model: torch.nn.Module) -> None:
        self.before, self.buffers, self.under_way = self.buffers, {}, True
        self.own, self.taken, self.reads = {name for name, _ in model.named_parameters()}, set(), Reads()


def _loading(model: torch.nn.Module) -> _Loading:
    found: _Loading = model.__dict__.setdefault("sluice_loading", _Loading())
    return found


def _materialize(layer: torch.nn.Module, *info: Any) -> None:
    """Replace vLLM's `materialize_layer`: tensors whose layout as loaded is that in use take the memory in use, which saves a
    copy and page faults. If vLLM's processing makes another tensor of one, that is copied over it, as without this."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    parameters, buffers = layerwise.get_layerwise_info(layer).kernel_tensors or ({}, {})
    for name, used in (parameters | buffers).items():
        loaded = getattr(layer, name, None)
        if loaded is not None and loaded.is_meta and _layout(loaded) == _layout(used):
            tensor = used.data
            tensor.__class__, tensor.__dict__ = loaded.__class__, loaded.__dict__.copy()
            setattr(layer, name, tensor)
    meta.materialize_layer(layer, *info)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _unfilled(model: torch.nn.Module) -> Iterator[str]:
    """Yield the parameters that got no weights so far, during a load."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # False once a layer is complete
            given = {name for name, _ in info.loaded_weights}
            for name, _ in layer.named_parameters(recurse=False):
                if name not in given:
                    yield f"{prefix}.{name}"


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Remove the experts' kernels, so that new ones are made. Experts pack their weights for a CPU only when they make their
    kernel. vLLM 0.30 does not pack again when new weights are loaded, and computes with unpacked ones as if packed."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
