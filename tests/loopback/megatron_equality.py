"""What two layouts of one training must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from launcher.conversion import conversion
from runtime.config import Optimizer
from tests.closeness import STEP, assert_close, forward_terms
from tests.loopback.megatron_member import OPTIMIZER, STEPS, Layout
from tests.unit.lora_cases import LORA
from tests.unit.training_steps import assert_metrics, assert_updated

Found = dict[str, Any]


def assert_equal(found: Found, expected: Found, last: int = 0, lora: bool = False) -> None:
    """But for rounding, which adds up from the first step on. `last`: only that many steps from the end were made. `lora`: of
    adapters."""
    first = STEPS - last if last else 0
    numbers, metrics = expected["numbers"][-last:], expected["metrics"][-last:]
    for step, (own, other) in enumerate(zip(found["numbers"], numbers, strict=True), first):
        assert other.count_nonzero()
        terms = step * STEP + forward_terms(tokens=46)
        assert_close(own, other, terms=terms, what=f"numbers of step {step}")
    for step, (own, other) in enumerate(zip(found["metrics"], metrics, strict=True), first):
        # With adapters the engines do not report the same figures about experts.
        untold = ("padding_waste", "moe/") if lora else ("padding_waste",)
        own, other = ({name: each[name] for name in each if not name.startswith(untold)} for each in (own, other))
        assert_metrics(own, other, steps=step + 1)
    factors = 2 * round(LORA.alpha) if lora else 1  # as in `lora_cases.assert_merged`
    assert_updated(found["published"], expected["published"], Optimizer(**OPTIMIZER), steps=factors * STEPS)


def assert_published(folder: Path, layout: Layout, found: Found) -> None:
    """What was published last is what was exported, and what the checkpoint of that step gives."""
    converted = folder / f"converted-{layout.name}"
    conversion.to_hf(folder / f"end-of-{layout.name}", converted, show=lambda *_: None)
    assert {path.name for path in converted.iterdir()} >= {"config.json", "tokenizer.json"}
    for made in (folder / f"export-{layout.name}", converted):
        tensors = load_file(made / "model.safetensors")
        assert tensors.keys() == found["published"].keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in found["published"].items())


def assert_adapters(folder: Path, layout: Layout, found: Found) -> None:
    """What was exported beside the policy makes of the base what was published."""
    before = load_file(folder / "policy" / "model.safetensors")
    adapters = load_file(folder / f"export-{layout.name}" / "adapter" / "adapter_model.safetensors")
    stems = [name.removesuffix("lora_A.weight") for name in adapters if name.endswith("lora_A.weight")]
    assert len(adapters) == 2 * len(stems) > 0
    for stem in stems:
        a, b = (adapters[f"{stem}lora_{kind}.weight"].double() for kind in "AB")
        name = f"{stem.removeprefix('base_model.model.')}weight"
        merged = before[name].double() + LORA.alpha / LORA.rank * b @ a
        assert_close(found["published"][name], merged, terms=LORA.rank + 2, what=name)  # their product, its scale, the sum


GRADIENT = 1e-5  # of the norm


def assert_experts(found: Found, expected: Found) -> None:
    """Compare the first step: the gradients are close, and the biases of the routers are equal bit for bit."""
    own, other = found["gradient"], expected["gradient"]
    assert own.keys() == other.keys()
    squares = [((own[name] - tensor).double().norm() ** 2, tensor.double().norm() ** 2) for name, tensor in other.items()]
    error, whole = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
    assert whole > 0 and error < GRADIENT * whole, (error, whole)
    for name, tensor in expected["published"].items():
        assert not name.endswith("e_score_correction_bias") or torch.equal(found["published"][name], tensor), name
