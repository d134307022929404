"""The trainer on megatron-core, its model or its tokens spread over two ranks, does what the torch engine does on one."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loopback.megatron_equality import assert_equal, assert_published
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.unit.test_convert_checkpoint import Running
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


def saved_with(folder: Path, target: Path, change: Callable[[Path], object]) -> None:
    """A copy in `target` of the policy, and of what the layout TENSOR has saved, whose folder `change` changes."""
    if not (folder / f"saved-by-{TENSOR.name}").exists():
        train(folder, TENSOR)
    (target / "policy").symlink_to(folder / "policy")
    change(shutil.copytree(folder / f"saved-by-{TENSOR.name}", target / f"saved-by-{TENSOR.name}") / "megatron")


def test_an_index_that_runs_something_is_refused(folder: Path, tmp_path: Path) -> None:
    saved_with(folder, tmp_path, lambda saved: (saved / ".metadata").write_bytes(pickle.dumps(Running(tmp_path / "run"))))
    with pytest.raises(AssertionError, match=r"megatron/\.metadata: its pickle wants posix\.system, which no checkpoint needs"):
        train(tmp_path, Layout(1), resumed=TENSOR.name)
    assert not (tmp_path / "run").exists()


def objects_run(saved: Path, made: Path) -> None:
    """The objects beside the tensors, and what ranks have in common, make a file when they are unpickled."""
    torch.save(Running(made), saved / "common.pt")
    index = pickle.loads((saved / ".metadata").read_bytes())
    file = io.BytesIO()
    torch.save([Running(made)], file)
    objects = [place for key, place in index.storage_data.items() if "_extra_state" in key.fqn]
    assert objects
    for place in objects:
        place.offset, place.length = (saved / place.relative_path).stat().st_size, len(file.getvalue())
        with (saved / place.relative_path).open("ab") as distributed:
            distributed.write(file.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(index))


def test_of_a_checkpoint_nothing_but_tensors_is_read(folder: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    saved_with(folder, tmp_path, lambda saved: objects_run(saved, tmp_path / "run"))
    found = train(tmp_path, Layout(1), resumed=TENSOR.name)
    assert_equal(found, expected, last=STEPS - SAVED)
    assert not (tmp_path / "run").exists()
