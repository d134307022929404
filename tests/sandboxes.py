"""What tests of sandboxes share: whether this machine has bubblewrap, and which processes are of whose namespace."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from runtime.errors import UserError
from runtime.sandbox import Sandbox, check


@cache
def fault_of_bwrap() -> str:
    try:
        asyncio.run(check(Sandbox(), "sandbox"))
    except UserError as error:
        return str(error)
    return ""


def needs_bwrap() -> None:
    """Skip where there is none: `apt-get install bubblewrap`."""
    if fault_of_bwrap():
        pytest.skip("bubblewrap does not work here: apt-get install bubblewrap")


def namespaces_below() -> set[int]:
    """The pid namespaces of this process's descendants, its own left out."""
    found = {_namespace(child.pid) for child in psutil.Process().children(recursive=True)}
    return found - {0, _namespace(os.getpid())}


def members(namespaces: set[int]) -> list[int]:
    """Living processes of these namespaces, whatever they call themselves."""
    return [pid for pid in psutil.pids() if _namespace(pid) in namespaces and _lives(pid)]


def _namespace(pid: int) -> int:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    return 0


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
