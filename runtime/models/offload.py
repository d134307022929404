"""Memory of a device that is lent out for a while: what lay there is on the host until it is wanted back."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostOffload:
    """The storages of some tensors, on their device or on the host. Every view of them is valid again once they are back.

    The host's memory, page-locked where the device is an accelerator, is kept from one time to the next: it takes long to get.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = True, frozen: bool = False):
        """Without `keep` what they hold is lost, and they come back as zeros. Of a storage that several share there is one.
        `frozen`: what they hold never changes, and is copied to the host once."""
        self._tensors = list(tensors)  # until the first `offload`
        self._storages: list[torch.UntypedStorage] = []
        self._nbytes: list[int] = []
        self._keep, self._frozen = keep, frozen
        self._hosts: list[torch.Tensor] = []

    def offload(self) -> None:
        """Copy to the host, and free the device's memory. For tensors that are on the device."""
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
        """Bring back what `offload` took off."""
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
    """uint8 [nbytes], a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
