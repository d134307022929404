"""The reference on megatron-core, its model spread over two ranks, finds what the torch engine finds on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.loopback.reference_member import TEMPERATURES, alone, spread
from tests.unit.tiny_models import save_model

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")


def test_every_layout_is_the_torch_engine(tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "qwen3")
    expected = alone(tmp_path)
    assert set(expected) == set(range(len(TEMPERATURES)))
    assert np.ptp(np.concatenate(list(expected.values()))) > 1
    for layout, found in spread(tmp_path).items():
        assert found.keys() == expected.keys(), layout
        for group, values in expected.items():
            assert found[group].dtype == values.dtype
            np.testing.assert_allclose(found[group], values, rtol=0, atol=2e-5, err_msg=layout)
