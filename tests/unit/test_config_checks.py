"""Configuration: what the cross-checks between keys see without torch, before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cluster.topology import alternates, reference_takes_part, takes_turns
from runtime.config import Config, loading
from runtime.config.checks import semantic_faults
from runtime.config.loading import _REMOVED, _RENAMED, _replacement, resolve, type_faults
from runtime.config.service_checks import colocation_faults, device_faults, network_faults, unequal_numbers
from runtime.coordinator.metrics_recorder import accelerators
from runtime.errors import ConfigError
from runtime.models.families import FAMILIES
from tests.unit.config_cases import EXPERTS, PPO, cases, checked, configured, model_folder


def test_a_sound_configuration_has_no_faults(sound: dict[str, Any]) -> None:
    assert checked(sound) == []
    assert checked(sound, available_bytes=None) == []


def test_dynamic_sampling_needs_rewards_that_can_differ(sound: dict[str, Any]) -> None:
    algorithm = {"advantage": "reinforce_plus_plus", "dynamic_sampling": True}
    raw = sound | {"sampling": {"group_size": 1, "max_new_tokens": 64}, "algorithm": algorithm}
    (fault,) = semantic_faults(resolve(msgspec.convert(raw, Config)), {}, 1 << 40)
    assert fault.startswith("sampling.group_size: 1 is too few; algorithm.dynamic_sampling needs at least 2")


def test_several_sources_are_checked_one_by_one(sound: dict[str, Any], tmp_path: Path) -> None:
    path = sound["data"]["train"]
    train = [{"path": path}, {"path": str(tmp_path), "weight": 2, "handler": "plain"}]  # a folder is a source too
    assert checked(sound, data={"train": train}) == []
    assert checked(sound, data={"train": [*train, {"path": path, "handler": "other"}]}) == [
        "data.train.2.handler: 'other' is not one of plain, nor FILE.py:NAME",
        f"data.train.2.path: '{path}' is there twice; give it more weight instead",
    ]


def test_a_chat_template_has_a_use_with_the_model_s_own_type_only(sound: dict[str, Any]) -> None:
    assert checked(sound, model={"chat_template": __file__}) == []
    told = "model.chat_template: has no use with data.prompt_type qwen, only with model"
    assert checked(sound, model={"chat_template": __file__}, data={"prompt_type": "qwen"}) == [told]


def test_a_warmup_names_model_and_data_later() -> None:
    raw: dict[str, Any] = {"run": {"name": "a"}, "warmup": {}, "rewards": {"rules": [{"name": "accuracy"}]}}
    raw |= {"data": {"max_prompt_tokens": 256}, "sampling": {"max_new_tokens": 256}}
    assert checked(raw, evaluation={"every": 5}, algorithm={"kl_coefficient": 0.1}) == []
    assert checked(raw, evaluation={"max_new_tokens": 256}, sampling={"max_new_tokens": 257}) == [
        "sampling.max_new_tokens: 257 and data.max_prompt_tokens 256 exceed the model's 512 positions"
    ]


SOUND = """
algorithm: {advantage: gae}, critic: {}, training: {mini_batch_size: 4, epochs: 2}, services: {critic: {processes: 4}}
services: {critic: {processes: 3}}
reference: {source: none}
reference: {source: adapter_off}, lora: {}, algorithm: {kl_coefficient: 0.1}
weight_sync: {in_flight: recompute}, training: {staleness: 2}
weight_sync: {in_flight: drain}, training: {staleness: 0}
services: {trainer: {devices: [1]}, rollout: {replicas: 2, devices: [0, 1]}}, weight_sync: {transport: shared_memory}
services: {trainer: {devices: [1]}, rollout: {replicas: 2, devices: [0, 1]}}, weight_sync: {backend: gloo}
services: {trainer: {devices: [2]}, rollout: {replicas: 2, devices: [0, 1]}}, weight_sync: {backend: hccl}
weight_sync: {transport: collective, encoding: delta, backend: gloo, dtype: bfloat16}
"""


@pytest.mark.parametrize("changes", SOUND.strip().splitlines())
def test_what_goes_together_is_not_refused(sound: dict[str, Any], changes: str) -> None:
    assert checked(sound, **configured(changes)) == []


FAULTS = """
run: {name: a/b} => run.name: 'a/b' is not the name of a folder
run: {resume: /no/where} => run.resume: '/no/where' is not a checkpoint's folder; never and auto are allowed besides
model: {path: /no/model} => model.path: '/no/model' is not a folder
model: {path: ''} => model.path: missing
model: {reference: /no/ref} => model.reference: '/no/ref' is not a folder
model: {chat_template: /no/t.jinja} => model.chat_template: '/no/t.jinja' is not a file
data: {train: ''} => data.train: missing
data: {train: []} => data.train: missing
data: {train: /no/x.jsonl} => data.train: '/no/x.jsonl' is not a file
data: {eval: /no/y.jsonl} => data.eval: '/no/y.jsonl' is not a file
data: {handler: other} => data.handler: 'other' is not one of plain, nor FILE.py:NAME
data: {handler: '/no/own.py:x'} => data.handler: '/no/own.py' is not a file
data: {train: [{path: /no/x.jsonl}]} => data.train.0.path: '/no/x.jsonl' is not a file
data: {prompt_type: qwen9} => data.prompt_type: 'qwen9' is not one of model, deepseek3, 
data: {prompt_type_path: /no.json} => data.prompt_type_path: /no.json: no such file or directory
evaluation: {every: 5} => data.eval: missing; evaluation.every is 5
evaluation: {max_new_tokens: 65} => evaluation.max_new_tokens: 65 and data.max_prompt_tokens 64 exceed the model's 128
evaluation: {sets: [{name: a, path: /no/z.jsonl}]} => evaluation.sets.0.path: '/no/z.jsonl' is not a file
sampling: {group_size: 1} => sampling.group_size: 1 is too few; algorithm.advantage group_norm needs at least 2
algorithm: {advantage: gea} => algorithm.advantage: 'gea' is not one of gae, group_norm, rloo, nor
algorithm: {kl: k9, kl_coefficient: 1} => algorithm.kl: 'k9' is not one of k1, k3
algorithm: {dual_clip: 0.5} => algorithm.dual_clip: 0.5 is not 0 (off) or > 1
algorithm: {correction: tis} => algorithm.correction: 'tis' is not one of icepop, none, nor FILE.py:NAME
algorithm: {loss: '/no/mine.py:own'} => algorithm.loss: '/no/mine.py' is not a file
algorithm: {correction: icepop}
  => algorithm.correction: 'icepop' with loss decoupled would weigh by proximal / behaviour twice; take loss ppo, or
