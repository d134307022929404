"""One training in every layout of megatron-core, for each family: all as the torch engine does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loopback.megatron_equality import assert_equal, assert_published
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_policy

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

TORCH, TENSOR = Layout(0), Layout(2, processes=2)
LAYOUTS = {
    "one rank": Layout(1),
    "tensor": TENSOR,
    "tensor with sequence": Layout(2, sequence=True, processes=2),
    "pipeline": Layout(1, 2, processes=2),
    "data": Layout(1, processes=2),
    "tensor and pipeline": Layout(2, 2, processes=4),
    "tensor and data": Layout(2, processes=4),
}
FAMILIES = {"qwen2_untied": "pipeline", "qwen3": "tensor with sequence", "llama": "tensor", "llama3_scaled": "one rank"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    make_policy(folder / "policy")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_the_torch_engine(folder: Path, expected: dict[str, Any], layout: Layout) -> None:
    found = train(folder, layout)
    assert_equal(found, expected)
    assert_published(folder, layout, found)


@pytest.mark.parametrize("layout", ["one rank", "pipeline", "data"])
def test_what_tensor_parallel_saved_goes_on_in_another_layout(folder: Path, layout: str) -> None:
    whole = train(folder, TENSOR)
    found = train(folder, LAYOUTS[layout], resumed=TENSOR.name)
    assert_equal(found, whole, last=STEPS - SAVED)
    for own, other in zip(found["metrics"], whole["metrics"][SAVED:], strict=True):
        assert own["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_torch_engine(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    assert_equal(train(tmp_path, LAYOUTS[FAMILIES[family]]), train(tmp_path, TORCH))


@pytest.mark.parametrize("layout", ["one rank", "tensor with sequence", "tensor and pipeline"])
def test_the_critic_is_the_torch_engines(folder: Path, layout: str) -> None:
    make_reward_model(folder / "policy", folder / "critic")
    found = train(folder, LAYOUTS[layout], role="critic")
    assert_equal(found, train(folder, TORCH, role="critic"))
    resumed = train(folder, LAYOUTS["data"], resumed=LAYOUTS[layout].name, role="critic")
    assert_equal(resumed, found, last=STEPS - SAVED)


def make_reward_model(policy: Path, folder: Path) -> None:
    """Of one with a value head that is not 0."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
