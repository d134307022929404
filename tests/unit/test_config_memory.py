"""Configuration: what processes hold against the memory that they have, where that is known and where it is not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from launcher import cli
from launcher.node import local_node
from launcher.node.local_node import LocalNode
from launcher.node.machine import Machine
from runtime.config import Config, model_checks
from runtime.config.loading import resolve
from runtime.config.model_checks import memory_of_ranks, spread_models
from runtime.errors import UserError
from runtime.models.limits import kv_cache_bytes
from runtime.models.tiny_model import write_tokenizer
from runtime.process import platform
from runtime.trainer.rank import TrainRank, make_rank
from tests.unit.config_cases import checked, model_folder
from tests.unit.model_dimensions import CONFIGS

CPUS, GPUS = Machine(), Machine(kind="cuda", devices=tuple("01234567"))


def test_kv_cache(sound: dict[str, Any]) -> None:
    # Qwen2.5-7B: 28 layers, 4 KV heads of 128; bf16 costs 57,344 bytes a token.
    qwen = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    assert kv_cache_bytes(qwen, 1, 1, 2) == 57_344
    assert kv_cache_bytes(qwen, 16, 1000, 4) == 57_344 * 2 * 16_000
    del qwen["num_key_value_heads"]
    assert kv_cache_bytes(qwen | {"head_dim": 64}, 1, 1, 2) == 57_344 * 7 // 2

    needed = 2 * (2 * 2 * 2 * 16 * 2) * (64 + 1) * 128  # 2 replicas of bf16; one sequence more is a probe
    services = {"rollout": {"replicas": 2, "dtype": "bfloat16"}}
    assert checked(sound, available_bytes=needed, services=services) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=services)
    assert fault.startswith("services.rollout.slots: 64 slots of 128 tokens in 2 replica(s) need 0.0 GiB of KV cache")
    fleets = {"rollout": [{"dtype": "bfloat16"}, {"replicas": 1, "dtype": "bfloat16"}]}
    assert checked(sound, available_bytes=needed, services=fleets) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=fleets)
    assert fault.startswith("services.rollout.1.slots: 64 slots")
    (fault,) = checked(sound, available_bytes=3 << 30, services={"rollout": {"slots": 1 << 18, "dtype": "float32"}})
    assert "need 16.0 GiB of KV cache; 3.0 GiB are available; if it is to run on devices, cluster.nodes says so" in fault


SPREAD: dict[str, Any] = {"services": {"trainer": {"engine": "megatron", "processes": 1}}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: True)


def held(raw: dict[str, Any], **changes: dict[str, Any]) -> int:
    merged = raw | {section: raw.get(section, {}) | values for section, values in changes.items()}
    config = resolve(msgspec.convert(merged, Config))
    return memory_of_ranks(config, spread_models(config), on_cpus=True)["trainer"].total


def test_micro_batches_that_no_rank_can_hold_are_refused_with_what_is_allowed(installed: None, sound: dict[str, Any]) -> None:
    many = SPREAD | {"training": {"max_tokens_per_microbatch": 1_000_000, "groups_per_step": 100_000}}
    needed = held(sound, **many)
    assert checked(sound, needed, **many) == []
    (fault,) = checked(sound, needed // 2, **many)
    assert fault.startswith("training.max_tokens_per_microbatch: 1000000 needs about ")
    allowed = int(re.findall(r"must be at most (\d+)", fault)[0])
    assert checked(sound, needed // 2, **many | {"training": many["training"] | {"max_tokens_per_microbatch": allowed}}) == []
    more = many["training"] | {"max_tokens_per_microbatch": allowed + 1000}
    assert checked(sound, needed // 2, **many | {"training": more}) != []
    # No step has so many: 4 groups of 4 samples of at most 128 tokens.
    without_limit: dict[str, Any] = SPREAD | {"training": {"max_tokens_per_microbatch": 10**9}}
    assert held(sound, **without_limit) < needed // 50
    # Conversations are longer than prompt and reply.
    assert held(sound, **without_limit, gateway={"context": 1024}) > held(sound, **without_limit)


def test_weights_that_no_rank_can_hold_are_refused(installed: None, sound: dict[str, Any]) -> None:
    vllm = {"services": SPREAD["services"] | {"rollout": {"engine": "vllm", "python": sys.executable}}}
    (fault,) = checked(sound, 1000, **vllm)
    assert fault.startswith("services.trainer.processes: 1 of them need 0.0 GB each without any activations, and have 0.0 GB")


@pytest.mark.parametrize(
    ("machine", "sections", "known"),
    [
        (CPUS, {}, True),
        (GPUS, {}, False),
        (CPUS, {"cluster": {"nodes": [{"name": "node0", "devices": 8}]}}, False),
        (CPUS, {"cluster": {"nodes": [{"name": "node0"}]}}, True),
        (CPUS, {"cluster": {"min_nodes": 2}}, False),
        (CPUS, {"services": {"rollout": {"devices": [0]}}}, False),
    ],
)
def test_memory_is_known_where_all_is_on_the_cpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, sections: dict[str, Any], known: bool
) -> None:
    monkeypatch.setattr(local_node.psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    config = msgspec.convert({"run": {"name": "a"}, **sections}, Config)
    assert LocalNode("node0", machine).memory(config) == (7 if known else None)


def validated(capsys: pytest.CaptureFixture[str], folder: Path, *overrides: str) -> tuple[int, str]:
    """Of the example in docs/guides/verl-and-trl.md with embedded rollouts, and a description in place of the model."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "verl-and-trl.md").read_text(encoding="utf-8")
    (example,) = (found for found in re.findall(r"```yaml\n(run: .*?)```", page, re.DOTALL) if "sets:" in found)
    (folder / "run.yaml").write_text(example)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (folder / "other.jsonl").write_text('{"prompt": "1+2", "answer": "3"}\n')
    model = model_folder(folder / "model")
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(CONFIGS["qwen25_7b"] | {"max_position_embeddings": 32768}))
    named = {"model.path": model, "data.train": folder / "rows.jsonl", "evaluation.sets.0.path": folder / "other.jsonl"}
    given = ["services.rollout={slots: 16}", *(f"{key}={value}" for key, value in named.items()), *overrides]
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", str(folder / "run.yaml"), *given])
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, said.out + said.err


