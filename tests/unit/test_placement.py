"""Which processes a configuration makes, how each is started, which is put where, and what is said when it cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node.topology import Machine, ProcessSpec, coordinator_spec, restarts, service_specs
from runtime.cluster.nodes import Launch, NodeRegistration, Rendezvous, launches
from runtime.cluster.placement import NodeResources, Placement, RestartBackoff, offers, place, table
from runtime.cluster.topology import (
    Instance,
    data_leaders,
    elastic_sizes,
    group_of,
    instances,
    replicas,
    sections,
    uses_reference,
    with_ranks,
)
from runtime.config import Config, Environment, RemoteServer, Rollout
from runtime.coordinator.metrics_recorder import accelerators
from runtime.errors import ConfigError
from sluice import start

KL = {"kl_coefficient": 0.1}


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def nodes(*devices: int, supernodes: str = "") -> list[NodeResources]:
    return [NodeResources(f"n{index}", count, supernodes[index : index + 1]) for index, count in enumerate(devices)]


def seats(placement: Placement, role: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(seat.node, seat.devices) for seat in placement.seats if seat.instance.role == role]


def refused(config: Config, offered: list[NodeResources], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        place(config, offered, **options)
    return caught.value.faults


# What MindSpeed-RL's R1-Zero page asks of 16 NPUs.
TRAIN_8_INFER_6_REFERENCE_2 = make(
    algorithm=KL,
    services={
        "trainer": {"engine": "megatron", "processes": 8, "parallel": {"tensor": 4}},
        "rollout": {"engine": "vllm", "replicas": 3, "parallel": {"tensor": 2}},
        "reference": {"replicas": 2},
    },
)


def test_train_8_infer_6_reference_2_on_one_node_of_16_or_two_of_8() -> None:
    placed = place(TRAIN_8_INFER_6_REFERENCE_2, nodes(16))
    assert seats(placed, "trainer") == [("n0", (device,)) for device in range(8)]
    assert seats(placed, "rollout") == [("n0", (8, 9)), ("n0", (10, 11)), ("n0", (12, 13))]
    assert seats(placed, "reference") == [("n0", (14,)), ("n0", (15,))]
    assert seats(placed, "reward") == [("n0", ())]
    placed = place(TRAIN_8_INFER_6_REFERENCE_2, nodes(8, 8))
    assert seats(placed, "trainer") == [("n0", (device,)) for device in range(8)]
    assert seats(placed, "rollout") == [("n1", (0, 1)), ("n1", (2, 3)), ("n1", (4, 5))]
    assert seats(placed, "reference") == [("n1", (6,)), ("n1", (7,))]
    rows = [row for row in table(placed, nodes(8, 8)) if row[1] in ("0", "-")]
    assert rows == [("n0", "0", "trainer-0"), ("n0", "-", "reward-0"), ("n1", "0", "rollout-0")]


def test_a_group_keeps_what_shares_every_layer_on_one_node() -> None:
    config = make(services={"trainer": {"engine": "megatron", "processes": 8, "parallel": {"tensor": 4}}})
    placed = place(config, nodes(6, 4, 1))
    assert seats(placed, "trainer") == [(node, (device,)) for node in ("n0", "n1") for device in range(4)]
    (fault,) = refused(config, nodes(6, 3, 3, 3))
    assert fault == (
        "services.trainer: 8 processes do not fit by 4 that have to be on one node; node n0 has 6 of 6 devices free; "
        "node n1 has 3 of 3 devices free; node n2 has 3 of 3 devices free; node n3 has 3 of 3 devices free"
    )


@pytest.mark.parametrize(
    ("processes", "devices", "expected"),
    [
        (6, (4, 4, 4, 4), {"n0": 4, "n2": 2}),
        (6, (1, 4, 4, 4), {"n1": 4, "n3": 2}),
        (10, (4, 4, 4, 4), {"n0": 4, "n2": 4, "n1": 2}),  # one supernode after the other
    ],
)
def test_a_group_is_put_into_a_supernode_that_holds_it(
    processes: int, devices: tuple[int, ...], expected: dict[str, int]
) -> None:
    placed = place(make(services={"trainer": {"processes": processes}}), nodes(*devices, supernodes="abab"))
    assert Counter(node for node, _ in seats(placed, "trainer")) == expected


def test_spread_is_even_and_a_list_names_the_nodes() -> None:
    config = make(
        services={"rollout": {"replicas": 4, "placement": "spread"}, "trainer": {"processes": 4, "placement": "spread"}}
    )
    placed = place(config, nodes(8, 8))
    assert Counter(node for node, _ in seats(placed, "trainer")) == {"n0": 2, "n1": 2}
    assert Counter(node for node, _ in seats(placed, "rollout")) == {"n0": 2, "n1": 2}
    named = make(services={"rollout": {"replicas": 2, "placement": ["n1", "n2"]}, "trainer": {"placement": ["n0"]}})
    placed = place(named, nodes(0, 0, 0))
    assert seats(placed, "rollout") == [("n1", ()), ("n2", ())]
    assert seats(placed, "trainer") == [("n0", ())]


def test_copies_on_another_node_need_ranks_on_several() -> None:
    config = make(checkpoint={"in_memory": "another_node"}, services={"trainer": {"processes": 4}})
    (fault,) = refused(config, nodes(8, 8))
    assert fault == (
        "checkpoint.in_memory: another_node, but all ranks of services.trainer are on node n0, and copies of their state would "
        "be there too; place the ranks on several nodes, or must be auto"
    )
    assert len({node for node, _ in seats(place(config, nodes(2, 3)), "trainer")}) == 2
    assert len({node for node, _ in seats(place(config, nodes(8)), "trainer")}) == 1  # there is no other node


@pytest.mark.parametrize(
    ("trainer", "training", "sizes"),
    [
        ({"processes": 8}, {"groups_per_step": 12}, [6, 4, 3, 2, 1]),
        ({"processes": 4}, {"groups_per_step": 8, "mini_batch_size": 2}, [2, 1]),
        ({"processes": 16, "engine": "megatron", "parallel": {"tensor": 2, "pipeline": 2}}, {}, [16, 8, 4]),
        ({"processes": 8, "engine": "megatron", "parallel": {"tensor": 2, "expert": 2}}, {}, [8, 4]),
    ],
)
def test_an_elastic_group_has_whole_blocks_that_divide_the_prompts(trainer: Any, training: Any, sizes: list[int]) -> None:
    config = make(services={"trainer": trainer}, training=training)
    assert list(elastic_sizes(config, "trainer")) == sizes
    smaller = with_ranks(config, "trainer", sizes[-1]).services.trainer
    assert (smaller.processes, len(data_leaders(smaller))) == (sizes[-1], smaller.parallel.data or sizes[-1])


def test_who_is_colocated_has_its_hosts_devices() -> None:
    services = {
        "trainer": {"processes": 4},
        "critic": {"processes": 4, "colocate": "trainer"},
        "rollout": {"engine": "vllm", "replicas": 2, "parallel": {"tensor": 2}, "colocate": "trainer"},
        "reference": {"replicas": 2, "colocate": "trainer"},
    }
    placed = place(make(algorithm=KL, critic={}, services=services), nodes(4))
    assert seats(placed, "critic") == seats(placed, "trainer") == [("n0", (device,)) for device in range(4)]
    assert seats(placed, "rollout") == [("n0", (0, 1)), ("n0", (2, 3))]
    assert seats(placed, "reference") == [("n0", (0,)), ("n0", (1,))]


def test_a_guest_comes_after_its_host_even_where_it_is_the_larger() -> None:
    services = {"rollout": {"engine": "vllm", "parallel": {"tensor": 2}, "colocate": "reference"}, "reference": {"replicas": 2}}
    placed = place(make(algorithm=KL, services=services), nodes(3))
    assert seats(placed, "rollout") == [("n0", (1, 2))]
    assert seats(placed, "reference") == [("n0", (1,)), ("n0", (2,))]


def test_the_largest_replicas_come_first() -> None:
    placed = place(make(services={"rollout": [{}, {"engine": "vllm", "parallel": {"tensor": 2}}]}), nodes(4))
    assert seats(placed, "rollout") == [("n0", (1, 2)), ("n0", (3,))]


def test_guests_are_on_their_hosts_nodes_also_where_there_are_no_devices() -> None:
    services = {
        "trainer": {"processes": 2, "placement": "spread"},
        "critic": {"processes": 2, "colocate": "trainer"},
        "rollout": {"replicas": 3, "colocate": "trainer"},
    }
    placed = place(make(critic={}, services=services), nodes(0, 0))
    assert seats(placed, "critic") == [("n0", ()), ("n1", ())]
    assert seats(placed, "rollout") == [("n0", ()), ("n1", ()), ("n0", ())]


def test_a_role_that_names_its_devices_has_those() -> None:
    services = {"trainer": {"processes": 2, "devices": [3, 1]}, "rollout": {"replicas": 2}}
    placed = place(make(services=services), nodes(3, 4))
    assert seats(placed, "trainer") == [("n1", (3,)), ("n1", (1,))]  # node n0 counts its devices from 0 to 2
    assert seats(placed, "rollout") == [("n0", (0,)), ("n0", (1,))]
    on_cpus = place(make(services=services), nodes(0, 0))
    assert seats(on_cpus, "trainer") == [("n0", ()), ("n0", ())]


def test_replicas_share_the_devices_that_their_role_names_in_order() -> None:
    rollout = {"engine": "vllm", "replicas": 2, "parallel": {"tensor": 2}, "devices": [3, 1, 2, 0]}
    placed = place(make(services={"rollout": rollout}), nodes(5))
    assert seats(placed, "rollout") == [("n0", (3, 1)), ("n0", (2, 0))]
    assert seats(placed, "trainer") == [("n0", (4,))]


def test_the_table_names_all_who_share_a_device_and_all_who_have_none() -> None:
    services = {"trainer": {}, "rollout": {"colocate": "trainer"}, "reward": {"replicas": 2}}
    placed = place(make(services=services), nodes(2))
    assert table(placed, nodes(2)) == [("n0", "0", "trainer-0, rollout-0"), ("n0", "1", ""), ("n0", "-", "reward-0, reward-1")]


TENSOR_2 = {"engine": "megatron", "processes": 2, "parallel": {"tensor": 2}, "placement": "spread"}
VLLM_2 = {"engine": "vllm", "parallel": {"tensor": 2}, "colocate": "trainer"}
VLLM_4 = {"engine": "vllm", "parallel": {"tensor": 2, "data": 2}}
UNEVEN = "trainer.placement: {} processes cannot be spread evenly over n0, n1"
FREE = "node n{} has {} of 2 devices free"
NO_DEVICE = f"rollout.devices: there is no device 2; {FREE.format(0, 2)}; {FREE.format(1, 2)}"
THEIRS = "others are used by trainer-0, rollout-0"
OF_TRAINER = "{0}.devices: 0 of node n0 is used by trainer-0; must be another, or services.{0}.colocate has to be trainer"
NO_HOST = "no process of critic is placed; must be a role of the run that is not colocated itself"


def spread(processes: int) -> dict[str, Any]:
    return {"trainer": {"processes": processes, "placement": "spread"}}


@pytest.mark.parametrize(
    ("services", "devices", "said"),
    [
        ({"trainer": TENSOR_2}, (4, 4), f"{UNEVEN.format(2)} by 2 that have to be on one node"),
        (spread(3), (4, 4), UNEVEN.format(3)),
        (spread(4), (8, 1), "trainer.placement: 2 of 4 processes do not fit on n1; node n1 has 1 of 1 devices free"),
        (spread(2) | {"rollout": VLLM_2}, (1, 1), "rollout.colocate: rollout-0 would have devices of two nodes of trainer"),
        ({"trainer": {"devices": [0]}, "critic": {"devices": [0]}}, (4,), OF_TRAINER.format("critic")),
        ({"trainer": {"devices": [0]}, "rollout": {"devices": [0]}}, (2,), OF_TRAINER.format("rollout")),
        ({"rollout": {"devices": [2]}}, (2, 2), NO_DEVICE),
        ({"trainer": {"processes": 3}}, (2,), f"trainer: 3 processes do not fit; {FREE.format(0, 2)}"),
        (
            {"rollout": {"replicas": 2}},
            (2,),
            f"rollout: no node has 1 free devices for rollout-1; {FREE.format(0, 0)} ({THEIRS})",
        ),
        ({"rollout": VLLM_4}, (2, 3), "rollout.parallel: takes 4 devices of one node, and nodes have at most 3"),
        ({"rollout": {"placement": ["n9"]}}, (2,), "rollout.placement: there is no node 'n9'; nodes are n0"),
        ({"rollout": {"replicas": 2, "colocate": "trainer"}}, (2,), "rollout.colocate: needs 2 devices, but trainer has 1"),
        ({"rollout": {"colocate": "critic"}}, (2,), f"rollout.colocate: {NO_HOST}"),
    ],
)
def test_what_does_not_fit_over_the_nodes_is_one_line_that_names_both_sides(
    services: dict[str, Any], devices: tuple[int, ...], said: str
) -> None:
    critic = {"critic": {}} if "critic" in services else {}
    assert refused(make(services=services, **critic), nodes(*devices)) == [f"services.{said}"]


def test_an_evaluation_has_the_devices_of_hosts_that_it_does_without() -> None:
    services = {"trainer": {"processes": 2}, "rollout": {"replicas": 2, "colocate": "trainer"}}
    placed = place(make(services=services), nodes(2), trains=False)
    assert seats(placed, "rollout") == [("n0", (0,)), ("n0", (1,))]
    assert not seats(placed, "trainer")


def test_an_evaluation_leaves_guests_with_the_hosts_that_it_has() -> None:
    rewards = {"model": {"path": "/m"}}
    services = {"rollout": [{"replicas": 2}, {"colocate": "trainer"}], "reward_model": {"colocate": "rollout"}}
    placed = place(make(rewards=rewards, services=services), nodes(4), trains=False)
    assert seats(placed, "rollout") == [("n0", (0,)), ("n0", (1,)), ("n0", (2,))]
    assert seats(placed, "reward_model") == [("n0", (0,))]
    alone = {"rollout": {"colocate": "trainer"}, "reward_model": {"colocate": "trainer"}}
    placed = place(make(rewards=rewards, services=alone), nodes(2), trains=False)
    assert seats(placed, "rollout") + seats(placed, "reward_model") == [("n0", (0,)), ("n0", (1,))]


def test_a_cluster_may_begin_small_and_its_replicas_wait() -> None:
    config = make(services={"rollout": {"replicas": 4}})
    first = place(config, nodes(3), waits=True)
    assert [instance.name for instance in first.pending] == ["rollout-2", "rollout-3"]
    second = place(config, nodes(3, 1), first.seats, waits=True)
    assert second.seats[: len(first.seats)] == first.seats
    assert seats(second, "rollout")[2:] == [("n1", (0,))]
    assert [instance.name for instance in second.pending] == ["rollout-3"]
    assert refused(config, nodes(1), waits=True)  # nobody of the role has room


def test_what_is_to_be_even_leaves_room_for_nodes_that_have_not_come() -> None:
    cluster = {"nodes": [{"name": name} for name in ("n0", "n1", "n2")], "min_nodes": 2}
    for placement in ("spread", ["n1", "n2"]):
        services = {"rollout": {"replicas": 2, "placement": placement}, "trainer": {"placement": ["n0"]}}
        config = make(cluster=cluster, services=services)
        first = place(config, nodes(0, 0), waits=True)
        both = place(config, nodes(0, 0, 0), first.seats, waits=True)
        assert len({node for node, _ in seats(both, "rollout")}) == 2
        assert not both.pending
    assert [instance.name for instance in first.pending] == ["rollout-1"]
    nowhere = make(cluster=cluster, services={"rollout": {"placement": ["n2"]}})
    assert refused(nowhere, nodes(0, 0), waits=True) == ["services.rollout.placement: none of n2 has come; nodes are n0, n1"]
    unknown = make(cluster=cluster, services={"rollout": {"placement": ["n1", "n9"]}})
    nobody = "services.rollout.placement: there is no node 'n9'; nodes are n0, n1, n2"
    assert refused(unknown, nodes(0, 0), waits=True) == [nobody]
    group = make(cluster=cluster, services={"trainer": {"processes": 2, "placement": ["n1", "n2"]}})
    missing = "services.trainer.placement: node 'n2' is not there, and a group needs all of its nodes"
    assert refused(group, nodes(0, 0), waits=True) == [missing]


def test_replicas_that_are_spread_wait_for_the_nodes_that_are_named_and_others_do_not() -> None:
    cluster = {"nodes": [{"name": name} for name in ("n0", "n1", "n2")], "min_nodes": 2}
    spread = make(cluster=cluster, services={"rollout": {"replicas": 3, "placement": "spread"}})
    first = place(spread, nodes(0, 0), waits=True)
    assert (seats(first, "rollout"), [instance.name for instance in first.pending]) == ([("n0", ()), ("n1", ())], ["rollout-2"])
    assert refused(spread, nodes(0, 0))[0].endswith("for rollout-2; nodes are n0, n1")
    packed = make(cluster=cluster, services={"rollout": {"replicas": 3}})
    assert seats(place(packed, nodes(0, 0, 0)), "rollout") == [("n0", ())] * 3
    # A node that no configuration names may come yet.
    named = place(make(services={"rollout": {"replicas": 2, "placement": ["n8", "n0"]}}), nodes(0), waits=True)
    assert (seats(named, "rollout"), [instance.name for instance in named.pending]) == ([("n0", ())], ["rollout-1"])
    nobody = make(services={"rollout": {"placement": ["n8", "n9"]}})
    assert refused(nobody, nodes(0), waits=True) == ["services.rollout.placement: none of n8, n9 has come; nodes are n0"]


def test_nodes_are_those_of_the_configuration_or_as_this_one() -> None:
    here = NodeResources("here", 8)
    assert offers(make(), here) == [here]
    assert offers(make(cluster={"min_nodes": 2}), here) == [NodeResources("node-0", 8), NodeResources("node-1", 8)]
    named = make(cluster={"nodes": [{"name": "a", "devices": 2, "supernode": "s"}, {"name": "b"}]})
    assert offers(named, here) == [NodeResources("a", 2, "s"), NodeResources("b", 8)]


def over_nodes(**rollout: Any) -> Config:
    return make(services={"rollout": {"engine": "vllm", "parallel": {"tensor": 4, "nodes": 2}, **rollout}})


def test_an_engine_over_nodes_has_a_process_on_each_and_as_many_devices_there() -> None:
    config = over_nodes(replicas=2)
    named = [one.name for one in instances(config) if one.role == "rollout"]
    assert named == ["rollout-0", "rollout-0n1", "rollout-1", "rollout-1n1"]
    units = [[one.name for one in group_of(config, Instance("rollout", name))] for name in named]
    assert units == [named[:2]] * 2 + [named[2:]] * 2
    placed = place(config, nodes(3, 2, 2, 2))
    found = {seat.instance.name: (seat.node, seat.devices) for seat in placed.seats if seat.instance.role == "rollout"}
    assert found == {
        "rollout-0": ("n0", (1, 2)),
        "rollout-0n1": ("n1", (0, 1)),
        "rollout-1": ("n2", (0, 1)),
        "rollout-1n1": ("n3", (0, 1)),
    }
    assert accelerators(config) == 9


def test_an_engine_over_nodes_that_finds_one_is_refused_or_waits_as_a_whole() -> None:
    (fault,) = refused(over_nodes(placement=["n0"]), nodes(9, 9))
    assert fault.startswith("services.rollout.parallel.nodes: 2, but, beside n0, no node has room for rollout-0n1; ")
    placed = place(over_nodes(replicas=2), nodes(5, 2), waits=True)
    assert [one.name for one in placed.pending] == ["rollout-1", "rollout-1n1"]
    assert [seat.instance.name for seat in placed.seats if seat.instance.role == "rollout"] == ["rollout-0", "rollout-0n1"]


@given(
    devices=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    trainer=st.integers(1, 6),
    replicas=st.integers(1, 6),
    tensor=st.integers(1, 3),
    references=st.integers(1, 3),
    placement=st.sampled_from(["pack", "spread"]),
)
def test_every_process_has_devices_of_its_own_on_one_node(
    devices: list[int], trainer: int, replicas: int, tensor: int, references: int, placement: str
) -> None:
    config = make(
        algorithm=KL,
        services={
            "trainer": {"processes": trainer},
            "rollout": {"engine": "vllm", "replicas": replicas, "parallel": {"tensor": tensor}, "placement": placement},
            "reference": {"replicas": references},
        },
    )
    try:
        placed = place(config, nodes(*devices))
    except ConfigError:
        return
    assert {seat.instance for seat in placed.seats} == set(instances(config))
    taken = Counter((seat.node, device) for seat in placed.seats for device in seat.devices)
    assert not taken or max(taken.values()) == 1
    for node, device in taken:
        assert device < devices[int(node[1:])]
    for seat in placed.seats:
        assert len(seat.devices) == {"rollout": tensor, "reward": 0}.get(seat.instance.role, 1)


def test_an_allowance_grants_so_many_within_its_window_each_later_than_the_one_before() -> None:
    allowance = RestartBackoff(2)
    assert [allowance.delay(now) for now in (0.0, 10.0, 20.0)] == [0.5, 1.0, None]
    assert allowance.delay(600.0) == 1.0  # the first is out of the window
    assert allowance.delay(605.0) is None
    assert RestartBackoff(0).delay(0.0) is None
    often = RestartBackoff(100)
    assert [often.delay(0.0) for _ in range(100)][-1] == 60.0


# --------------------------------------------------------------------------------------------- the processes of a configuration
def started(config: Config, trains: bool = True) -> list[Launch]:
    """On a machine without accelerators, which is the only one."""
    here = NodeRegistration(name="here", address="127.0.0.1")
    placement = place(config, [NodeResources("here")], trains=trains)
    return launches(config, placement, {"here": here}, {}, b"")["here"]


def specs(config: Config, trains: bool = True) -> list[ProcessSpec]:
    return list(service_specs(config, started(config, trains), Path("c.yaml"), "python", "host:1", 8, Machine()).values())


def names(config: Config) -> list[str]:
    return [instance.name for instance in instances(config)]


@pytest.mark.parametrize(
    ("sections", "expected", "devices"),
    [
        ({"services": {"rollout": {"replicas": 2}, "critic": {"processes": 4}}}, "rollout-0 rollout-1 reward-0 trainer-0", 3),
        ({"critic": {}, "services": {"critic": {"processes": 2}}}, "rollout-0 reward-0 trainer-0 critic-0 critic-1", 4),
        ({"reference": {"source": "service"}, "algorithm": KL}, "rollout-0 reward-0 reference-0 trainer-0", 3),
        ({"reference": {"source": "service"}}, "rollout-0 reward-0 trainer-0", 2),
        ({"reference": {"source": "adapter_off"}, "lora": {}, "algorithm": KL}, "rollout-0 reward-0 trainer-0", 2),
    ],
)
def test_a_service_is_there_only_where_it_is_asked(sections: dict[str, Any], expected: str, devices: int) -> None:
    config = make(**sections)
    assert names(config) == expected.split()
    assert accelerators(config) == devices
    assert uses_reference(config) is ("reference-0" in expected)


def test_a_reference_is_replicas_or_the_ranks_of_one_group() -> None:
    kl = {"algorithm": {"kl_coefficient": 0.1}}
    replicas = make(**kl, services={"reference": {"replicas": 2}})
    found = [instance for instance in instances(replicas) if instance.role == "reference"]
    assert found == [Instance("reference", f"reference-{index}") for index in range(2)]
    group = make(**kl, services={"reference": {"engine": "megatron", "processes": 2, "parallel": {"tensor": 2}}})
    found = [instance for instance in instances(group) if instance.role == "reference"]
    assert found == [Instance("reference", f"reference-{rank}", rank) for rank in range(2)]
    (spec,) = (spec for spec in specs(group) if spec.role == "reference")
    assert spec.command[2:9] == ("launcher.node.ranks", "--group", "reference-0", "--ranks", "0,1", "--world", "2")
    assert spec.command[9:11] == (start.__file__, "services.reference")
    assert spec.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_fleets_have_settings_of_their_own_and_their_names_count_on() -> None:
    fleets = [
        {"replicas": 2, "max_num_seqs": 8, "python": "/a", "env": {"A": "1"}},
        {"max_num_seqs": 4, "dtype": "bfloat16", "env": {"OMP_NUM_THREADS": "3"}},
    ]
    config = make(services={"rollout": fleets})
    assert names(config) == ["rollout-0", "rollout-1", "rollout-2", "reward-0", "trainer-0"]
    assert accelerators(config) == 4
    made = [(name, each.max_num_seqs, each.dtype) for name, each in replicas(config).items()]
    assert made == [("rollout-0", 8, "auto"), ("rollout-1", 8, "auto"), ("rollout-2", 4, "bfloat16")]
    found = [spec for spec in specs(config) if spec.role == "rollout"]
    settings = [(spec.command[0], spec.env.get("A"), spec.env["OMP_NUM_THREADS"]) for spec in found]
    assert settings == [("/a", "1", "2"), ("/a", "1", "2"), ("python", None, "3")]


def test_ranks_live_and_die_together_and_replicas_each_for_itself() -> None:
    spread = {"engine": "megatron", "processes": 2}
    config = make(critic={}, algorithm={"kl_coefficient": 0.1}, services={"critic": {"processes": 2}, "reference": spread})
    units = {instance.name: [one.name for one in group_of(config, instance)] for instance in instances(config)}
    alone = {name: [name] for name in ("rollout-0", "reward-0", "trainer-0")}
    groups = {f"{role}-{rank}": [f"{role}-0", f"{role}-1"] for role in ("reference", "critic") for rank in range(2)}
    assert units == alone | groups
    replicas = make(algorithm={"kl_coefficient": 0.1}, services={"reference": {"replicas": 2}})
    assert [len(group_of(replicas, instance)) for instance in instances(replicas)] == [1] * 5


def test_everything_but_the_coordinator_is_started_again_a_group_by_the_name_of_its_first_rank() -> None:
    critic = {"processes": 2, "restarts": 7}
    config = make(critic={}, services={"rollout": {"replicas": 2}, "critic": critic})
    allowed = restarts(config, started(config))
    assert set(allowed) == {"rollout-0", "rollout-1", "reward-0", "trainer-0", "critic-0"}
    assert (allowed["critic-0"], allowed["trainer-0"]) == (7, 3)
    assert {spec.name for spec in specs(config)} == set(allowed)


def test_a_part_of_a_group_that_spans_nodes_is_not_this_nodes_to_start_again() -> None:
    config = make(services={"trainer": {"processes": 2}})
    meeting = Rendezvous(host="10.0.0.1", port=7001, key=b"\x01\xff")
    part = Launch(role="trainer", name="trainer-1", ranks=[1], rendezvous=meeting)
    assert restarts(config, [part]) == {}
    spec = service_specs(config, [part], Path("c.yaml"), "python", "host:1", 8, Machine())["trainer-1"]
    where = ("--group", "trainer-1", "--ranks", "1", "--world", "2", "--at", "10.0.0.1:7001")
    assert spec.command[2 : 3 + len(where)] == ("launcher.node.ranks", *where)
    assert spec.env["SLUICE_STORE_KEY"] == "01ff" and "01ff" not in " ".join(spec.command)


def test_the_ranks_of_a_critic_are_started_together_and_a_reward_model_computes() -> None:
    own = {"python": "/own/python", "env": {"A": "1", "OMP_NUM_THREADS": "3"}}
    config = make(critic={}, services={"critic": {"processes": 2, "standby": False, **own}})
    (spec,) = (spec for spec in specs(config) if spec.role == "critic")
    assert spec.name == "critic-0"
    ranks = ("launcher.node.ranks", "--group", "critic-0", "--ranks", "0,1", "--world", "2")
    arguments = ("--name", "critic-0", "--config", "c.yaml", "--coordinator", "host:1")
    assert spec.command == ("/own/python", start.__file__, *ranks, start.__file__, "services.critic", *arguments)
    assert (spec.env["OMP_NUM_THREADS"], spec.env["A"]) == ("3", "1")
    config = make(rewards={"model": {"path": "x"}}, services={"reward_model": {"replicas": 2, **own}})
    found = [spec for spec in specs(config) if spec.role == "reward_model"]
    assert [spec.name for spec in found] == ["reward_model-0", "reward_model-1"]
    assert found[1].command[:5] == ("/own/python", start.__file__, "services.reward_model", "--name", "reward_model-1")
    assert (found[1].env["OMP_NUM_THREADS"], found[1].env["A"]) == ("3", "1")
    assert accelerators(config) == 4


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


def test_an_evaluation_alone_has_rollouts_and_rewards_which_share_all_cores() -> None:
    config = make(critic={}, algorithm={"kl_coefficient": 0.1}, services={"rollout": {"replicas": 2}})
    found = specs(config, trains=False)
    assert {spec.name: spec.env["OMP_NUM_THREADS"] for spec in found} == {"rollout-0": "4", "rollout-1": "4", "reward-0": "1"}
    assert {instance.name for instance in instances(config, trains=False)} == {spec.name for spec in found}
    for trains in (False, True):
        led = coordinator_spec(config, Path("c.yaml"), "python", ("--ready-fd", "3"), 0.0, trains, Machine())
        assert ("--evaluate" in led.command) is not trains


def test_a_section_is_one_or_a_list_or_a_mapping_or_nothing() -> None:
    one, user = Rollout(max_num_seqs=1), Environment(server=RemoteServer(address="a:1"))
    services: Any = SimpleNamespace(one=one, list=[one, one], named={"a": one, "user": user}, none=None, word="ascend")
    config: Any = SimpleNamespace(services=services)
    assert sections(config, "one") == {"services.one": one}
    assert sections(config, "list") == {"services.list.0": one, "services.list.1": one}
    assert sections(config, "named") == {"services.named.a": one}  # the other's process is the user's to start
    assert sections(config, "none") == sections(config, "word") == {}
