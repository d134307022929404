"""The trainer on megatron-core, its model or its tokens spread over two ranks, does what the torch engine does on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loopback.megatron_equality import assert_equal, assert_published
from tests.loopback.megatron_member import STEPS, Layout, train
from tests.unit.training_cases import make_policy

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

TORCH, TENSOR, CONTEXT = Layout(0), Layout(2, processes=2), Layout(1, processes=2, context=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    make_policy(folder / "policy")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


def test_tensor_parallel_is_the_torch_engine(folder: Path, expected: dict[str, Any]) -> None:
    found = train(folder, TENSOR)
    assert len(found["metrics"]) == STEPS
    assert len({metrics["actor/grad_norm"] for metrics in found["metrics"]}) == STEPS
    assert_equal(found, expected)
    assert_published(folder, TENSOR, found)


def test_context_parallel_is_the_torch_engine(folder: Path, expected: dict[str, Any]) -> None:
    assert_equal(train(folder, CONTEXT), expected)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", tied=False)
    if not (folder / f"saved-by-{TENSOR.name}").exists():
        train(folder, TENSOR)
    (tmp_path / f"saved-by-{TENSOR.name}").symlink_to(folder / f"saved-by-{TENSOR.name}")
    with pytest.raises(AssertionError, match=r"is of another model; \d+ tensors differ, such as .*output_layer"):
        train(tmp_path, Layout(1), resumed=TENSOR.name)
