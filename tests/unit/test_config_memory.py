"""Configuration: what processes hold against the memory that they have, and what is refused of a model on megatron-core."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from launcher.node import local_node
from launcher.node.local_node import LocalNode
from launcher.node.machine import Machine
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Trainer, model_checks
from runtime.config.checks import semantic_faults
from runtime.config.loading import load, resolve
from runtime.config.model_checks import megatron_faults, memory_of_ranks, spread_models
from runtime.errors import UserError
from runtime.models.limits import kv_cache_bytes
from runtime.process import platform
from runtime.trainer.rank import TrainRank, make_rank
from tests.unit.config_cases import EXPERTS, MODEL, cases, checked, configured
from tests.unit.model_dimensions import CONFIGS

CPUS, GPUS = Machine(), Machine(kind="cuda", devices=tuple("01234567"))
SPREAD: dict[str, Any] = {"services": {"trainer": {"engine": "megatron", "processes": 1}}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(model_checks, "_version", lambda: "0.16.1")


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


def held(raw: dict[str, Any], **changes: dict[str, Any]) -> int:
    merged = raw | {section: raw.get(section, {}) | values for section, values in changes.items()}
    config = resolve(msgspec.convert(merged, Config))
    return memory_of_ranks(config, spread_models(config), on_cpus=True)["trainer"].total


def test_micro_batches_that_no_rank_can_hold_are_refused_with_what_is_allowed(sound: dict[str, Any]) -> None:
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


def test_memory_is_known_where_all_is_on_the_cpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_node.psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    elsewhere = "cluster: {nodes: [{name: a, devices: 8}]}", "cluster: {min_nodes: 2}", "services: {rollout: {devices: [0]}}"
    for machine, known, unknown in ((CPUS, ("", "cluster: {nodes: [{name: a}]}"), elsewhere), (GPUS, (), ("",))):
        for sections in (*known, *unknown):
            config = msgspec.convert({"run": {"name": "a"}, **configured(sections)}, Config)
            assert LocalNode("node0", machine).memory(config) == (7 if sections in known else None)


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


# ------------------------------------------------------------------------------------------------ megatron-core


def faults(model: dict[str, Any] | None = MODEL, role: str = "trainer", **sections: Any) -> list[str]:
    config = msgspec.convert({"run": {"name": "test"}, **sections}, Config)
    return list(megatron_faults(config, {role: model}))


def services(processes: int, role: str = "trainer", **parallel: Any) -> dict[str, Any]:
    return {"services": {role: {"engine": "megatron", "processes": processes, "parallel": parallel}}}


LAYOUTS = """
processes: 1 => none
processes: 2, tensor: 2, sequence: true => none
processes: 12, tensor: 4, pipeline: 3 => none
processes: 24, tensor: 2, pipeline: 2, context: 3, data: 2 => none
processes: 4, pipeline: 4, layers_per_stage: [1, 2, 2, 1] => none
processes: 3, tensor: 2 => processes: 3 is not a multiple of parallel.tensor 2 x context 1 x pipeline 1
processes: 2, context: 2, pipeline: 2 => processes: 2 is not a multiple of parallel.tensor 1 x context 2 x pipeline 2
processes: 4, tensor: 2, data: 3
  => processes: 4 is not parallel.tensor 2 x context 1 x pipeline 1 x data 3; must be 6, or left out
sequence: true => parallel.sequence: true needs parallel.tensor > 1
processes: 4, pipeline: 4 => parallel: pipeline parallel is 4; must divide the layers (6)
processes: 8, tensor: 8 => parallel: tensor parallel is 8; must divide attention heads (12)
processes: 2, pipeline: 2, layers_per_stage: [2, 3]
  => parallel: layers per stage are 2,3; must be positive and add up to the layers (6)
processes: 4, pipeline: 4, layers_per_stage: [1, 1, 3, 1]
  => parallel.layers_per_stage: [1, 1, 3, 1]: all but the first and the last number must be equal
processes: 2, expert: 2 => parallel: expert parallel is 2; must be 1 for a model without experts
experts: true, processes: 8, expert: 2 => none
experts: true, processes: 16, tensor: 2, pipeline: 2, expert: 4, sequence: true => none
experts: true, processes: 4, tensor: 2, expert: 4, sequence: true
  => parallel.expert: 4 does not divide the ranks that hold the same part of the model, of which 4 processes of
