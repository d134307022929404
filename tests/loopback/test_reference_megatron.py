"""The reference on megatron-core, its model spread over two ranks, finds what the torch engine finds on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.closeness import LOGITS, assert_close, forward_terms
from tests.loopback.reference_member import TEMPERATURES, alone, predicted, requests, spread
from tests.unit.tiny_models import save_model

pytestmark = pytest.mark.numeric

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")


def test_every_layout_is_the_torch_engine(tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "qwen3")
    expected = alone(tmp_path)
    assert set(expected) == set(range(len(TEMPERATURES)))
    assert np.ptp(np.concatenate(list(expected.values()))) > 1
    for layout, found in spread(tmp_path).items():
        assert found.keys() == expected.keys(), layout
        for request in requests():
            group, counted = request.group_id, predicted(request)
            assert found[group].dtype == expected[group].dtype
            scale = LOGITS / TEMPERATURES[group]
            assert_close(found[group][counted], expected[group][counted], terms=forward_terms(36), scale=scale, what=layout)
