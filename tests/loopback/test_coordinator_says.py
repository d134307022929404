"""What a coordinator says of itself: why it cannot listen, and what it waits for."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Config
from runtime.errors import UserError
from runtime.status import Progress
from runtime.telemetry.startup import Phases
from services.coordinator import CoordinatorProcess


def coordinator(folder: Path, **sections: Any) -> CoordinatorProcess:
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