algorithm: {loss: m2po, correction: icepop}
  => algorithm.correction: 'icepop' with loss m2po would leave it ratios of 1; take loss ppo, or correction none
algorithm: {loss: ppo, correction: icepop, correction_low: 1.5}
  => algorithm.correction_low: [1.5, 5] leaves out 1, the weight where both engines agree
algorithm: {loss: gspo}
  => algorithm.aggregation: 'token_mean' is not seq_mean_token_mean, nor seq_mean_token_sum; loss gspo is one value a
algorithm: {loss: clip_cov, loss_options: {low: 5}} => algorithm.loss_options.low: 5 is not below high 5
algorithm: {kl_target: 0.1} => algorithm.kl_target: needs kl_coefficient > 0 to start from
algorithm: {kl_importance_weighted: true, kl_placement: reward}
  => algorithm.kl_importance_weighted: true is for kl_placement loss
sampling: {group_size: 1}, algorithm: {advantage: rloo}
  => sampling.group_size: 1 is too few; algorithm.advantage rloo needs at least 2
rewards: {rules: []} => rewards.rules: empty
rewards: {rules: [{name: format}, {name: z}]} => rewards.rules.1.name: 'z' is not one of accuracy, format
training: {optimizer: {min_learning_rate: 1}} => training.optimizer.min_learning_rate: 1 is above learning_rate 1e-06
stop: {accuracy: 0.9} => stop.accuracy: needs evaluation.every >= 1
services: {trainer: {processes: 3}} => services.trainer.processes: 3 does not divide training.groups_per_step = 8
training: {mini_batch_size: 3} => training.mini_batch_size: 3 does not divide groups_per_step = 8
training: {mini_batch_size: 16} => training.mini_batch_size: 16 does not divide groups_per_step = 8
training: {mini_batch_size: 2}, services: {trainer: {processes: 4}}
  => services.trainer.processes: 4 does not divide training.mini_batch_size = 2
