"""Lists of processors, and what is said of those that the machine has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node import cpus
from launcher.node.environment import environment, faults
from launcher.node.machine import Machine, this_machine
from launcher.node.topology import coordinator_spec, service_specs
from runtime.cluster.nodes import Launch
from runtime.config import Config

CONFIG = Path("c.yaml")
MACHINE = Machine(cpus=frozenset(range(8)))


def make(**services: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": services}, Config)


def test_numbers_and_ranges_in_any_order() -> None:
    assert cpus.parse("32, 0-3,2") == (0, 1, 2, 3, 32)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_shown_is_read_back(some: set[int]) -> None:
    assert set(cpus.parse(cpus.shown(some))) == some


def test_runs_are_shown_as_ranges() -> None:
    assert cpus.shown([5, 0, 1, 2, 7]) == "0-2,5,7"


@pytest.mark.parametrize("wrong", ["3-1", "a", "1,,2", "-1", "0-1-2"])
def test_anything_else_is_no_list(wrong: str) -> None:
    with pytest.raises(ValueError, match="is no processor and no range of processors"):
        cpus.parse(wrong)


def test_each_role_has_its_own() -> None:
    config = make(coordinator={"cpus": "7"}, rollout={"cpus": "0-3"})
    launches = [Launch(role="rollout", name="rollout-0"), Launch(role="trainer", name="trainer-0", ranks=[0])]
    specs = service_specs(config, launches, CONFIG, "python", "host:1", 8, MACHINE)
    assert specs["rollout-0"].cpus == (0, 1, 2, 3)
    assert specs["trainer-0"].cpus == ()
    assert coordinator_spec(config, CONFIG, "python", ("--ready-fd", "3"), 0.0, machine=MACHINE).cpus == (7,)


def test_there_are_no_more_threads_than_processors_unless_asked_for() -> None:
    role = make(trainer={"cpus": "0-1"}).services.trainer
    assert environment(role, 6, MACHINE)["OMP_NUM_THREADS"] == "2"
    assert environment(role, 1, MACHINE)["OMP_NUM_THREADS"] == "1"
    role = make(trainer={"cpus": "0-1", "threads": 4}).services.trainer
    assert environment(role, 6, MACHINE)["OMP_NUM_THREADS"] == "4"


def test_what_the_machine_has_not_is_refused() -> None:
    config = make(trainer={"cpus": "6-9"}, rollout=[{"cpus": "x"}], reward={"cpus": "0-7"})
    found = dict(line.split(": ", 1) for line in faults(config, MACHINE))
    assert found == {
        "services.trainer.cpus": "6-9, but this machine gives no 8-9; must be of 0-7",
        "services.rollout.0.cpus": "'x' is no processor and no range of processors; must be a list such as 0-15,32",
    }


def test_this_machine_has_some() -> None:
    assert this_machine().cpus
