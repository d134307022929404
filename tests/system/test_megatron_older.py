"""megatron-core 0.12.1, which MindSpeed pairs with: what it computes, and what is refused with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.config import model_checks
from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import Layout, train
from tests.loopback.ranks import FRESH
from tests.system.runs import ROOT
from tests.unit.training_cases import make_policy

OLDER, VERSION = ROOT / ".megatron-0.12", "0.12.1"
LAYOUTS = {
    "one rank": Layout(1),
    "tensor": Layout(2, processes=2),
    "data": Layout(1, processes=2),
    "context": Layout(1, processes=2, context=2),
    "pipeline": Layout(1, 2, processes=2, layers_per_stage=(2, 1)),
}

pytestmark = pytest.mark.skipif(not OLDER.exists(), reason="needs `make .megatron-0.12/installed`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    make_policy(folder / "policy", tied=False, layers=3)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, Layout(0))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_the_torch_engine(
    folder: Path, expected: dict[str, Any], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OLDER))
    found = train(folder, layout, context=FRESH)
    assert found["megatron"] == VERSION
    assert_equal(found, expected)


def test_the_configurations_checks_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OLDER))
    assert model_checks._version() == VERSION
