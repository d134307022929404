"""How a rank writes its part of a checkpoint: in its own thread.

megatron-core's own writer forks, which a process with threads of its own must not, and leaves a helper process behind. What is
written is the same: torch's distributed checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as core
from torch.distributed import checkpoint


class Writer(core.TorchDistSaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collective; returns when all is on disk."""
        by_key, _, _ = core._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        checkpoint.save(
            core.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
            planner=core.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