experts: true, processes: 3, expert: 3 => parallel: expert parallel is 3; must divide the experts of a layer (4)
experts: true, processes: 2, tensor: 2
  => parallel.sequence: must be true for a mixture of experts with parallel.tensor 2
"""


@pytest.mark.parametrize(("layout", "fault"), cases(LAYOUTS))
def test_layouts(layout: dict[str, Any], fault: str) -> None:
    parallel = {key: value for key, value in layout.items() if key not in ("experts", "processes")}
    found = faults(MODEL | EXPERTS if "experts" in layout else MODEL, **services(layout.get("processes", 1), **parallel))
    assert found == [] if fault == "none" else found[0].startswith(f"services.trainer.{fault}")


def test_an_older_version_does_not_cut_up_a_tied_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tied, cut = MODEL | {"tie_word_embeddings": True}, services(2, pipeline=2)
    assert faults(tied, **cut) == []
    monkeypatch.setattr(model_checks, "_version", lambda: "0.12.1")
    (fault,) = faults(tied, **cut)
    assert fault.startswith("services.trainer.parallel.pipeline: 2: megatron-core 0.12.1 cannot cut up a model whose head")
    assert faults(**cut) == []
    assert faults(tied, "critic", critic={}, **services(2, "critic", pipeline=2)) == []
    cut["services"]["trainer"]["python"] = "/other/python"  # which has another version, perhaps
    assert faults(tied, **cut) == []


def test_the_critics_model_is_its_own() -> None:
    found = faults(MODEL | {"num_key_value_heads": 3}, "critic", critic={}, **services(4, "critic", tensor=4))
    assert found == ["services.critic.parallel: tensor parallel is 4; must divide key-value heads (3)"]


REFERENCES = """
engine: megatron, processes: 4, parallel: {tensor: 4} => none
engine: megatron, processes: 8, parallel: {tensor: 8} => parallel: tensor parallel is 8; must divide attention heads (12)
engine: megatron, replicas: 2 => replicas: 2 is for engine torch; engine megatron takes processes
processes: 2 => processes: 2 is for engine megatron; engine torch takes replicas
parallel: {tensor: 2} => parallel: is for engine megatron; engine torch has one process a replica
backend: gloo => backend: gloo is for engine megatron; engine torch has one process a replica
"""


@pytest.mark.parametrize(("settings", "fault"), cases(REFERENCES))
def test_the_reference_is_spread_or_has_replicas(tmp_path: Path, settings: dict[str, Any], fault: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    sections = {"run": {"name": "a"}, "model": {"path": str(tmp_path)}, "services": {"reference": settings}}
    told = semantic_faults(msgspec.convert(sections | {"algorithm": {"kl_coefficient": 0.1}}, Config))
    found = [each for each in told if each.startswith("services.reference")]
    assert (not found if fault == "none" else found[0].startswith(f"services.reference.{fault}")) and len(found) <= 2


def test_the_warm_ups_model_is_checked_too() -> None:
    config = msgspec.convert({"run": {"name": "test"}, "warmup": {"layers": 3}, **services(2, pipeline=2)}, Config)
    told = [fault for fault in semantic_faults(config) if fault.startswith("services")]
    assert told == ["services.trainer.parallel: pipeline parallel is 2; must divide the layers (3), or give layers per stage"]


ENGINES = """
services: {trainer: {engine: megatron, cpu_offload: true}}
  => services.trainer.cpu_offload: is engine torch's; must be false for engine megatron
training: {optimizer: {name: muon}}, services: {trainer: {engine: megatron}}
  => training.optimizer.name: muon is engine torch's; must be adamw for engine megatron
role: critic, critic: {optimizer: {name: adamw_8bit}}, services: {critic: {engine: megatron}}
  => critic.optimizer.name: adamw_8bit is engine torch's; must be adamw for engine megatron
services: {trainer: {processes: 2, parallel: {tensor: 2}}} => services.trainer.parallel: is for engine megatron
checkpoint: {async_save: true} => checkpoint.async_save: 
services: {trainer: {overlap: false, offload_train_grad: true, offload_train_param: true}} => services.trainer.overlap: 
services: {trainer: {engine: megatron, overlap: false, offload_train_param: true}}, checkpoint: {async_save: true} => none
role: critic, critic: {}, services: {critic: {engine: torch, offload_train_param: true}}
  => services.critic.offload_train_param: true leaves it no weights to compute values with
role: critic, critic: {}, services: {critic: {engine: megatron, offload_train_param: true}}
  => services.critic.offload_train_param: true leaves it no weights to compute values with
