"""The torch engine on two ranks does what it does on one, for families that no other test trains so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import Layout, train
from tests.unit.tiny_models import save_model

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("family", ["mistral", "mixtral", "gemma3", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_two_ranks_are_one(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    assert_equal(train(tmp_path, Layout(0, processes=2)), train(tmp_path, Layout(0)))
