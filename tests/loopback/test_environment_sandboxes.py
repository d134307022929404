"""Sandboxes that agents open: by what their environment allows, and gone with the episode."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from runtime.config import Environment
from runtime.config.sandbox import Sandbox
from runtime.environments.sandboxes import EpisodeSandboxes, stricter
from runtime.environments.workers import AgentWorkers
from runtime.errors import UserError
from tests.loopback.test_environment_workers import AGENTS, played, request

LIMITS = Sandbox(runtime="subprocess", network="open", memory=1 << 28, processes=8)


def boxed(sandbox: Sandbox | None, name: str = "boxed", **task: Any) -> tuple[Any, EpisodeSandboxes]:
    async def work() -> tuple[Any, EpisodeSandboxes]:
        sandboxes = EpisodeSandboxes(sandbox, "services.environment.test")
        made = AgentWorkers("test", Environment(run=f"{AGENTS}:{name}"), dict(os.environ), sandboxes)
        try:
            await made.start()
            return (await played(made, request(**task)))[1], sandboxes
        finally:
            await made.close()

    return asyncio.run(work())


def test_commands_of_one_sandbox_share_its_folder() -> None:
    end, sandboxes = boxed(LIMITS)
    assert end.reward == 1.0 and not sandboxes._boxes


def test_an_agent_may_ask_for_less_and_not_for_more() -> None:
    end, _ = boxed(LIMITS, spec={"memory": 1 << 27})
    assert end.reward == 1.0
    end, _ = boxed(LIMITS, spec={"memory": 1 << 29})
    assert "memory: 536870912 is more than the 268435456 allowed" in end.reason
    end, _ = boxed(None)
    assert "there is none; set services.environment.test.sandbox" in end.reason


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"timeout": 1e9}, "timeout: "),
        ({"runtime": "bwrap"}, "runtime, image and network are those of services.environment"),
        ({"network": "gateway"}, "runtime, image and network"),
        ({"read": ["/etc"]}, "read: '/etc' is none of"),
        ({"memory": "much"}, "Expected `int`"),
        ({"colour": 1}, "unknown field `colour`"),
    ],
)
def test_what_is_less_strict_is_refused(spec: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        stricter(LIMITS, spec)
    assert stricter(LIMITS, {"processes": 2}) == Sandbox(runtime="subprocess", network="open", memory=1 << 28, processes=2)
