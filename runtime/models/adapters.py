"""Adapters in a weight sync, and how a rollout merges them into the weights of its model folder.

An adapted matrix W [out, in] of the folder has two tensors: A [rank, in], named W plus `DOWN`, and B [out, rank], named W plus
`UP` and already scaled. The policy's matrix is W + B A (LoRA, arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runtime.errors import InvalidMessage, UserError
from runtime.models.families.adapters import DOWN, UP
from runtime.models.hf_folder import WeightFiles, fingerprint

# ---- Adapters. Initial values and base model of low-rank adapters, for all engines.


def start_of(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the initial A, float32 [rank, in], by its name in PEFT's files: uniform within 1 / √in, as in PEFT. The values
    depend only on `seed` and `name`, not on the engine or on the rank's other tensors."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    start = torch.empty(*shape)
    torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
    return start


class AdapterBase:
    """The model that adapters are trained on. A checkpoint of adapters names it by a fingerprint of the weights."""

    def __init__(self, path: str):
        self.path = str(Path(path).absolute())

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.path)

    def describe(self) -> dict[str, str]:
        return {"path": self.path, "fingerprint": self.fingerprint}

    def require(self, folder: Path, saved: Any) -> None:
        """Check that `saved`, the base in checkpoint `folder` of adapters, is this model. Raises UserError if not."""
        if isinstance(saved, dict) and (other := str(saved.get("fingerprint"))) != self.fingerprint:
            raise UserError(
                f"model.path: {self.path} (fingerprint {self.fingerprint}) is not the base of the adapters in checkpoint "
                f"{folder}; their base is {saved.get('path')} (fingerprint {other})"
            )


# ---- Offload. Memory of a device that is lent out for a while: its content is on the host until the device is back.


class HostOffload:
    """The storages of some tensors, on their device or on the host. After `onload` every view of them is valid again. The
    host's memory, page-locked if the device is an accelerator, is kept for the next time: it takes long to allocate."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = True, frozen: bool = False):
        """Hold the tensors' storages, each once. Without `keep` their content is lost, and they come back as zeros. `frozen`:
        their content never changes, and is copied to the host once."""
        self._tensors = list(tensors)  # until the first `offload`
        self._storages: list[torch.UntypedStorage] = []
        self._nbytes: list[int] = []
        self._keep, self._frozen = keep, frozen
        self._hosts: list[torch.Tensor] = []

    def offload(self) -> None:
        """Copy the tensors to the host and free the device's memory. They must be on the device."""
        if self._tensors:
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in self._tensors)}
            self._storages = [storage for storage in storages.values() if storage.nbytes()]
            self._nbytes = [storage.nbytes() for storage in self._storages]
            self._tensors = []
        changed = not (self._frozen and self._hosts)
        if self._keep and not self._hosts:
            self._hosts = [_host(storage) for storage in self._storages]
        for storage, host in zip(self._storages, self._hosts, strict=False) if changed else ():
            host.copy_(_bytes(storage))
        for storage in self._storages:
            storage.resize_(0)

    def onload(self) -> None:
        """Bring the tensors back to the device."""
        for storage, nbytes in zip(self._storages, self._nbytes, strict=True):
            storage.resize_(nbytes)
        for storage, host in zip(self._storages, self._hosts, strict=False):
            _bytes(storage).copy_(host)
        if not self._keep:
            for storage in self._storages:
                _bytes(storage).zero_()


def _host(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of the storage, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def base_of(names: Iterable[str], folder: str) -> str:
    """Return the fingerprint of `folder`, the base of adapters of these names; "" if the names are not adapters'."""
    return fingerprint(folder) if any(name.endswith(UP) for name in names) else ""


def require_base(base: str, folder: str) -> None:
    """Check that the weights of `folder` have the fingerprint `base`. Raises UserError if not."""
    if (found := fingerprint(folder)) != base:
        raise UserError(f"model.path: {folder!r} has other weights here ({found}) than in the trainer ({base})")


@torch.no_grad()
def merged(files: WeightFiles, adapters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's weights, one at a time, in the order of `files`: adapted weights in float32, all others as in the
    folder. The files are read each time, from the system's cache if there is room: no copy of the base stays in the process.
    Raises InvalidMessage, before the first weight, if adapters do not fit."""
    _require_fit(files.shapes, adapters)
    for name, weight in files:
        if name + UP in adapters:
            weight = adapted(weight, adapters[name + UP].float(), adapters[name + DOWN].float())
        yield name, weight


def adapted(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return a matrix plus its float32 adapter, float32 [out, in]."""
    return torch.addmm(weight.float(), up, down)


def _require_fit(shapes: Mapping[str, Sequence[int]], adapters: Mapping[str, torch.Tensor]) -> None:
    for name in sorted({name.removesuffix(DOWN).removesuffix(UP) for name in adapters}):
        up, down = (tuple(adapters[name + end].shape) if name + end in adapters else () for end in (UP, DOWN))
        own = tuple(shapes.get(name, ()))
        if len(own) != 2 or (*up[:1], *down[1:]) != own or up[1:] != down[:1]:
            raise InvalidMessage(f"adapters do not fit the model: {name} is {[*own]}, B {[*up]} and A {[*down]}")