reference: {source: none}, algorithm: {kl_coefficient: 0.1}
  => reference.source: none leaves the KL term of algorithm.kl_coefficient 0.1 without its reference
reference: {source: adapter_off} => reference.source: adapter_off needs a lora section
algorithm: {advantage: gae} => critic: missing; algorithm.advantage gae needs one
critic: {} => critic: there is one, but algorithm.advantage group_norm takes no values; leave the section out
algorithm: {advantage: gae}, critic: {path: /no/critic} => critic.path: '/no/critic' is not a folder
algorithm: {advantage: gae}, critic: {}, services: {critic: {processes: 3}}
  => services.critic.processes: 3 does not divide training.groups_per_step = 8
algorithm: {advantage: gae}, critic: {}, training: {mini_batch_size: 2}, services: {critic: {processes: 8}}
  => services.critic.processes: 8 does not divide training.mini_batch_size = 2
services: {reward: {python: /no/python}} => services.reward.python: '/no/python' is not an executable
services: {rollout: []} => services.rollout: an empty list; at least one fleet is needed
weight_sync: {backend: nccl, transport: collective}, services: {trainer: {devices: [0]}, rollout: {devices: [0]}}
  => weight_sync.backend: nccl takes one member a device, but trainer-0 and rollout-0 have 0; must be backend gloo
weight_sync: {transport: collective}, services: {trainer: {devices: [1]}, rollout: {replicas: 2, devices: [0, 1]}}
  => weight_sync.transport: collective takes one member a device, but trainer-0 and rollout-1 have 1; must be backend
services: {rollout: [{}, {python: /no/.venv-vllm/bin/python}]}
  => services.rollout.1.python: '/no/.venv-vllm/bin/python' is not an executable; run make install-vllm
weight_sync: {transport: shared_memory, backend: gloo}
  => weight_sync.backend: gloo is for a collective; transport shared_memory has none, so must be auto
