"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1) in the policy, through PEFT.

A linear layer's W becomes W + (alpha / rank) · B A, where B [out, rank] begins at 0 and A [rank, in] is random; only they are
trained, in float32. `peft` is imported inside the functions: it takes seconds, and only a run with `lora` needs it.
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
from runtime.trainer.fsdp import sharding

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER = "adapter"
STEM = "adapter_model"
_NAME = "default"  # of the set of adapters, of which PEFT allows several


def adapt(model: Any, settings: Lora, source: str, seed: int, frozen: torch.dtype) -> LoraConfig:
    """Put adapters into `model`, which lies whole on the CPU, and freeze the rest of it in the dtype `frozen`.

    A's values depend on `seed` alone, so every rank has the same; the global generators stay as they are. `source` is the
    folder that the model came from. Raises UserError for a layer that there is not.
    """
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head]
    targets = target_modules(layers, settings.target_modules)
    config = peft_config(settings, targets, source)
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):  # for PEFT's own start of A
            inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {' '.join(str(error).split())}") from error
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
        if ".lora_A." in name:
            parameter.data.copy_(start_of(_in_files(name), parameter.shape, seed))
    config.target_modules = targets  # of which PEFT makes a set, and of many another one
    return config


def peft_config(settings: Lora, targets: list[str], source: str) -> LoraConfig:
    """As PEFT describes adapters on the model of folder `source`. Raises UserError where the package is missing."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(LORA_NEEDS_PEFT) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(source).absolute()),
    )
    config.target_modules = targets  # PEFT's own start makes it a set, which is written in any order
    return config


def description(config: LoraConfig) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that goes on from it: keys of the section `lora`."""
    return {"rank": config.r, "alpha": config.lora_alpha, "target_modules": config.target_modules}


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Write adapters, whole and on the host, as a folder of PEFT's."""
    folder.mkdir()
    save_file(dict(tensors), folder / f"{STEM}.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _in_files(name: str) -> str:
    """An adapter's name in PEFT's files, from that in the model."""
    return PREFIX + name.replace(f".{_NAME}.", ".")


class Adapters:
    """The adapters of a policy, which lies where it is trained. With several ranks, all call every method alike.

    `trained` are they, under their names in PEFT's files; `published` are the same, under those of `runtime.models.adapters`;
    `base` is the policy without them, under its Hugging Face names.
    """

    def __init__(self, model: Any, config: LoraConfig, base: AdapterBase):
        """`config` is what `adapt` gave."""
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
        """The whole policy, tensor by tensor in the order of `base`, which is left as it is."""
        for name, weight in sharding.wholes(self.base):
            if name in self._pairs:
                down, up = map(sharding.full, self._pairs[name])
                weight = adapted(weight, up * self._scaling, down)
            yield name, weight

    def scaled(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """`part` of the tensor `name` of `published`, as it is published."""
        return part * self._scaling if name.endswith(UP) else part

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model computes what it did before it was adapted.

        By a scale of 0: PEFT's own switch also says of the adapters that they are not trained, which FSDP2 would believe of
        what it runs for the first time.
        """
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
        """Write a folder as PEFT has it; rank 0 writes."""
        tensors = {name: whole.cpu().contiguous() for name, whole in sharding.wholes(self.trained) if rank == 0}
        if rank == 0:
            write(folder, tensors, self.config)
