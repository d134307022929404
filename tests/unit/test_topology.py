"""Which processes a configuration makes, and how each is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launcher.node.fork_server import forked_roles
from launcher.node.machine import Machine
from launcher.node.topology import ProcessSpec, coordinator_spec, restarts, service_specs
from runtime.cluster.nodes import Launch, NodeRegistration, Rendezvous, launches
from runtime.cluster.placement import NodeOffer, place
from runtime.cluster.topology import Instance, group_of, instances, replicas, sections, uses_reference
from runtime.config import Config, Environment, RemoteServer, Rollout
from runtime.coordinator.run_context import accelerators
from sluice import start


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def started(config: Config, trains: bool = True) -> list[Launch]:
    """On a machine without accelerators, which is the only one."""
    here = NodeRegistration(name="here", address="127.0.0.1")
    placement = place(config, [NodeOffer("here")], trains=trains)
    return launches(config, placement, {"here": here}, {}, b"")["here"]


def specs(config: Config, trains: bool = True) -> list[ProcessSpec]:
    return list(service_specs(config, started(config, trains), Path("c.yaml"), "python", "host:1", 8).values())


def names(config: Config) -> list[str]:
    return [instance.name for instance in instances(config)]


def test_a_run_without_kl_or_critic_has_neither_service() -> None:
    config = make(services={"rollout": {"replicas": 2}, "critic": {"processes": 4}})
    assert names(config) == ["rollout-0", "rollout-1", "reward-0", "trainer-0"]
    assert accelerators(config) == 3


@pytest.mark.parametrize(
    ("mode", "coefficient", "used"), [("service", 0.1, True), ("service", 0.0, False), ("adapter_off", 0.1, False)]
)
def test_a_reference_service_is_there_only_where_it_is_asked(mode: str, coefficient: float, used: bool) -> None:
    config = make(reference={"mode": mode}, lora={}, algorithm={"kl_coefficient": coefficient})
    assert uses_reference(config) is used
    assert ("reference-0" in names(config)) is used


def test_a_reference_is_replicas_or_the_ranks_of_one_group() -> None:
    kl = {"algorithm": {"kl_coefficient": 0.1}}
    replicas = make(**kl, services={"reference": {"replicas": 2}})
    assert [instance for instance in instances(replicas) if instance.role == "reference"] == [
        Instance("reference", "reference-0"),
        Instance("reference", "reference-1"),
    ]
    group = make(**kl, services={"reference": {"engine": "megatron", "processes": 2, "parallel": {"tensor": 2}}})
    assert [instance for instance in instances(group) if instance.role == "reference"] == [
        Instance("reference", "reference-0", 0),
        Instance("reference", "reference-1", 1),
    ]
    (spec,) = (spec for spec in specs(group) if spec.role == "reference")
    assert spec.command[2:9] == ("launcher.node.ranks", "--group", "reference-0", "--ranks", "0,1", "--world", "2")
    assert spec.command[9:11] == (start.__file__, "services.reference")
    assert spec.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_fleets_have_settings_of_their_own_and_their_names_count_on() -> None:
    fleets = [{"replicas": 2, "slots": 8, "python": "/a", "env": {"A": "1"}}, {"slots": 4, "dtype": "bfloat16", "threads": 3}]
    config = make(services={"rollout": fleets})
    assert names(config) == ["rollout-0", "rollout-1", "rollout-2", "reward-0", "trainer-0"]
    assert accelerators(config) == 4
    assert [(name, each.slots, each.dtype) for name, each in replicas(config).items()] == [
        ("rollout-0", 8, "auto"),
        ("rollout-1", 8, "auto"),
        ("rollout-2", 4, "bfloat16"),
    ]
    found = [spec for spec in specs(config) if spec.role == "rollout"]
    assert [(spec.command[0], spec.env.get("A"), spec.env["OMP_NUM_THREADS"]) for spec in found] == [
        ("/a", "1", "2"),
        ("/a", "1", "2"),
        ("python", None, "3"),
    ]


def test_every_rank_of_a_critic_is_an_instance() -> None:
    config = make(critic={}, services={"critic": {"processes": 2}})
    assert instances(config)[-2:] == [Instance("critic", "critic-0", 0), Instance("critic", "critic-1", 1)]
    assert accelerators(config) == 4


def test_ranks_live_and_die_together_and_replicas_each_for_itself() -> None:
    spread = {"engine": "megatron", "processes": 2}
    config = make(critic={}, algorithm={"kl_coefficient": 0.1}, services={"critic": {"processes": 2}, "reference": spread})
    units = {instance.name: [one.name for one in group_of(config, instance)] for instance in instances(config)}
    assert units == {
        "rollout-0": ["rollout-0"],
        "reward-0": ["reward-0"],
        "reference-0": ["reference-0", "reference-1"],
        "reference-1": ["reference-0", "reference-1"],
        "trainer-0": ["trainer-0"],
        "critic-0": ["critic-0", "critic-1"],
        "critic-1": ["critic-0", "critic-1"],
    }
    replicas = make(algorithm={"kl_coefficient": 0.1}, services={"reference": {"replicas": 2}})
    assert [len(group_of(replicas, instance)) for instance in instances(replicas)] == [1] * 5


def test_everything_but_the_coordinator_is_started_again_a_group_by_the_name_of_its_first_rank() -> None:
    critic = {"processes": 2, "restarts": {"attempts": 7}}
    config = make(critic={}, services={"rollout": {"replicas": 2}, "critic": critic})
    allowed = restarts(config, started(config))
    assert set(allowed) == {"rollout-0", "rollout-1", "reward-0", "trainer-0", "critic-0"}
    assert (allowed["critic-0"].attempts, allowed["trainer-0"].attempts) == (7, 3)
    assert {spec.name for spec in specs(config)} == set(allowed)


def test_a_part_of_a_group_that_spans_nodes_is_not_this_nodes_to_start_again() -> None:
    config = make(services={"trainer": {"processes": 2}})
    meeting = Rendezvous(host="10.0.0.1", port=7001, key=b"\x01\xff")
    part = Launch(role="trainer", name="trainer-1", ranks=[1], rendezvous=meeting)
    assert restarts(config, [part]) == {}
    spec = service_specs(config, [part], Path("c.yaml"), "python", "host:1", 8)["trainer-1"]
    where = ("--group", "trainer-1", "--ranks", "1", "--world", "2", "--at", "10.0.0.1:7001")
    assert spec.command[2 : 3 + len(where)] == ("launcher.node.ranks", *where)
    assert spec.env["SLUICE_STORE_KEY"] == "01ff" and "01ff" not in " ".join(spec.command)


def test_the_ranks_of_a_critic_are_started_together() -> None:
    critic = {"processes": 2, "threads": 3, "python": "/own/python", "env": {"A": "1"}}
    config = make(critic={}, services={"critic": critic})
    (spec,) = (spec for spec in specs(config) if spec.role == "critic")
    assert spec.name == "critic-0"
    ranks = ("launcher.node.ranks", "--group", "critic-0", "--ranks", "0,1", "--world", "2")
    arguments = ("--name", "critic-0", "--config", "c.yaml", "--coordinator", "host:1")
    assert spec.command == ("/own/python", start.__file__, *ranks, start.__file__, "services.critic", *arguments)
    assert (spec.env["OMP_NUM_THREADS"], spec.env["A"]) == ("3", "1")


def test_tensor_and_context_parallel_ranks_launch_their_kernels_in_order() -> None:
    def connections(role: str = "trainer", **settings: Any) -> str | None:
        config = make(critic={}, services={role: {"engine": "megatron", "processes": 2, **settings}})
        (spec,) = (spec for spec in specs(config) if spec.role == role)
        return spec.env.get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert connections(parallel={"pipeline": 2}) is None
    assert connections(parallel={"tensor": 2}) == "1"
    assert connections(parallel={"context": 2}) == "1"
    assert connections("critic", parallel={"tensor": 2}) == "1"
    assert connections("critic") is None
    assert connections(parallel={"tensor": 2}, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == "8"


def test_the_cores_are_shared_out_among_all_that_compute() -> None:
    def threads(**sections: Any) -> dict[str, str]:
        return {spec.name: spec.env["OMP_NUM_THREADS"] for spec in specs(make(**sections))}

    assert threads() == {"rollout-0": "4", "reward-0": "1", "trainer-0": "4"}
    shared = threads(critic={}, services={"critic": {"processes": 2}})
    assert shared == {"rollout-0": "2", "reward-0": "1", "trainer-0": "2", "critic-0": "2"}
    assert threads(rewards={"model": {"path": "x"}}) == {"rollout-0": "2", "reward_model-0": "2", "trainer-0": "2"}


def test_what_is_forked_needs_nothing_that_comes_before_torch() -> None:
    def forked(machine: Machine = Machine(), **services: Any) -> list[str]:  # noqa: B008  immutable
        config = make(services=services)
        found = service_specs(config, started(config), Path("c.yaml"), "python", "host:1", 8, machine)
        return [name for name, spec in found.items() if spec.forked]

    assert forked() == ["rollout-0", "trainer-0"]
    assert forked(rollout={"engine": "vllm"}) == ["trainer-0"]
    for own in ({"python": "/own/python"}, {"env": {"A": "1"}}, {"cpus": "0"}, {"processes": 2}, {"jemalloc": "/lib/j.so"}):
        assert forked(trainer=own) == ["rollout-0"]
    assert forked(Machine(kind="npu", devices=("0", "1"))) == []


def test_the_fork_server_imports_for_the_roles_that_there_are() -> None:
    assert forked_roles(make(), True, Machine()) == ("rollout", "trainer")
    assert forked_roles(make(), False, Machine()) == ("rollout",)
    assert forked_roles(make(critic={}), True, Machine()) == ("critic", "rollout", "trainer")
    assert forked_roles(make(services={"rollout": {"engine": "vllm"}}), False, Machine()) == ()
    assert forked_roles(make(), True, Machine(kind="cuda", devices=("0",))) == ()


def test_a_reward_model_is_a_service_that_computes() -> None:
    settings = {"replicas": 2, "python": "/own/python", "env": {"A": "1"}}
    config = make(rewards={"model": {"path": "x"}}, services={"reward_model": settings})
    found = [spec for spec in specs(config) if spec.role == "reward_model"]
    assert [spec.name for spec in found] == ["reward_model-0", "reward_model-1"]
    assert found[1].command[:5] == ("/own/python", start.__file__, "services.reward_model", "--name", "reward_model-1")
    assert (found[1].env["OMP_NUM_THREADS"], found[1].env["A"]) == ("2", "1")
    assert accelerators(config) == 4


def test_an_evaluation_alone_has_rollouts_and_rewards_which_share_all_cores() -> None:
    config = make(critic={}, algorithm={"kl_coefficient": 0.1}, services={"rollout": {"replicas": 2}})
    found = specs(config, trains=False)
    assert {spec.name: spec.env["OMP_NUM_THREADS"] for spec in found} == {"rollout-0": "4", "rollout-1": "4", "reward-0": "1"}
    assert {instance.name for instance in instances(config, trains=False)} == {spec.name for spec in found}
    assert "--evaluate" in coordinator_spec(config, Path("c.yaml"), "python", ("--ready-fd", "3"), 0.0, trains=False).command
    assert "--evaluate" not in coordinator_spec(config, Path("c.yaml"), "python", ("--ready-fd", "3"), 0.0).command


def test_a_section_is_one_or_a_list_or_a_mapping_or_nothing() -> None:
    one, user = Rollout(slots=1), Environment(server=RemoteServer(address="a:1"))
    services: Any = SimpleNamespace(one=one, list=[one, one], named={"a": one, "user": user}, none=None, word="ascend")
    config: Any = SimpleNamespace(services=services)
    assert sections(config, "one") == {"services.one": one}
    assert sections(config, "list") == {"services.list.0": one, "services.list.1": one}
    assert sections(config, "named") == {"services.named.a": one}  # the other's process is the user's to start
    assert sections(config, "none") == sections(config, "word") == {}
