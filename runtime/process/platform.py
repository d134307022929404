"""Devices: the only module that knows which accelerators exist and their names.

The order of preference is npu, cuda, cpu. Only this module imports torch_npu, and only if it is installed or requested."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import torch

from runtime.config import DType
from runtime.config.base import computed_dtype
from runtime.errors import UserError

DeviceKind = Literal["npu", "cuda", "cpu"]
CollectiveBackend = Literal["hccl", "nccl", "gloo"]

_BACKENDS: dict[str, CollectiveBackend] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


_OF_NPU = re.compile(r"call (hccl|acl|rts) api failed")  # torch_npu raises RuntimeError for everything


def is_beyond_use(error: BaseException | None) -> bool:
    """Return whether `error` shows a failed communicator or device, which cannot compute any more."""
    broken = (torch.distributed.DistBackendError, getattr(torch, "AcceleratorError", torch.distributed.DistBackendError))
    return isinstance(error, broken) or (isinstance(error, RuntimeError) and bool(_OF_NPU.search(str(error))))


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes of one device; for the CPU, of the machine. `available` includes free memory in the caching allocator."""

    total: int
    available: int


def _load_npu() -> bool:
    """Import torch_npu, and return whether it finds an NPU. Raises UserError if the import fails."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch_npu"
        cure = "install it" if missing else "source CANN's set_env.sh, or uninstall torch_npu"
        raise UserError(f"torch_npu cannot be imported ({error}); {cure} (docs/guides/ascend.md)") from error
    return bool(_accelerator("npu").is_available())


def device_kind() -> DeviceKind:
    if importlib.util.find_spec("torch_npu") is not None and _load_npu():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device(kind: str = "auto", index: int = 0) -> torch.device:
    """Make the device `index` of `kind` ("auto", "npu", "cuda", "cpu") current, and return it. Raises UserError if missing."""
    if kind == "auto":
        kind = device_kind()
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in _BACKENDS:
        raise UserError(f"device {kind!r}: must be one of auto, npu, cuda, cpu")
    available = _load_npu() if kind == "npu" else torch.cuda.is_available()
    count = _accelerator(kind).device_count() if available else 0
    if index >= count:
        raise UserError(f"device {kind}:{index}: this machine has {count} {kind} device(s) that this process may use")
    _accelerator(kind).set_device(index)
    return torch.device(kind, index)


def device_count() -> int:
    """Return the number of accelerators that this process may use, or 1 for the CPU."""
    kind = device_kind()
    return 1 if kind == "cpu" else int(_accelerator(kind).device_count())


def _accelerator(kind: str) -> Any:
    """Return torch.cuda or torch.npu, which offer the same functions."""
    return getattr(torch, kind)


def collective_backend(
    name: str, where: torch.device, key: str = "weight_sync.backend", *, gloo: bool = True
) -> CollectiveBackend:
    """Return the backend of a process group for tensors on `where`. "auto": the device's own. `key`: of `name`, for errors.
    `gloo`: whether an accelerator may use gloo, which stages through the host. Raises UserError if they do not match."""
    own = _BACKENDS[where.type]
    if name in ("auto", own):
        return own
    if name == "gloo" and gloo:
        return "gloo"
    allowed = ", ".join(("auto", own, "gloo") if gloo else ("auto", own))
    raise UserError(f"{key}: {name!r} does not work on {where.type}; must be one of {allowed}")


def process_group_class(backend: str) -> Any:
    """Return the class of a process group over "nccl" or "hccl", for a group beside torch's default group."""
    if backend == "nccl":
        return torch.distributed.ProcessGroupNCCL
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    return ProcessGroupHCCL


def memory(where: torch.device) -> DeviceMemory:
    if where.type == "cpu":
        figures = psutil.virtual_memory()
        return DeviceMemory(figures.total, figures.available)
    accelerator = _accelerator(where.type)
    free, total = accelerator.mem_get_info(where)
    cached = accelerator.memory_reserved(where) - accelerator.memory_allocated(where)
    return DeviceMemory(total, free + cached)


