"""Roles on another role's devices: what goes together, and what is told of what does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.cluster.topology import alternates, reference_takes_part, takes_turns
from runtime.config import Config
from runtime.config.service_checks import colocation_faults, device_faults
from runtime.coordinator.run_context import accelerators

WITH_ALL = {"algorithm": {"kl_coefficient": 0.1}, "critic": {}, "training": {"staleness": 1}}


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, **WITH_ALL, **sections}, Config)


def faults(**sections: Any) -> list[str]:
    return list(colocation_faults(make(**sections), trains=True))


@pytest.mark.parametrize("staleness", [0, 1])
def test_everything_may_lie_on_the_trainers_devices(staleness: int) -> None:
    services = {role: {"colocate": "trainer"} for role in ("rollout", "reference", "critic", "reward_model")}
    assert faults(services=services, training={"staleness": staleness}) == []
    config = make(services=services)
    assert (takes_turns(config), reference_takes_part(config), alternates(config)) == (True, True, False)
    assert accelerators(config) == 1
    services["critic"]["offload_train_optimizer"] = True  # type: ignore[assignment]
    assert alternates(make(services=services))


def test_who_lies_on_others_takes_no_turns() -> None:
    services = {"reference": {"colocate": "rollout"}, "critic": {"colocate": "trainer"}}
    assert faults(services=services, training={"staleness": 4}) == []
    config = make(services=services)
    assert (takes_turns(config), reference_takes_part(config), alternates(config)) == (False, False, False)
    assert accelerators(config) == 2


TURNS = {"rollout": {"colocate": "trainer"}}


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        (
            {"services": {"rollout": {"colocate": "actor"}}},
            "services.rollout.colocate: 'actor' is no role with devices; must be one of reward_model, reference, trainer, "
            "critic",
        ),
        (
            {"services": {"reference": {"colocate": "reference"}}},
            "services.reference.colocate: reference is the role itself; must be one of rollout, reward_model, trainer, critic",
        ),
        (
            {"services": {"trainer": {"colocate": "rollout"}}},
            "services.trainer.colocate: rollout: others lie on the trainer's devices; must be services.rollout.colocate: "
            "trainer instead",
        ),
        (
            {"services": {"rollout": {"colocate": "critic"}}, "critic": None},
            "services.rollout.colocate: this run has no critic; must be another, or left out",
        ),
        (
            {"services": {"reference": {"colocate": "critic"}, "critic": {"colocate": "trainer"}}},
            "services.reference.colocate: critic lies on the devices of trainer itself; must be a role with devices of its own",
        ),
        (
            {"services": {"rollout": {"colocate": "trainer", "devices": [1]}, "trainer": {"devices": [1]}}},
            "services.rollout.devices: [1], but colocate says that they are those of trainer; must be one of both",
        ),
        (
            {"services": {"rollout": [{"colocate": "trainer"}, {"colocate": "trainer"}], "trainer": {"devices": [1]}}},
            "services.rollout.{}.colocate: needs 2 devices, but trainer has 1 (services.trainer.devices)",
        ),
        (
            {"services": TURNS, "training": {"staleness": 2}},
            "training.staleness: 2, but rollouts and trainer take turns (colocate: trainer); must be 0 or 1, or "
            "training.partial_rollouts true",
        ),
        (
            {"services": TURNS, "training": {"staleness": 0, "partial_rollouts": True}},
            "training.staleness: 0, but with training.partial_rollouts replies have several versions; must be at least 1",
        ),
        (
            {"services": TURNS, "training": {"partial_rollouts": True}, "publication": {"in_flight": "drain"}},
            "publication.in_flight: drain, but training.partial_rollouts has replies go on; must be keep or recompute",
        ),
        (
            {"training": {"partial_rollouts": True}},
            "training.partial_rollouts: true, but rollouts and trainer do not take turns (colocate: trainer); must be false",
        ),
        (
            {"services": {"rollout": [{"colocate": "trainer"}, {}]}},
            "services.rollout.1.colocate: must be trainer, as that of other fleets: all rollouts take turns with it, or none",
        ),
        (
            {"services": TURNS, "publication": {"backend": "nccl"}},
            "publication.backend: nccl takes one member a device, and rollouts lie on the trainer's; must be auto or gloo",
        ),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(sections: dict[str, Any], fault: str) -> None:
    found = faults(**sections)
    assert found == ([fault.format(0), fault.format(1)] if "{}" in fault else [fault])
    if "nccl" in fault:
        assert list(device_faults(make(**sections), trains=True)) == []  # told once


def test_a_cycle_is_told_on_both_sides() -> None:
    services = {"reference": {"colocate": "critic"}, "critic": {"colocate": "reference"}}
    assert [fault.partition(":")[0] for fault in faults(services=services)] == [
        "services.reference.colocate",
        "services.critic.colocate",
    ]
