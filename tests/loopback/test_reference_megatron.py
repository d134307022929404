"""The reference on megatron-core, its model spread over two ranks, finds what the torch engine finds on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loopback.reference_member import TEMPERATURES, alone, spread
from tests.unit.tiny_models import save_model

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "data": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    save_model(folder / "policy", "qwen3")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_the_torch_engine(folder: Path, layout: dict[str, Any]) -> None:
    expected, found = alone(folder), spread(folder, 2, **layout)
    assert found.keys() == expected.keys() == set(range(len(TEMPERATURES)))
    for group, values in expected.items():
        assert values.dtype == found[group].dtype
        np.testing.assert_allclose(found[group], values, rtol=0, atol=2e-5)
    assert np.ptp(np.concatenate(list(expected.values()))) > 1
