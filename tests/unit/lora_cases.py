"""What the tests of adapters share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from runtime.config import Config, Lora, Reference, Run
from runtime.trainer.step import ModelTrainer
from tests.unit.training_cases import make_config
from tests.unit.training_steps import assert_updated

LORA = Lora(rank=4, alpha=12.0)


def lora_config(path: str, lora: Lora | None = LORA, *, mode: str = "service", seed: int = 1234, **sections: Any) -> Config:
    """`make_config` with adapters, and steps large enough to see what they do."""
    sections["optimizer"] = {"learning_rate": 1e-2, "eps": 1e-2, **sections.get("optimizer", {})}
    config = make_config(path, **sections)
    return replace(config, lora=lora, reference=Reference(source=mode), run=Run(name="test", seed=seed))


def saved(engine: ModelTrainer, folder: Path) -> Path:
    """`folder`, where the engine has saved its state."""
    folder.mkdir()
    engine.save(str(folder))
    return folder


def adapter_tensors(engine: ModelTrainer, folder: Path) -> dict[str, Any]:
    """The adapters by their names in PEFT's files, by way of a checkpoint."""
    return load_file(saved(engine, folder) / "adapter" / "adapter_model.safetensors")


def grown(saved: Path, folder: Path) -> None:
    """Make `folder` a checkpoint as `saved`, without a history, of adapters with large B, so that the gradients of A are large
    too."""
    shutil.copytree(saved, folder, ignore=lambda *_: ["optimizer.safetensors"])
    file, told = folder / "adapter" / "adapter_model.safetensors", folder / "trainer.json"
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(file)
    for name in sorted(name for name in tensors if ".lora_B." in name):
        torch.nn.init.normal_(tensors[name], std=0.1, generator=generator)
    save_file(tensors, file)
    told.write_text(json.dumps(json.loads(told.read_text()) | {"optimizer_updates": 0}))


def assert_merged(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], config: Config, steps: int) -> None:
    """Weights with adapters in them, after so many steps, are the same but for rounding.

    An element of them moves by alpha / rank times the sum over `rank` products, by what either factor moves times the other,
    none of which is larger than 1.
    """
    assert config.lora is not None
    assert_updated(left, right, config.training.optimizer, steps=2 * steps * round(config.lora.alpha))