def rng_state(where: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, uint8 tensors: the CPU's, and an accelerator's own."""
    state = {"cpu": torch.get_rng_state()}
    if where.type != "cpu":
        state[where.type] = _accelerator(where.type).get_rng_state(where)
    return state


def set_rng_state(where: torch.device, state: dict[str, torch.Tensor]) -> None:
    """Restore the result of `rng_state`. Raises UserError if it comes from another kind of device."""
    expected = {"cpu", where.type}
    if set(state) != expected:
        raise UserError(f"the saved random state is of {sorted(state)}, but this process runs on {sorted(expected)}")
    torch.set_rng_state(state["cpu"])
    if where.type != "cpu":
        _accelerator(where.type).set_rng_state(state[where.type], where)


def resolve_dtype(dtype: DType, where: torch.device, policy: DType = "auto") -> torch.dtype:
    """Return torch's dtype for the result of `computed_dtype`, for a process on the device `where`."""
    resolved: torch.dtype = getattr(torch, computed_dtype(dtype, policy, where.type == "cpu"))
    return resolved


def release(where: torch.device) -> None:
    """Free the caching allocator's unused memory for other processes."""
    if where.type != "cpu":
        _accelerator(where.type).empty_cache()


def trim() -> None:
    """Return the C allocator's unused memory to the system. glibc keeps free memory between used pieces."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def synchronize(where: torch.device) -> None:
    """Wait for the work queued on an accelerator. Does nothing on the CPU."""
    if where.type != "cpu":
        _accelerator(where.type).synchronize(where)


@contextmanager
def beside(where: torch.device) -> Iterator[None]:
    """Run the block's copies on a separate stream of an accelerator, and wait for the copies at its end. They do not delay the
    computation of other threads. Allocate targets before the block: their memory's earlier use is awaited. No effect on CPU."""
    if where.type == "cpu":
        yield
        return
    module = _accelerator(where.type)
    stream = module.Stream(device=where)
    stream.wait_stream(module.current_stream(where))
    with module.stream(stream):
        yield
    stream.synchronize()


# ---- Profile of a thread and its device


_ALLOCATIONS = 1_000_000  # newest allocations in a memory profile, which uses host memory


class TorchProfile:
    """A profile of one thread. Call `start` and `stop` there, `write` in any. It writes `STEM.json.gz`, a trace in Chrome's
    format; on an NPU the folder `STEM` with CANN's records, to be converted in another process: torch_npu forks for that."""

    def __init__(self, stem: Path, memory: bool):
        """Prepare the profile. `memory`: record CUDA's allocator too. Raises UserError without CUDA."""
        self._kind = device_kind()
        if memory and self._kind != "cuda":
            raise UserError(f"--memory: is of CUDA's allocator, and this process computes on {self._kind}")
        self._stem, self._memory = stem, memory
        self._profiler: Any = None

    def start(self) -> None:
        made = self._of_npu() if self._kind == "npu" else torch.profiler.profile()
        made.start()
        self._profiler = made
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    def stop(self) -> None:
        if self._profiler is None:
            return
        if self._kind != "cpu":
            _accelerator(self._kind).synchronize()
        try:
            self._profiler.stop()
            if self._memory:
                torch.cuda.memory._dump_snapshot(str(self._file(".memory.pickle")))
        finally:
            if self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def write(self) -> list[Path]:
        if self._kind == "npu":
            return [self._stem]
        self._profiler.export_chrome_trace(str(trace := self._file(".json.gz")))
        return [trace, *([self._file(".memory.pickle")] if self._memory else [])]

    def _file(self, suffix: str) -> Path:
        return self._stem.with_name(self._stem.name + suffix)

    def _of_npu(self) -> Any:
        profiler = importlib.import_module("torch_npu.profiler")
        handler = profiler.tensorboard_trace_handler(dir_name=str(self._stem), analyse_flag=False)
        return profiler.profile(on_trace_ready=handler)
