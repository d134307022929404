"""What two layouts of one training must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.engines import conversion
from tests.loopback.megatron_member import Layout

Found = dict[str, Any]


def assert_equal(found: Found, expected: Found, last: int = 0) -> None:
    """`last`: only that many steps from the end were made."""
    numbers, metrics = expected["numbers"][-last:], expected["metrics"][-last:]
    for own, other in zip(found["numbers"], numbers, strict=True):
        assert other.count_nonzero()
        torch.testing.assert_close(own, other, rtol=0, atol=2e-5)
    for own, other in zip(found["metrics"], metrics, strict=True):
        assert own.keys() == other.keys()
        for name in other.keys() - {"padding_waste"}:  # which depends on the packing alone
            norm = name.endswith("grad_norm")
            assert own[name] == pytest.approx(other[name], rel=1e-5 if norm else 2e-4, abs=0 if norm else 1e-5), name
    assert found["published"].keys() == expected["published"].keys()
    for name, tensor in expected["published"].items():
        torch.testing.assert_close(found["published"][name], tensor, rtol=0, atol=1e-5, msg=name)


def assert_published(folder: Path, layout: Layout, found: Found) -> None:
    """What was published last is what was exported, and what the checkpoint of that step gives."""
    converted = folder / f"converted-{layout.name}"
    conversion.to_hf(folder / f"end-of-{layout.name}", converted, show=lambda *_: None)
    assert {path.name for path in converted.iterdir()} >= {"config.json", "tokenizer.json"}
    for made in (folder / f"export-{layout.name}", converted):
        tensors = load_file(made / "model.safetensors")
        assert tensors.keys() == found["published"].keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in found["published"].items())
