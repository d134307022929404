"""Which transport `publication.transport` stands for."""

from __future__ import annotations

import pytest

from runtime.errors import UserError
from runtime.weights.plan import resolve_transport

HERE = {"trainer-0": "a", "rollout-0": "a", "rollout-1": "a"}
APART = HERE | {"rollout-1": "b"}
UNKNOWN = dict.fromkeys(HERE, "")


@pytest.mark.parametrize(
    ("transport", "backend", "machines", "chosen"),
    [
        ("auto", "auto", HERE, "shared_memory"),
        ("auto", "auto", APART, "collective"),
        ("auto", "auto", UNKNOWN, "collective"),
        ("auto", "nccl", HERE, "collective"),
        ("auto", "gloo", HERE, "collective"),
        ("collective", "auto", HERE, "collective"),
        ("shared_memory", "nccl", HERE, "shared_memory"),
    ],
)
def test_auto_follows_the_members(transport: str, backend: str, machines: dict[str, str], chosen: str) -> None:
    assert resolve_transport(transport, backend, machines) == chosen


@pytest.mark.parametrize(("machines", "named"), [(APART, "rollout-1"), (UNKNOWN, "trainer-0, rollout-0, rollout-1")])
def test_shared_memory_across_machines_names_who_is_apart(machines: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=f"publication.transport: shared_memory needs .*, and {named} cannot") as caught:
        resolve_transport("shared_memory", "auto", machines)
    assert "\n" not in str(caught.value)