weight_sync: {staging_bytes: 1, in_flight: drain} => weight_sync.staging_bytes: 1: services.rollout.engine must be vllm
"""


@pytest.mark.parametrize(("changes", "fault"), cases(FAULTS))
def test_each_cross_check(sound: dict[str, Any], changes: dict[str, Any], fault: str) -> None:
    (found,) = checked(sound, **changes)
    assert found.startswith(fault)


def test_no_worker_of_vllm_receives_on_the_trainers_device(sound: dict[str, Any]) -> None:
    rollout = {"engine": "vllm", "python": sys.executable, "parallel": {"tensor": 2}, "devices": [0, 1]}
    services = {"trainer": {"devices": [1]}, "rollout": rollout}
    (found,) = checked(sound, weight_sync={"transport": "collective"}, services=services)
    assert "takes one member a device, but trainer-0 and rollout-0 have 1; must be backend gloo" in found


def test_functions_and_rules_of_ones_own(sound: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    own = f"{tmp_path}/mine.py:own"
    names = dict.fromkeys(("advantage", "loss", "correction", "aggregation", "kl"), own)
    assert checked(sound, algorithm=names, rewards={"rules": [{"name": own}]}) == []
    (fault,) = checked(sound, rewards={"rules": [{"name": "/no/yours.py:own"}]})
    assert fault == "rewards.rules.0.name: '/no/yours.py' is not a file"


def test_what_needs_a_package_says_how_to_install_it(sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = msgspec.convert(sound | {"trackers": [{"name": "jsonl"}, {"name": "wandb"}]}, Config)
    told = "trackers.1.name: wandb needs a package: pip install 'sluice-rl[wandb]'"
    assert semantic_faults(config, available_bytes=1 << 40) == [told]
    for platform, how in (("", "run make install-vllm"), ("ascend", "install vllm-ascend")):
        (fault,) = checked(sound, services={"platform": platform, "rollout": {"engine": "vllm"}})
        assert fault.startswith(f"services.rollout.engine: vllm is not installed here; {how}, and name its interpreter in ")


def test_moments_of_8_bits_need_a_package(sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.config.checks._has", lambda package: package != "torchao")
    small = {"optimizer": {"name": "adamw_8bit"}}
    critic = {"algorithm": {"advantage": "gae"}, "critic": {}, "training": small}
    needs = "adamw_8bit needs a package: pip install 'sluice-rl[torchao]'"
    assert checked(sound, training=small) == [f"training.optimizer.name: {needs}"]
    python = {"python": sys.executable}
    assert checked(sound, **critic, services={"trainer": python}) == [f"training.optimizer.name: {needs}"]
    assert checked(sound, **critic, services={"trainer": python, "critic": python}) == []


def test_a_value_that_was_removed_says_what_to_write_now() -> None:
    told = "weight_sync.transport: files is no longer a value: write auto"
    assert type_faults({"run": {"name": "x"}, "weight_sync": {"transport": "files"}}) == [told]


@pytest.mark.parametrize(("path", "now"), [*_REMOVED.items(), *((old, f"write {new}") for old, new in _RENAMED.items())])
def test_a_key_that_was_removed_says_what_to_write_now(path: str, now: str) -> None:
    key = path.replace("environment.*", "environment.mine").replace("*", "0")
    assert _replacement(key) == now
    if not path.startswith("services.*"):  # whose roles have different keys
        raw: Any = 1
        for part in reversed(key.split(".")):
            raw = [raw] if part == "0" else {part: raw}
        assert f"{key}: no longer a key: {now}" in type_faults({"run": {"name": "x"}, **raw})


def test_a_removed_key_of_a_presets_file_is_refused(sound: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("trainer: {restarts: {backoff: 1}}")
    with pytest.raises(ConfigError) as refused:
        loading.load(sound, [f"services.platform={path}"])
    assert refused.value.faults[0].startswith(f"services.platform: {path}: trainer.restarts.backoff: no longer a key: ")


@pytest.mark.parametrize(
    ("changes", "on_cpus", "keys"),
    [
        ({}, True, []),
        ({}, False, []),
        ({"model": {"dtype": "bfloat16"}}, True, []),
        ({"weight_sync": {"dtype": "bfloat16"}}, True, ["weight_sync.dtype: bfloat16"]),
        ({"weight_sync": {"dtype": "bfloat16"}}, False, []),
        ({"weight_sync": {"encoding": "delta"}}, True, ["weight_sync.encoding: delta"]),
        ({"services": {"rollout": {"dtype": "bfloat16"}}}, True, ["services.rollout.dtype: rollouts compute in bfloat16"]),
        ({"services": {"rollout": {"dtype": "float32"}}}, False, ["services.rollout.dtype: rollouts compute in float32"]),
    ],
)
def test_numbers_that_are_unequal_are_told(changes: dict[str, Any], on_cpus: bool, keys: list[str]) -> None:
    told = list(unequal_numbers(msgspec.convert({"run": {"name": "r"}, **changes}, Config), on_cpus))
    assert [line.startswith(key) for line, key in zip(told, keys, strict=True)] == [True] * len(keys)


def test_deltas_of_float32_would_be_whole_versions(sound: dict[str, Any]) -> None:
    changes = "changes in nearly every element, and encoding delta would send it all; must be auto or bfloat16"
    assert checked(sound, weight_sync={"encoding": "delta", "dtype": "float32"}) == [f"weight_sync.dtype: float32 {changes}"]
    for weight_sync in ({"dtype": "float32"}, {"encoding": "delta"}, {"encoding": "delta", "dtype": "bfloat16"}):
        assert checked(sound, model={"dtype": "float32"}, weight_sync=weight_sync) == []


WITH_ALL = {"algorithm": {"kl_coefficient": 0.1}, "critic": {}, "training": {"staleness": 1}}


def made(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, **sections}, Config)


def colocation(**sections: Any) -> list[str]:
    return list(colocation_faults(made(**WITH_ALL | sections), trains=True))


def test_who_takes_turns_with_the_trainer() -> None:
    services: dict[str, Any] = {role: {"colocate": "trainer"} for role in ("rollout", "reference", "critic", "reward_model")}
    apart = {"reference": {"colocate": "rollout"}, "critic": {"colocate": "trainer"}}
    for given, staleness in ((services, 0), (services, 1), (apart, 4)):
        assert colocation(services=given, training={"staleness": staleness}) == []
    for given, turns, devices in ((services, (True, True, False), 1), (apart, (False, False, False), 2)):
        config = made(**WITH_ALL, services=given)
        assert (takes_turns(config), reference_takes_part(config), alternates(config)) == turns
        assert accelerators(config) == devices
    services["critic"]["offload"] = ["optimizer"]
    assert alternates(made(**WITH_ALL, services=services))


COLOCATED = """
services: {rollout: {colocate: actor}}
  => services.rollout.colocate: 'actor' is no role with devices; must be one of reward_model, reference, trainer, critic
