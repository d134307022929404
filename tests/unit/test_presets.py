"""configs/ that name a model and its devices: each is valid, has room where it is meant to run, and can be rehearsed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.node.local_node import LocalNode
from runtime.cluster.placement import NodeResources, offers, place
from runtime.config import model_checks
from runtime.config.loading import load, resolve
from runtime.config.model_checks import memory_of_ranks
from runtime.models.tiny_model import described, write_tokenizer
from tests.unit.model_dimensions import CONFIGS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs"
PAGE = ROOT / "docs" / "presets.md"
# Devices of its nodes, and how many of all nodes' are used.
DEVICES = {
    "gsm8k_qwen25_1_5b": (3, 3),
    "r1_zero_qwen25_7b": (16, 16),
    "r1_zero_qwen25_32b": (16, 32),
    "ppo_qwen25_32b": (16, 48),
    "dapo_qwen3_30b_a3b": (16, 32),
    "atlas/grpo_qwen25_7b_a3": (16, 16),
    "atlas/grpo_qwen25_7b_a2": (8, 8),
    "atlas/grpo_qwen3_8b_a3": (16, 16),
    "atlas/grpo_qwen25_32b_a3": (16, 32),
    "atlas/grpo_qwen25_32b_a2": (8, 32),
    "atlas/ppo_qwen25_32b_a3": (16, 48),
    "atlas/ppo_qwen25_32b_a2": (8, 48),
    "atlas/dapo_qwen3_32b_a3": (16, 32),
    "atlas/dapo_qwen25_32b_a3": (16, 64),
    "atlas/dapo_qwen25_32b_a2": (8, 64),
}
UNPUBLISHED = {"grpo_qwen25_7b_a2", "ppo_qwen25_32b_a2"}
ROWS: dict[str, dict[str, Any]] = {
    row["name"]: row
    for row in yaml.safe_load((ROOT / "tests" / "unit" / "mindspeed" / "published.yaml").read_text(encoding="utf-8"))
}
QWEN25_3B = CONFIGS["qwen25_1.5b"] | {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16}
QWEN25_3B |= {"num_hidden_layers": 36}


def dimensions(model: str) -> dict[str, Any]:
    """Of a published model: `models/Qwen2.5-7B-Instruct`."""
    name = Path(model).name.lower().replace("qwen2.5", "qwen25").removesuffix("-instruct").replace("-", "_")
    return QWEN25_3B if name == "qwen25_3b" else CONFIGS[name]


def as_written(preset: str, folder: Path) -> list[str]:
    """The preset, and overrides that name data, and folders with the descriptions of its models alone."""
    path = FOLDER / f"{preset}.yaml"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    overrides = [f"data.train={rows(folder)}"]
    for key, model in raw["model"].items():
        named = folder / key
        named.mkdir()
        (named / "config.json").write_text(json.dumps(dimensions(model)))
        write_tokenizer(named)
        (named / "model.safetensors").touch()
        overrides.append(f"model.{key}={named}")
    return [str(path), *overrides]


def rows(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("{}\n")
    return folder / "train.jsonl"


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with megatron-core and devices, whose memory is not known."""
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: None)


def test_all_are_here_and_what_is_not_published_is_said_to_be_so() -> None:
    atlas = {f"atlas/{path.stem}" for path in (FOLDER / "atlas").glob("*")}
    assert {path.stem for path in FOLDER.glob("*_qwen*.yaml")} | atlas == set(DEVICES)
    assert {Path(preset).name for preset in atlas} - set(ROWS) == UNPUBLISHED
    for name in UNPUBLISHED:
        assert "| none |" in row_of_the_page(f"atlas/{name}")


@pytest.mark.parametrize("preset", DEVICES)
def test_it_is_valid_fills_its_nodes_and_its_memory_is_that_of_the_page(
    preset: str, tmp_path: Path, validated: Callable[..., tuple[int, str]]
) -> None:
    file, *overrides = as_written(preset, tmp_path)
    code, said = validated(file, *overrides)
    assert code == 0, said
    config = resolve(load(file, overrides))
    assert config.run.name == Path(preset).name
    told = row_of_the_page(preset)
    for role, held in memory_of_ranks(config).items():
        assert held.total < 0.75 * 64e9, role
        assert f"{role}: about {held.total / 1e9:.1f} GB a rank" in said
        assert f"{role} {held.total / 1e9:.1f}" in told
    each, wanted = DEVICES[preset]
    nodes = offers(config, NodeResources("here", each))
    assert {node.devices for node in nodes} == {each}
    placed = place(config, nodes)
    used = {(seat.node, device) for seat in placed.seats for device in seat.devices}
    assert not placed.pending
    assert len(used) == wanted == sum(node.devices for node in nodes)
    assert f"| {wanted} |" in told


@pytest.mark.parametrize(
    "preset", ["gsm8k_qwen25_1_5b", "dapo_qwen3_30b_a3b", "atlas/ppo_qwen25_32b_a3", "atlas/dapo_qwen3_32b_a3"]
)
def test_it_can_be_rehearsed(preset: str, tmp_path: Path, validated: Callable[..., tuple[int, str]]) -> None:
    """With a model of its own family, and a layout of one process a role that the families' tests run."""
    path = FOLDER / f"{preset}.yaml"
    family = dimensions(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["path"])["model_type"]
    overrides = [f"model=tiny:{family}", "services=one_machine", "cluster={}"]
    common = [str(path), f"data.train={rows(tmp_path)}", "sampling.max_new_tokens=32", *overrides]
    assert f"model.path: tiny:{family}" in validated(*common)[1]
    assert " ".join(overrides) in PAGE.read_text(encoding="utf-8")
    code, said = validated(*common, "services=one_machine_vllm", "services.rollout.python=python3")  # vLLM's may be missing
    assert code == 0, said
    assert described(f"tiny:{family}")["model_type"] == family  # type: ignore[index]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_published_row_has_a_preset_of_its_sizes(row: dict[str, Any]) -> None:
    name = row["name"]
    preset = f"atlas/{name}" if f"atlas/{name}" in DEVICES else name.removesuffix("_a3")
    config = load(FOLDER / f"{preset}.yaml")
    assert (config.algorithm.preset, config.training.groups_per_step) == (row["algorithm"], row["global_batch"])
    assert (config.sampling.group_size, config.sampling.max_new_tokens) == (row["group_size"], row["max_new_tokens"])
    assert config.data.max_prompt_tokens == row["max_prompt_tokens"]
    assert Path(config.model.path).name.removesuffix("-Instruct") == row["model"]
    assert name.endswith(row["hardware"].lower())
    assert f"| {row['e2e_tps_per_device']} |" in row_of_the_page(preset)


def row_of_the_page(preset: str) -> str:
    (row,) = re.findall(rf"^\| \[`{re.escape(preset)}`\].*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return row
