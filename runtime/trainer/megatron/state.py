"""A training engine's state on disk as megatron-core shards it: any layout reads what any other layout has written.

megatron/           dist_checkpointing's: weights, master weights and Adam's moments; and the Hugging Face folder's description
trainer.json        format, engine, step, Adam's step count, coefficient of the KL term

Each rank writes its part in its own process, in any thread (`Writer`). megatron-core's own writer forks, which is unsafe in a
process with threads, and it leaves a helper process behind. The files are the same: torch's distributed checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as core
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from runtime.models import hf_policy
from runtime.run_files import read_object
from runtime.trainer.backend import RankInfo, TrainingPosition
from runtime.trainer.fsdp.state import require_same_adapters
from runtime.trainer.megatron.core_checkpoint import FOLDER, INDEX, OWN, TRAINER, read_index
from runtime.trainer.megatron.optimizer import KINDS, MegatronOptimizer
from runtime.trainer.rank_group import exchange

FORMAT = 1
ENGINE = "megatron"


def prepare(
    folder: Path, updates: MegatronOptimizer, position: TrainingPosition, source: str, writer: Writer
) -> Callable[[], None]:
    """Copy the state to the host. Return a function that writes each rank's part, beside training. Collective."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)  # on each node, if nodes share no folder
    if dist.get_rank() == 0:
        description = {
            "format": FORMAT,
            "engine": ENGINE,
            "step": position.step,
            "optimizer_updates": updates.count,
            "kl_coefficient": position.kl_coefficient,
        }
        (folder / TRAINER).write_text(json.dumps(description) + "\n", encoding="utf-8")
    dist.barrier()
    dist_checkpointing.save(_saved(updates), str(target), writer)
    if dist.get_rank() == 0:
        hf_policy.write_description(source, target, None, but=(OWN,))
    return writer.take()


def load(folder: Path, updates: MegatronOptimizer) -> TrainingPosition:
    """Restore what `save` wrote in any layout. Collective. Raises UserError if the state does not fit the model."""
    description = read_object(folder / TRAINER, f"checkpoint {folder}: {TRAINER}")
    require_same_adapters(folder, description.get("lora"), None)
    if (description.get("engine"), description.get("format")) != (ENGINE, FORMAT):
        raise UserError(
            f"checkpoint {folder}: is of engine {description.get('engine', 'torch')!r}, format {description.get('format')!r}; "
            f"engine {ENGINE} reads only its own, of format {FORMAT}"
        )
    target, sharded = folder / FOLDER, core.TorchDistLoadShardedStrategy()
    wanted = _described(updates, lambda parameter, _: {kind: torch.empty(parameter.shape) for kind in KINDS})
    model = wanted["model"]
    # Objects that modules keep for Transformer Engine; they are not restored.
    objects = {name: model.pop(name).data for name in list(model) if isinstance(model[name], ShardedObject)}
    _require_same(folder, wanted, sharded.load_tensors_metadata(target))
    found = dist_checkpointing.load(wanted, str(target), sharded, _NothingInCommon())
    updates.model.module.load_state_dict(found["model"] | objects)
    for name, parameter in updates.model.module.named_parameters():
        updates.scatter(parameter, {kind: found["optimizer"][kind][name] for kind in KINDS})
    updates.set_count(description["optimizer_updates"])
    return TrainingPosition(description["step"], description["kl_coefficient"])


def needed(folder: Path, updates: MegatronOptimizer) -> set[str]:
    """Return the checkpoint's files with tensors that this rank reads. Raises UserError if the index is torn."""
    index, found = read_index(folder / FOLDER / INDEX), set()
    wanted = _described(updates, lambda parameter, _: {kind: torch.empty(parameter.shape) for kind in KINDS})
    for tensor in _tensors(wanted):
        sizes = torch.Size((*(1,) * tensor.prepend_axis_num, *tensor.local_shape))
        part = ChunkStorageMetadata(torch.Size(tensor.global_offset), sizes)
        stored = index.state_dict_metadata.get(tensor.key)
        if isinstance(stored, TensorStorageMetadata):
            items = create_read_items_for_chunk_list(tensor.key, stored, [part])
            found |= {f"{FOLDER}/{index.storage_data[item.storage_index].relative_path}" for item in items}
    return found


