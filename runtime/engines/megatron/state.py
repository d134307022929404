"""A training engine's state on disk as megatron-core shards it: any layout reads what any other has written.

megatron/           dist_checkpointing's: weights, master weights and Adam's moments
trainer.json        format, engine, step, Adam's step count, coefficient of the KL term
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from runtime.engines.megatron.optimizer import KINDS, Updates
from runtime.engines.megatron.writer import Writer
from runtime.engines.train_model import Position
from runtime.errors import UserError

FORMAT = 1
ENGINE = "megatron"
FOLDER = "megatron"


def save(folder: Path, updates: Updates, position: Position) -> None:
    """Collective; every rank writes its part."""
    target = folder / FOLDER
    if dist.get_rank() == 0:
        target.mkdir()
        description = {
            "format": FORMAT,
            "engine": ENGINE,
            "step": position.step,
            "optimizer_updates": updates.count,
            "kl_coefficient": position.kl_coefficient,
        }
        (folder / "trainer.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    dist.barrier()
    dist_checkpointing.save(_sharded(updates), str(target), Writer())


def load(folder: Path, updates: Updates) -> Position:
    """Restore what `save` wrote, whatever the layout was. Collective. Raises UserError when it does not fit the model."""
    description = _description(folder)
    target = str(folder / FOLDER)
    wanted = _sharded(updates)
    _require_same(folder, wanted, dist_checkpointing.load_tensors_metadata(target))
    found = dist_checkpointing.load(wanted, target)
    updates.model.module.load_state_dict(found["model"])
    for name, parameter in updates.model.module.named_parameters():
        updates.scatter(parameter, {kind: found["optimizer"][kind][name] for kind in KINDS})
    updates.count = description["optimizer_updates"]
    return Position(description["step"], description["kl_coefficient"])


def _sharded(updates: Updates) -> dict[str, Any]:
    """What is saved, or loaded into: the parameters as they are, and each one's master weights and moments alike.

    megatron-core's own description of its optimizer's state does not fit torch's AdamW, and pads where it must not.
    """
    model = updates.model.module.sharded_state_dict(prefix="")
    entries = {id(entry.data): entry for entry in model.values() if hasattr(entry, "data")}
    optimizer: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for name, parameter in updates.model.module.named_parameters():
        entry = entries[id(parameter)]
        for kind, whole in updates.gather(parameter).items():
            known = {"dtype": whole.dtype} if isinstance(entry, ShardedTensor) else {}
            optimizer[kind][name] = replace(entry, key=f"optimizer.{kind}.{entry.key}", data=whole, **known)
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
    elif isinstance(tree, ShardedTensorFactory):
        yield from _tensors(tree.build())
    elif isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(each)
