"""Configuration: what processes hold against the memory that they have, what megatron-core takes of a model, what is said of
rewards and of environments."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from launcher.node import local_node
from launcher.node.local_node import LocalNode, Machine
from runtime.cluster.topology import data_leaders, instances, path_of, players, settings_of
from runtime.config import Config, Trainer, model_checks
from runtime.config.checks import environment_faults, semantic_faults
from runtime.config.loading import load, resolve
from runtime.config.model_checks import megatron_faults, memory_of_copies, memory_of_ranks
from runtime.config.service_checks import rollout_faults
from runtime.errors import UserError
from runtime.models import hf_folder
from runtime.models.families import family_for
from runtime.models.limits import kv_cache_bytes
from runtime.process import platform
from runtime.trainer.rank import TrainRank, make_rank
from tests.unit.config_cases import EXPERTS, MODEL, Loading, cases, checked, configured
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
    assert fault.startswith("services.rollout.max_num_seqs: 64 slots of 128 tokens in 2 replica(s) need 0.0 GiB of KV cache")
    fleets = {"rollout": [{"dtype": "bfloat16"}, {"replicas": 1, "dtype": "bfloat16"}]}
    assert checked(sound, available_bytes=needed, services=fleets) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=fleets)
    assert fault.startswith("services.rollout.1.max_num_seqs: 64 slots")
    (fault,) = checked(sound, available_bytes=3 << 30, services={"rollout": {"max_num_seqs": 1 << 18, "dtype": "float32"}})
    assert "need 16.0 GiB of KV cache; 3.0 GiB are available; if it is to run on devices, cluster.nodes says so" in fault


def test_copies_in_memory_have_to_fit(sound: dict[str, Any]) -> None:
    """Two versions of float32 weights and two moments: 24 bytes an element."""
    config = resolve(msgspec.convert(sound, Config))
    needed = memory_of_copies(config)["trainer"]
    shapes = family_for(hf_folder.read_raw(config.model.path)).tensors().values()
    assert needed == 24 * sum(map(math.prod, shapes))
    muon = resolve(msgspec.convert(sound | {"training": {"optimizer": {"name": "muon"}}}, Config))
    assert 3 * memory_of_copies(muon)["trainer"] == 2 * needed
    faults = [fault for fault in checked(sound, needed - 1) if "in_memory" in fault]
    assert faults == ["checkpoint.in_memory: auto needs 0.0 GiB of host memory, 0.0 GiB are available; must be off"]
    assert not [fault for fault in checked(sound, needed) if "in_memory" in fault]
    off = {"checkpoint": {"in_memory": "off"}}
    assert not [fault for fault in checked(sound, needed - 1, **off) if "in_memory" in fault]
    (fault,) = checked(sound, services={"trainer": {"elastic": True}}, **off)
    assert fault == "services.trainer.elastic: true needs the copies of checkpoint.in_memory, which is off; must be false"


def held(raw: dict[str, Any], **changes: dict[str, Any]) -> int:
    merged = raw | {section: raw.get(section, {}) | values for section, values in changes.items()}
    config = resolve(msgspec.convert(merged, Config))
    return memory_of_ranks(config, on_cpus=True)["trainer"].total


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
"""


