"""What the coordinator sees of a role. `services.rpc.client` implements it over gRPC; tests implement it in memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from runtime.status import Status
from runtime.types import Command

R = TypeVar("R")


class RolePort(Protocol):
    """A process, or a group of ranks that live and die together: when it is lost another may come in its place, of the next
    incarnation. Nobody but the register calls these methods."""

    name: str
    incarnation: int
    machine: str
    """Where it, or its first rank, runs: `os_process.machine()`."""

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        """Put a command on its way now; what is returned waits for the answer. Commands of data are carried out in the order of
        these calls, those of control before them.

        Awaiting raises DeadlineExceeded when the command's deadline passes, and ServiceFault when the process failed or is
        gone. It may be cancelled.
        """

    async def call(self, command: Command[R]) -> R:
        """`post`, once this is awaited."""

    def acknowledge(self, command: Command[Any]) -> None:
        """What was answered to `command` is in the ledger. Until then the process keeps its answers about groups under
        training, and to Apply, for a coordinator that asks again."""

    async def status(self) -> Status:
        """What the process says of itself. It answers while it computes."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once the connection is lost, at once if it is lost already."""

    def give_up(self, reason: str) -> None:
        """Ask nothing of it any more: every call under way, and every later one, raises Unreachable. Idempotent."""


class TrainerPort(RolePort, Protocol):
    machines: Mapping[str, str]
    """Where those of its processes run that send weights, by name."""
