"""The trainer on megatron-core, the experts of its layers on two ranks, does what the torch engine does on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.unit.tiny_models import save_model

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

TORCH, EXPERT = Layout(0), Layout(1, processes=2, expert=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder / "policy", "qwen3_moe")
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def spread(folder: Path) -> dict[str, Any]:
    return train(folder, EXPERT)


def test_expert_parallel_is_the_torch_engine(folder: Path, spread: dict[str, Any]) -> None:
    expected = train(folder, TORCH)
    assert_equal(spread, expected)
    before, after = load_file(folder / "policy" / "model.safetensors"), spread["published"]
    assert all(not torch.equal(before[name], after[name]) for name in after)
    exported = load_file(folder / f"export-{EXPERT.name}" / "model.safetensors")
    assert exported.keys() == after.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in after.items())


def test_what_expert_ranks_saved_goes_on_with_all_experts_on_one(folder: Path, spread: dict[str, Any]) -> None:
    assert_equal(train(folder, Layout(1), resumed=EXPERT.name), spread, last=STEPS - SAVED)
