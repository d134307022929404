"""`tiny:FAMILY`: the folders that it stands for, and what becomes of a configuration that names one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from launcher.config_reference import schema
from runtime.config import Config, Critic, Model, Parallel, RewardModel, Rewards, Run, Warmup
from runtime.config.loading import load, preset_names, resolve
from runtime.config.model_checks import layout_of
from runtime.errors import ConfigError, UserError
from runtime.models import tiny_model
from runtime.models.families import FAMILIES, family_for

ALL = ", ".join(f"tiny:{name}" for name in sorted(FAMILIES))
FAMILY = {"deepseek": "deepseek_v3", "a3b": "qwen3_moe", "qwen3": "qwen3"}  # by a part of a preset's name: the first that fits


def made(cache: Path, family: str) -> Config:
    """One whose four models are all of that family."""
    name = f"tiny:{family}"
    return tiny_model.made(
        Config(
            run=Run(name="a"),
            model=Model(path=name, reference=name),
            warmup=Warmup(cache=str(cache)),
            critic=Critic(path=name),
            rewards=Rewards(model=RewardModel(path=name)),
        )
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_folders_whole(family: str, tmp_path: Path) -> None:
    config = made(tmp_path, family)
    assert config.model.path == config.model.reference == config.critic.path != config.rewards.model.path  # type: ignore[union-attr]
    policy, found = AutoModelForCausalLM.from_pretrained(config.model.path, output_loading_info=True)
    assert not any(found.values()), found
    assert (policy.config.model_type, policy.dtype) == (family, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    assert tokenizer.eos_token_id == policy.config.eos_token_id
    logits = policy(torch.tensor([tokenizer("12+34=").input_ids])).logits[0]
    assert logits.shape == (6, len(tokenizer))
    assert 0.1 < logits.std() < 10.0  # neither all alike nor certain: it generates, and its rewards can differ
    if family == "glm4_moe":  # of which transformers has no sequence classifier
        return
    scorer, found = AutoModelForSequenceClassification.from_pretrained(
        config.rewards.model.path,  # type: ignore[union-attr]
        output_loading_info=True,
    )
    assert not any(found.values()), found
    assert scorer.score.weight.shape == (1, policy.config.hidden_size)
    assert scorer.score.weight.any()


def test_a_folder_is_made_once_and_always_the_same(tmp_path: Path) -> None:
    first = made(tmp_path / "a", "qwen3_moe")
    weights = Path(first.model.path) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert made(tmp_path / "a", "qwen3_moe") == first
    assert weights.stat().st_mtime_ns == before
    other = Path(made(tmp_path / "b", "qwen3_moe").model.path) / "model.safetensors"
    assert other.read_bytes() == weights.read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        Path(path).name
        for path in (first.model.path, first.rewards.model.path)  # type: ignore[union-attr]
    )


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^model\.path: a tiny model cannot be written to .*: Not a directory$"):
        made(tmp_path / "file" / "cache", "qwen2")


@pytest.mark.parametrize("preset", preset_names("services.preset"))
def test_its_sizes_divide_by_every_layout_of_ours(preset: str) -> None:
    """So that a configuration that spreads its model can be rehearsed spread."""
    path = Path(__file__).parents[2] / "configs" / "models" / f"{preset}.yaml"
    family = next((each for part, each in FAMILY.items() if part in preset), "qwen2")
    shape = family_for(tiny_model.described(f"tiny:{family}") or {}).shape
    for role in ("trainer", "critic", "reference"):
        parallel = yaml.safe_load(path.read_text())[role].get("parallel", {})
        sizes = {key: parallel.get(key, 1) for key in ("tensor", "pipeline", "expert")}
        if parallel.get("layers_per_stage"):  # a rehearsal has other layers
            del sizes["pipeline"]
        assert layout_of(Parallel(**sizes)).faults(shape) == []


# ------------------------------------------------------------------------------------------------ in a configuration


def written(folder: Path, **sections: Any) -> str:
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    raw = {
        "run": {"name": "a", "dir": str(folder / "run")},
        "data": {"train": str(folder / "train.jsonl"), "handler": "gsm8k"},
        "rewards": {"rules": [{"name": "gsm8k"}]},
        **sections,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    return str(folder / "run.yaml")


REAL = {"model": {"path": "/models/policy", "reference": "/models/larger", "dtype": "bfloat16"}}


def test_the_name_stands_for_the_model_of_every_role_and_what_comes_later_stands(tmp_path: Path) -> None:
    critic, model = {"path": "/models/critic", "value_clip": 0.5}, {"path": "/models/judge", "weight": 2.0}
    config = resolve(load(written(tmp_path, **REAL, critic=critic, rewards={"model": model}), ["model=tiny:qwen3"]))
    assert config.model == Model(path="tiny:qwen3", reference="tiny:qwen3")
    assert config.critic == Critic(path="tiny:qwen3", value_clip=0.5)
    assert config.rewards.model == RewardModel(path="tiny:qwen3", weight=2.0)
    file = written(tmp_path, model="tiny:qwen3")
    config = load(file, ["critic.path=/models/critic"])
    assert (config.model, config.rewards.model) == (Model(path="tiny:qwen3"), None)
    assert config.critic == Critic(path="/models/critic")
    assert load(file, ["model=tiny:llama", "model.dtype=bfloat16"]).model == Model(path="tiny:llama", dtype="bfloat16")


def test_a_layouts_name_stands_for_the_services(tmp_path: Path) -> None:
    file = written(tmp_path, services={"trainer": {"processes": 16}, "rollout": {"replicas": 6}})
    services = load(file, ["services=one_machine"]).services
    assert (services.preset, services.trainer.processes, services.rollout) == (
        "one_machine",
        1,
        load(file, ["services={preset: one_machine}"]).services.rollout,
    )
    with pytest.raises(ConfigError, match=r"^services\.preset: 'one_machin' is not one of .*one_machine, "):
        load(file, ["services=one_machin"])


def test_the_schema_takes_names_in_their_place() -> None:
    properties = schema()["$defs"]["Config"]["properties"]
    for key in ("model", "services"):
        assert [kind.get("type", "section") for kind in properties[key]["anyOf"]] == ["section", "string"]
    assert re.match(properties["model"]["anyOf"][1]["pattern"], "tiny:qwen2")
    assert not re.match(properties["model"]["anyOf"][1]["pattern"], "/models/policy")


def test_validating_makes_nothing(
    tmp_path: Path, validated: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, **REAL)
    code, said = validated(file, "model=tiny:qwen2", "algorithm.kl_coefficient=0.01")
    assert code == 0
    for key in ("model.path", "model.reference"):
        assert f"{key}: tiny:qwen2, small and random, is made when a run starts" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "train.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model=tiny:gpt9"], f"model: 'tiny:gpt9' is not a section of keys, nor one of {ALL}"),
        (["model.path=tiny:gpt9"], f"model.path: 'tiny:gpt9' is not one of {ALL}"),
        (["model=/models/policy"], f"model: '/models/policy' is not a section of keys, nor one of {ALL}; a folder is named"),
        (["model=tiny:qwen2", "model.reference=LARGER"], "has a vocabulary of 151936 tokens, the policy one of 264"),
        (["model=tiny:qwen2", "rewards.model.path=tiny:gpt9"], f"rewards.model.path: 'tiny:gpt9' is not one of {ALL}"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, validated: Callable[..., tuple[int, str]], overrides: list[str], line: str
) -> None:
    model = tmp_path / "larger"  # of another vocabulary
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**(tiny_model.described("tiny:qwen2") or {}), "vocab_size": 151936}))
    (model / "model.safetensors").touch()
    code, said = validated(written(tmp_path), *(one.replace("LARGER", str(model)) for one in overrides))
    assert code == 2
    assert line in said
    assert len(said.splitlines()) == 1, said
