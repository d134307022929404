"""A training engine's state on disk: safetensors and JSON with whole tensors, which any number of ranks can read.

model/              a Hugging Face folder, float32
adapter/            instead of model/ where adapters are trained: only the adapters, in PEFT's format
optimizer*.safetensors   float32: Adam's moments `exp_avg.NAME` and `exp_avg_sq.NAME`, or Muon's `momentum_buffer.NAME`
rng.safetensors     the generators' states: `RANK.DEVICE`
trainer.json        format, step, the optimizer's kind and step count, coefficient of the KL term, the section `lora`, and
                    the base model of the adapters

Adapters have this format with both engines, and both engines continue from them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.process import platform
from runtime.run_files import read_object
from runtime.trainer.backend import RankInfo, StatePart, TrainingPosition, full, local, local_rows, wholes
from runtime.trainer.fsdp import lora, optimizers
from runtime.trainer.fsdp.lora import Adapters

if TYPE_CHECKING:
    from peft import LoraConfig

FORMAT = 1
GENERATORS = "rng.safetensors"


class TrainingState(NamedTuple):
    """The state to save or to restore. `parameters` are the trained ones: the model's, or those of `adapters`. Among them are
    stand-ins for those that other ranks hold, which have no gradient."""

    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    rank_info: RankInfo
    adapters: Adapters | None
    fixed: Mapping[str, torch.Tensor]  # the model's other tensors, which no gradient changes


def save(folder: Path, state: TrainingState, position: TrainingPosition, source: str) -> None:
    """Write `state`; all ranks call it, rank 0 writes. Configuration and tokenizer come from `source`."""
    rank, optimizer = state.rank_info.rank, state.optimizer
    if state.adapters is not None:
        state.adapters.write(folder / lora.FOLDER, rank)
    else:
        if rank == 0:
            (folder / "model").mkdir()
        tensors = {**state.parameters, **state.fixed}
        hf_policy.write_model(folder / "model", tensors, wholes(tensors), rank, torch.float32, source)
    if count := updates(state):
        kept = _kept(state)
        moments = ((name, _whole(optimizer, name, parameter)) for name, parameter in kept.items())
        hf_policy.write_tensors(folder, "optimizer", kept, moments, rank, torch.float32)
    generators = _gather_generators(state)
    description = describe(position, optimizers.family(optimizer), count, state.adapters)
    if rank == 0:
        save_file(generators, folder / GENERATORS)
        (folder / "trainer.json").write_text(description, encoding="utf-8")


def updates(state: TrainingState) -> int:
    """Return the number of updates. The optimizer's state exists from the first one on, or from `pieces` on."""
    first = next(iter(_own(state).values()))
    return int(state.optimizer.state[first]["step"]) if state.optimizer.state else 0


