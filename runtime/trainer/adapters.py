"""What low-rank adapters begin with, and the model that they are put on, whatever the engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runtime.errors import UserError
from runtime.models.hf_weights import fingerprint


def start_of(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """The values that A begins with, float32 [rank, in], by its name in PEFT's files: uniform within 1 / √in, as PEFT has them.

    They depend on `seed` and `name` alone: neither on the engine nor on what else a rank holds.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    start = torch.empty(*shape)
    torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
    return start


class AdapterBase:
    """The model that adapters are trained on, which a checkpoint of them names by a fingerprint of its weights."""

    def __init__(self, path: str):
        self.path = str(Path(path).absolute())

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.path)

    def describe(self) -> dict[str, str]:
        return {"path": self.path, "fingerprint": self.fingerprint}

    def require(self, folder: Path, saved: Any) -> None:
        """Raises UserError unless the adapters of checkpoint `folder`, which says `saved` of their base, are this one's."""
        if isinstance(saved, dict) and (other := str(saved.get("fingerprint"))) != self.fingerprint:
            raise UserError(
                f"model.path: {self.path} (fingerprint {self.fingerprint}) is not what the adapters of checkpoint {folder} "
                f"were trained on, which is {saved.get('path')} (fingerprint {other})"
            )