services: {reference: {colocate: reference}}
  => services.reference.colocate: reference is the role itself; must be one of rollout, reward_model, trainer, critic
services: {trainer: {colocate: rollout}}
  => services.trainer.colocate: rollout: others lie on the trainer's devices; must be services.rollout.colocate: trainer instead
services: {rollout: {colocate: critic}}, critic: null
  => services.rollout.colocate: this run has no critic; must be another, or left out
services: {reference: {colocate: critic}, critic: {colocate: trainer}}
  => services.reference.colocate: critic lies on the devices of trainer itself; must be a role with devices of its own
services: {rollout: {colocate: trainer, devices: [1]}, trainer: {devices: [1]}}
  => services.rollout.devices: [1], but colocate says that they are those of trainer; must be one of both
services: {rollout: [{colocate: trainer}, {colocate: trainer}], trainer: {devices: [1]}}
  => services.rollout.{}.colocate: needs 2 devices, but trainer has 1 (services.trainer.devices)
services: {rollout: {colocate: trainer}}, training: {staleness: 2}
  => training.staleness: 2, but rollouts and trainer take turns (colocate: trainer); must be 0 or 1, or training.partial_rollout
services: {rollout: {colocate: trainer}}, training: {staleness: 0, partial_rollouts: true}
  => training.staleness: 0, but with training.partial_rollouts replies have several versions; must be at least 1
services: {rollout: {colocate: trainer}}, training: {partial_rollouts: true}, weight_sync: {in_flight: drain}
  => weight_sync.in_flight: drain, but training.partial_rollouts has replies go on; must be keep or recompute
training: {partial_rollouts: true}
  => training.partial_rollouts: true, but rollouts and trainer do not take turns (colocate: trainer); must be false
services: {rollout: [{colocate: trainer}, {}]}
  => services.rollout.1.colocate: must be trainer, as that of other fleets: all rollouts take turns with it, or none
services: {rollout: {colocate: trainer}}, weight_sync: {backend: nccl}
  => weight_sync.backend: nccl takes one member a device, and rollouts lie on the trainer's; must be auto or gloo
