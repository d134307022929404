"""How MindSpeed-RL's keys of data and rewards are translated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.mindspeed_cases import OLDER, at, made, of


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("./a/data", "./a/data.parquet"),
        ("./a/data.jsonl", "./a/data.jsonl"),
        ("2,./a,0.5,./b.json", [{"path": "./a.parquet", "weight": 2.0}, {"path": "./b.json", "weight": 0.5}]),
        (["./a", "./b"], [{"path": "./a.parquet"}, {"path": "./b.parquet"}]),
    ],
)
def test_data(path: Any, ours: Any) -> None:
    assert at(made(megatron_training={"data_path": path}), "data.train") == ours


def test_handlers_and_columns() -> None:
    columns = {"prompt": "q", "query": "", "response": "a", "system": ""}
    got = made(megatron_training={"handler_name": "R1AlpacaStyleInstructionHandler", "map_keys": columns})
    assert got.raw["data"]["handler"] == "r1"
    assert [got.raw["data"][f"{name}_key"] for name in ("prompt", "query", "label", "system")] == ["q", "", "a", ""]


@pytest.mark.parametrize(("theirs", "ours"), [("acc", "r1_zero_acc"), ("format", "r1_zero_format"), ("step", "step")])
def test_verifiers_of_the_older_format(theirs: str, ours: str) -> None:
    older = of("r1_zero", OLDER, {"algorithm": {"verifier_function": [theirs]}}, {}, ())
    assert at(older, "rewards.rules") == [{"name": ours}]
    assert at(made(rl_config={"verifier_function": [theirs]}), "rewards.rules") == [{"name": theirs}]


def test_a_reward_model_of_the_older_format() -> None:
    changes = {
        "reward": {"verifier": False, "load": "orm"},
        "resource_pool": {"actor_rollout": [4], "reward": [2, 1], "ref": [2]},
    }
    got = of("r1_zero", OLDER, changes, {}, ())
    assert got.raw["rewards"] == {"model": {"path": "orm"}}
    assert at(got, "services.reward_model.replicas") == 3
    assert at(got, "services.reference.processes") == 2


def test_additional_columns_reach_the_rules_and_labels_are_there_anyway() -> None:
    assert at(made(megatron_training={"dataset_additional_keys": ["labels", "level"]}), "data.additional_keys") == ["level"]
