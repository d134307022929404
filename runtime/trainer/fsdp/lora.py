"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1) in the policy, through PEFT.

A linear layer's W becomes W + (alpha / rank) · B A. B [out, rank] begins at 0, A [rank, in] is random. Only these are trained,
in float32. `peft` is imported inside the functions: the import takes seconds, and only a run with `lora` needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from runtime.config import Lora
from runtime.errors import UserError
from runtime.models.adapters import DOWN, UP, AdapterBase, adapted, start_of
from runtime.models.families.adapters import PREFIX, target_modules
from runtime.models.limits import LORA_NEEDS_PEFT
from runtime.trainer.backend import full, wholes

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER = "adapter"
STEM = "adapter_model"
_NAME = "default"  # PEFT allows several sets of adapters in a model; this is the name of the one set


def adapt(model: Any, settings: Lora, source: str, seed: int, frozen: torch.dtype) -> LoraConfig:
    """Put adapters into `model` (of the folder `source`, whole and on the CPU), and freeze its other parameters in the dtype
    `frozen`. A's values depend only on `seed`: all ranks have the same. Raises UserError if a target layer is missing."""
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head]
    targets = target_modules(layers, settings.target_modules)
    config = peft_config(settings, targets, source)
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):  # PEFT initialises A itself
            inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {' '.join(str(error).split())}") from error
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
        if ".lora_A." in name:
            parameter.data.copy_(start_of(_in_files(name), parameter.shape, seed))
    config.target_modules = targets  # PEFT has made a set of the list, and sometimes other names
    return config


def peft_config(settings: Lora, targets: list[str], source: str) -> LoraConfig:
    """Return PEFT's description of adapters on the model of folder `source`. Raises UserError if PEFT is missing."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(LORA_NEEDS_PEFT) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT accepts any number
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(source).absolute()),
    )
    config.target_modules = targets  # PEFT's constructor makes a set of the list, which has no fixed order in the file
    return config


def description(config: LoraConfig) -> dict[str, Any]:
    """Return the keys of the section `lora` that must be the same in a checkpoint and in a run that continues it."""
    return {"rank": config.r, "alpha": config.lora_alpha, "target_modules": config.target_modules}


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Write adapters, whole and on the host, as a PEFT folder."""
    folder.mkdir()
    save_file(dict(tensors), folder / f"{STEM}.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _in_files(name: str) -> str:
    """Return an adapter's name in PEFT's files, given its name in the model."""
    return PREFIX + name.replace(f".{_NAME}.", ".")


class Adapters:
    """The adapters of a policy under training. All ranks call every method alike. `trained` has them by their names in PEFT's
    files, `published` under those of `runtime.models.adapters`; `base` is the rest, under its Hugging Face names."""

    def __init__(self, model: Any, config: LoraConfig, base: AdapterBase):
        """Find the adapters in `model`. `config` is the result of `adapt`."""
        self._model, self.config, self.known_base = model, config, base
        named = dict(model.named_parameters())
        self.base = {name.replace(".base_layer.", "."): p for name, p in named.items() if not p.requires_grad}
        self.trained = {_in_files(name): p for name, p in named.items() if p.requires_grad}
        self._scaling = config.lora_alpha / config.r
        self._pairs = {  # A [rank, in] and B [out, rank] of each layer, float32
            name.replace(f".lora_A.{_NAME}.", "."): (p, named[name.replace(".lora_A.", ".lora_B.")])
            for name, p in named.items()
            if ".lora_A." in name
        }
        self.published = {n + end: p for n, pair in self._pairs.items() for end, p in zip((DOWN, UP), pair, strict=True)}

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole policy with merged adapters, tensor by tensor in the order of `base`. `base` does not change."""
        for name, weight in wholes(self.base):
            if name in self._pairs:
                down, up = map(full, self._pairs[name])
                weight = adapted(weight, up * self._scaling, down)
            yield name, weight

    def scaled(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return `part` of the tensor `name` of `published` with the scale of a weight sync."""
        return part * self._scaling if name.endswith(UP) else part

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Make the model compute as before it was adapted, within the context. This sets the scale to 0. PEFT's own switch also
        marks the adapters as not trained, and FSDP2 would take this over in a first pass."""
        from peft.tuners.lora import LoraLayer

        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_scale(_NAME, 1.0)

    def write(self, folder: Path, rank: int) -> None:
        """Write a PEFT folder; rank 0 writes."""
        tensors = {name: whole.cpu().contiguous() for name, whole in wholes(self.trained) if rank == 0}
        if rank == 0:
            write(folder, tensors, self.config)