"""


@pytest.mark.parametrize(("sections", "fault"), cases(COLOCATED))
def test_what_does_not_go_together_is_told_in_one_line(sections: dict[str, Any], fault: str) -> None:
    found = colocation(**sections)
    told = [fault.format(0), fault.format(1)] if "{}" in fault else [fault]
    assert [each[: len(told[0])] for each in found] == told
    if "nccl" in fault:
        assert list(device_faults(made(**WITH_ALL | sections), trains=True)) == []  # told once


def test_a_cycle_is_told_on_both_sides() -> None:
    found = colocation(services={"reference": {"colocate": "critic"}, "critic": {"colocate": "reference"}})
    assert [fault.partition(":")[0] for fault in found] == ["services.reference.colocate", "services.critic.colocate"]


TWO_NODES = {"nodes": [{"name": "a"}, {"name": "b"}]}
REACHED: dict[str, Any] = {"services": {"coordinator": {"host": "10.1.0.1", "port": 7000}}, "network": {"interface": "eth0"}}


def addresses(trains: bool = True, **sections: Any) -> list[str]:
    return list(network_faults(made(**sections), trains))


def test_one_node_may_be_on_loopback_and_several_need_addresses_that_others_reach() -> None:
    for cluster in ({}, {"min_nodes": 1}, {"nodes": [{"name": "a"}]}):
        assert addresses(cluster=cluster) == []
    for cluster in ({"min_nodes": 2}, TWO_NODES, TWO_NODES | {"min_nodes": 1}):
        assert addresses(cluster=cluster, **REACHED) == []
        interface, host, port = addresses(cluster=cluster)
        assert interface.startswith("network.interface: '127.0.0.1' is loopback, by which no other node is reached; on several")
        assert host.startswith("services.coordinator.host: missing; on several nodes it must be the address that all reach")
        assert port == "services.coordinator.port: 0 is any free port, on one node; on several it must be named"
    for host in ("127.0.0.1", "127.3.0.1", "localhost", "::1"):
        (fault,) = addresses(cluster=TWO_NODES, **REACHED | {"services": {"coordinator": {"host": host, "port": 7000}}})
        assert fault.startswith(f"services.coordinator.host: '{host}' is loopback; on several nodes it must be the address")


NETWORK = """
cluster: {nodes: []} => cluster.nodes: empty; must be auto, or name at least one node
cluster: {nodes: [{name: a}, {name: a}]} => cluster.nodes.1.name: 'a' is that of another node; must be its own
cluster: {nodes: [{name: a}, {name: ''}]}
  => cluster.nodes.1.name: '' is no name; must be what its agent is called (--name, or its host name)
cluster: {nodes: [{name: a}, {name: b}], min_nodes: 3}
  => cluster.min_nodes: 3, but cluster.nodes names 2; must be at most that
placement: [] => services.trainer.placement: empty; must be pack, spread, or name at least one node
placement: [a, b, a] => services.trainer.placement: names 'a' twice; must name each node once
standby: c => services.coordinator.standby: 'c' is no node; must be one of a, b
cluster: {}, standby: b
  => services.coordinator.standby: 'b', but the run has one node; needs cluster.nodes or cluster.min_nodes
