"""Which process is put where, and what is said when it cannot be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cluster.placement import NodeOffer, Placement, offers, place, table
from runtime.cluster.topology import instances
from runtime.config import Config
from runtime.errors import ConfigError

KL = {"kl_coefficient": 0.1}


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def nodes(*devices: int, supernodes: str = "") -> list[NodeOffer]:
    return [NodeOffer(f"n{index}", count, supernodes[index : index + 1]) for index, count in enumerate(devices)]


def seats(placement: Placement, role: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(seat.node, seat.devices) for seat in placement.seats if seat.instance.role == role]


def refused(config: Config, offered: list[NodeOffer], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        place(config, offered, **options)
    return caught.value.faults


# What MindSpeed-RL's R1-Zero page asks of 16 NPUs.
TRAIN_8_INFER_6_REFERENCE_2 = make(
    algorithm=KL,
    services={
        "trainer": {"engine": "megatron", "processes": 8, "parallel": {"tensor": 4}},
        "rollout": {"engine": "vllm", "replicas": 3, "tensor_parallel": 2},
        "reference": {"replicas": 2},
    },
)


def test_train_8_infer_6_reference_2_on_one_node_of_16() -> None:
    placed = place(TRAIN_8_INFER_6_REFERENCE_2, nodes(16))
    assert seats(placed, "trainer") == [("n0", (device,)) for device in range(8)]
    assert seats(placed, "rollout") == [("n0", (8, 9)), ("n0", (10, 11)), ("n0", (12, 13))]
    assert seats(placed, "reference") == [("n0", (14,)), ("n0", (15,))]
    assert seats(placed, "reward") == [("n0", ())]


def test_train_8_infer_6_reference_2_on_two_nodes_of_8() -> None:
    placed = place(TRAIN_8_INFER_6_REFERENCE_2, nodes(8, 8))
    assert seats(placed, "trainer") == [("n0", (device,)) for device in range(8)]
    assert seats(placed, "rollout") == [("n1", (0, 1)), ("n1", (2, 3)), ("n1", (4, 5))]
    assert seats(placed, "reference") == [("n1", (6,)), ("n1", (7,))]
    assert [row for row in table(placed, nodes(8, 8)) if row[1] in ("0", "-")] == [
        ("n0", "0", "trainer-0"),
        ("n0", "-", "reward-0"),
        ("n1", "0", "rollout-0"),
    ]


def test_a_group_keeps_what_shares_every_layer_on_one_node() -> None:
    config = make(services={"trainer": {"engine": "megatron", "processes": 8, "parallel": {"tensor": 4}}})
    placed = place(config, nodes(6, 4, 1))
    assert seats(placed, "trainer") == [("n0", (0,)), ("n0", (1,)), ("n0", (2,)), ("n0", (3,))] + [
        ("n1", (device,)) for device in range(4)
    ]
    (fault,) = refused(config, nodes(6, 3, 3, 3))
    assert fault == (
        "services.trainer: 8 processes do not fit by 4 that have to be on one node; node n0 has 6 of 6 devices free; "
        "node n1 has 3 of 3 devices free; node n2 has 3 of 3 devices free; node n3 has 3 of 3 devices free"
    )


def test_a_group_is_put_into_one_supernode_that_holds_it() -> None:
    config = make(services={"trainer": {"processes": 6}})
    assert {node for node, _ in seats(place(config, nodes(4, 4, 4, 4, supernodes="abab")), "trainer")} == {"n0", "n2"}
    assert {node for node, _ in seats(place(config, nodes(1, 4, 4, 4, supernodes="abab")), "trainer")} == {"n1", "n3"}


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


def test_who_is_colocated_has_its_hosts_devices() -> None:
    services = {
        "trainer": {"processes": 4},
        "critic": {"processes": 4, "colocate": "trainer"},
        "rollout": {"engine": "vllm", "replicas": 2, "tensor_parallel": 2, "colocate": "trainer"},
        "reference": {"replicas": 2, "colocate": "trainer"},
    }
    placed = place(make(algorithm=KL, critic={}, services=services), nodes(4))
    assert seats(placed, "critic") == seats(placed, "trainer") == [("n0", (device,)) for device in range(4)]
    assert seats(placed, "rollout") == [("n0", (0, 1)), ("n0", (2, 3))]
    assert seats(placed, "reference") == [("n0", (0,)), ("n0", (1,))]


def test_a_guest_comes_after_its_host_even_where_it_is_the_larger() -> None:
    services = {"rollout": {"engine": "vllm", "tensor_parallel": 2, "colocate": "reference"}, "reference": {"replicas": 2}}
    placed = place(make(algorithm=KL, services=services), nodes(3))
    assert seats(placed, "rollout") == [("n0", (1, 2))]
    assert seats(placed, "reference") == [("n0", (1,)), ("n0", (2,))]


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
    rollout = {"engine": "vllm", "replicas": 2, "tensor_parallel": 2, "devices": [3, 1, 2, 0]}
    placed = place(make(services={"rollout": rollout}), nodes(5))
    assert seats(placed, "rollout") == [("n0", (3, 1)), ("n0", (2, 0))]
    assert seats(placed, "trainer") == [("n0", (4,))]


def test_ranks_go_over_one_supernode_after_the_other() -> None:
    placed = place(make(services={"trainer": {"processes": 10}}), nodes(4, 4, 4, 4, supernodes="abab"))
    assert Counter(node for node, _ in seats(placed, "trainer")) == {"n0": 4, "n2": 4, "n1": 2}


def test_the_table_names_all_who_share_a_device_and_all_who_have_none() -> None:
    services = {"trainer": {}, "rollout": {"colocate": "trainer"}, "reward": {"replicas": 2}}
    placed = place(make(services=services), nodes(2))
    assert table(placed, nodes(2)) == [
        ("n0", "0", "trainer-0, rollout-0"),
        ("n0", "1", ""),
        ("n0", "-", "reward-0, reward-1"),
    ]


TENSOR_2 = {"engine": "megatron", "processes": 2, "parallel": {"tensor": 2}, "placement": "spread"}


@pytest.mark.parametrize(
    ("services", "devices", "said"),
    [
        (
            {"trainer": TENSOR_2},
            (4, 4),
            "services.trainer.placement: 2 processes cannot be spread evenly over n0, n1 by 2 that have to be on one node",
        ),
        (
            {"trainer": {"processes": 3, "placement": "spread"}},
            (4, 4),
            "services.trainer.placement: 3 processes cannot be spread evenly over n0, n1",
        ),
        (
            {"trainer": {"processes": 4, "placement": "spread"}},
            (8, 1),
            "services.trainer.placement: 2 of 4 processes do not fit on n1; node n1 has 1 of 1 devices free",
        ),
        (
            {
                "trainer": {"processes": 2, "placement": "spread"},
                "rollout": {"engine": "vllm", "tensor_parallel": 2, "colocate": "trainer"},
            },
            (1, 1),
            "services.rollout.colocate: rollout-0 would have devices of two nodes of trainer's",
        ),
        (
            {"trainer": {"devices": [0]}, "critic": {"devices": [0]}},
            (4,),
            "services.critic.devices: 0 of node n0 is that of trainer-0; must be another, or services.critic.colocate has to "
            "be trainer",
        ),
        (
            {"rollout": {"devices": [2]}},
            (2, 2),
            "services.rollout.devices: there is no device 2; node n0 has 2 of 2 devices free; node n1 has 2 of 2 devices free",
        ),
    ],
)
def test_what_does_not_fit_over_the_nodes_is_one_line(services: dict[str, Any], devices: tuple[int, ...], said: str) -> None:
    critic = {"critic": {}} if "critic" in services else {}
    assert refused(make(services=services, **critic), nodes(*devices)) == [said]


@pytest.mark.parametrize(
    ("services", "said"),
    [
        (
            {"trainer": {"devices": [0]}, "rollout": {"devices": [0]}},
            "services.rollout.devices: 0 of node n0 is that of trainer-0; must be another, or services.rollout.colocate has to "
            "be trainer",
        ),
        ({"trainer": {"processes": 3}}, "services.trainer: 3 processes do not fit; node n0 has 2 of 2 devices free"),
        (
            {"rollout": {"replicas": 2}},
            "services.rollout: no node has 1 free devices for rollout-1; node n0 has 0 of 2 devices free (others are those of "
            "trainer-0, rollout-0)",
        ),
        ({"rollout": {"devices": [7]}}, "services.rollout.devices: there is no device 7; node n0 has 2 of 2 devices free"),
        ({"rollout": {"placement": ["n9"]}}, "services.rollout.placement: there is no node 'n9'; nodes are n0"),
        ({"rollout": {"replicas": 2, "colocate": "trainer"}}, "services.rollout.colocate: needs 2 devices, but trainer has 1"),
        (
            {"rollout": {"colocate": "critic"}},
            "services.rollout.colocate: no process of critic is placed; must be a role of the run that is not colocated itself",
        ),
    ],
)
def test_what_has_no_room_is_one_line_that_names_both_sides(services: dict[str, Any], said: str) -> None:
    assert refused(make(services=services), nodes(2)) == [said]


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
    assert refused(unknown, nodes(0, 0), waits=True) == [
        "services.rollout.placement: there is no node 'n9'; nodes are n0, n1, n2"
    ]
    group = make(cluster=cluster, services={"trainer": {"processes": 2, "placement": ["n1", "n2"]}})
    assert refused(group, nodes(0, 0), waits=True) == [
        "services.trainer.placement: node 'n2' is not there, which a group cannot do without"
    ]


def test_replicas_that_are_spread_wait_for_the_nodes_that_are_named_and_others_do_not() -> None:
    cluster = {"nodes": [{"name": name} for name in ("n0", "n1", "n2")], "min_nodes": 2}
    spread = make(cluster=cluster, services={"rollout": {"replicas": 3, "placement": "spread"}})
    first = place(spread, nodes(0, 0), waits=True)
    assert (seats(first, "rollout"), [instance.name for instance in first.pending]) == ([("n0", ()), ("n1", ())], ["rollout-2"])
    assert refused(spread, nodes(0, 0))[0].endswith("for rollout-2; nodes are n0, n1")
    packed = make(cluster=cluster, services={"rollout": {"replicas": 3}})
    assert seats(place(packed, nodes(0, 0, 0)), "rollout") == [("n0", ())] * 3


def test_a_node_that_no_configuration_names_may_come_yet() -> None:
    config = make(services={"rollout": {"replicas": 2, "placement": ["n8", "n0"]}})
    first = place(config, nodes(0), waits=True)
    assert (seats(first, "rollout"), [instance.name for instance in first.pending]) == ([("n0", ())], ["rollout-1"])
    nobody = make(services={"rollout": {"placement": ["n8", "n9"]}})
    assert refused(nobody, nodes(0), waits=True) == ["services.rollout.placement: none of n8, n9 has come; nodes are n0"]


def test_nodes_are_those_of_the_configuration_or_as_this_one() -> None:
    here = NodeOffer("here", 8)
    assert offers(make(), here) == [here]
    assert offers(make(cluster={"min_nodes": 2}), here) == [NodeOffer("node-0", 8), NodeOffer("node-1", 8)]
    named = make(cluster={"nodes": [{"name": "a", "devices": 2, "supernode": "s"}, {"name": "b"}]})
    assert offers(named, here) == [NodeOffer("a", 2, "s"), NodeOffer("b", 8)]


@settings(max_examples=200)
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
            "rollout": {"engine": "vllm", "replicas": replicas, "tensor_parallel": tensor, "placement": placement},
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
