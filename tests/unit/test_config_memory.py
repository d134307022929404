"""Configuration: what processes hold against the memory that they have, and what is refused of a model on megatron-core."""

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
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Trainer, model_checks
from runtime.config.checks import semantic_faults
from runtime.config.loading import load, resolve
from runtime.config.model_checks import megatron_faults, memory_of_ranks, spread_models
from runtime.errors import UserError
from runtime.models.limits import kv_cache_bytes
from runtime.models.tiny_model import write_tokenizer
from runtime.process import platform
from runtime.trainer.rank import TrainRank, make_rank
from tests.unit.config_cases import EXPERTS, MODEL, cases, checked, model_folder
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


def test_weights_that_no_rank_can_hold_are_refused(sound: dict[str, Any]) -> None:
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
    folder.mkdir()
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


def test_memory_is_compared_where_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = validated(capsys, tmp_path / "unknown")
    assert code == 0, said
    # bfloat16, as on a device: 57,344 bytes a token.
    slots = (16 + 1) * (2048 + 20480) * 57_344
    assert f"services.rollout: about {slots / 1e9:.1f} GB of KV cache a replica" in said
    assert "How much memory the devices have is not known here: each process compares when it starts" in said
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: 64 << 30)
    code, said = validated(capsys, tmp_path / "known")
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


# ------------------------------------------------------------------------------------------------ megatron-core


def faults(model: dict[str, Any] | None = MODEL, role: str = "trainer", **sections: Any) -> list[str]:
    config = msgspec.convert({"run": {"name": "test"}, **sections}, Config)
    return list(megatron_faults(config, {role: model}))


def services(processes: int, role: str = "trainer", **parallel: Any) -> dict[str, Any]:
    return {"services": {role: {"engine": "megatron", "processes": processes, "parallel": parallel}}}


LAYOUTS = """
processes: 1 => none
processes: 8 => none
processes: 2, tensor: 2, sequence: true => none
processes: 12, tensor: 4, pipeline: 3 => none
processes: 24, tensor: 2, pipeline: 6 => none
processes: 24, tensor: 2, pipeline: 2, context: 3 => none
processes: 24, tensor: 2, pipeline: 2, context: 3, data: 2 => none
processes: 4, pipeline: 4, layers_per_stage: [1, 2, 2, 1] => none
processes: 2, pipeline: 2, layers_per_stage: [2, 4] => none
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
experts: true, processes: 1 => none
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


def test_what_it_does_not_do() -> None:
    whole = services(2, tensor=2)
    (fault,) = faults(services={"trainer": whole["services"]["trainer"] | {"cpu_offload": True}})
    assert fault == "services.trainer.cpu_offload: is engine torch's; must be false for engine megatron"
    (fault,) = faults(training={"optimizer": {"name": "muon"}}, **whole)
    assert fault == "training.optimizer.name: muon is engine torch's; must be adamw for engine megatron"
    own = {"critic": {"optimizer": {"name": "adamw_8bit"}}, "services": {"critic": whole["services"]["trainer"]}}
    (fault,) = faults(role="critic", **own)
    assert fault == "critic.optimizer.name: adamw_8bit is engine torch's; must be adamw for engine megatron"
    (fault,) = faults(MODEL | {"model_type": "deepseek_v2"}, **whole)
    assert "model_type 'deepseek_v2' has no mapping to megatron-core" in fault
    (fault,) = faults(services={"trainer": {"processes": 2, "parallel": {"tensor": 2}}})
    assert fault.startswith("services.trainer.parallel: is for engine megatron")


@pytest.mark.parametrize(
    ("targets", "layout", "fault"),
    [
        ([], {"tensor": 2}, ""),
        (["q_proj", "layers.4.mlp.up_proj"], {"pipeline": 2}, ""),
        (
            ["query"],
            {"tensor": 2},
            "lora.target_modules: 'query' is no linear layer of the model; must be among down_proj, gate_",
        ),
        (
            ["layers.4.mlp.up_proj"],
            {"pipeline": 2},
            "lora.target_modules: ['layers.4.mlp.up_proj'] leaves ranks of pipeline stage 0",
        ),
    ],
)
def test_every_rank_has_adapters(targets: list[str], layout: dict[str, Any], fault: str) -> None:
    found = faults(lora={"target_modules": targets}, **services(2, **layout))
    assert [fault] == [each[: len(fault)] for each in found] if fault else not found
    assert not faults(role="critic", lora={"target_modules": targets}, **services(2, "critic", **layout))


def test_all_experts_have_adapters_or_none() -> None:
    spread = services(2, expert=2)
    assert not faults(MODEL | EXPERTS, lora={"target_modules": ["mlp.experts.0.up_proj", "mlp.experts.2.up_proj"]}, **spread)
    (fault,) = faults(MODEL | EXPERTS, lora={"target_modules": ["q_proj", "mlp.experts.0.up_proj"]}, **spread)
    assert fault.startswith(
        "lora.target_modules: ['mlp.experts.0.up_proj', 'q_proj'] leaves ranks of pipeline stage 0 with fewer"
    )


def test_what_is_for_it_alone() -> None:
    away = {"offload_train_grad": True, "offload_train_param": True}
    asked = {"services": {"trainer": {"overlap": False, **away}}, "checkpoint": {"async_save": True}}
    assert [fault.partition(": ")[0] for fault in faults(**asked)] == ["checkpoint.async_save", "services.trainer.overlap"]
    asked["services"]["trainer"]["engine"] = "megatron"
    assert faults(**asked) == []
    for engine in ("torch", "megatron"):
        (fault,) = faults(role="critic", critic={}, services={"critic": {"engine": engine, **away}})
        assert fault.startswith("services.critic.offload_train_param: true leaves it no weights to compute values with")
    there = [f"services.trainer.offload_train_{kind}" for kind in ("grad", "param")]
    found = faults(services={"trainer": {"cpu_offload": True, **away}})
    assert [fault.partition(":")[0] for fault in found] == there


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_installed", lambda: False)
    (fault,) = faults(**services(1))
    assert fault == "services.trainer.engine: megatron needs a package: pip install 'sluice-rl[megatron]'"
    elsewhere = services(1)
    elsewhere["services"]["platform"] = "ascend"
    (fault,) = faults(**elsewhere)
    assert fault == "services.trainer.engine: megatron needs Megatron-LM and MindSpeed: install them (docs/guides/ascend.md)"
    elsewhere["services"]["trainer"]["python"] = "/other/python"  # whose packages are not this process's
    assert faults(**elsewhere) == []


def test_the_first_rank_of_each_block_is_given_data() -> None:
    def leaders(**settings: Any) -> list[int]:
        return list(data_leaders(msgspec.convert(settings, Trainer)))

    assert leaders() == [0]
    assert leaders(processes=3) == [0, 1, 2]
    assert leaders(processes=2, parallel={"tensor": 2}) == [0]
    assert leaders(processes=8, parallel={"tensor": 2, "pipeline": 2}) == [0, 2]
    assert leaders(processes=6, parallel={"pipeline": 2}) == [0, 1, 2]
    assert leaders(processes=16, parallel={"tensor": 2, "context": 2, "pipeline": 2}) == [0, 4]


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
