"""How a rank writes its part of a checkpoint: in its own process, in whatever thread.

megatron-core's own writer forks, which a process with threads of its own must not, and leaves a helper process behind. What is
written is the same: torch's distributed checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as core
from torch.distributed import checkpoint
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from runtime.errors import DeadlineExceeded, ServiceFault


class Writer(core.TorchDistSaveShardedStrategy):
    """What `dist_checkpointing.save` calls to write tensors. It leaves that to `write`."""

    write: Callable[[], None]
    """Collective over `group`, in any thread; returns when all ranks have written all to disk. Raises ServiceFault, phase
    "save", naming rank and file."""

    def __init__(self, group: Any, name: str, deadline: float):
        """`group` is of gloo, spans all ranks, waits for `deadline` seconds, and has no other use; `name` is the role."""
        super().__init__("torch_dist", 1)
        self._group, self._name, self._deadline = group, name, deadline

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        by_key, _, _ = core._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.write = partial(self._write, core.mcore_to_pyt_state_dict(by_key, False), Path(checkpoint_dir))

    def _write(self, state: dict[str, Any], folder: Path) -> None:
        began = time.monotonic()
        try:
            checkpoint.save(
                state,
                storage_writer=_Files(folder),
                planner=core.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
            raise ServiceFault(f"{self._name} rank {rank}", "save", str(failure)) from error
        except RuntimeError as error:  # gloo's
            if time.monotonic() - began >= self._deadline:
                raise DeadlineExceeded(
                    self._name, "save", f"{folder}: not all ranks wrote their part", self._deadline
                ) from error
            raise ServiceFault(self._name, "save", f"{folder}: a rank is lost: {error}") from error


class _Files(checkpoint.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Raises OSError, which unlike what torch raises names the file. It travels to the other ranks."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            told = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise OSError(f"{self.path}/{plan.storage_data.prefix}0.distcp: {told}") from error
