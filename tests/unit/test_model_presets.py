"""The presets of configs/models: each is valid for its model, and what a rank holds fits a device of 64 GB."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.node.local_node import LocalNode
from runtime.config import Parallel, model_checks
from runtime.config.loading import load, preset_names, resolve
from runtime.config.model_checks import memory_of_ranks
from runtime.models.families import Layout, family_for
from runtime.models.families.memory import ModelWork, RankBytes, rank_bytes
from runtime.models.tiny_model import write_tokenizer
from tests.unit.model_dimensions import CONFIGS, PARAMETERS

DEVICE = 64e9  # bytes of the smallest device meant
ROOM = 0.75  # of it: the rest is for what no formula counts
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
ROWS = dict(re.findall(r"^\| `(\w[\w.]*)` \|.*\| ([\d.]+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE))
ONE_MACHINE = ["one_machine", "one_machine_vllm"]  # of no model, and of no number of devices
PRESETS = [name for name in preset_names("services.preset") if name not in ONE_MACHINE]


def model_of(preset: str) -> str:
    return preset.rpartition("_")[0]


def arguments(preset: str, folder: Path) -> list[str]:
    """A file of a run, and overrides that apply the preset to a folder that has the model's description alone."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[model_of(preset)]))
    write_tokenizer(model)
    (model / "model.safetensors").touch()
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "run.yaml").write_text(
        "run: {name: a}\n"
        "data: {handler: gsm8k}\n"
        "rewards: {rules: [{name: gsm8k}]}\n"
        "algorithm: {kl_coefficient: 0.01}\n"
        "training: {groups_per_step: 16}\n"
        "services: {rollout: {max_num_seqs: 8}}\n"
    )
    overrides = {"services.preset": preset, "model.path": model, "data.train": folder / "train.jsonl"}
    return [str(folder / "run.yaml"), *(f"{key}={value}" for key, value in overrides.items())]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with megatron-core and devices, whose memory is not known."""
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: None)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dimensions_are_those_of_the_published_models(name: str) -> None:
    parameters = family_for(CONFIGS[name]).parameters(Layout())
    assert sum(math.prod(parameter.shape) for parameter in parameters) == PARAMETERS[name]


def test_every_model_has_a_preset_for_either_kind_of_node_and_a_row_in_the_guide() -> None:
    assert sorted(f"{name}_{devices}" for name in CONFIGS for devices in (8, 16)) == PRESETS == sorted(ROWS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_valid_and_fits(preset: str, tmp_path: Path, validated: Callable[..., tuple[int, str]]) -> None:
    file, *overrides = arguments(preset, tmp_path)
    code, said = validated(file, *overrides)
    assert code == 0, said
    config = resolve(load(file, overrides))
    held = memory_of_ranks(config)
    assert ROWS[preset] == f"{held['trainer'].total / 1e9:.1f}", "what the guide says"
    for role, each in held.items():
        assert each.total < ROOM * DEVICE, role
        assert f"{role}: about {each.total / 1e9:.1f} GB a rank" in said
    assert config.services.critic == config.services.trainer
    assert config.services.trainer.parallel.tensor <= int(preset.rpartition("_")[2])


def test_what_the_user_writes_stands_over_the_preset(tmp_path: Path) -> None:
    file, *overrides = arguments("qwen25_7b_8", tmp_path)
    services = load(file, [*overrides, "services.trainer.parallel.tensor=2", "services.critic.processes=8"]).services
    assert (services.preset, services.rollout.max_num_seqs) == ("qwen25_7b_8", 8)
    assert services.trainer.parallel == Parallel(tensor=2, sequence=True)
    assert (services.trainer.engine, services.trainer.processes, services.critic.processes) == ("megatron", 4, 8)


class TestBytes:
    """Against sums made by hand, of a model with 2 layers, width 4, one head, an MLP of 6 and a vocabulary of 10, not tied."""

    CONFIG = {  # noqa: RUF012
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 2,
    }
    LAYER = 3 * 4 * 4 + 4 * 4 + 3 * 4 * 6 + 2 * 4 + 2 * 2  # q, k, v; output; MLP; two norms; those of queries and keys
    ENDS = 2 * 10 * 4 + 4  # embedding and head; the last norm

    def of(self, layout: Layout, **work: object) -> RankBytes:
        return rank_bytes(family_for(self.CONFIG), layout, ModelWork(**{"ranks": 1, "tokens": 5, **work}))  # type: ignore[arg-type]

    def test_of_one_rank(self) -> None:
        held, count = self.of(Layout()), 2 * self.LAYER + self.ENDS
        assert (held.weights, held.gradients, held.optimizer) == (2 * count, 4 * count, 12 * count)
        assert held.activations == 2 * 5 * 4 * 34 + 5 * 10 * 14

    def test_no_more_logits_than_are_made_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("runtime.models.families.memory.CHUNK_ELEMENTS", 20)
        assert self.of(Layout()).activations == 2 * 5 * 4 * 34 + 20 * 14

    def test_the_optimizer_alone_is_shared_out_over_blocks(self) -> None:
        one, four = self.of(Layout()), self.of(Layout(), ranks=4)
        assert (four.weights, four.gradients, four.optimizer) == (one.weights, one.gradients, one.optimizer // 4)

    def test_float32_has_no_second_copy(self) -> None:
        held, count = self.of(Layout(), width=4), 2 * self.LAYER + self.ENDS
        assert (held.weights, held.gradients, held.optimizer) == (4 * count, 4 * count, 8 * count)

    def test_of_the_stage_that_holds_most(self) -> None:
        held = self.of(Layout(pipeline=2), ranks=2, checkpointing=True)
        assert held.weights == 2 * (self.LAYER + 10 * 4 + 4)  # the last one: head and norm
        assert held.activations == 1 * 1 * 5 * 4 * 2 + 5 * 4 * 34 + 5 * 10 * 14

    def test_a_reference_holds_weights_alone(self) -> None:
        held = self.of(Layout(tensor=2), ranks=2, trains=False)
        assert (held.gradients, held.optimizer) == (0, 0)
        norms = 2 * (2 * 4 + 2 * 2) + 4
        assert held.weights == 2 * ((2 * self.LAYER + self.ENDS - norms) // 2 + norms)

    def test_experts_are_shared_out_over_the_blocks_that_hold_the_same(self) -> None:
        experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
        family = family_for(self.CONFIG | experts)
        held = rank_bytes(family, Layout(expert=2), ModelWork(ranks=4, tokens=5))
        expert, router = 3 * 4 * 6, 4 * 4
        shared = 2 * (self.LAYER - expert + router) + self.ENDS
        assert held.weights == 2 * (shared + 2 * 2 * expert)
        assert held.optimizer == 12 * shared // 4 + 12 * 2 * 2 * expert // 2
