"""One training in every layout of megatron-core, for each family: all as the torch engine does it. What is marked `long` is a
combination of layouts, or of a family with one, whose parts others have."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Moe, model_checks
from tests.loopback.megatron_equality import assert_adapters, assert_equal, assert_published
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.loopback.ranks import FRESH
from tests.system.runs import ROOT
from tests.unit.lora_cases import grown
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_policy

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

SPREAD = "tensor with sequence and context"
TORCH, TENSOR = Layout(0), Layout(2, processes=2)
LAYOUTS = {
    "one rank": Layout(1),
    "tensor": TENSOR,
    "tensor with sequence": Layout(2, sequence=True, processes=2),
    "pipeline": Layout(1, 2, processes=2),
    "data": Layout(1, processes=2),
    "context": Layout(1, processes=2, context=2),
    "tensor and pipeline": Layout(2, 2, processes=4),
    "tensor and data": Layout(2, processes=4),
    "tensor with sequence and context": Layout(2, sequence=True, processes=4, context=2),
    "context and pipeline": Layout(1, 2, processes=4, context=2),
}
LORA = {  # by family
    "qwen2": (Layout(2, processes=2, lora="all"), Layout(1, 2, processes=2, lora="up_proj")),
    "deepseek_v3": (Layout(2, sequence=True, processes=4, expert=2, lora="all"),),
}
BFLOAT16 = 2**-5  # of logits of about 10 whose last bit is 2**-5 to 2**-4: what half of it comes to
EXPERTS = {
    "one rank": Layout(1),
    "tensor with sequence": Layout(2, sequence=True, processes=2),
    "expert, twice": Layout(1, processes=4, expert=2),
    "expert and tensor": Layout(2, sequence=True, processes=4, expert=2),
    "expert and pipeline": Layout(1, 2, processes=4, expert=2),
    "expert and context": Layout(1, processes=2, context=2, expert=2),
}
FAMILIES = {
    "qwen2_untied": "pipeline",
    "qwen3": "tensor with sequence",
    "llama": "tensor",
    "llama3_scaled": "one rank",
    "mistral": "context",
    "mixtral_sliding": "pipeline",
    "glm4_moe": "tensor with sequence",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    make_policy(folder / "policy")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    return train(folder, TENSOR)


def some(names: Iterable[str], brief: set[str]) -> list[Any]:
    """The parameters of a test: those that are not in `brief` are `long`."""
    return [pytest.param(name, id=name, marks=() if name in brief else pytest.mark.long) for name in names]


@pytest.mark.parametrize(
    "layout", some(LAYOUTS, {"pipeline", "data", "tensor with sequence and context", "tensor and pipeline"})
)
def test_a_layout_is_the_torch_engine(folder: Path, expected: dict[str, Any], layout: str) -> None:
    found = train(folder, LAYOUTS[layout])
    assert_equal(found, expected)
    assert_published(folder, LAYOUTS[layout], found)


def test_stages_of_different_lengths(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", layers=4)
    expected = train(tmp_path, TORCH)
    three = Layout(1, 3, processes=3, layers_per_stage=(1, 2, 1))
    assert_equal(train(tmp_path, three), expected)
    two = Layout(1, 2, processes=2, layers_per_stage=(3, 1))
    assert_equal(train(tmp_path, two, resumed=three.name), expected, last=STEPS - SAVED)


def test_in_bfloat16_layouts_agree_as_far_as_it_goes(folder: Path) -> None:
    alone = train(folder, Layout(1, dtype="bfloat16"))
    spread = train(folder, Layout(2, processes=2, dtype="bfloat16"))
    for own, other in zip(spread["numbers"], alone["numbers"], strict=True):
        difference = (own - other).abs()
        assert difference.mean() < BFLOAT16 and difference.max() < 8 * BFLOAT16
    for own, other in zip(spread["metrics"], alone["metrics"], strict=True):
        assert own["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=BFLOAT16)


@pytest.mark.parametrize("layout", some(["one rank", "pipeline", "data", "context"], {"pipeline"}))
def test_what_tensor_parallel_saved_goes_on_in_another_layout(folder: Path, whole: dict[str, Any], layout: str) -> None:
    found = train(folder, LAYOUTS[layout], resumed=TENSOR.name)
    assert_equal(found, whole, last=STEPS - SAVED)
    for own, other in zip(found["metrics"], whole["metrics"][SAVED:], strict=True):
        assert own["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)


@pytest.mark.parametrize("family", some(FAMILIES, {"qwen3", "llama3_scaled", "glm4_moe"}))
def test_a_family_is_the_torch_engine(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    assert_equal(train(tmp_path, LAYOUTS[FAMILIES[family]]), train(tmp_path, TORCH))


@pytest.fixture(scope="module", params=["qwen3_moe_tied", "deepseek_v3"])
def of_experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder / "policy", request.param)
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def expected_of_experts(of_experts: Path) -> dict[str, Any]:
    return train(of_experts, TORCH)


@pytest.mark.parametrize("layout", some(EXPERTS, {"expert and tensor", "expert and pipeline", "expert and context"}))
def test_a_mixture_of_experts_is_the_torch_engine(of_experts: Path, expected_of_experts: dict[str, Any], layout: str) -> None:
    found = train(of_experts, EXPERTS[layout])
    assert_equal(found, expected_of_experts)
    assert_published(of_experts, EXPERTS[layout], found)


def test_fsdp_has_a_gradient_for_experts_that_one_rank_has_no_token_for(
    of_experts: Path, expected_of_experts: dict[str, Any]
) -> None:
    assert_equal(train(of_experts, Layout(0, processes=2)), expected_of_experts)


@pytest.mark.parametrize("layout", some(["one rank", "tensor with sequence"], {"tensor with sequence"}))
def test_what_expert_and_tensor_parallel_saved_goes_on_in_another_layout(of_experts: Path, layout: str) -> None:
    saved = EXPERTS["expert and tensor"]
    if not (of_experts / f"{saved.name}.pt").exists():
        train(of_experts, saved)
    whole = torch.load(of_experts / f"{saved.name}.pt")
    assert_equal(train(of_experts, EXPERTS[layout], resumed=saved.name), whole, last=STEPS - SAVED)


@pytest.mark.parametrize("family", some(LORA, {"qwen2"}))  # loopback has adapters of experts
def test_adapters_are_engine_torchs(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    for layout in LORA[family]:
        torch_engine = Layout(0, lora=layout.lora)
        train(tmp_path, torch_engine)
        shutil.rmtree(tmp_path / f"export-{torch_engine.name}")
        grown(tmp_path / f"saved-by-{torch_engine.name}", tmp_path / f"saved-by-{layout.lora}")
        expected = train(tmp_path, torch_engine, resumed=layout.lora)
        found = train(tmp_path, layout, resumed=layout.lora)
        assert_equal(found, expected, last=STEPS - SAVED, lora=True)
        assert_adapters(tmp_path, layout, found)


@pytest.mark.long
def test_the_critic_may_have_experts(of_experts: Path) -> None:
    make_reward_model(of_experts / "policy", of_experts / "critic")
    layout = Layout(1, processes=2, expert=2)
    assert_equal(train(of_experts, layout, role="critic"), train(of_experts, TORCH, role="critic"))


@pytest.mark.parametrize(
    "layout",
    some(["one rank", "tensor with sequence and context", "tensor and pipeline"], {"tensor with sequence and context"}),
)
def test_the_critic_is_the_torch_engines(folder: Path, layout: str) -> None:
    make_reward_model(folder / "policy", folder / "critic")
    found = train(folder, LAYOUTS[layout], role="critic")
    assert_equal(found, train(folder, TORCH, role="critic"))
    resumed = train(folder, LAYOUTS["data"], resumed=LAYOUTS[layout].name, role="critic")
    assert_equal(resumed, found, last=STEPS - SAVED)


def make_reward_model(policy: Path, folder: Path) -> None:
    """Of one with a value head that is not 0."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ 0.12.1, MindSpeed's

