"""Adapters on megatron-core, spread over two ranks, learn what engine torch's learn on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.unit.tiny_models import save_model

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

TORCH = Layout(0, lora=True)
LAYOUTS = {
    "one": Layout(1, lora=True),
    "tensor": Layout(2, processes=2, lora=True),
    "tensor with sequence": Layout(2, sequence=True, processes=2, lora=True),
    "expert": Layout(1, processes=2, expert=2, lora=True),
    "pipeline": Layout(1, 2, processes=2, lora=True),
    "expert and tensor": Layout(2, sequence=True, processes=4, expert=2, lora=True),
}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen2"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "policy", request.param)
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout(folder: Path, expected: dict[str, Any], layout: Layout) -> None:
    assert_equal(train(folder, layout), expected, lora=True)
