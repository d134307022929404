"""Checks of how weights travel. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from runtime.config import Config, Publication
from runtime.config.base import DType

_DEFAULT = Publication()
_OF_16_BITS = [dtype for dtype in get_args(DType) if dtype not in ("auto", "float32")]


def publication_faults(config: Config, policy: Mapping[str, Any] | None) -> Iterator[str]:
    """`policy`: the contents of its config.json, None when there is none to be read."""
    settings = config.publication
    if settings.transport == "filesystem":
        yield from _folder(settings.folder)
        if settings.backend != _DEFAULT.backend:
            yield f"publication.backend: {settings.backend} is for a collective; transport filesystem has none, so must be auto"
    elif settings.transport == "shared_memory" and settings.backend != _DEFAULT.backend:
        yield f"publication.backend: {settings.backend} is for a collective; transport shared_memory has none, so must be auto"
    if settings.senders == "all" and settings.transport == "filesystem":
        yield "publication.senders: all is not for transport filesystem, whose folder one process writes; must be one"
    if settings.folder and settings.transport != "filesystem":
        yield f"publication.folder: '{settings.folder}' is for transport filesystem alone, and it is {settings.transport}"
    if not settings.overlap and config.services.trainer.processes > 1 and settings.transfer_timeout >= config.deadlines.train:
        yield (
            f"publication.transfer_timeout: {settings.transfer_timeout:g} must be below deadlines.train "
            f"({config.deadlines.train:g}): without overlap the trainer's ranks wait for each other while buckets are taken"
        )
    if settings.transport != "delta" and settings.full_every != _DEFAULT.full_every:
        yield f"publication.full_every: {settings.full_every} is for transport delta alone, and it is {settings.transport}"
    if settings.transport == "delta" and policy is not None and _on_the_wire(config, policy) == "float32":
        of = " (the policy's own)" if settings.dtype == "auto" else ""
        yield (
            f"publication.dtype: float32{of} changes in nearly every element, and transport delta would send it all; "
            f"must be {' or '.join(_OF_16_BITS)}"
        )


def _on_the_wire(config: Config, policy: Mapping[str, Any]) -> str:
    """The dtype that weights are published in."""
    chosen = (dtype for dtype in (config.publication.dtype, config.model.dtype) if dtype != "auto")
    return next(chosen, str(policy.get("dtype") or policy.get("torch_dtype") or "float32"))


def _folder(folder: str) -> Iterator[str]:
    if not folder:
        yield "publication.folder: missing; transport filesystem needs a folder that trainer and rollouts share"
        return
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        yield f"publication.folder: '{folder}' cannot be made, as {there} is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"publication.folder: '{folder}' cannot be written"
