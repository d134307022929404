"""A training engine's state on disk as megatron-core shards it: any layout reads what any other has written.

megatron/           dist_checkpointing's: weights, master weights and Adam's moments
trainer.json        format, engine, step, coefficient of the KL term
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from runtime.engines.megatron import facade
from runtime.engines.megatron.optimizer import Updates
from runtime.engines.megatron.writer import Writer
from runtime.engines.train_model import Position
from runtime.errors import UserError

FORMAT = 1
ENGINE = "megatron"
FOLDER = "megatron"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: Path, updates: Updates, position: Position) -> None:
    """Collective; every rank writes its part."""
    target = folder / FOLDER
    if dist.get_rank() == 0:
        target.mkdir()
        description = {
            "format": FORMAT,
            "engine": ENGINE,
            "step": position.step,
            "kl_coefficient": position.kl_coefficient,
        }
        (folder / "trainer.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    dist.barrier()
    dist_checkpointing.save(_sharded(updates, loading=False), str(target), Writer())


def load(folder: Path, updates: Updates) -> Position:
    """Restore what `save` wrote, whatever the layout was. Collective. Raises UserError when it does not fit the model."""
    description = _description(folder)
    target = str(folder / FOLDER)
    wanted = _sharded(updates, loading=True)
    _require_same(folder, wanted, dist_checkpointing.load_tensors_metadata(target))
    found = dist_checkpointing.load(wanted, target)
    updates.model.module.load_state_dict(found["model"])
    with _step_counts(updates):
        updates.optimizer.load_state_dict(found["optimizer"])
    return Position(description["step"], description["kl_coefficient"])


def _sharded(updates: Updates, loading: bool) -> dict[str, Any]:
    model = updates.model.module.sharded_state_dict(prefix="")
    with facade.moving(updates.device):
        optimizer = updates.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_SHARDING)
    return {"model": model, "optimizer": optimizer}


def _description(folder: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"checkpoint {folder}: trainer.json cannot be read: {error}") from error
    if (description.get("engine"), description.get("format")) != (ENGINE, FORMAT):
        raise UserError(
            f"checkpoint {folder}: is of engine {description.get('engine', 'torch')!r}, format {description.get('format')!r}; "
            f"engine {ENGINE} reads its own, format {FORMAT}"
        )
    return description


def _require_same(folder: Path, wanted: dict[str, Any], saved: dict[str, Any]) -> None:
    """Names and global shapes. The vocabulary's padding depends on the layout."""
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
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)


@contextlib.contextmanager
def _step_counts(updates: Updates) -> Iterator[None]:
    """Around the loading of the optimizer, which with torch's AdamW forgets to bring the step count with the moments, and then
    leaves one count to all parameters, each of which would add to it.
    """
    with contextlib.ExitStack() as stack:
        for part in updates.torch_parts():
            stack.enter_context(_bringing_steps(part))
        yield
    for part in updates.torch_parts():
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


@contextlib.contextmanager
def _bringing_steps(part: Any) -> Iterator[None]:
    original = part._set_main_param_and_optimizer_states

    def with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        original(parameter, {"step": state["step"], **tensors})

    part._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        del part._set_main_param_and_optimizer_states