def test_where_it_is_not_known_that_is_said(installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = validated(capsys, tmp_path)
    assert code == 0, said
    # bfloat16, as on a device: 57,344 bytes a token.
    slots = (16 + 1) * (2048 + 20480) * 57_344
    assert f"services.rollout: about {slots / 1e9:.1f} GB of KV cache a replica" in said
    assert "How much memory the devices have is not known here: each process compares when it starts" in said


def test_where_it_is_known_it_is_compared(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: 64 << 30)
    code, said = validated(capsys, tmp_path)
    assert code == 2
    assert "services.trainer.processes: 4 of them need" in said
    assert "cluster.nodes says so" in said


def test_a_rank_that_its_device_cannot_hold_is_refused_before_it_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS["qwen25_7b"]))  # and nothing to load
    raw = {"run": {"name": "a"}, "model": {"path": str(model)}, "training": {"max_tokens_per_microbatch": 1_000_000}}
    config = resolve(msgspec.convert(raw | {"services": {"trainer": {"engine": "megatron"}}}, Config))
    memory = platform.DeviceMemory(total=200 * 10**9, available=10**9)
    monkeypatch.setattr(platform, "device", lambda index: torch.device("cuda", 0))
    monkeypatch.setattr(platform, "memory", lambda where: memory)
    with pytest.raises(UserError) as refused:
        make_rank(TrainRank, config, 0, 1)
    assert re.fullmatch(
        r"training\.max_tokens_per_microbatch: 1000000 needs about \S+ GB in a process of services\.trainer, which has "
        r"200\.0 GB; must be at most \d+",
        str(refused.value),
    )