standby: b => none
cluster: {min_nodes: 2}, standby: anybody => none
port_range: [80, 90] => network.port_range: [80, 90] is not a range of ports from 1024 to 65535, first and last
port_range: [7000, 6999] => network.port_range: [7000, 6999] is not a range of ports from 1024 to 65535, first and last
port_range: [59000, 60000] => none
platform: ascend, port_range: [59000, 60000] => network.port_range: [59000, 60000] overlaps HCCL's ports, 60000 to 61999
platform: ascend, port_range: [61500, 61600] => network.port_range: [61500, 61600] overlaps HCCL's ports, 60000 to 61999
platform: ascend, port: 61999 => services.coordinator.port: 61999 is one of HCCL's, 60000 to 61999; must be another
port_range: [7000, 7001] => none
"""


@pytest.mark.parametrize(("given", "fault"), cases(NETWORK))
def test_nodes_and_ports_that_cannot_be(given: dict[str, Any], fault: str) -> None:
    """`none`: which nodes take how many of a range is known when they are there."""
    services = {"trainer": {"placement": given.get("placement", "pack")}, "platform": given.get("platform", "")}
    own = {name: given[name] for name in ("standby", "port") if name in given}
    services["coordinator"] = REACHED["services"]["coordinator"] | own
    found = {"interface": "eth0"} | ({"port_range": given["port_range"]} if "port_range" in given else {})
    told = addresses(cluster=given.get("cluster", TWO_NODES), services=services, network=found)
    assert told == ([] if fault == "none" else [fault])


LISTENING = """
trains: true => 6
trains: true, services: {coordinator: {port: 6000}} => 5
trains: false => 3
trains: true, metrics: {prometheus: {port: 0}} => 10
trains: true, metrics: {prometheus: {port: 6000}} => 9
"""


@pytest.mark.parametrize(("sections", "needed"), cases(LISTENING))
def test_a_range_holds_what_listens_at_once(sections: dict[str, Any], needed: str) -> None:
    """A rollout, a reward, a trainer, the coordinator, and two rendezvous of the weights: six. As many again as there are
    processes are what Prometheus asks, the coordinator among them unless its port is named."""
    sections["rewards"] = {"rules": [{"name": "gsm8k"}]}
    assert addresses(network={"port_range": [7000, 6999 + int(needed)]}, **sections) == []
    (fault,) = addresses(network={"port_range": [7000, 6998 + int(needed)]}, **sections)
    assert fault.endswith(f"has fewer ports than the run needs, {needed}")


METRICS = """
network: {} => none
network: {interface: '::1'} => none
network: {interface: 10.1.0.0/16} => metrics.prometheus.token: missing
network: {interface: 10.1.0.7, security: token} => metrics.prometheus.token: missing
network: {interface: 10.1.0.7, security: none} => none
"""
UNUSED = "network.tls: is not used with network.security {}; must be left out, or that be tls or auto"


@pytest.mark.parametrize(("sections", "fault"), cases(METRICS))
def test_off_this_machine_metrics_are_for_who_has_the_token(sections: dict[str, Any], fault: str) -> None:
    told = addresses(**sections, metrics={"prometheus": {}})
    assert [each.partition(";")[0] for each in told] == [fault] * (fault != "none")
    assert addresses(**sections, metrics={"prometheus": {"token": {"from": "SCRAPED"}}}) == []
    assert addresses(**sections) == []


def test_certificates_that_are_not_used_are_told() -> None:
    for security, told in {"auto": [], "tls": [], "token": [UNUSED.format("token")], "none": [UNUSED.format("none")]}.items():
        assert addresses(network={"security": security, "tls": {"ca": "a", "certificate": "b", "key": "c"}}) == told


DECODED = f"must be one of {', '.join(FAMILIES)}"
DIVERGING = {"algorithm": {"kl_coefficient": 0.1}}
VLLM: dict[str, Any] = {"rollout": {"engine": "vllm", "python": sys.executable}}


def test_model_folders(sound: dict[str, Any], tmp_path: Path) -> None:
    policy = Path(sound["model"]["path"])
    wide = model_folder(tmp_path / "wide", vocab_size=301)
    (fault,) = checked(sound, model={"reference": str(wide)})
    assert fault == f"model.reference: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(wide)}}))
    assert fault == f"critic.path: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (model_folder(tmp_path / "empty") / "model.safetensors").unlink()
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(tmp_path / "empty")}}))
    assert fault == f"critic.path: '{tmp_path / 'empty'}' has no weights (*.safetensors)"

    (policy / "model.safetensors").unlink()
    assert checked(sound) == [f"model.path: '{policy}' has no weights (*.safetensors)"]
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checked(sound) == [f"model.path: '{policy}' lacks 1.safetensors, which its index names, and 1 more"]
    for shard in "12":
        (policy / f"{shard}.safetensors").write_bytes(b"w")
    assert checked(sound) == []
    (policy / "tokenizer.json").unlink()
    (policy / "config.json").write_text("{")
    none = [f"model.path: '{policy}' has no {each}" for each in ("config.json of a language model", "tokenizer.json")]
    assert checked(sound) == none


@pytest.mark.parametrize("kind", ["phi3", "qwen2_moe"])
def test_embedded_rollouts_take_the_decoders_families_alone_and_references_others_too(
    sound: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    other = str(model_folder(tmp_path / "other", **EXPERTS | {"model_type": kind}))
    needs = "rollouts need services.rollout.engine vllm for this model"
    unknown = f"services.rollout.engine: torch: model.path: model_type '{kind}' is not supported; {DECODED}; {needs}"
    assert checked(sound, model={"path": other}) == checked(sound, model={"path": other}, **DIVERGING) == [unknown]
    assert checked(sound, model={"reference": other}, **DIVERGING) == []
    assert checked(sound, model={"path": other}, services=VLLM) == []
    ours = str(model_folder(tmp_path / "ours", **EXPERTS))
    assert checked(sound, model={"path": ours}, **DIVERGING) == []
    stretched = str(model_folder(tmp_path / "a", rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    ropes = "rope_type 'dynamic' is not supported; must be one of default, linear, llama3, yarn"
    assert checked(sound, model={"path": stretched}) == [f"services.rollout.engine: torch: model.path: {ropes}; {needs}"]


UNTRAINED = """
model_type: qwen2_5_vl => the installed transformers has no 
model_type: gpt_oss, quantization_config: {quant_method: mxfp4}
  => quantization_config has quant_method 'mxfp4', which is not trained; must be a folder of bfloat16 weights