services: {trainer: {cpu_offload: true, offload_train_grad: true}} => services.trainer.offload_train_grad: 
services: {trainer: {cpu_offload: true, offload_train_param: true}} => services.trainer.offload_train_param: 
services: {trainer: {engine: megatron}}, platform: true
  => services.trainer.engine: megatron needs Megatron-LM and MindSpeed: install them (docs/guides/ascend.md)
"""


@pytest.mark.parametrize(("sections", "fault"), cases(ENGINES))
def test_what_is_one_engines_alone(sections: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sections.pop("platform", False):
        monkeypatch.setattr(model_checks, "_installed", lambda: False)
        sections["services"]["platform"] = "ascend"
    found = faults(**sections)
    assert [each[: len(fault.strip())] for each in found] == [fault.strip()] * (fault != "none")


ADAPTERS = """
targets: [], tensor: 2 => none
targets: [q_proj, layers.4.mlp.up_proj], pipeline: 2 => none
targets: [query], tensor: 2 => lora.target_modules: 'query' is no linear layer of the model; must be among down_proj, gate_
targets: [layers.4.mlp.up_proj], pipeline: 2
  => lora.target_modules: ['layers.4.mlp.up_proj'] leaves ranks of pipeline stage 0
"""


@pytest.mark.parametrize(("layout", "fault"), cases(ADAPTERS))
def test_every_rank_has_adapters(layout: dict[str, Any], fault: str) -> None:
    lora, parallel = {"target_modules": layout["targets"]}, {key: layout[key] for key in layout if key != "targets"}
    found = faults(lora=lora, **services(2, **parallel))
    assert [each[: len(fault)] for each in found] == [fault] * (fault != "none")
    assert not faults(role="critic", lora=lora, **services(2, "critic", **parallel))


def test_all_experts_have_adapters_or_none() -> None:
    spread = services(2, expert=2)
    assert not faults(MODEL | EXPERTS, lora={"target_modules": ["mlp.experts.0.up_proj", "mlp.experts.2.up_proj"]}, **spread)
    (fault,) = faults(MODEL | EXPERTS, lora={"target_modules": ["q_proj", "mlp.experts.0.up_proj"]}, **spread)
    assert fault.startswith(
        "lora.target_modules: ['mlp.experts.0.up_proj', 'q_proj'] leaves ranks of pipeline stage 0 with fewer"
    )


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: False)
    (fault,) = faults(**services(1))
    assert fault == "services.trainer.engine: megatron needs a package: pip install 'sluice-rl[megatron]'"
    elsewhere = services(1)
    elsewhere["services"]["trainer"]["python"] = "/other/python"  # whose packages are not this process's
    assert faults(**elsewhere) == []


LEADERS = """
processes: 1 => [0]
processes: 3 => [0, 1, 2]
processes: 2, parallel: {tensor: 2} => [0]
processes: 8, parallel: {tensor: 2, pipeline: 2} => [0, 2]
processes: 6, parallel: {pipeline: 2} => [0, 1, 2]
processes: 16, parallel: {tensor: 2, context: 2, pipeline: 2} => [0, 4]
"""


@pytest.mark.parametrize(("settings", "leaders"), cases(LEADERS))
def test_the_first_rank_of_each_block_is_given_data(settings: dict[str, Any], leaders: str) -> None:
    assert str(list(data_leaders(msgspec.convert(settings, Trainer)))) == leaders


def test_processes_that_are_left_out_are_as_many_as_the_layout_has_places(tmp_path: Path) -> None:
    def processes(trainer: str, *overrides: str) -> list[int]:
        file = tmp_path / "config.yaml"
        file.write_text(f"{{run: {{name: a}}, services: {{trainer: {{{trainer}}}, critic: {{engine: megatron}}}}}}")
        services = load(file, overrides).services
        return [services.trainer.processes, services.critic.processes]

    assert processes("engine: megatron, parallel: {tensor: 2, context: 3, pipeline: 2}") == [12, 1]
    assert processes("engine: megatron, parallel: {tensor: 2}", "services.trainer.parallel.data=4") == [8, 1]
    assert processes("engine: megatron, parallel: {tensor: 2}", "services.critic.parallel.tensor=2") == [2, 2]
    assert processes("engine: megatron, processes: 8, parallel: {tensor: 2}") == [8, 1]
    assert processes("engine: torch, parallel: {tensor: 2}") == [1, 1]
