"""Collectives beside computation, and a device that is lent out between steps: the same numbers, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loopback import megatron_overlap_member
from tests.loopback.ranks import run_two
from tests.unit.training_cases import make_policy

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")


def test_neither_changes_a_bit(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", tied=False)
    run_two(megatron_overlap_member.member, tmp_path)