@pytest.mark.parametrize(("settings", "fault"), cases(REFERENCES))
def test_the_reference_is_spread_or_has_replicas(tmp_path: Path, settings: dict[str, Any], fault: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    sections = {"run": {"name": "a"}, "model": {"path": str(tmp_path)}, "services": {"reference": settings}}
    told = semantic_faults(msgspec.convert(sections | {"algorithm": {"kl_coefficient": 0.1}}, Config))
    found = [each for each in told if each.startswith("services.reference")]
    assert (not found if fault == "none" else found[0].startswith(f"services.reference.{fault}")) and len(found) <= 2


NODES = """
parallel: {tensor: 4, nodes: 2} => none
parallel: {tensor: 1, data: 4, nodes: 2} => none
parallel: {tensor: 3, nodes: 2} => nodes: 2 does not divide parallel.tensor × pipeline, 3; must divide it
parallel: {tensor: 2, data: 3, nodes: 2} => nodes: 2 does not divide parallel.data, 3; must divide it
parallel: {tensor: 4, nodes: 4} => nodes: 4, but cluster has 2; must be at most that
parallel: {tensor: 2, nodes: 2}, placement: [a] => nodes: 2, but placement has 1; must be at most that
parallel: {tensor: 2, nodes: 2}, devices: [0] => nodes: 2 does not go with devices [0]; must be 1, or that be left out
parallel: {tensor: 2, nodes: 2}, colocate: trainer
  => nodes: 2 does not go with colocate trainer; must be 1, or that be left out
parallel: {tensor: 2, nodes: 2}, staging: 1000
  => nodes: 2 does not go with weight_sync.staging_bytes 1000; must be 1, or that be left out
"""


@pytest.mark.parametrize(("rollout", "fault"), cases(NODES))
def test_an_engine_over_nodes_that_cannot_be_is_one_line(rollout: dict[str, Any], fault: str) -> None:
    given, staging = dict(rollout), rollout.get("staging", 0)
    given.pop("staging", None)
    sections = {"cluster": {"nodes": [{"name": "a"}, {"name": "b"}]}, "weight_sync": {"staging_bytes": staging}}
    fleet = {"engine": "vllm", "python": "/vllm/python", **given}
    config = msgspec.convert({"run": {"name": "test"}, "services": {"rollout": fleet}, **sections}, Config)
    found = [each for each in rollout_faults(config, None) if "nodes" in each]
    assert found == ([] if fault == "none" else [f"services.rollout.parallel.{fault}"])


def test_the_warm_ups_model_is_checked_too() -> None:
    config = msgspec.convert({"run": {"name": "test"}, "warmup": {}, **services(3, pipeline=3)}, Config)
    told = [fault for fault in semantic_faults(config) if fault.startswith("services")]
    assert told == ["services.trainer.parallel: pipeline parallel is 3; must divide the layers (4), or give layers per stage"]


ENGINES = """
services: {trainer: {engine: megatron, cpu_offload: true}}
  => services.trainer.cpu_offload: is engine torch's; must be false for engine megatron
training: {optimizer: {name: muon}}, services: {trainer: {engine: megatron}}
  => training.optimizer.name: muon is engine torch's; must be adamw for engine megatron
role: critic, training: {optimizer: {name: adamw_8bit}}, services: {critic: {engine: megatron}}
  => training.optimizer.name: adamw_8bit is engine torch's; must be adamw for engine megatron
services: {trainer: {processes: 2, parallel: {tensor: 2}}} => services.trainer.parallel: is for engine megatron
checkpoint: {async_save: true} => checkpoint.async_save: 
services: {trainer: {engine: megatron, offload: [param]}}, checkpoint: {async_save: true} => none
role: critic, critic: {}, services: {critic: {engine: torch, offload: [param]}}
  => services.critic.offload: param leaves it no weights to compute values with
role: critic, critic: {}, services: {critic: {engine: megatron, offload: [optimizer, param]}}
  => services.critic.offload: param leaves it no weights to compute values with
services: {trainer: {cpu_offload: true, offload: [grad]}} => services.trainer.offload: grad, but with cpu_offload 
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


SPREAD_EXPERTS = """
experts: true, processes: 4, expert: 2 => none
experts: true, role: critic, processes: 4, expert: 4 => none
experts: true, processes: 3, expert: 2 => does not divide its 3 processes
processes: 2, expert: 2 => is for models with experts
experts: true, processes: 3, expert: 3 => does not divide the 4 experts of a layer
experts: true, processes: 2, expert: 2, lora: {} => is not for adapters (lora)
experts: true, processes: 2, expert: 2, training: {optimizer: {name: adamw_8bit}} => none
experts: true, processes: 2, expert: 2, training: {optimizer: {name: muon}} => is not for training.optimizer.name muon
"""


@pytest.mark.parametrize(("case", "fault"), cases(SPREAD_EXPERTS))
def test_engine_torch_spreads_experts(case: dict[str, Any], fault: str) -> None:
    role, expert, processes = case.pop("role", "trainer"), case.pop("expert"), case.pop("processes")
    model = MODEL | EXPERTS if case.pop("experts", False) else MODEL
    more = {"critic": {}} if role == "critic" else {}
    spread = {"services": {role: {"processes": processes, "parallel": {"expert": expert}}}}
    expected = [] if fault == "none" else [f"services.{role}.parallel.expert: {expert} {fault}; must be 1"]
    assert faults(model, role, **case, **more, **spread) == expected


def test_joined_experts_are_not_spread() -> None:
    joined = MODEL | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    (fault,) = faults(joined, services={"trainer": {"processes": 2, "parallel": {"expert": 2}}})
    assert fault == "services.trainer.parallel.expert: 2 is not for gpt_oss, whose experts are joined; must be 1"


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


REMOTE = {"name": "taste", "address": "127.0.0.1:50051"}
RULE = {"name": "gsm8k"}
QUIET = {"before": False, "after": False}
KEY = "services.environment.game"
OTHER: dict[str, Any] = {"server": {"address": "127.0.0.1:5000"}}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "policy", architectures=["Qwen2ForCausalLM"])


def write_folder(folder: Path, tokenizer: bool = True, **settings: Any) -> Path:
    folder.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 100, "intermediate_size": 8}
    shape |= {"model_type": "qwen2", **settings}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def make(policy: Path, **sections: Any) -> Config:
    data = policy.parent / "data.jsonl"
    data.write_text("{}\n")
    raw = {"run": {"name": "a"}, "model": {"path": str(policy)}, "data": {"train": str(data)}, **sections}
    return msgspec.convert(raw, Config)


def said_of(policy: Path, rewards: dict[str, Any], **sections: Any) -> list[str]:
    return semantic_faults(make(policy, rewards=rewards, **sections), available_bytes=1 << 40)


def classifier(folder: Path, **settings: Any) -> Path:
    labels = {"0": "LABEL_0"}
    return write_folder(folder, **{"architectures": ["Qwen2ForSequenceClassification"], "id2label": labels, **settings})


def test_addresses(policy: Path) -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:65535", "localhost:50051", "[::1]:50051", "127.0.0.1:00080"):
        assert said_of(policy, {"rules": [RULE], "remote": [REMOTE | {"address": address}]}) == []
    none = [":50051", "judge", "judge:", "judge:0", "judge:65536", "judge:http", "http://judge:80", "::1:50051"]
    for address in ("", "a b:1", *none):
        (fault,) = said_of(policy, {"rules": [RULE], "remote": [REMOTE | {"address": address}]})
        assert fault == f"rewards.remote.0.address: '{address}' is not HOST:PORT, with a port from 1 to 65535"


def test_another_machine_has_to_be_allowed(policy: Path) -> None:
    """ENVIRONMENTS has what else is said of one that others run: its certificates and its token."""
    for address in ("10.0.0.7:50051", "judge.example:50051", "[fe80::1]:50051", "0.0.0.0:50051"):
        remote = REMOTE | {"address": address}
        (fault,) = said_of(policy, {"rules": [RULE], "remote": [REMOTE | {"name": "first"}, remote]})
        assert fault.startswith(f"rewards.remote.1.address: '{address}' is not this machine")
        assert "rewards.remote.1.plaintext" in fault
        for allowed in ({"plaintext": True}, {"ca": "system"}):
            assert said_of(policy, {"rules": [RULE], "remote": [remote | allowed]}) == []
    both = "rewards.remote.0.plaintext: true, but there is rewards.remote.0.ca; must be one of the two"
    assert said_of(policy, {"rules": [RULE], "remote": [remote | {"ca": "system", "plaintext": True}]}) == [both]


@pytest.mark.parametrize("name", ["taste", "gsm8k", "own", "reward_model", "a/b"])
def test_names_are_not_given_twice_and_are_parts_of_a_metrics(policy: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text("")
    model = {"path": str(classifier(tmp_path / "reward"))}
    rules = [RULE, {"name": f"{tmp_path}/mine.py:own"}]
    (fault,) = said_of(policy, {"rules": rules, "model": model, "remote": [REMOTE, REMOTE | {"name": name}]})
    assert fault.startswith(f"rewards.remote.1.name: '{name}'" + (" is taken" if name != "a/b" else ""))


def test_a_remote_reward_answers_before_the_coordinator_gives_up(policy: Path) -> None:
    rewards = {"rules": [RULE], "remote": [REMOTE | {"timeout": 20}]}
    (fault,) = said_of(policy, rewards, deadlines={"score": 20})
    assert fault == "rewards.remote.0.timeout: 20 is not below deadlines.score 20"


def test_a_reward_model_is_a_classifier_with_one_label(policy: Path, tmp_path: Path) -> None:
    def fault(folder: Path, **settings: Any) -> str:
        (line,) = said_of(policy, {"rules": [RULE], "model": {"path": str(folder), **settings}})
        return line

    assert said_of(policy, {"rules": [RULE], "model": {"path": str(classifier(tmp_path / "sound"))}}) == []
    assert fault(tmp_path / "none") == f"rewards.model.path: '{tmp_path / 'none'}' is not a folder"
    assert "is not a sequence classifier" in fault(policy)
    assert "has not one label" in fault(classifier(tmp_path / "two", id2label={"0": "a", "1": "b"}))
    unnamed = classifier(tmp_path / "unnamed", id2label=None)
    assert "has not one label" in fault(unnamed)  # transformers' default is two
    limited = classifier(tmp_path / "limited", max_position_embeddings=64)
    assert fault(limited, max_tokens=65) == "rewards.model.max_tokens: 65 is above the model's 64 positions"


def test_a_reward_model_that_reads_tokens_knows_the_policys(policy: Path, tmp_path: Path) -> None:
    def found(folder: Path, **settings: Any) -> list[str]:
        return said_of(policy, {"rules": [RULE], "model": {"path": str(folder), **settings}})

    small = classifier(tmp_path / "small", vocab_size=99)
    assert found(small) == []  # it has a tokenizer of its own
    (fault,) = found(small, input="tokens")
    assert "has a vocabulary of 99 tokens, the policy one of 100" in fault
    bare = classifier(tmp_path / "bare", tokenizer=False, vocab_size=99)
    assert len(found(bare)) == 1
    (fault,) = found(classifier(tmp_path / "large", tokenizer=False, vocab_size=128), input="text")
    assert fault.endswith("has no tokenizer.json")


def test_an_evaluation_needs_a_rule(policy: Path, tmp_path: Path) -> None:
    rewards = {"model": {"path": str(classifier(tmp_path / "reward"))}}
    data = {"train": str(policy / "config.json"), "eval": str(policy / "config.json")}
    for evaluation in ({}, {"before": False}, {"after": False}, {"every": 3, **QUIET}):
        (fault,) = said_of(policy, rewards, data=data, evaluation=evaluation)
        assert fault.startswith("rewards.rules: empty; an evaluation's accuracy is by the first rule")
        assert said_of(policy, rewards | {"rules": [RULE | {"weight": 0}]}, data=data, evaluation=evaluation) == []
    assert said_of(policy, rewards, data=data, evaluation=QUIET) == []
    assert said_of(policy, rewards, evaluation={"before": True}) == []  # there is nothing to evaluate on


def test_whoever_plays_may_be_the_only_one_to_give_rewards(policy: Path) -> None:
    none = "rewards.rules: empty; at least one rule, remote or model is needed"
    assert said_of(policy, {}, gateway={}) == []
    assert said_of(policy, {"environment": 0}, gateway={}) == [none]
    assert said_of(policy, {}) == [none]


def test_its_column_is_nobody_else_s(policy: Path) -> None:
    taken = {"rules": [RULE], "remote": [REMOTE | {"name": "environment"}]}
    assert said_of(policy, taken) == []
    assert [each.partition(":")[0] for each in said_of(policy, taken, gateway={})] == ["rewards.remote.0.name"]
    (policy.parent / "own.py").write_text("")
    (found,) = said_of(policy, {"rules": [{"name": f"{policy.parent}/own.py:environment"}]}, gateway={})
    assert found.startswith("rewards.rules: 'environment' is what")


def test_a_discount_by_turns_is_not_ignored(policy: Path) -> None:
    for advantage, told in (("group_norm", []), ("reinforce_plus_plus", ["algorithm.turn_discount"])):
        found = said_of(policy, {"rules": [RULE]}, algorithm={"advantage": advantage, "turn_discount": 0.9})
        assert [each.partition(":")[0] for each in found] == told


def test_a_worker_waits_for_its_sandbox(policy: Path) -> None:
    sandbox = {"timeout": 10.0, "memory": 1 << 30}
    assert said_of(policy, {"rules": [RULE], "sandbox": sandbox}) == []
    assert said_of(policy, {"rules": [{"name": "code"}]}) == []
    assert said_of(policy, {"rules": [{"name": "code"}], "sandbox": sandbox}) == [
        "rewards.sandbox.timeout: 10 is not below rewards.timeout 10",
        f"rewards.sandbox.memory: {1 << 30} is more than rewards.memory_bytes {384 << 20}, which bounds it",
    ]
    assert said_of(policy, {"rules": [{"name": "code_share"}], "sandbox": {"network": "gateway"}}) == [
        "rewards.sandbox.network: 'gateway' is for episodes; must be none for the rules code and code_share"
    ]
    assert said_of(policy, {"rules": [RULE], "sandbox": {"runtime": "docker"}}) == [
        "rewards.sandbox.image: empty; runtime 'docker' needs an image that has python3"
    ]


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text("def run(data, **_): return 1.0\n")
    return f"{tmp_path / 'agent.py'}:run"


def config_of(environment: dict[str, Any], **sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": {"environment": environment}, **sections}, Config)


def refused(environment: dict[str, Any], **sections: Any) -> list[str]:
    return list(environment_faults(config_of(environment, **sections)))


def test_one_environment_needs_to_be_named_by_nobody(loading: Loading, agent: str) -> None:
    assert refused({"game": {"run": agent, "python": "python3"}}, data={"train": "a.jsonl"}) == []
    assert resolve(config_of({"game": {"run": agent}})).data.environment == "game"
    assert resolve(config_of({"game": {"run": agent}, "shop": OTHER})).data.environment == ""
    assert resolve(config_of({})).data.environment == ""
    assert loading("run: {name: a}", f"{KEY}.run={agent}").gateway is not None  # without its section
    assert loading("run: {name: a}").gateway is None


ENVIRONMENTS = """
none: true => : must have either run or server
run: 'a.py:b', server: {address: '127.0.0.1:5000'} => : must have either run or server
run: agent.py => .run: 'agent.py' is not of the form FILE.py:NAME
run: 'agent:run' => .run: 'agent:run' is not of the form FILE.py:NAME
run: 'agent.py:' => .run: 'agent.py:' is not of the form FILE.py:NAME
run: 'nowhere.py:run' => .run: 'nowhere.py' is not a file
server: {address: here} => .server.address: 'here' is not HOST:PORT, with a port from 1 to 65535
replicas: 2, server: {address: '127.0.0.1:1'}
  => .replicas: is of processes that the run starts; must be left out with server
env: {A: '1'}, server: {address: '127.0.0.1:1'}
  => .env: is of processes that the run starts; must be left out with server
sandbox: {runtime: docker} => .sandbox.image: empty; runtime 'docker' needs an image that has python3
server: {address: '10.0.0.1:1'} => .server.address: '10.0.0.1:1' is not this machine
server: {address: '10.0.0.1:1', plaintext: true, token: {from: T}} => .server.token: would be sent to '10.0.0.1:1'
server: {address: '10.0.0.1:1', ca: no.pem} => .server.ca: 'no.pem' is not a file
server: {address: '10.0.0.1:1', plaintext: true} => none
server: {address: '[::1]:1', token: {from: T}} => none
server: {address: '10.0.0.1:1', ca: system} => none
"""


@pytest.mark.parametrize(("settings", "fault"), cases(ENVIRONMENTS))
def test_what_cannot_be_is_refused(agent: str, settings: dict[str, Any], fault: str) -> None:
    usable = {"run": agent} if not {"run", "server", "none"} & settings.keys() else {}
    settings.pop("none", None)
    found = refused({"game": usable | settings})
    assert [each[: len(KEY + fault)] for each in found] == ([] if fault == "none" else [f"{KEY}{fault}"])


def test_of_several_each_place_names_one_that_there_is(agent: str) -> None:
    both = {"game": {"run": agent}, "shop": OTHER}
    (missing,) = refused(both, data={"train": "a.jsonl"})
    assert missing == "data.environment: missing; must be one of services.environment: game, shop"
    assert refused(both, data={"train": "a.jsonl", "environment": "shop"}) == []
    assert refused(both, data={"train": "a.jsonl", "columns": {"environment": "who"}}) == []
    named = [{"path": "a", "environment": "game"}, {"path": "b", "columns": {"environment": "who"}}]
    assert refused(both, data={"train": named}) == []
    assert refused(both, data={"train": [*named, {"path": "c"}]}) == [missing]
    wrong = refused(
        both,
        data={"train": [{"path": "a", "environment": "gmae"}], "environment": "bazaar"},
        evaluation={"sets": [{"name": "s", "path": "b", "environment": "shpo"}]},
    )
    assert [each.partition(" is not one of services.environment: game, shop")[0] for each in wrong] == [
        "data.environment: 'bazaar'",
        "data.train.0.environment: 'gmae'",
        "evaluation.sets.0.environment: 'shpo'",
    ]


def test_a_name_is_a_word_and_rows_cannot_name_one_where_there_is_none(agent: str) -> None:
    told = "services.environment.a b: a name must consist of letters, digits, _ and -"
    assert (refused({"a b": {"run": agent}}), refused({"two-turns_2": {"run": agent}})) == ([told], [])
    (fault,) = refused({}, data={"environment": "game"})
    assert fault == "data.environment: 'game' is not one of services.environment: there is none"


@pytest.mark.parametrize(("python", "how"), [("no/python", ""), (".venv-agents/none", "; run make install-agents")])
def test_an_interpreter_that_is_not_there_is_told_of_once(agent: str, python: str, how: str) -> None:
    found = semantic_faults(config_of({"game": {"run": agent, "python": python}}), trains=True)
    told = [fault for fault in found if fault.startswith(KEY)]
    assert told == [f"{KEY}.python: '{python}' is not an executable{how}"]


def test_processes_are_counted_over_all_environments_but_for_servers_of_ones_own(agent: str) -> None:
    config = config_of({"game": {"run": agent, "replicas": 2}, "shop": OTHER, "maze": {"run": agent}})
    assert players(config) == {"environment-0": KEY, "environment-1": KEY, "environment-2": "services.environment.maze"}
    own = [each for each in instances(config, trains=False) if each.role == "environment"]
    assert [path_of(config, each) for each in own] == [KEY, KEY, "services.environment.maze"]
    assert settings_of(config, own[2]) is config.services.environment["maze"]