model_type: qwen2, quantization_config: {quant_method: awq} => quantization_config: quant_method 'awq', 
model_type: qwen3_next, layer_types: [linear_attention, full_attention]
  => a qwen3_next model cannot run packed (linear_attention); all layers must be full or sliding attention
model_type: gemma2, attn_logit_softcapping: 50.0 => a gemma2 model cannot run packed (its attention has soft
"""


@pytest.mark.parametrize(("described", "fault"), cases(UNTRAINED))
def test_trainer_and_critic_take_what_transformers_runs_and_reward_models_run_packed(
    sound: dict[str, Any], tmp_path: Path, described: dict[str, Any], fault: str
) -> None:
    architectures = ["XForSequenceClassification"]
    other = str(model_folder(tmp_path / "other", **described, architectures=architectures, id2label={"0": "a"}))
    of_role = {"trainer": {"model": {"path": other}}, "critic": PPO | {"critic": {"path": other}}}
    of_role["reward_model"] = {"rewards": {"model": {"path": other, "max_tokens": 128}}}
    for role, named in (("trainer", "model"), ("critic", "critic"), ("reward_model", "rewards.model")):
        services = VLLM if role == "trainer" else {}
        found = checked(sound, services=services, **of_role[role])
        if "cannot run packed" in fault and role != "reward_model":
            assert found == []
        else:
            (told,) = found
            assert told.removeprefix(f"services.{role}.engine: torch: ").startswith(f"{named}.path: {fault}")
        own = VLLM | {role: {"python": sys.executable}}  # another interpreter has another transformers
        assert checked(sound, services=own, **of_role[role]) == []


def test_weights_in_float8_are_for_the_embedded_engines(sound: dict[str, Any], tmp_path: Path) -> None:
    float8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    other = {"path": str(model_folder(tmp_path / "other", quantization_config=float8))}
    said = "services.rollout.engine: vllm: model.path is quantised, what is published is not; must be torch, or another folder"
    assert (checked(sound, model=other), checked(sound, model=other, services=VLLM)) == ([], [said])


ALL = {"router_replay": "routing", "aux_loss": 0.01, "z_loss": 0.001}


def test_what_of_the_section_moe_a_model_may_have(sound: dict[str, Any], tmp_path: Path) -> None:
    experts = {"path": str(model_folder(tmp_path / "experts", **EXPERTS))}
    routing, bias = {"router_replay": "routing"}, {"bias_update": 0.001}
    assert checked(sound, model=experts, moe=ALL) == []
    (fault,) = checked(sound, model=experts, moe=ALL | bias)
    assert fault.startswith("moe.bias_update: 0.001 is for models whose scores have a bias, as deepseek_v3's and glm4_moe's")
    told = [each.partition(", and model.path has none; must be ")[0] for each in checked(sound, moe=ALL | bias)]
    set_so = ("router_replay: routing", "aux_loss: 0.01", "z_loss: 0.001", "bias_update: 0.001")
    assert told == [f"moe.{each} is for models with experts" for each in set_so]
    megatron = {"services": {"trainer": {"engine": "megatron"}}}
    for engine in ({}, megatron):
        said = checked(sound, model=experts, moe=routing | {"z_loss": 0.001}, lora={}, **engine)
        assert [fault for fault in said if fault.startswith("moe.")] == [
            "moe.z_loss: 0.001 is not for adapters (lora), whose router is fixed; must be 0.0"
        ]