OLDER, VERSION = ROOT / ".megatron-0.12", "0.12.1"
needs_older = pytest.mark.skipif(not OLDER.exists(), reason="needs `make .megatron-0.12/installed`")


@pytest.fixture(scope="module")
def of_older(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A policy, and what the torch engine makes of it."""
    folder = tmp_path_factory.mktemp("older")
    make_policy(folder / "policy", tied=False, layers=3)
    return folder, train(folder, TORCH)


@needs_older
@pytest.mark.long
@pytest.mark.parametrize("layout", ["one rank", "tensor", "data", "context", "uneven pipeline"])
def test_a_layout_of_the_older_megatron_is_the_torch_engine(
    of_older: tuple[Path, dict[str, Any]], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OLDER))
    uneven = {"uneven pipeline": Layout(1, 2, processes=2, layers_per_stage=(2, 1))}
    found = train(of_older[0], (LAYOUTS | uneven)[layout], context=FRESH)
    assert found["megatron"] == VERSION
    assert_equal(found, of_older[1])


@needs_older
def test_the_older_megatron_refuses_to_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OLDER))
    save_model(tmp_path / "policy", "qwen3_moe")
    with pytest.raises(AssertionError, match=r"UserError: moe\.router_replay: routing: megatron-core 0\.12\.1 cannot set"):
        train(tmp_path, Layout(1, moe=Moe(router_replay="routing")), context=FRESH)


@needs_older
def test_the_configurations_checks_know_the_older_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OLDER))
    assert model_checks._version() == VERSION
