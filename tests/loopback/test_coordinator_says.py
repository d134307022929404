"""What a coordinator says of itself: why it cannot listen, and what it waits for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cluster.nodes import Death
from runtime.config import Config
from runtime.errors import UserError
from runtime.process import keys
from runtime.status import Loss, Progress
from runtime.telemetry.startup import Phases
from services.coordinator import CoordinatorProcess


def coordinator(folder: Path, **sections: Any) -> CoordinatorProcess:
    keys.begun(folder)
    given = {"run": {"name": "a", "dir": str(folder)}, "rewards": {"rules": [{"name": "gsm8k"}]}, "model": {"path": "/m"}}
    return CoordinatorProcess(msgspec.convert({**given, **sections}, Config), Phases())


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"services": {"coordinator": {"host": "192.0.2.77"}}}, "services.coordinator.host"),
        ({"services": {"coordinator": {"host": "192.0.2.77", "port": 29777}}}, "services.coordinator.port"),
        ({"network": {"interface": "192.0.2.77"}}, "network.interface"),
    ],
)
def test_an_address_that_is_not_this_machines_is_told_with_its_key(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(UserError, match=f"^{key}: cannot listen on 192.0.2.77:[0-9]+: "):
            asyncio.run(coordinator(tmp_path, **sections).serve(write))
    finally:
        os.close(read)
        os.close(write)


def test_its_status_says_what_a_start_waits_for_and_why_a_run_recovers(tmp_path: Path) -> None:
    found = coordinator(tmp_path)
    found._wait_for_nodes("1 of 2 nodes")
    assert found.status().detail == "a: starting 0/1000: waits for 1 of 2 nodes"
    found.report(Progress(phase="recovering", step=3, steps=10, detail="trainer-0: run: connection lost"))
    assert found.status().detail == "a: recovering 3/10: trainer-0: run: connection lost"


def test_a_death_that_an_agent_tells_of_is_the_loss_of_the_process_though_its_session_stands(tmp_path: Path) -> None:
    class Standing:
        name, incarnation, given_up = "reward-1", 2, ""

        def when_lost(self, tell: Callable[[str], None]) -> None:
            """Its connection does not break."""

        def give_up(self, reason: str) -> None:
            self.given_up = reason

    async def test() -> None:
        found, session = coordinator(tmp_path), Standing()
        found._failed = asyncio.get_running_loop().create_future()
        found._register.place("reward", ["reward-0"])
        found._register.add("reward", session)
        found.report(Progress(phase="training"))
        death = Death(node="b", name="reward-1", incarnation=2, reason="reward-1: run: was killed by SIGKILL")
        await found._coordinator_handlers()["ReportDeath"](death)
        assert session.given_up == death.reason
        assert found._progress.lost == [Loss(name="reward-1", incarnation=2, reason=death.reason)]
        assert not found._failed.done()  # there is another
        await found._coordinator_handlers()["ReportDeath"](msgspec.structs.replace(death, name="reward-0", incarnation=0))
        assert found._failed.exception() is not None

    asyncio.run(test())
