"""Adapters on megatron-core, those of experts on two ranks, learn what engine torch's learn on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.closeness import assert_close
from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.unit.lora_cases import LORA, grown
from tests.unit.tiny_models import save_model

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

TORCH, EXPERT = Layout(0, lora="all"), Layout(1, processes=2, expert=2, lora="all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "policy", "qwen3_moe")
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


@pytest.fixture(scope="module")
def spread(folder: Path) -> dict[str, Any]:
    return train(folder, EXPERT)


def test_adapters_of_experts_are_engine_torchs(folder: Path, expected: dict[str, Any], spread: dict[str, Any]) -> None:
    assert_equal(spread, expected, lora=True)
    assert spread["metrics"][-1]["actor/kl"] > 1e-4  # so the reference is not the policy
    before = load_file(folder / "policy" / "model.safetensors")
    frozen = {name for name, tensor in spread["published"].items() if torch.equal(tensor, before[name])}
    assert frozen == {name for name in before if "_proj" not in name}


def test_what_is_written_is_pefts(folder: Path, spread: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exported = load_file(folder / f"export-{EXPERT.name}" / "model.safetensors")
    for name, tensor in spread["published"].items():
        assert_close(exported[name], tensor, terms=LORA.rank + 2, what=name)  # their product, its scale, the sum
    for adapter in (folder / f"export-{EXPERT.name}" / "adapter", folder / f"end-of-{EXPERT.name}" / "adapter"):
        base = AutoModelForCausalLM.from_pretrained(folder / "policy")
        merged = dict(PeftModel.from_pretrained(base, adapter).merge_and_unload().named_parameters())
        for name, tensor in spread["published"].items():
            assert_close(merged[name].detach(), tensor, terms=LORA.rank + 2, what=name)


def test_a_checkpoint_of_either_engine_goes_on_in_the_other(
    folder: Path, expected: dict[str, Any], spread: dict[str, Any], tmp_path: Path
) -> None:
    names = [{path.name for path in (folder / f"saved-by-{each.name}").iterdir()} for each in (TORCH, EXPERT)]
    assert names[0] == names[1] == {"adapter", "optimizer.safetensors", "rng.safetensors", "trainer.json"}
    own, other = tmp_path / "own", tmp_path / "other"
    for place in (own, other):
        place.mkdir()
        (place / "policy").symlink_to(folder / "policy")
    (own / f"saved-by-{EXPERT.name}").symlink_to(folder / f"saved-by-{EXPERT.name}")
    assert_equal(train(own, TORCH, resumed=EXPERT.name), expected, last=STEPS - SAVED, lora=True)
    grown(folder / f"saved-by-{TORCH.name}", other / "saved-by-grown")
    found = train(other, EXPERT, resumed="grown")
    (other / "saved-by-grown").rename(own / "saved-by-grown")
    shutil.rmtree(own / f"export-{TORCH.name}")
    assert_equal(found, train(own, TORCH, resumed="grown"), last=STEPS - SAVED, lora=True)


def test_adapters_of_another_base_are_refused(folder: Path, spread: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "qwen3_moe", seed=1)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / f"saved-by-{EXPERT.name}").symlink_to(folder / f"saved-by-{EXPERT.name}")
    base = json.loads((tmp_path / f"saved-by-{EXPERT.name}" / "trainer.json").read_text())["base"]
    assert base["path"] == str(folder / "policy")
    told = (
        rf"model\.path: {tmp_path}/policy \(fingerprint \w+\) is not what the adapters of checkpoint .* were trained on, which"
    )
    with pytest.raises(
        AssertionError, match=rf"UserError: {told} is {folder}/policy \(fingerprint {base['fingerprint'][:16]}\)\n"
    ):
        train(tmp_path, EXPERT, resumed=EXPERT.name)


def test_weights_that_are_trained_and_adapters_do_not_mix(folder: Path, spread: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(folder / "policy")
    (tmp_path / f"saved-by-{EXPERT.name}").symlink_to(folder / f"saved-by-{EXPERT.name}")
    with pytest.raises(AssertionError, match=r"UserError: lora: is not set, but checkpoint .* holds adapters; must be \{"):
        train(tmp_path, Layout(1), resumed=EXPERT.name)
    (tmp_path / "saved-by-whole").mkdir()
    (tmp_path / "saved-by-whole" / "trainer.json").write_text('{"format": 1, "engine": "megatron"}')
    with pytest.raises(
        AssertionError, match=r"UserError: lora: is set, but checkpoint .* is of a run without; must be left out"
    ):
        train(tmp_path, Layout(1, lora="all"), resumed="whole")
