"""Writing where there is no room for now."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import timeouts
from runtime.errors import ServiceFault
from runtime.process import disk


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.0)


def failing(*errors: int) -> Callable[[], str]:
    """Fails with each, one after the other; then writes."""
    left = list(errors)

    def work() -> str:
        if left:
            raise OSError(left.pop(0), "no")
        return "written"

    return work


def waited(work: Callable[[], str]) -> tuple[str, list[str]]:
    said: list[str] = []
    return asyncio.run(disk.done(work, Path("/run/a"), said.append)), said


@pytest.mark.parametrize("passing", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_what_passes_is_waited_for_and_told_once(passing: int) -> None:
    assert waited(failing(passing, passing)) == ("written", ["waits until there is room for /run/a: no"])
    assert disk.until_done(failing(passing, passing), Path("/run/a")) == "written"


def test_what_does_not_pass_is_a_fault() -> None:
    with pytest.raises(ServiceFault, match="/run/a"):
        waited(failing(errno.ENOSPC, errno.EACCES))
    with pytest.raises(ServiceFault, match="/run/a"):
        disk.until_done(failing(errno.EACCES), Path("/run/a"))
