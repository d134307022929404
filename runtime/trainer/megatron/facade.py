"""megatron-core on this process's device. Call `prepare` before any other import of megatron-core.

megatron-core is written for CUDA. On NPUs, MindSpeed's adaptor replaces its use of CUDA. On CPUs, the modules of megatron-core,
and only these, get a `torch` in which the few names of CUDA stand for the CPU. torch itself does not change.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import UserError
from runtime.models.limits import MEGATRON_NEEDS_CORE
from runtime.trainer.megatron.core_checkpoint import CoreReader

_USED = (
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "distributed",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "optimizer",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "transformer.moe.moe_utils",
    "transformer.multi_latent_attention",
    "transformer.transformer_block",
)
_FACTORIES = ("empty", "empty_like", "ones", "tensor", "zeros")
_CPU = torch.device("cpu")


def prepare(device: torch.device) -> None:
    """Import the used modules of megatron-core for `device`. Raises UserError, which says what to install, if one is absent."""
    if device.type == "npu":
        _import("mindspeed.megatron_adaptor", "engine megatron on NPUs needs MindSpeed: see its own instructions to install it")
    if device.type == "cpu":
        # megatron-core compiles functions at their first call, for which many machines lack a compiler. With this variable
        # torch does not even load its own compiler, which takes seconds.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    logging.getLogger("megatron").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not installed
        for name in _USED:
            _import(f"megatron.core.{name}", f"engine {MEGATRON_NEEDS_CORE}")
    for message in ("The .grad attribute of a Tensor that is not a leaf", ".*deprecat", ".*CUDA_DEVICE_MAX_CONNECTIONS"):
        warnings.filterwarnings("ignore", message)  # warnings inside megatron-core, or irrelevant on a CPU
    # Version 0.16.1 uses this name whenever it routes to experts, but defines it only with Transformer Engine.
    vars(sys.modules["megatron.core.transformer.moe.moe_utils"]).setdefault("te_general_gemm", None)
    # Without Transformer Engine the module still takes it for installed, and uses a class that does not exist.
    latent: Any = sys.modules["megatron.core.transformer.multi_latent_attention"]
    latent.HAVE_TE = isinstance(getattr(latent, "TELinear", None), type)
    # megatron-core's readers unpickle a checkpoint's index.
    checkpoints: Any = sys.modules["megatron.core.dist_checkpointing.strategies.torch"]
    checkpoints.FileSystemReader = checkpoints.CachedMetadataFileSystemReader = CoreReader
    checkpoints._get_filesystem_reader = lambda folder, *_, **__: CoreReader(folder)
    if device.type == "cpu":
        _put_on_cpu()
    # Version 0.12 asks Transformer Engine to quantise the 8-bit parameters, even if there are none.
    optimizer: Any = sys.modules["megatron.core.optimizer.distrib_optimizer"]
    optimizer.quantize_param_shard = lambda *_, **__: None
    # The imported objects stay. Garbage collections that skip them are faster: the one at the process's end by seconds.
    gc.collect()
    gc.freeze()


def _import(name: str, advice: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{advice} ({error})") from error


class _Facade(types.ModuleType):
    """The module `real` with some names replaced."""

    def __init__(self, real: types.ModuleType, **replaced: Any):
        super().__init__(real.__name__)
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Stream:
    """A CPU's sequence of computation, in place of a CUDA stream or event."""

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


def _put_on_cpu() -> None:
    stream = _Stream()
    cuda = _Facade(
        torch.cuda,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        current_device=lambda: _CPU,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        manual_seed=lambda _: None,
    )
    collectives = _Facade(torch.distributed, all_gather=gather_uneven, reduce_scatter=reduce_scatter_uneven)
    facade = _Facade(torch, cuda=cuda, distributed=collectives, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = facade  # type: ignore[attr-defined]
    _coalesce_nothing(sys.modules["megatron.core.distributed.param_and_grad_buffer"])
    # Without dropout, recomputation has no generators to restore.
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0)
    random._set_cuda_rng_state = lambda *_, **__: None
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _on_host


def _coalesce_nothing(buffers: Any) -> None:
    """Make `buffers`, megatron-core's module, reduce and gather one by one over gloo, not coalesced. With torch 2.13, coalesced
    gathers in the two threads of a group sometimes corrupt the process's memory ("malloc(): unaligned tcache chunk detected").
    Both threads write the name of their last operation to one string, without a lock. "ALLGATHER_COALESCED" is too long for the
    string's own storage: the address sanitizer saw a name freed twice."""
    open_: list[_Works] = []

    @contextlib.contextmanager
    def apart(*_: Any, **__: Any) -> Iterator[_Works]:
        open_.append(_Works())
        try:
            yield open_[-1]
        finally:
            open_.pop()

    def begun_by(collective: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **options: Any) -> Any:
            if (work := collective(*args, **options)) is not None:
                open_[-1].append(work)
            return work

        return begin

    buffers._coalescing_manager = apart
    buffers.dist_all_gather_func = begun_by(dist.all_gather_into_tensor)
    buffers.dist_reduce_scatter_func = begun_by(dist.reduce_scatter_tensor)


class _Works(list[Any]):
    """The running collectives, in place of torch's handle of coalesced ones."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def _on_host(tensor: torch.Tensor | None, as_numpy: bool = False, **_: Any) -> Any:
    """Do what megatron-core does only with CUDA tensors: collectives need numbers of tokens as an array."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = _CPU
        return make(*args, **options)

    return on_cpu


@contextlib.contextmanager
def moving(device: torch.device) -> Iterator[None]:
    """Make CPU tensors look like CUDA's, and moves to CUDA do nothing, in this context. For code that asks tensors whether they
    are CUDA's or moves them there: building models and optimizers, and the passes of version 0.12."""
    if device.type != "cpu":
        yield
        return
    type_name, to_cuda = torch.Tensor.type, torch.Tensor.cuda

    def as_cuda(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        answer = type_name(tensor, *args, **options)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    replaced: Any = torch.Tensor
    replaced.type, replaced.cuda = as_cuda, lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        replaced.type, replaced.cuda = type_name, to_cuda


# Collectives over parts of different sizes, which gloo lacks: expert ranks get as many tokens as were routed to them.


def gather_uneven(wholes: list[torch.Tensor], own: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """Do torch.distributed's all_gather. `wholes` may differ in their first dimension, but only without `options`."""
    if _same_shapes(wholes):
        return dist.all_gather(wholes, own, group=group, **options)
    assert not options
    wholes[dist.get_rank(group)].copy_(own)
    for source, whole in zip(dist.get_process_group_ranks(group), wholes, strict=True):
        if whole.numel():
            dist.broadcast(whole, source, group=group)
    return None


def reduce_scatter_uneven(
    own: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    """Do torch.distributed's reduce_scatter. `parts` may differ in their first dimension, but only without `options`."""
    if _same_shapes(parts):
        return dist.reduce_scatter(own, parts, op, group=group, **options)
    assert not options
    for target, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
        total = part.clone()  # dist.reduce leaves it undefined on ranks that are not the target
        if total.numel():
            dist.reduce(total, target, op, group=group)
        if target == dist.get_rank():
            own.copy_(total)
    return None


def _same_shapes(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
