"""What two layouts of one training must agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
