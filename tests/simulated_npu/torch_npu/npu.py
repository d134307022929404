"""SIMULATION of torch_npu.npu: what Sluice calls of it. Work is done when a call returns, so streams are always idle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TOTAL = 8 << 30  # bytes of memory that a simulated NPU has
_current = 0


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return 8 if visible is None else len(visible.split(","))


def current_device() -> int:
    return _current


def set_device(device: int) -> None:
    global _current
    _current = device


def synchronize(device: Any = None) -> None:
    pass


def empty_cache() -> None:
    pass


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL // 2, TOTAL


def memory_reserved(device: Any = None) -> int:
    return 3 << 20


def memory_allocated(device: Any = None) -> int:
    return 1 << 20


_generator = torch.Generator()


def manual_seed_all(seed: int) -> None:
    _generator.manual_seed(seed)


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return _generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


class Stream:
    def __init__(self, device: Any = None, priority: int = 0):
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    def record(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    yield


def current_stream(device: Any = None) -> Stream:
    return Stream()


def get_device_name(device_name: Any = None) -> str:
    return "simulated"
