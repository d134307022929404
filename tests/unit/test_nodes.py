"""Whom the coordinator admits as a node, and what each node is to run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.cluster.nodes import NodePaths, NodeRegistration, Rendezvous, Roster, code, launches, path_faults
from runtime.cluster.placement import NodeOffer, place
from runtime.config import Config
from runtime.errors import UserError


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def node(name: str, **values: Any) -> NodeRegistration:
    given = {"address": "10.0.0.1", "devices": 8, "config": "c0", "version": "1.0", "ports": list(range(7001, 7013))}
    return NodeRegistration(name=name, **{**given, **values})


def roster(*names: str, **cluster: Any) -> Roster:
    made = Roster(make(cluster=cluster))
    for name in names:
        made.admit(node(name))
        made.ready(name)
    return made


NAMED = [{"name": "a", "devices": 8, "supernode": "s"}, {"name": "b"}]


def test_named_nodes_are_waited_for_and_filled_in_the_configurations_order() -> None:
    assert roster(nodes=NAMED).missing == ["a", "b"]
    assert roster("b", nodes=NAMED).missing == ["a"]
    assert roster("b", nodes=NAMED, min_nodes=1).missing == []
    both = roster("b", "a", nodes=NAMED)
    assert both.missing == []
    assert both.offers == [NodeOffer("a", 8, "s"), NodeOffer("b", 8)]


def test_with_auto_it_is_whoever_comes_in_that_order() -> None:
    assert roster().missing == ["1 of 1 nodes"]
    assert roster("z", min_nodes=3).missing == ["2 of 3 nodes"]
    assert roster("z", "a", min_nodes=2).offers == [NodeOffer("z", 8), NodeOffer("a", 8)]


def test_a_node_counts_once_it_has_told_its_paths_and_until_it_leaves() -> None:
    made = roster("a")
    made.admit(node("b"))
    assert list(made.nodes) == ["a"]
    made.ready("b")
    assert list(made.nodes) == ["a", "b"]
    made.leave("a")
    assert list(made.nodes) == ["b"]
    made.admit(node("a"))  # and it may come back


@pytest.mark.parametrize(
    ("comes", "said"),
    [
        (node("a"), "node a: 10.0.0.1 has this name already; one of them needs another --name"),
        (node("c"), "node c: not in cluster.nodes, a, b; must be one of these (--name)"),
        (node("b", version="0.9"), "node b has Sluice 0.9, and a 1.0; must be the same"),
        (
            node("b", config="c1"),
            "node b was started with another configuration (hash c1) than a (c0); must be the same file and the same overrides",
        ),
    ],
)
def test_who_does_not_fit_is_refused_in_one_line_that_names_both(comes: NodeRegistration, said: str) -> None:
    made = roster("a", nodes=NAMED)
    with pytest.raises(UserError) as caught:
        made.admit(comes)
    assert str(caught.value) == said
    assert list(made.nodes) == ["a"]


def test_a_node_that_lacks_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"^cluster.nodes: a is to have 8 devices, but its agent finds 6$"):
        Roster(make(cluster={"nodes": NAMED})).admit(node("a", devices=6))


def test_what_two_nodes_do_not_have_alike_is_a_line_for_each_path() -> None:
    paths = {"run.dir": "/r", "model.path": "/m", "model.reference": "/f", "critic.path": "/c", "rewards.model.path": "/m"}
    ours = {"run.dir": "1", "model.path": "2", "model.reference": "3", "critic.path": "", "rewards.model.path": "2"}
    theirs = {"run.dir": "1", "model.path": "9", "model.reference": "", "critic.path": "4", "rewards.model.path": "9"}
    mine, other = NodePaths(node="a", found=ours), NodePaths(node="b", found=theirs)
    assert list(path_faults(mine, other, paths)) == [
        "model.path: /m is not the same on node b (hash 9) as on a (2)",
        "model.reference: /f is missing on node b, and is there on a",
        "critic.path: /c is missing on node a, and is there on b",
    ]


def test_a_group_over_two_nodes_meets_at_the_first_and_a_replica_keeps_its_incarnation() -> None:
    config = make(services={"trainer": {"processes": 4}, "rollout": {"replicas": 2}})
    there = {"a": node("a", devices=3), "b": node("b", address="10.0.0.2", devices=3)}
    placed = place(config, [NodeOffer("a", 3), NodeOffer("b", 3)])
    told = launches(config, placed, there, {"rollout-0": 2, "trainer-0": 1}, b"secret")
    first, second = ({launch.name: launch for launch in told[name]} for name in ("a", "b"))
    assert (first["trainer-0"].ranks, first["trainer-0"].devices, first["trainer-0"].incarnation) == ([0, 1, 2], [0, 1, 2], 1)
    meeting = first["trainer-0"].rendezvous
    assert meeting == Rendezvous(host="10.0.0.1", port=7004, key=b"" if meeting is None else meeting.key)
    assert (second["trainer-3"].ranks, second["trainer-3"].rendezvous) == ([3], meeting)
    assert (second["rollout-0"].devices, second["rollout-0"].incarnation, second["rollout-1"].incarnation) == ([1], 2, 0)


def test_each_incarnation_of_a_group_has_a_key_that_nobody_foretells_and_no_log_shows() -> None:
    config = make(services={"trainer": {"processes": 4}, "rollout": {"replicas": 2}})
    there = {"a": node("a", devices=3), "b": node("b", address="10.0.0.2", devices=3)}
    placed = place(config, [NodeOffer("a", 3), NodeOffer("b", 3)])
    keys = []
    for incarnation, secret in ((0, b"one"), (1, b"one"), (0, b"other"), (0, b"one")):
        told = launches(config, placed, there, {"trainer-0": incarnation}, secret)
        (meeting,) = {launch.rendezvous for each in told.values() for launch in each if launch.role == "trainer"}
        assert meeting is not None and len(meeting.key) == 32 and repr(meeting.key) not in repr(told)
        keys.append(meeting.key)
    assert len(set(keys[:3])) == 3 and keys[3] == keys[0]


def test_a_group_waits_for_all_its_nodes_and_a_replica_for_its_own() -> None:
    config = make(services={"trainer": {"processes": 4}, "rollout": {"replicas": 2}})
    placed = place(config, [NodeOffer("a", 3), NodeOffer("b", 3)])
    assert [launch.role for launch in launches(config, placed, {"a": node("a")}, {}, b"")["a"]] == ["reward"]
    assert {launch.name for launch in launches(config, placed, {"b": node("b")}, {}, b"")["b"]} == {"rollout-0", "rollout-1"}


def test_what_a_node_executes_is_known_by_its_key_or_as_a_file_of_python() -> None:
    given = {
        "run": {"name": "a"},
        "model": {"path": "/home/me/.pyenv/models/a.pyramid"},  # which a warm-up may say otherwise
        "rewards": {"rules": [{"name": "own.py:judge"}, {"name": "gsm8k"}]},
        "services": {"rollout": {"engine_args": {"x": 1}}, "trainer": {"env": {"A": "b"}}},
    }
    found = code(msgspec.convert(given, Config))
    assert found["rewards.rules.0.name"] == "own.py:judge"
    assert found["services.trainer.env"] == {"A": "b"} and found["services.rollout.engine_args"] == {"x": 1}
    assert {key.rpartition(".")[2] for key in found} == {"name", "python", "env", "jemalloc", "engine_args"}