def _saved(updates: MegatronOptimizer) -> dict[str, Any]:
    """Return `_described` with copies on the host. Of ranks that hold the same tensor, one copies and writes it."""

    def wholes(parameter: torch.nn.Parameter, entry: Any) -> dict[str, torch.Tensor]:
        return {kind: _host_copy(whole, entry) for kind, whole in updates.gather(parameter).items()}

    tree = _described(updates, wholes)
    for name, entry in tree["model"].items():
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
            tree["model"][name] = replace(entry, data=_host_copy(entry.data.detach(), entry))
    return tree


def _host_copy(tensor: torch.Tensor, entry: Any) -> torch.Tensor:
    """Return a copy of `tensor`; if another rank writes `entry`, only its shape."""
    return tensor.to("cpu", copy=True) if is_main_replica(entry.replica_id) else tensor.to("meta")


def _described(
    updates: MegatronOptimizer, wholes: Callable[[torch.nn.Parameter, Any], Mapping[str, torch.Tensor]]
) -> dict[str, Any]:
    """Return the tree to save or to load into: the parameters as they are, and with the same sharding each parameter's master
    weights and moments. `wholes` returns these by kind for a parameter and its entry. megatron-core's own description of its
    optimizer's state does not fit torch's AdamW, and pads where it must not."""
    model = updates.model.module.sharded_state_dict(prefix="")
    entries = {id(entry.data): entry for entry in model.values() if hasattr(entry, "data")}
    optimizer: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for name, parameter in updates.model.module.named_parameters():
        entry = entries[id(parameter)]
        for kind, whole in wholes(parameter, entry).items():
            known = {"dtype": whole.dtype} if isinstance(entry, ShardedTensor) else {}
            optimizer[kind][name] = replace(entry, key=f"optimizer.{kind}.{entry.key}", data=whole, **known)
    return {"model": model, "optimizer": optimizer}


def _require_same(folder: Path, wanted: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check names and global shapes; the vocabulary's padding may differ. Raises UserError if the model is another one."""
    wrong = []
    for tensor in _tensors(wanted):
        found = saved.get(tensor.key)
        padded = tensor.allow_shape_mismatch and found is not None
        if found is None or (tuple(found.global_shape) != tuple(tensor.global_shape) and not padded):
            wrong.append(tensor.key)
    if wrong:
        raise UserError(f"checkpoint {folder}: is of another model; {len(wrong)} tensors differ, such as {min(wrong)}")


def _tensors(tree: Any) -> Iterator[ShardedTensor]:
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, ShardedTensorFactory):
        yield from _tensors(tree.build())
    elif isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(each)


class _NothingInCommon(TorchCommonLoadStrategy):
    """Does not read common.pt, in which our checkpoints have nothing: version 0.12 would unpickle it."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}


class Writer(core.TorchDistSaveShardedStrategy):
    """The strategy that `dist_checkpointing.save` calls to write tensors. The function from `take` does the writing."""

    def __init__(self, group: Any, name: str, deadline: float, gather: bool = False):
        """Set up the writer. `group` is a gloo group of all ranks for this use only, with a timeout of `deadline` seconds;
        `name` is the role. `gather`: rank 0's node gets the files of all others."""
        super().__init__("torch_dist", 1)
        self._group, self._name, self._deadline, self._gather = group, name, deadline, gather

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        by_key, _, _ = core._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self._saved = core.mcore_to_pyt_state_dict(by_key, False), Path(checkpoint_dir)

    def take(self) -> Callable[[], None]:
        """Return a function that writes the saved tensors: collective over `group`, in any thread. It returns when all ranks
        have written everything to disk. It raises ServiceFault, phase "save", which names rank and file."""
        saved = self._saved
        del self._saved  # so that the memory is free once it is written
        return partial(self._write, *saved)

    def _write(self, state: dict[str, Any], folder: Path) -> None:
        began = time.monotonic()
        try:
            checkpoint.save(
                state,
                storage_writer=_Files(folder),
                planner=core.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
            if self._gather:
                own = RankInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), self._group)
                list(exchange(folder, lambda _: own.rank == 0, own))
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
        """Write this rank's data. Raises OSError, which names the file, unlike torch's error, and reaches the other ranks."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise OSError(f"{self.path}/{plan.storage_data.prefix}0.distcp: {reason}") from error