def _own(state: TrainingState) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that this rank holds parts of."""
    return {name: parameter for name, parameter in state.parameters.items() if parameter.requires_grad}


def pieces(state: TrainingState) -> Iterator[StatePart]:
    """Yield this rank's part of `state`, as `ModelBackend.pieces` has it. An optimizer without state gets zeros."""
    for name, parameter in _own(state).items():
        own, kinds = local(parameter), optimizers.kept(state.optimizer, parameter)
        start = local_rows(parameter).start * parameter.shape[1:].numel() if parameter.ndim else 0
        yield StatePart(name, start, own.view(-1))
        if parameter not in state.optimizer.state:
            optimizers.restore(state.optimizer, parameter, 0, {kind: torch.zeros_like(own) for kind in kinds})
        for kind in kinds:
            for part in optimizers.storages(state.optimizer.state[parameter][kind]):
                # Numbers with a common scale: only those of equal blocks fit together.
                block = own.numel() // max(1, part.numel())
                yield StatePart(f"{kind}.{name}.{block}.{start % max(1, block)}", start // max(1, block), part.view(-1))
    for name, tensor in {} if state.adapters else state.fixed.items():
        yield StatePart(name, 0, tensor.view(-1))


def describe(position: TrainingPosition, optimizer: str, updates: int, adapters: Any) -> str:
    """Return the text of trainer.json. `adapters`: None, or either engine's. All ranks call it."""
    content = {
        "format": FORMAT,
        "step": position.step,
        "optimizer": optimizer,
        "optimizer_updates": updates,
        "kl_coefficient": position.kl_coefficient,
        "lora": lora.description(adapters.config) if adapters else None,
        "base": adapters.known_base.describe() if adapters else None,
    }
    return json.dumps(content) + "\n"


def _kept(state: TrainingState) -> dict[str, torch.nn.Parameter]:
    """Return the parameter of each tensor of the optimizer's state, by the tensor's name in the file."""
    return {
        f"{kind}.{name}": parameter
        for name, parameter in state.parameters.items()
        for kind in optimizers.kept(state.optimizer, parameter)
    }


def _whole(optimizer: torch.optim.Optimizer, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    held = optimizer.state.get(parameter)
    return full(parameter, None if held is None else optimizers.numbers(held[name.partition(".")[0]]))


def _gather_generators(state: TrainingState) -> dict[str, torch.Tensor]:
    kinds = sorted(platform.rng_state(state.rank_info.device).items())
    wholes = ((kind, state.rank_info.gathered(own[None])) for kind, own in kinds)
    return {f"{rank}.{kind}": each.clone() for kind, whole in wholes for rank, each in enumerate(whole)}


@torch.no_grad()
def load(folder: Path, state: TrainingState) -> TrainingPosition:
    """Restore what `save` wrote into `state`'s parameters and optimizer, each rank its rows. Return the progress of training.
    Raises UserError, and changes nothing, if the checkpoint does not fit the model."""
    description = read_description(folder, state.adapters)
    require_same_optimizer(folder, description, optimizers.family(state.optimizer))
    where = (folder / lora.FOLDER, lora.STEM) if state.adapters else (folder / "model", "model")
    kept = state.parameters if state.adapters else {**state.parameters, **state.fixed}
    with contextlib.ExitStack() as stack:
        weights = open_tensors(*where, _shapes(kept), stack)
        history = open_tensors(folder, "optimizer", _shapes(_kept(state)), stack) if description["optimizer_updates"] else None
        generators = stack.enter_context(_safetensors(folder / GENERATORS))
        for name, tensor in {} if state.adapters else state.fixed.items():
            tensor.copy_(weights(name)[...])
        for name, parameter in _own(state).items():
            local(parameter).copy_(weights(name)[local_rows(parameter)])
            state.optimizer.state.pop(parameter, None)
            if history is not None:
                names, rows = optimizers.kept(state.optimizer, parameter), local_rows(parameter)
                moments = {kind: history(f"{kind}.{name}")[rows] for kind in names}
                optimizers.restore(state.optimizer, parameter, description["optimizer_updates"], moments)
        _restore_generators(generators, state)
    return TrainingPosition(description["step"], description.get("kl_coefficient"))


def read_description(folder: Path, adapters: Any) -> dict[str, Any]:
    """Return the content of trainer.json. Raises UserError for another engine's, or if `adapters` (or None) do not match."""
    description = read_object(folder / "trainer.json", f"checkpoint {folder}: trainer.json")
    require_same_adapters(folder, description.get("lora"), adapters and adapters.config)
    if "engine" in description:
        raise UserError(
            f"checkpoint {folder}: is of engine {description['engine']}, whose checkpoints engine torch does not read"
        )
    if description.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder}: format {description.get('format')!r} is not known; must be {FORMAT}")
    if adapters is not None:
        adapters.known_base.require(folder, description.get("base"))
    return description


def require_same_adapters(folder: Path, saved: dict[str, Any] | None, config: LoraConfig | None) -> None:
    """Check that adapters `config` can continue from the adapters `saved` in checkpoint `folder`. Raises UserError if not."""
    if saved is None and config is None:
        return
    if saved is None:
        raise UserError(f"lora: is set, but checkpoint {folder} has no adapters; must be left out")
    if config is None:
        raise UserError(f"lora: is not set, but checkpoint {folder} holds adapters; must be {json.dumps(saved)}")
    for key, value in lora.description(config).items():
        if value != (other := saved.get(key)):
            raise UserError(f"lora.{key}: {value} differs from checkpoint {folder}; must be {other}")


def require_same_optimizer(folder: Path, description: Mapping[str, Any], own: str) -> None:
    """Check that the checkpoint is of an optimizer of the kind `own`. Raises UserError if it is of another."""
    if (saved := description.get("optimizer", "adamw")) != own:
        what = f"checkpoint {folder} is of {saved}, which {own} cannot go on from; must be {saved}"
        raise UserError(f"training.optimizer.name: {what}")


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint {path}: cannot be read: {error}") from error


def open_tensors(
    folder: Path, stem: str, expected: Mapping[str, tuple[int, ...]], stack: contextlib.ExitStack
) -> Callable[[str], Any]:
    """Open the files of `stem` and return a function that gives a tensor's slices by its name. Raises UserError if the tensors
    do not have the `expected` names and shapes."""
    files = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        file = stack.enter_context(_safetensors(path))
        files.update(dict.fromkeys(file.keys(), file))
    if files.keys() != expected.keys():
        names = sorted(files.keys() ^ expected.keys())
        raise UserError(f"checkpoint {folder}: is of another model; {len(names)} tensors differ, such as {names[0]}")
    for name, wanted in expected.items():
        shape = tuple(files[name].get_slice(name).get_shape())
        if shape != tuple(wanted):
            raise UserError(f"checkpoint {folder}: {name} has shape {shape}, the model's is {tuple(wanted)}")
    return lambda name: files[name].get_slice(name)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _restore_generators(file: Any, state: TrainingState) -> None:
    """Restore this rank's generators. If the checkpoint has fewer ranks, the further ranks keep their generators."""
    names = [name for name in file.keys() if name.startswith(f"{state.rank_info.rank}.")]  # noqa: SIM118 - it is no mapping
    own = {name.split(".")[1]: file.get_tensor(name) for name in names}
    if own:
        platform.set_rng_state(state.rank_info.device, own)
