"""SIMULATION: tensors that say they are an NPU's, and compute on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# What is called where the fallback cannot be: for want of a tensor among the arguments, or from within torch.tensor.
_KERNELS = ("empty.memory_format", "empty_strided.default", "copy_.default")


class SimulatedTensor(torch.Tensor):
    """A tensor of device type npu around `host`, whose storage it shares with its views."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> SimulatedTensor:
        with torch.inference_mode(False):  # a view that is made in inference mode has to be what its base is
            made = torch.Tensor._make_wrapper_subclass(
                cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device="npu:0"
            )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_host(op, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()  # which torch refuses subclasses

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimulatedTensor({self.host!r})"


def register() -> list[torch.library.Library]:
    """Kernels for what a tensor's own dispatch does not see."""
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # everything stays in the dtype that it has
    every.fallback(lambda op, *args, **kwargs: _on_host(op, args, kwargs), "PrivateUse1")
    for name in _KERNELS:
        packet, overload = name.split(".")
        aten.impl(name.removesuffix(".default"), _kernel(getattr(getattr(torch.ops.aten, packet), overload)), "PrivateUse1")
    return [every, aten]


def _kernel(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _on_host(op, args, kwargs)


def _on_host(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    wrapped: dict[int, SimulatedTensor] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, SimulatedTensor):
            wrapped[id(value.host)] = value
            return value.host
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value

    def to_npu(value: Any) -> Any:
        return wrapped.get(id(value), SimulatedTensor(value)) if isinstance(value, torch.Tensor) else value

    asked = kwargs.get("device")
    host_args, host_kwargs = pytree.tree_map(to_host, (args, kwargs))
    result = op(*host_args, **host_kwargs)
    if op is torch.ops.aten.copy_.default:
        return args[0]  # which may be the host's own
    if asked is not None and torch.device(asked).type == "cpu":
        return result
    return pytree.tree_map(to_npu, result)
