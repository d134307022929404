"""The torch engine on two ranks does what it does on one, for families that no other test trains so."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import Moe
from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import Layout, train
from tests.unit.tiny_models import WITH_EXPERTS, save_model

pytestmark = pytest.mark.numeric

MOE = {
    "glm4_moe": Moe(replay="routing", aux_loss=0.1, z_loss=0.01, bias_update=0.01),
    "mixtral": Moe(aux_loss=0.1, z_loss=0.01),
}


@pytest.mark.parametrize("family", ["mistral", "mixtral", "gemma3", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_two_ranks_are_one(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    moe = MOE.get(family, Moe())
    found = train(tmp_path, Layout(0, processes=2, moe=moe))
    assert_equal(found, train(tmp_path, Layout(0, moe=moe)))
    assert any(name.startswith("moe/") for name in found["metrics"][0]) == (family in WITH_EXPERTS)
