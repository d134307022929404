"""The exceptions of Sluice: of a mistake that the user can correct, a failed service, and a broken guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class SluiceError(Exception):
    """Root of every error that Sluice raises on purpose."""


class UserError(SluiceError):
    """A mistake that the user can correct. `str(error)` is one line with the key, the value and what is allowed."""


class InUse(UserError):
    """Another process uses what only one process may use."""


class ConfigError(UserError):
    """One or more faults of a configuration; `faults` holds one line each."""

    def __init__(self, faults: Sequence[str]):
        super().__init__("\n".join(faults))
        self.faults = list(faults)


class StorageFull(UserError):
    """No room on the device. Half written files are never read, and the write can be repeated once there is room."""

    def __init__(self, path: Path | str):
        self.path = str(path)
        super().__init__(f"{path}: no space left on device; free some, then go on with run.resume=auto")


class Forbidden(SluiceError):
    """The caller is not of the run, or may not call this."""


class Fenced(SluiceError):
    """The caller is a coordinator that another one has replaced: its calls have no effect."""


class InvalidMessage(SluiceError):
    """A message that does not meet its schema. It changed nothing."""


class Cancelled(SluiceError):
    """The caller withdrew the request before it was done."""


class ServiceFault(SluiceError):
    """A service failed in a phase. `service` is its name ("rollout-0"), `deadline` in seconds if one applied."""

    def __init__(self, service: str, phase: str, message: str, deadline: float | None = None):
        within = f" (deadline {deadline:g} s)" if deadline is not None else ""
        super().__init__(f"{service}: {phase}: {message}{within}")
        self.service = service
        self.phase = phase
        self.reason = message
        self.deadline = deadline


class BlobLost(ServiceFault):
    """No agent holds a blob any more. Its group must be generated again."""


class Unreachable(ServiceFault):
    """The connection to a service is lost."""


class DeadlineExceeded(ServiceFault):
    """A task was not done within its deadline."""


class Unanswered(DeadlineExceeded):
    """A service did not answer a call within its deadline."""


class InvariantViolated(SluiceError):
    """One of Sluice's own guarantees does not hold; the message says which."""
