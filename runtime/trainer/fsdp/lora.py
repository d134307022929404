"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1) in the policy, through PEFT.

A linear layer's W becomes W + (alpha / rank) · B A, where B [out, rank] begins at 0 and A [rank, in] is random; only they are
trained, in float32. `peft` is imported inside the functions: it takes seconds, and only a run with `lora` needs it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from runtime.config import Lora
from runtime.errors import UserError
from runtime.models.adapters import DOWN, UP, adapted
from runtime.models.limits import LORA_NEEDS_PEFT
from runtime.trainer.fsdp import sharding

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER = "adapter"
STEM = "adapter_model"
_NAME = "default"  # of the set of adapters, of which PEFT allows several
_PREFIX = "base_model.model."  # of a tensor's name in PEFT's files


def adapt(model: Any, settings: Lora, source: str, seed: int, frozen: torch.dtype) -> LoraConfig:
    """Put adapters into `model`, which lies whole on the CPU, and freeze the rest of it in the dtype `frozen`.

    A's values depend on `seed` alone, so every rank has the same; the global generators stay as they are. `source` is the
    folder that the model came from. Raises UserError for a layer that there is not.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(LORA_NEEDS_PEFT) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules=_targets(model, settings),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(source).absolute()),
    )
    try:
        with torch.random.fork_rng(devices=[]):  # for PEFT's own start of A
            inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {' '.join(str(error).split())}") from error
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    config.target_modules = sorted(config.target_modules or ())  # a set, which is written in any order
    return config


def _targets(model: Any, settings: Lora) -> list[str]:
    """What PEFT finds the layers by: a name, or the end of one after a dot."""
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head]
    names = sorted({name.rpartition(".")[2] for name in layers})
    for target in settings.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise UserError(
                f"lora.target_modules: {target!r} is no linear layer of the model; must be among {', '.join(names)}"
            )
    return settings.target_modules or names


@dataclass(frozen=True)
class _Pair:
    """The adapter of one layer."""

    down: torch.Tensor  # A, float32 [rank, in]
    up: torch.Tensor  # B, float32 [out, rank]


class Adapters:
    """The adapters of a policy, which lies where it is trained. With several ranks, all call every method alike.

    `trained` are they, under their names in PEFT's files; `published` are the same, under those of `runtime.models.adapters`;
    `base` is the policy without them, under its Hugging Face names.
    """

    def __init__(self, model: Any, config: LoraConfig):
        """`config` is what `adapt` gave."""
        self._model, self._config = model, config
        named = dict(model.named_parameters())
        self.base = {name.replace(".base_layer.", "."): p for name, p in named.items() if not p.requires_grad}
        self.trained = {_PREFIX + name.replace(f".{_NAME}.", "."): p for name, p in named.items() if p.requires_grad}
        self._scaling = config.lora_alpha / config.r
        self._pairs = {
            name.replace(f".lora_A.{_NAME}.", "."): _Pair(p, named[name.replace(".lora_A.", ".lora_B.")])
            for name, p in named.items()
            if ".lora_A." in name
        }
        self.published = {n + end: p for n, pair in self._pairs.items() for end, p in ((DOWN, pair.down), (UP, pair.up))}

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that goes on from it: keys of the section `lora`."""
        return {"rank": self._config.r, "alpha": self._config.lora_alpha, "target_modules": self._config.target_modules}

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole policy, tensor by tensor in the order of `base`, which is left as it is."""
        for name, weight in sharding.wholes(self.base):
            pair = self._pairs.get(name)
            if pair is None:
                yield name, weight
            else:
                yield name, adapted(weight, sharding.full(pair.up) * self._scaling, sharding.full(pair.down))

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
            folder.mkdir()
            save_file(tensors, folder / f"{STEM}.safetensors", metadata={"format": "pt"})
            self._config.save_pretrained(str(folder))
